"""Distributions of lengths: small values that draw real numbers; a sampler rounds them to tokens.

Every one has ``draw(generator, count) -> float64[count]``. They compose: a mixture of a truncated log-normal
and a Pareto tail is three values inside one another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from seqloom.errors import SeqloomError


class Distribution(Protocol):
    """Anything that draws lengths."""

    def draw(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """Draw ``count`` real lengths, float64[count]."""
        ...


@dataclass(frozen=True, slots=True)
class Atom:
    """One fixed length."""

    length: float

    def draw(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """``count`` copies of the length."""
        return np.full(count, float(self.length))


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniform between ``low`` and ``high`` tokens."""

    low: float
    high: float

    def __post_init__(self) -> None:
        """Check the order of the ends."""
        _require(self.low <= self.high, f"uniform from {self.low} to {self.high}", "the low end comes first")

    def draw(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """Draw lengths."""
        return generator.uniform(self.low, self.high, count)


@dataclass(frozen=True, slots=True)
class Normal:
    """Normal with ``mean`` and standard deviation ``sigma`` in tokens; clip it, lengths are positive."""

    mean: float
    sigma: float

    def draw(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """Draw lengths."""
        return self.mean + self.sigma * generator.standard_normal(count)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """exp(mu + sigma z): median exp(mu), mean exp(mu + sigma^2 / 2)."""

    mu: float
    sigma: float

    def draw(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """Draw lengths."""
        return np.exp(self.mu + self.sigma * generator.standard_normal(count))


@dataclass(frozen=True, slots=True)
class Pareto:
    """Density ~ x^-(alpha+1) between ``low`` and ``high``: the tail above ``high`` does not exist."""

    alpha: float
    low: float
    high: float

    def __post_init__(self) -> None:
        """Check exponent and ends."""
        _require(self.alpha > 0, f"Pareto exponent {self.alpha}", "it must be positive")
        _require(0 < self.low < self.high, f"Pareto from {self.low} to {self.high}", "0 < low < high")

    def draw(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """Draw lengths by inversion."""
        mass = 1 - (self.low / self.high) ** self.alpha
        return self.low * (1 - mass * generator.random(count)) ** (-1 / self.alpha)


@dataclass(frozen=True, slots=True)
class QuantileTable:
    """Lengths at given probabilities (0 and 1 included); the logarithm of the length is linear in between."""

    probabilities: tuple[float, ...]
    lengths: tuple[float, ...]

    def __post_init__(self) -> None:
        """Check that the table is a quantile function."""
        p, x = np.asarray(self.probabilities), np.asarray(self.lengths)
        _require(
            len(p) == len(x) >= 2,
            f"{len(p)} probabilities for {len(x)} lengths",
            "one for each, two at least",
        )
        _require(p[0] == 0 and p[-1] == 1, f"probabilities from {p[0]} to {p[-1]}", "they run from 0 to 1")
        _require(bool((np.diff(p) > 0).all()), "probabilities out of order", "they must rise")
        _require(
            x[0] > 0 and bool((np.diff(x) >= 0).all()),
            "lengths out of order",
            "they are positive and never fall",
        )

    def draw(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """Draw lengths by inversion."""
        return np.exp(np.interp(generator.random(count), self.probabilities, np.log(self.lengths)))


@dataclass(frozen=True, slots=True)
class Histogram:
    """Shares of bins ``(edges[i], edges[i + 1]]``; inside one, lengths (or their logarithms) are uniform."""

    edges: tuple[float, ...]
    shares: tuple[float, ...]
    spacing: str = "linear"

    def __post_init__(self) -> None:
        """Check edges, shares and spacing."""
        sizes = f"{len(self.edges)} edges for {len(self.shares)} shares"
        _require(len(self.edges) == len(self.shares) + 1 >= 2, sizes, "one edge more than shares")
        _require(bool((np.diff(self.edges) > 0).all()) and self.edges[0] >= 1, "edges", "they rise from 1 or more")
        _require(min(self.shares) >= 0 < sum(self.shares), "shares", "they are positive")
        _require(self.spacing in ("linear", "log"), f"spacing {self.spacing!r}", "it is 'linear' or 'log'")

    def draw(self, generator: np.random.Generator, count: int) -> np.ndarray:
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
        """Check the weights."""
        sizes = f"{len(self.weights)} weights for {len(self.parts)} parts"
        _require(len(self.weights) == len(self.parts) >= 1, sizes, "one weight for each part")
        _require(min(self.weights) >= 0 < sum(self.weights), f"weights {self.weights}", "they are positive")

    def draw(self, generator: np.random.Generator, count: int) -> np.ndarray:
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

    def draw(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """Draw and clip."""
        return np.clip(self.of.draw(generator, count), self.low, self.high)


@dataclass(frozen=True, slots=True)
class Truncated:
    """Lengths outside ``[low, high]`` are thrown away and drawn again."""

    of: Distribution
    low: float
    high: float

    def draw(self, generator: np.random.Generator, count: int) -> np.ndarray:
        """Draw until ``count`` lengths lie inside."""
        what = f"lengths from {self.low:g} to {self.high:g}"
        drawn = draw_until(
            lambda missing: self.of.draw(generator, missing),
            lambda lengths: (lengths >= self.low) & (lengths <= self.high),
            count,
            what,
        )
        return drawn[(drawn >= self.low) & (drawn <= self.high)]


@dataclass(frozen=True, slots=True)
class Upsampled:
    """Lengths from ``threshold`` up come twice, one copy as it is, the other as exactly ``length``."""

    of: Distribution
    threshold: float
    length: float

    def draw(self, generator: np.random.Generator, count: int) -> np.ndarray:
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
