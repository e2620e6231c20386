"""Published step times of FlexSP's main result, and an independent replay of its constants."""

from __future__ import annotations

# Seconds per step of DeepSpeed, FlexSP-BatchAda and FlexSP, and FlexSP's speed-up over DeepSpeed as printed:
# FlexSP (arXiv 2412.01523), main result.
PUBLISHED: dict[tuple[str, int, str], tuple[float, float, float, float]] = {
    ("gpt-7b", 192, "GitHub"): (28.5, 26.4, 19.6, 1.45),
    ("gpt-7b", 192, "CommonCrawl"): (24.1, 22.0, 15.9, 1.50),
    ("gpt-7b", 192, "Wikipedia"): (7.9, 5.8, 4.6, 1.72),
    ("gpt-13b", 192, "GitHub"): (47.7, 44.3, 34.3, 1.40),
    ("gpt-13b", 192, "CommonCrawl"): (39.9, 37.2, 29.4, 1.35),
    ("gpt-13b", 192, "Wikipedia"): (13.7, 10.4, 8.5, 1.59),
    ("gpt-30b", 192, "GitHub"): (120, 114, 82.9, 1.44),
    ("gpt-30b", 192, "CommonCrawl"): (110, 100, 70.5, 1.54),
    ("gpt-30b", 192, "Wikipedia"): (28.5, 23.7, 17.0, 1.64),
    ("gpt-7b", 384, "GitHub"): (32.3, 31.3, 25.5, 1.26),
    ("gpt-7b", 384, "CommonCrawl"): (26.9, 25.7, 18.7, 1.42),
    ("gpt-7b", 384, "Wikipedia"): (8.2, 6.0, 5.6, 1.46),
    ("gpt-13b", 384, "GitHub"): (54.0, 51.0, 41.7, 1.29),
    ("gpt-13b", 384, "CommonCrawl"): (52.9, 49.9, 38.4, 1.37),
    ("gpt-13b", 384, "Wikipedia"): (14.9, 12.2, 10.4, 1.43),
    ("gpt-30b", 384, "GitHub"): (133, 130, 108, 1.22),
    ("gpt-30b", 384, "CommonCrawl"): (116, 111, 87.4, 1.33),
    ("gpt-30b", 384, "Wikipedia"): (32.2, 27.4, 20.8, 1.53),
}

# An independent replay of the same constants on the same file, Wikipedia at 192K: seconds of static at degree 64, of
# the best single degree per batch, and of an enumeration of group sizes ("FX").
REPLAY = {"gpt-7b": (6.74, 5.18, 3.68), "gpt-13b": (11.09, 8.87, 6.33), "gpt-30b": (24.27, 20.28, 14.90)}
