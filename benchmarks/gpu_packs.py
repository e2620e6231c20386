"""Packs of documents whose lengths a process has not seen before; of 128K tokens unless told otherwise."""

from __future__ import annotations

import numpy as np

from seqloom.describe import lengths_from

TOKENS = 131_072


def uniform_pack(length: int, rng: np.random.Generator) -> list[int]:
    """Documents of one length nobody asked for before, near `length`, and one that fills the pack."""
    fresh = int(length * rng.uniform(0.95, 1.0)) - 1
    count = TOKENS // fresh
    rest = TOKENS - count * fresh
    return [fresh] * count + ([rest] if rest else [])


def drawn_packs(source: str, count: int, seed: int, tokens: int = TOKENS) -> list[list[int]]:
    """Packs of documents in the order of the source; one that does not fit is cut, as loaders do."""
    if source == "short":
        stream = np.random.default_rng(seed).integers(16, 512, size=count * 600)
    else:
        stream = lengths_from(source, seed=seed, count=count * 4_000, max_length=tokens)
    packs: list[list[int]] = [[]]
    for length in stream.tolist():
        room = tokens - sum(packs[-1])
        packs[-1].append(min(length, room))
        if length >= room:
            if len(packs) == count:
                return packs
            packs.append([])
    raise SystemExit(f"{source}: too few documents for {count} packs")
