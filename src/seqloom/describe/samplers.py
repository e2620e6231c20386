"""Samplers: named, seeded streams of lengths that look like well-known data.

A `Sampler` rounds the real numbers of a `Distribution` to tokens. Distributions compose: a mixture of a truncated
log-normal and a Pareto tail is three values inside one another. ``presets/samplers.json`` holds the named ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.random import Generator

from seqloom.describe.lengths import MAX_LENGTH
from seqloom.describe.presets import Presets
from seqloom.errors import SeqloomError


class Distribution(Protocol):
    """Anything that draws lengths."""

    def draw(self, generator: Generator, count: int) -> np.ndarray:
        """Draw ``count`` real lengths, float64[count]."""
        ...


@dataclass(frozen=True, slots=True)
class Atom:
    """One fixed length."""

    length: float

    def draw(self, generator: Generator, count: int) -> np.ndarray:
        """``count`` copies of the length."""
        return np.full(count, float(self.length))


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniform between ``low`` and ``high`` tokens."""

    low: float
    high: float

    def __post_init__(self) -> None:
        _require(self.low <= self.high, f"uniform from {self.low} to {self.high}", "the low end comes first")

    def draw(self, generator: Generator, count: int) -> np.ndarray:
        """Draw lengths."""
        return generator.uniform(self.low, self.high, count)


@dataclass(frozen=True, slots=True)
class Normal:
    """Normal with ``mean`` and standard deviation ``sigma`` in tokens; clip it, lengths are positive."""

    mean: float
    sigma: float

    def draw(self, generator: Generator, count: int) -> np.ndarray:
        """Draw lengths."""
        return self.mean + self.sigma * generator.standard_normal(count)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """exp(mu + sigma z): median exp(mu), mean exp(mu + sigma^2 / 2)."""

    mu: float
    sigma: float

    def draw(self, generator: Generator, count: int) -> np.ndarray:
        """Draw lengths."""
        return np.exp(self.mu + self.sigma * generator.standard_normal(count))


@dataclass(frozen=True, slots=True)
class Pareto:
    """Density ~ x^-(alpha+1) between ``low`` and ``high``: the tail above ``high`` does not exist."""

    alpha: float
    low: float
    high: float

    def __post_init__(self) -> None:
        _require(self.alpha > 0, f"Pareto exponent {self.alpha}", "it must be positive")
        _require(0 < self.low < self.high, f"Pareto from {self.low} to {self.high}", "0 < low < high")

    def draw(self, generator: Generator, count: int) -> np.ndarray:
        """Draw lengths by inversion."""
        mass = 1 - (self.low / self.high) ** self.alpha
        return self.low * (1 - mass * generator.random(count)) ** (-1 / self.alpha)


@dataclass(frozen=True, slots=True)
class QuantileTable:
    """Lengths at given probabilities (0 and 1 included); the logarithm of the length is linear in between."""

    probabilities: tuple[float, ...]
    lengths: tuple[float, ...]

    def __post_init__(self) -> None:
        p, x = np.asarray(self.probabilities), np.asarray(self.lengths)
        _require(len(p) == len(x) >= 2, f"{len(p)} probabilities for {len(x)} lengths", "one for each, two at least")
        _require(p[0] == 0 and p[-1] == 1, f"probabilities from {p[0]} to {p[-1]}", "they run from 0 to 1")
        _require(bool((np.diff(p) > 0).all()), "probabilities out of order", "they must rise")
        rising = x[0] > 0 and bool((np.diff(x) >= 0).all())
        _require(rising, "lengths out of order", "they are positive and never fall")

    def draw(self, generator: Generator, count: int) -> np.ndarray:
        """Draw lengths by inversion."""
        return np.exp(np.interp(generator.random(count), self.probabilities, np.log(self.lengths)))


@dataclass(frozen=True, slots=True)
class Histogram:
    """Shares of bins ``(edges[i], edges[i + 1]]``; inside one, lengths (or their logarithms) are uniform."""

    edges: tuple[float, ...]
    shares: tuple[float, ...]
    spacing: str = "linear"

    def __post_init__(self) -> None:
        sizes = f"{len(self.edges)} edges for {len(self.shares)} shares"
        _require(len(self.edges) == len(self.shares) + 1 >= 2, sizes, "one edge more than shares")
        _require(bool((np.diff(self.edges) > 0).all()) and self.edges[0] >= 1, "edges", "they rise from 1 or more")
        _require(min(self.shares) >= 0 < sum(self.shares), "shares", "they are positive")
        _require(self.spacing in ("linear", "log"), f"spacing {self.spacing!r}", "it is 'linear' or 'log'")

    def draw(self, generator: Generator, count: int) -> np.ndarray:
        """Draw lengths, already whole: rounding up keeps each one in its bin."""
        to, back = (np.log, np.exp) if self.spacing == "log" else (np.asarray, np.asarray)
        levels = np.append(0, np.cumsum(self.shares)) / np.sum(self.shares)
        lengths = np.ceil(back(np.interp(generator.random(count), levels, to(np.asarray(self.edges)))))
        return np.minimum(lengths, self.edges[-1])


@dataclass(frozen=True, slots=True)
class Mixture:
    """One of several distributions, chosen with the given weights (any positive scale)."""

    weights: tuple[float, ...]
    parts: tuple[Distribution, ...]

    def __post_init__(self) -> None:
        sizes = f"{len(self.weights)} weights for {len(self.parts)} parts"
        _require(len(self.weights) == len(self.parts) >= 1, sizes, "one weight for each part")
        _require(min(self.weights) >= 0 < sum(self.weights), f"weights {self.weights}", "they are positive")

    def draw(self, generator: Generator, count: int) -> np.ndarray:
        """Choose a part for each draw, then draw from the parts in turn."""
        levels = np.cumsum(self.weights) / np.sum(self.weights)
        choice = np.searchsorted(levels[:-1], generator.random(count), side="right")
        lengths = np.empty(count)
        for index, part in enumerate(self.parts):
            chosen = choice == index
            lengths[chosen] = part.draw(generator, int(chosen.sum()))
        return lengths


@dataclass(frozen=True, slots=True)
class Clipped:
    """Lengths outside ``[low, high]`` are moved to the nearer end."""

    of: Distribution
    low: float
    high: float

    def draw(self, generator: Generator, count: int) -> np.ndarray:
        """Draw and clip."""
        return np.clip(self.of.draw(generator, count), self.low, self.high)


@dataclass(frozen=True, slots=True)
class Truncated:
    """Lengths outside ``[low, high]`` are thrown away and drawn again."""

    of: Distribution
    low: float
    high: float

    def draw(self, generator: Generator, count: int) -> np.ndarray:
        """Draw until ``count`` lengths lie inside."""
        what = f"lengths from {self.low:g} to {self.high:g}"
        drawn = draw_until(lambda missing: self.of.draw(generator, missing), self._inside, count, what)
        return drawn[self._inside(drawn)]

    def _inside(self, lengths: np.ndarray) -> np.ndarray:
        return (lengths >= self.low) & (lengths <= self.high)


@dataclass(frozen=True, slots=True)
class Upsampled:
    """Lengths from ``threshold`` up come twice, one copy as it is, the other as exactly ``length``."""

    of: Distribution
    threshold: float
    length: float

    def draw(self, generator: Generator, count: int) -> np.ndarray:
        """Draw, double the long ones, shuffle, and take ``count``."""
        lengths = self.of.draw(generator, count)
        copies = int((lengths >= self.threshold).sum())
        return generator.permutation(np.append(lengths, np.full(copies, float(self.length))))[:count]


def draw_until(
    draw: Callable[[int], np.ndarray], keep: Callable[[np.ndarray], np.ndarray], count: int, what: str
) -> np.ndarray:
    """Draw until ``count`` of the values are kept; returns all that were drawn, up to the last kept one.

    Args:
        draw: takes how many are still missing, returns at least one value.
        keep: mask of the values that count.
        count: how many are wanted.
        what: what is kept, for the message when almost nothing is.
    """
    blocks: list[np.ndarray] = []
    kept = drawn = 0
    while kept < count:
        blocks.append(draw(count - kept))
        mask = keep(blocks[-1])
        if kept + int(mask.sum()) >= count:
            last = np.flatnonzero(mask)[count - kept - 1]
            blocks[-1] = blocks[-1][: last + 1]
        kept += int(mask.sum())
        drawn += len(mask)
        if drawn >= 100_000 and kept < drawn / 1000:
            raise SeqloomError(
                f"{what}: only {kept} of {drawn:,} draws qualify; widen the range (raise the maximum length) "
                "or choose another sampler"
            )
    return np.concatenate(blocks) if blocks else np.empty(0)


def _require(holds: bool, what: str, rule: str) -> None:
    if not holds:
        raise SeqloomError(f"distribution of lengths: {what}; {rule}")


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

        This is a file as one would read it: `drop_longer` then keeps ``count`` lengths and counts the others.
        """
        if count < 1:
            raise SeqloomError(f"{count} sequences of sampler {self.name}; ask for at least 1")
        if seed < 0:
            raise SeqloomError(f"seed {seed} is negative; use a whole number from 0 up")
        limit = MAX_LENGTH if max_length is None else max_length
        generator = Generator(np.random.PCG64(seed))

        def block(_: int) -> np.ndarray:
            return np.clip(np.rint(self.lengths.draw(generator, _BLOCK)), 1, MAX_LENGTH).astype(np.int64)

        what = f"sampler {self.name} up to {limit:,} tokens"
        return draw_until(block, lambda lengths: lengths <= limit, count, what)


def sampler(name: str) -> Sampler:
    """Return the preset sampler ``name``, or offer the nearest names."""
    return SAMPLERS.lookup(name)


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
