"""Samplers: named, seeded streams of lengths that look like well-known data.

A `Sampler` rounds the real numbers of a `Distribution` to tokens. Distributions compose: a mixture of a truncated
log-normal and a Pareto tail is three values inside one another. ``presets/samplers.json`` holds the named ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.random import Generator

from seqloom.describe.lengths import MAX_LENGTH
from seqloom.describe.presets import Presets
from seqloom.errors import SeqloomError

Distribution = Callable[[Generator, int], np.ndarray]
"""Draws so many real lengths, float64[count]."""


def atom(length: float) -> Distribution:
    """One fixed length."""
    return lambda generator, count: np.full(count, float(length))


def uniform(low: float, high: float) -> Distribution:
    """Uniform between ``low`` and ``high`` tokens."""
    _require(low <= high, f"uniform from {low} to {high}", "the low end comes first")
    return lambda generator, count: generator.uniform(low, high, count)


def normal(mean: float, sigma: float) -> Distribution:
    """Normal with ``mean`` and standard deviation ``sigma`` in tokens; clip it, lengths are positive."""
    return lambda generator, count: mean + sigma * generator.standard_normal(count)


def log_normal(mu: float, sigma: float) -> Distribution:
    """exp(mu + sigma z): median exp(mu), mean exp(mu + sigma^2 / 2)."""
    return lambda generator, count: np.exp(mu + sigma * generator.standard_normal(count))


def pareto(alpha: float, low: float, high: float) -> Distribution:
    """Density ~ x^-(alpha+1) between ``low`` and ``high``: the tail above ``high`` does not exist."""
    _require(alpha > 0, f"Pareto exponent {alpha}", "it must be positive")
    _require(0 < low < high, f"Pareto from {low} to {high}", "0 < low < high")
    mass = 1 - (low / high) ** alpha
    return lambda generator, count: low * (1 - mass * generator.random(count)) ** (-1 / alpha)


def quantile_table(probabilities: Sequence[float], lengths: Sequence[float]) -> Distribution:
    """Lengths at given probabilities (0 and 1 included); the logarithm of the length is linear in between."""
    p, x = np.asarray(probabilities), np.asarray(lengths)
    _require(len(p) == len(x) >= 2, f"{len(p)} probabilities for {len(x)} lengths", "one for each, two at least")
    _require(p[0] == 0 and p[-1] == 1, f"probabilities from {p[0]} to {p[-1]}", "they run from 0 to 1")
    _require(bool((np.diff(p) > 0).all()), "probabilities out of order", "they must rise")
    rising = x[0] > 0 and bool((np.diff(x) >= 0).all())
    _require(rising, "lengths out of order", "they are positive and never fall")
    return lambda generator, count: np.exp(np.interp(generator.random(count), p, np.log(x)))


def histogram(edges: Sequence[float], shares: Sequence[float], spacing: str = "linear") -> Distribution:
    """Shares of bins ``(edges[i], edges[i + 1]]``; inside one, lengths (or their logarithms) are uniform.

    Lengths are whole already: rounding up keeps each one in its bin.
    """
    _require(len(edges) == len(shares) + 1 >= 2, f"{len(edges)} edges for {len(shares)} shares", "one edge more")
    _require(bool((np.diff(edges) > 0).all()) and edges[0] >= 1, "edges", "they rise from 1 or more")
    _require(min(shares) >= 0 < sum(shares), "shares", "they are positive")
    _require(spacing in ("linear", "log"), f"spacing {spacing!r}", "it is 'linear' or 'log'")
    to, back = (np.log, np.exp) if spacing == "log" else (np.asarray, np.asarray)
    levels = np.append(0, np.cumsum(shares)) / np.sum(shares)

    def draw(generator: Generator, count: int) -> np.ndarray:
        lengths = np.ceil(back(np.interp(generator.random(count), levels, to(np.asarray(edges)))))
        return np.minimum(lengths, edges[-1])

    return draw


def mixture(weights: Sequence[float], parts: Sequence[Distribution]) -> Distribution:
    """One of several distributions, chosen with the given weights (any positive scale)."""
    _require(len(weights) == len(parts) >= 1, f"{len(weights)} weights for {len(parts)} parts", "one weight for each")
    _require(min(weights) >= 0 < sum(weights), f"weights {weights}", "they are positive")
    levels = np.cumsum(weights) / np.sum(weights)

    def draw(generator: Generator, count: int) -> np.ndarray:
        choice = np.searchsorted(levels[:-1], generator.random(count), side="right")
        lengths = np.empty(count)
        for index, part in enumerate(parts):
            chosen = choice == index
            lengths[chosen] = part(generator, int(chosen.sum()))
        return lengths

    return draw


def clipped(of: Distribution, low: float, high: float) -> Distribution:
    """Lengths outside ``[low, high]`` are moved to the nearer end."""
    return lambda generator, count: np.clip(of(generator, count), low, high)


def truncated(of: Distribution, low: float, high: float) -> Distribution:
    """Lengths outside ``[low, high]`` are thrown away and drawn again."""

    def inside(lengths: np.ndarray) -> np.ndarray:
        return (lengths >= low) & (lengths <= high)

    def draw(generator: Generator, count: int) -> np.ndarray:
        what = f"lengths from {low:g} to {high:g}"
        drawn = draw_until(lambda missing: of(generator, missing), inside, count, what)
        return drawn[inside(drawn)]

    return draw


def upsampled(of: Distribution, threshold: float, length: float) -> Distribution:
    """Lengths from ``threshold`` up come twice, one copy as it is, the other as exactly ``length``."""

    def draw(generator: Generator, count: int) -> np.ndarray:
        lengths = of(generator, count)
        copies = int((lengths >= threshold).sum())
        return generator.permutation(np.append(lengths, np.full(copies, float(length))))[:count]

    return draw


def draw_until(
    draw: Callable[[int], np.ndarray], keep: Callable[[np.ndarray], np.ndarray], count: int, what: str
) -> np.ndarray:
    """Draw until ``count`` of the values are kept; returns all that were drawn, up to the last kept one.

    ``draw`` takes how many are still missing, ``keep`` masks the values that count; a message says ``what`` is kept.
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

_KINDS: dict[str, Callable[..., Distribution]] = {
    "atom": atom,
    "clipped": clipped,
    "histogram": histogram,
    "lognormal": log_normal,
    "mixture": mixture,
    "normal": normal,
    "pareto": pareto,
    "quantiles": quantile_table,
    "truncated": truncated,
    "uniform": uniform,
    "upsampled": upsampled,
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
            return np.clip(np.rint(self.lengths(generator, _BLOCK)), 1, MAX_LENGTH).astype(np.int64)

        what = f"sampler {self.name} up to {limit:,} tokens"
        return draw_until(block, lambda lengths: lengths <= limit, count, what)


def sampler(name: str) -> Sampler:
    """Return the preset sampler ``name``, or offer the nearest names."""
    return SAMPLERS.lookup(name)


def sample(name: str, count: int, *, seed: int, max_length: int | None = None) -> np.ndarray:
    """Draw ``count`` lengths of a preset, int64[count]; see `Sampler.sample`."""
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
