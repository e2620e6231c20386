"""Samplers: named, seeded streams of lengths that look like well-known data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from seqloom.describe.distributions import (
    Atom,
    Clipped,
    Distribution,
    Histogram,
    LogNormal,
    Mixture,
    Normal,
    Pareto,
    QuantileTable,
    Truncated,
    Uniform,
    Upsampled,
    draw_until,
)
from seqloom.describe.lengths import LONGEST
from seqloom.describe.registry import Presets
from seqloom.errors import SeqloomError

__all__ = [
    "SAMPLERS",
    "Atom",
    "Clipped",
    "Distribution",
    "Histogram",
    "LogNormal",
    "Mixture",
    "Normal",
    "Pareto",
    "QuantileTable",
    "Sampler",
    "Truncated",
    "Uniform",
    "Upsampled",
    "sample",
    "sampler",
]

_BLOCK = 8192
"""Lengths drawn at a time. Fixed, so that a longer sample begins with the shorter one of the same seed."""

_KINDS: dict[str, type[Any]] = {
    "atom": Atom,
    "clipped": Clipped,
    "histogram": Histogram,
    "lognormal": LogNormal,
    "mixture": Mixture,
    "normal": Normal,
    "pareto": Pareto,
    "quantiles": QuantileTable,
    "truncated": Truncated,
    "uniform": Uniform,
    "upsampled": Upsampled,
}


@dataclass(frozen=True, slots=True)
class Sampler:
    """A distribution of lengths with a name and a line that says where it comes from."""

    name: str
    note: str
    """Source; begins with ``stand-in:`` where the data themselves could not be read."""
    lengths: Distribution

    @property
    def stand_in(self) -> bool:
        """Whether this imitates published figures instead of reproducing data that could be read."""
        return "stand-in" in self.note

    def sample(self, count: int, *, seed: int, max_length: int | None = None) -> np.ndarray:
        """Draw ``count`` lengths, int64[count]; longer ones than ``max_length`` are left out and drawn again.

        The same seed gives the same lengths, and a longer sample begins with the shorter one.
        """
        drawn = self.stream(count, seed=seed, max_length=max_length)
        return drawn if max_length is None else drawn[drawn <= max_length]

    def stream(self, count: int, *, seed: int, max_length: int | None = None) -> np.ndarray:
        """Draw until ``count`` lengths are at most ``max_length``; longer ones in between are returned too.

        This is a file as one would read it: :func:`seqloom.describe.drop_longer` then keeps ``count`` lengths
        and counts the others.
        """
        if count < 1:
            raise SeqloomError(f"{count} sequences of sampler {self.name}; ask for at least 1")
        if seed < 0:
            raise SeqloomError(f"seed {seed} is negative; use a whole number from 0 up")
        limit = LONGEST if max_length is None else max_length
        generator = np.random.Generator(np.random.PCG64(seed))
        return draw_until(
            lambda missing: self._block(generator),
            lambda lengths: lengths <= limit,
            count,
            f"sampler {self.name} up to {limit:,} tokens",
        )

    def _block(self, generator: np.random.Generator) -> np.ndarray:
        lengths = np.rint(self.lengths.draw(generator, _BLOCK))
        return np.clip(lengths, 1, LONGEST).astype(np.int64)


def sampler(name: str) -> Sampler:
    """The preset sampler ``name``; the nearest names are offered when it does not exist."""
    return SAMPLERS.named(name)


def sample(name: str, count: int, *, seed: int, max_length: int | None = None) -> np.ndarray:
    """Draw ``count`` lengths of a preset, int64[count].

    Args:
        name: a key of :data:`SAMPLERS`.
        count: number of sequences.
        seed: same seed, same lengths, on any machine.
        max_length: longer sequences are left out and drawn again.
    """
    return sampler(name).sample(count, seed=seed, max_length=max_length)


def _distribution(entry: dict[str, Any] | str) -> Distribution:
    """Build a distribution from its JSON form: the name of another preset, or an object with its ``kind``."""
    if isinstance(entry, str):
        return SAMPLERS[entry].lengths
    fields: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    kind = _KINDS[fields.pop("kind")]
    if "of" in fields:
        fields["of"] = _distribution(fields["of"])
    if "parts" in fields:
        fields["parts"] = tuple(_distribution(part) for part in fields["parts"])
    return kind(**fields)


def _build(name: str, entry: dict[str, Any]) -> Sampler:
    return Sampler(name, entry["note"], _distribution(entry["lengths"]))


SAMPLERS: Presets[Sampler] = Presets("sampler", "samplers.json", _build)
"""Every preset, by name."""
