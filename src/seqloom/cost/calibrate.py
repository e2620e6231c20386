"""Calibration: fit the constants of a profile to measured steps, and a kernel's throughput curve to measured times.

Without overlap a step's time is a sum in which every constant stands once: the step's price under a profile in which
only that constant costs anything, times a factor. So the factors are a non-negative least squares problem, and what is
fitted is the cost model itself, not a copy of its formulas.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from seqloom.cost.compute import BACKWARD_FLOPS
from seqloom.cost.model import CostModel
from seqloom.cost.profile import AnalyticProfile, Curve, LinkRate, Links, require_analytic
from seqloom.errors import SeqloomError
from seqloom.plan import Plan

FREE = 1e9
"""A rate is multiplied with this where a constant shall cost nothing."""
TRAFFIC = ("all_to_all", "p2p", "collective")
SCALED_US = ("layer", "ring_step", "document", "gathered", "piece", "prefix", "step")
"""Constants that the profile has in microseconds."""
CONSTANTS = (
    *("matmul", "memory", "attention", "tile", "document", "gathered", "piece", "prefix", "layer", "ring_step", "step"),
    *map(".".join, itertools.product(("intra", "network"), TRAFFIC, ("bytes", "call", "hop"))),
)
"""Everything of a profile that takes time. A round's own constant is not among them: it is counted per layer."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A plan that was run, and the time of its step in ns."""

    plan: Plan
    ns: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fitted profile, and how well it predicts the steps that it was fitted to."""

    profile: AnalyticProfile  # the start with every constant scaled
    factors: dict[str, float]  # by which each constant costs more than at the start
    trials: tuple[Trial, ...]
    predicted_ns: tuple[float, ...]  # of every trial, by the fitted profile

    @property
    def errors(self) -> tuple[float, ...]:
        """Predicted / measured - 1 of every trial."""
        pairs = zip(self.trials, self.predicted_ns, strict=True)
        return tuple(predicted / trial.ns - 1 for trial, predicted in pairs)


def calibrate(cost: CostModel, trials: Sequence[Trial], known: Mapping[str, float]) -> Calibration:
    """Fit the constants of a profile to measured steps. One that no step depends on stays as it is at the start.

    Without a ring among the steps, tiles get the factor of causal documents: the kernels are the same.

    Args:
        cost: prices the plans; its profile is the start, in which every fitted constant costs something.
        trials: steps of equal groups, so that no group waits for another.
        known: weights of the start's own constants: how many trials it takes to outvote a separate measurement.
    """
    start = require_analytic(cost.profile)
    times = np.array([trial.ns for trial in trials])
    nothing = dict.fromkeys(CONSTANTS, 0.0)
    floor = _prices(cost, scale_constants(start, nothing), trials)
    prices = {name: _prices(cost, scale_constants(start, nothing | {name: 1.0}), trials) - floor for name in CONSTANTS}
    fitted = [name for name, column in prices.items() if column.any()]
    design = [np.array([prices[name] for name in fitted]).T / times[:, None]]
    target = [1.0 - floor / times]
    for name, weight in known.items():  # a row that says: this factor is 1
        design.append(weight * np.array([[float(name == other) for other in fitted]]))
        target.append(np.array([weight * float(name in fitted)]))
    found = non_negative_least_squares(np.concatenate(design), np.concatenate(target))
    factors = dict.fromkeys(CONSTANTS, 1.0) | dict(zip(fitted, found.tolist(), strict=True))
    if "tile" not in fitted:
        factors["tile"] = factors["attention"]
    profile = scale_constants(start, factors)
    return Calibration(profile, factors, tuple(trials), tuple(_prices(cost, profile, trials).tolist()))


def _prices(cost: CostModel, profile: AnalyticProfile, trials: Sequence[Trial]) -> np.ndarray:
    """float64[trials] ns under another profile, nothing hidden behind anything."""
    priced = cost.with_profile(replace(profile, overlap=0.0))
    return np.array([priced.plan_ns(trial.plan) for trial in trials], dtype=np.float64)


def scale_constants(profile: AnalyticProfile, factors: Mapping[str, float]) -> AnalyticProfile:
    """Multiply the time of constants by factors, by names of `CONSTANTS`; 0 makes one free, those not named stay."""

    def factor(name: str) -> float:
        return float(factors.get(name, 1.0))

    def rate(name: str) -> float:
        return 1.0 / max(factor(name), 1.0 / FREE)

    def curve(own: Curve, name: str) -> Curve:
        forward, backward = (tuple(each * rate(name) for each in rates) for rates in (own.forward, own.backward))
        return Curve(own.lengths, forward, backward)

    def link(own: LinkRate, name: str) -> LinkRate:
        call_us, hop_us = own.call_us * factor(f"{name}.call"), own.hop_us * factor(f"{name}.hop")
        return LinkRate(own.efficiency * rate(f"{name}.bytes"), call_us, hop_us)

    def links(own: Links, place: str) -> Links:
        return Links(*(link(getattr(own, kind), f"{place}.{kind}") for kind in TRAFFIC))

    return replace(
        profile,
        matmul_tflops=profile.matmul_tflops * rate("matmul"),
        memory_efficiency=profile.memory_efficiency * rate("memory"),
        attention=curve(profile.attention, "attention"),
        tile=curve(profile.tile, "tile"),
        intra=links(profile.intra, "intra"),
        network=links(profile.network, "network"),
        round_us=profile.round_us * factor("layer"),
        **{f"{name}_us": getattr(profile, f"{name}_us") * factor(name) for name in SCALED_US},
    )


def non_negative_least_squares(columns: np.ndarray, times: np.ndarray) -> np.ndarray:
    """float64[k]: the coefficients, none below zero, whose ``columns @ coefficients`` is nearest to ``times``.

    Columns come in one after the other, the one that helps most first; one that turns negative goes out again (Lawson
    and Hanson's active set method).
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


def fit_curve(
    lengths: Sequence[int], forward_us: Sequence[float], backward_us: Sequence[float], heads: int, head_dim: int
) -> Curve:
    """Throughput by length from the times of one causal document each; lengths ascend.

    A forward is ``4 * s^2/2 * heads * head_dim`` FLOPs. Noise must not make a longer document faster than a shorter
    one: such a time is raised as far as a curve needs.
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
