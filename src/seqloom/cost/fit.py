"""From measurements to profile values: least squares for constants and links, throughput for kernels."""

from __future__ import annotations

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
    document faster than a shorter one: such a time is raised to the shorter one's.
    """
    flops = [2.0 * length * length * heads * head_dim for length in lengths]
    forward = np.maximum.accumulate(np.asarray(forward_us, dtype=np.float64))
    backward = np.maximum.accumulate(np.asarray(backward_us, dtype=np.float64))
    if not len(lengths) == len(forward) == len(backward) or np.any(np.diff(lengths) <= 0) or forward[0] <= 0:
        raise SeqloomError("a curve needs ascending lengths with one positive forward and backward time each")
    return Curve(
        tuple(int(length) for length in lengths),
        tuple(float(f / t * 1e-6) for f, t in zip(flops, forward, strict=True)),
        tuple(float(BACKWARD_FLOPS * f / t * 1e-6) for f, t in zip(flops, backward, strict=True)),
    )


def _fit(columns: np.ndarray, times: np.ndarray) -> tuple[list[float], float]:
    """Non-negative coefficients with the least squared *relative* error, and the largest relative error.

    Relative, because a profile must be right for short documents too. A coefficient that comes out negative
    is dropped and the others fitted again: with two or three columns that is as good as a proper active-set
    method.
    """
    if len(times) < columns.shape[1] or np.any(times <= 0) or len(times) != len(columns):
        raise SeqloomError(
            f"{len(times)} measurements for {columns.shape[1]} constants; give at least as many, all times above 0"
        )
    weighted = columns / times[:, None]
    active = list(range(columns.shape[1]))
    while True:
        scale = np.abs(weighted[:, active]).max(axis=0)
        scale[scale == 0] = 1.0
        solution = np.linalg.lstsq(weighted[:, active] / scale, np.ones(len(times)), rcond=None)[0] / scale
        if solution.min() >= 0 or len(active) == 1:
            break
        active.pop(int(np.argmin(solution * scale)))
    coefficients = [0.0] * columns.shape[1]
    for place, value in zip(active, solution, strict=True):
        coefficients[place] = max(0.0, float(value))
    error = np.abs(columns @ np.array(coefficients) - times) / times
    return coefficients, float(error.max())
