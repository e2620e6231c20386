"""Dual feasible functions: parts that sum to at most one still do so after rounding.

They round up what a document keeps others from using. Two documents that each fill more than half of a group cannot
share it, so each may be counted as a whole group. All of them are superadditive: parts that sum to at most ``z`` sum to
at most ``rounding(z)`` after rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

PRECISION = 1e-7
"""Relative slack against rounding in floating point; the bound stays below the truth."""


@dataclass(frozen=True)
class Rounding:
    """A dual feasible function."""

    function: Callable[[np.ndarray], np.ndarray]
    whole: float
    """Parts above this count as one; the function is nowhere above ``part / whole``."""

    def __call__(self, share: np.ndarray) -> np.ndarray:
        """Parts after rounding."""
        return self.function(share)

    def most(self, mean: float) -> float:
        """The most that ``rounding(z)`` is on average, if ``z`` is at most ``mean`` on average."""
        return min(1.0, max(0.0, mean) / self.whole)


def identity(share: np.ndarray) -> np.ndarray:
    """Count every part as it is."""
    return share


def steps(count: int) -> Rounding:
    """The dual feasible function ``floor((count + 1) x) / count``, exact at multiples of ``1 / (count + 1)``."""

    def rounding(share: np.ndarray) -> np.ndarray:
        scaled = share * (count + 1)
        whole = np.abs(scaled - np.rint(scaled)) < 1e-12  # a part just below must not count as if it reached
        return np.where(whole, share, np.floor(scaled) / count)

    return Rounding(rounding, count / (count + 1))


def without_small(least: float) -> Rounding:
    """The dual feasible function that ignores parts below ``least`` and rounds parts above ``1 - least`` up to one."""

    def rounding(share: np.ndarray) -> np.ndarray:
        kept = np.where(share < least + PRECISION, 0.0, share)
        return np.where(share > 1 - least + PRECISION, 1.0, kept)

    return Rounding(rounding, 1 - least)


ROUNDINGS: tuple[Rounding, ...] = (
    Rounding(identity, 1.0),
    steps(1),
    steps(2),
    steps(3),
    without_small(0.15),
    without_small(0.25),
    without_small(0.35),
    without_small(0.45),
)

NEGLIGIBLE = 0.15
"""Parts below this count as nothing in every rounding but the identity."""
