"""From measurements to profile values: least squares for constants and links, throughput for kernels."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from seqloom.cost.compute import BACKWARD_FLOPS
from seqloom.cost.memory import GIB
from seqloom.cost.model import CostModel
from seqloom.cost.profile import AnalyticProfile, Curve, LinkRate, Links
from seqloom.errors import SeqloomError
from seqloom.plan import Plan, Sharding


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


# ---- merged: cost.calibrate
# A profile from measured steps: which constants make the cost model tell the times that were measured.
#
# Without overlap a step's time is a sum in which every constant stands once: its price under a profile in which
# only
# that constant costs anything, times how much dearer it is than there. So the factors are a least squares problem
# without negative solutions, and what is fitted is the cost model itself, not a copy of its formulas.


FREE = 1e9
"""A rate is this many times as high where a constant shall cost nothing."""
PLACES, KINDS = ("intra", "network"), ("all_to_all", "p2p", "collective")
CONSTANTS = (
    "matmul",
    "memory",
    "attention",
    "tile",
    "document",
    "gathered",
    "piece",
    "prefix",
    "layer",
    "ring_step",
    "step",
    *(f"{place}.{kind}.{what}" for place in PLACES for kind in KINDS for what in ("bytes", "call", "hop")),
)
"""Everything of a profile that takes time. A round's own constant is not among them: it is counted per layer."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A plan that was run, and the time of its step."""

    plan: Plan
    ns: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fitted profile, and how well it tells what it was fitted to.

    Attributes:
        profile: the start with every constant scaled.
        factors: how much dearer each constant is than at the start.
        trials: what it was fitted to.
        predicted_ns: what the profile says of every trial.
    """

    profile: AnalyticProfile
    factors: dict[str, float]
    trials: tuple[Trial, ...]
    predicted_ns: tuple[float, ...]

    @property
    def errors(self) -> tuple[float, ...]:
        """Predicted / measured - 1 of every trial."""
        pairs = zip(self.trials, self.predicted_ns, strict=True)
        return tuple(predicted / trial.ns - 1 for trial, predicted in pairs)


def calibrate(cost: CostModel, trials: Sequence[Trial], known: Mapping[str, float]) -> Calibration:
    """Fit the constants of a profile to measured steps. One that no step depends on stays as it is at the start.

    Without a ring among the steps, tiles are as much dearer as causal documents are: the kernels are the same.

    Args:
        cost: prices the plans; its profile is the start, in which every fitted constant costs something.
        trials: steps of equal groups, so that no group waits for another.
        known: weights of the start's own constants: how many trials it takes to outvote what was measured apart.
    """
    start = cost.profile
    if not isinstance(start, AnalyticProfile):
        raise SeqloomError(f"profile {start.name} holds published constants; start from an analytic one, such as cpu")
    times = np.array([trial.ns for trial in trials])
    floor = _prices(cost, scale_constants(start, dict.fromkeys(CONSTANTS, 0.0)), trials)
    prices = {name: _prices(cost, scale_constants(start, _only(name)), trials) - floor for name in CONSTANTS}
    fitted = [name for name, column in prices.items() if column.any()]
    design = [np.array([prices[name] for name in fitted]).T / times[:, None]]
    target = [1.0 - floor / times]
    for name, weight in known.items():  # a row that says: this factor is 1
        design.append(weight * np.array([[float(name == other) for other in fitted]]))
        target.append(np.array([weight * float(name in fitted)]))
    found = non_negative(np.concatenate(design), np.concatenate(target))
    factors = dict.fromkeys(CONSTANTS, 1.0) | dict(zip(fitted, found.tolist(), strict=True))
    if "tile" not in fitted:
        factors["tile"] = factors["attention"]
    profile = scale_constants(start, factors)
    return Calibration(profile, factors, tuple(trials), tuple(_prices(cost, profile, trials).tolist()))


def with_profile(cost: CostModel, profile: AnalyticProfile, sharding: Sharding | None = None) -> CostModel:
    """The same cost model with another profile, and with another sharding if one is given."""
    budget = cost.budget_bytes / GIB
    return CostModel(cost.cluster, cost.model, profile, sharding or cost.sharding, budget, cost.max_length)


def scale_constants(profile: AnalyticProfile, factors: Mapping[str, float]) -> AnalyticProfile:
    """The profile with constants that many times as dear; those not named stay.

    Args:
        factors: by names of `CONSTANTS`; 0 is free.
    """
    dearer = {name: float(factors.get(name, 1.0)) for name in CONSTANTS}

    def links(own: Links, place: str) -> Links:
        return Links(*(_link(getattr(own, kind), dearer, f"{place}.{kind}") for kind in KINDS))

    return replace(
        profile,
        matmul_tflops=profile.matmul_tflops * _rate(dearer["matmul"]),
        memory_efficiency=profile.memory_efficiency * _rate(dearer["memory"]),
        attention=_curve(profile.attention, dearer["attention"]),
        tile=_curve(profile.tile, dearer["tile"]),
        intra=links(profile.intra, "intra"),
        network=links(profile.network, "network"),
        layer_us=profile.layer_us * dearer["layer"],
        round_us=profile.round_us * dearer["layer"],
        ring_step_us=profile.ring_step_us * dearer["ring_step"],
        document_us=profile.document_us * dearer["document"],
        gathered_us=profile.gathered_us * dearer["gathered"],
        piece_us=profile.piece_us * dearer["piece"],
        prefix_us=profile.prefix_us * dearer["prefix"],
        step_us=profile.step_us * dearer["step"],
    )


def _prices(cost: CostModel, profile: AnalyticProfile, trials: Sequence[Trial]) -> np.ndarray:
    """float64[trials] ns under another profile, nothing hidden behind anything."""
    priced = with_profile(cost, replace(profile, overlap=0.0))
    return np.array([priced.plan_ns(trial.plan) for trial in trials], dtype=np.float64)


def _only(name: str) -> dict[str, float]:
    return {other: float(other == name) for other in CONSTANTS}


def _rate(dearer: float) -> float:
    """What a rate is multiplied with when its time is multiplied with ``dearer``."""
    return 1.0 / max(dearer, 1.0 / FREE)


def _curve(curve: Curve, dearer: float) -> Curve:
    forward, backward = (tuple(rate * _rate(dearer) for rate in rates) for rates in (curve.forward, curve.backward))
    return Curve(curve.lengths, forward, backward)


def _link(rate: LinkRate, dearer: Mapping[str, float], name: str) -> LinkRate:
    return LinkRate(
        rate.efficiency * _rate(dearer[f"{name}.bytes"]),
        rate.call_us * dearer[f"{name}.call"],
        rate.hop_us * dearer[f"{name}.hop"],
    )
