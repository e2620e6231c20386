"""The settings and figures of the Seq1F1B paper: 2.7B to 30B GPT models on A100-80G."""

from __future__ import annotations

PRINTED = ("1F1B", "1F1B-I", "Seq1F1B", "Seq1F1B-I")
# layers, hidden, heads; stages, GPUs per stage; micro-batches. From the authors' scripts.
MODELS = {
    "2.7B": ((32, 2560, 32), (8, 1), (16, 32)),
    "7B": ((32, 4096, 32), (4, 8), (8, 16)),
    "13B": ((40, 5120, 40), (4, 8), (8,)),
    "30B": ((64, 6144, 64), (8, 8), (8,)),
}
# Tokens per second over all GPUs, 7B on 32 A100, in the order of PRINTED; None: out of memory, or not consistent.
SPEED: dict[tuple[str, int, int], tuple[int | None, ...]] = {
    ("7B", 32, 8): (48189, 52964, 53485, 47232),
    ("7B", 32, 16): (55333, 56304, 55765, 46195),
    ("7B", 64, 8): (37343, 41677, 43297, 40908),
    ("7B", 64, 16): (43063, 44712, None, 40990),
    ("7B", 128, 8): (None, None, 30392, 30023),
    ("7B", 128, 16): (None, None, 31584, 30362),
}
# Peak GB, from the figure's coordinates; None: out of memory.
MEMORY: dict[tuple[str, int], tuple[float | None, ...]] = {
    ("2.7B", 16): (51.40, 70.95, 29.85, 29.70),
    ("2.7B", 24): (74.30, None, 41.45, 41.90),
    ("2.7B", 32): (None, None, 53.10, 54.45),
    ("7B", 32): (28.00, 34.20, 18.90, 16.35),
    ("7B", 64): (51.40, 62.90, 34.30, 28.45),
    ("7B", 128): (None, None, 69.80, 57.55),
    ("13B", 32): (44.20, 53.25, 29.70, 25.80),
    ("13B", 48): (64.30, 76.45, 42.35, 35.90),
    ("13B", 64): (66.85, None, 51.60, 42.95),
    ("30B", 32): (71.40, None, 37.60, 38.65),
    ("30B", 48): (None, None, 54.70, 55.55),
    ("30B", 64): (None, None, 67.50, 66.90),
}
