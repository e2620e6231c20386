"""From measurements to profile values: least squares for constants and links, throughput for kernels."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from seqloom.cost.compute import BACKWARD_FLOPS
from seqloom.cost.profile import Curve
from seqloom.errors import SeqloomError


class AdditiveFit(NamedTuple):
    """``T = quadratic_ms * sum s^2 + linear_ms * sum s + fixed_ms`` and its fit."""

    quadratic_ms: float
    linear_ms: float
    fixed_ms: float
    worst_error: float  # largest relative error over the measurements


class LinkFit(NamedTuple):
    """``T = latency_us + bytes / gb_s`` and how well it describes the measurements."""

    latency_us: float
    gb_s: float
    worst_error: float


def fit_additive(packs: Sequence[Sequence[int]], times_ms: Sequence[float]) -> AdditiveFit:
    """Fit the constants of the additive model on one device.

    Args:
        packs: the document lengths of each measured micro-batch.
        times_ms: its time, forward and backward.
    """
    squares = [sum(length * length for length in pack) for pack in packs]
    tokens = [sum(pack) for pack in packs]
    columns = np.array([squares, tokens, [1] * len(packs)], dtype=np.float64).T
    (quadratic, linear, fixed), worst = _fit(columns, np.asarray(times_ms, dtype=np.float64))
    return AdditiveFit(quadratic, linear, fixed, worst)


def fit_link(sizes: Sequence[int], times_us: Sequence[float]) -> LinkFit:
    """Fit latency and bandwidth from message sizes in bytes and times in microseconds."""
    columns = np.array([[1.0] * len(sizes), list(sizes)], dtype=np.float64).T
    (latency, per_byte), worst = _fit(columns, np.asarray(times_us, dtype=np.float64))
    if per_byte == 0:
        raise SeqloomError("the measured times do not grow with the message size; measure larger messages")
    return LinkFit(latency, 1e-3 / per_byte, worst)


def fit_curve(
    lengths: Sequence[int],
    forward_us: Sequence[float],
    backward_us: Sequence[float],
    heads: int,
    head_dim: int,
) -> Curve:
    """Throughput by length from the times of one causal document each.

    A forward is ``4 * s^2/2 * heads * head_dim`` FLOPs. Lengths must ascend. Noise must not make a longer
    document faster than a shorter one: such a time is raised as far as a curve needs.
    """
    if not len(lengths) == len(forward_us) == len(backward_us) or np.any(np.diff(lengths) <= 0):
        raise SeqloomError("a curve needs ascending lengths with one forward and backward time each")
    if min(*forward_us, *backward_us) <= 0:
        raise SeqloomError("a curve needs times above 0; measure longer documents")
    flops = [2.0 * length * length * heads * head_dim for length in lengths]
    forward, backward = (_rising(lengths, times) for times in (forward_us, backward_us))
    return Curve(
        tuple(int(length) for length in lengths),
        tuple(float(f / t * 1e-6) for f, t in zip(flops, forward, strict=True)),
        tuple(float(BACKWARD_FLOPS * f / t * 1e-6) for f, t in zip(flops, backward, strict=True)),
    )


def _rising(lengths: Sequence[int], times_us: Sequence[float]) -> list[float]:
    """The times, raised where time would fall with length anywhere on a curve through them.

    Between two lengths a < b a curve's time per token is linear, from p to q. Its time rises up to b if
    ``q + (q - p) / (b - a) * b > 0``, so if q is above ``p * b / (2 b - a)``.
    """
    raised = [float(times_us[0])]
    for (a, b), time in zip(itertools.pairwise(lengths), times_us[1:], strict=True):
        least = raised[-1] / a * b / (2 * b - a) * b
        raised.append(max(float(time), least * (1 + 1e-6)))
    return raised


def non_negative(columns: np.ndarray, times: np.ndarray) -> np.ndarray:
    """float64[k]: the coefficients, none below zero, whose ``columns @ coefficients`` is nearest to ``times``.

    Columns come in one after the other, the one that helps most first; one that turns negative goes out again.

    Args:
        columns: float64[n, k].
        times: float64[n].
    """
    scale = np.abs(columns).max(axis=0)
    scale[scale == 0] = 1.0
    scaled = columns / scale
    found, inside = np.zeros(columns.shape[1]), np.zeros(columns.shape[1], dtype=bool)
    for _ in range(3 * columns.shape[1]):
        slope = np.where(inside, -np.inf, scaled.T @ (times - scaled @ found))
        if slope.max() <= 1e-12 * np.abs(times).sum():
            break
        inside[int(np.argmax(slope))] = True
        while True:
            trial = np.zeros_like(found)
            trial[inside] = np.linalg.lstsq(scaled[:, inside], times, rcond=None)[0]
            wrong = inside & (trial <= 0)
            if not wrong.any():
                break
            share = (found[wrong] / (found[wrong] - trial[wrong])).min()
            found = found + share * (trial - found)
            inside &= found > 1e-15
        found = trial
    return found / scale


def _fit(columns: np.ndarray, times: np.ndarray) -> tuple[list[float], float]:
    """Non-negative coefficients with the least squared *relative* error, and the largest relative error.

    Relative, because a profile must be right for short documents too.
    """
    if len(times) < columns.shape[1] or np.any(times <= 0) or len(times) != len(columns):
        raise SeqloomError(
            f"{len(times)} measurements for {columns.shape[1]} constants; give at least as many, all times above 0"
        )
    found = non_negative(columns / times[:, None], np.ones(len(times)))
    error = np.abs(columns @ found - times) / times
    return found.tolist(), float(error.max())
