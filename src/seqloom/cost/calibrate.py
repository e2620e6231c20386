"""A profile from measured steps: which constants make the cost model tell the times that were measured.

Without overlap a step's time is a sum in which every constant stands once: its price under a profile in which only
that constant costs anything, times how much dearer it is than there. So the factors are a least squares problem
without negative solutions, and what is fitted is the cost model itself, not a copy of its formulas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from seqloom.cost.fit import non_negative
from seqloom.cost.memory import GIB
from seqloom.cost.model import CostModel
from seqloom.cost.profile import AnalyticProfile, Curve, LinkRate, Links
from seqloom.errors import SeqloomError
from seqloom.plan import Plan, Sharding

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
    floor = _prices(cost, scaled(start, dict.fromkeys(CONSTANTS, 0.0)), trials)
    prices = {name: _prices(cost, scaled(start, _only(name)), trials) - floor for name in CONSTANTS}
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
    profile = scaled(start, factors)
    return Calibration(profile, factors, tuple(trials), tuple(_prices(cost, profile, trials).tolist()))


def under(cost: CostModel, profile: AnalyticProfile, sharding: Sharding | None = None) -> CostModel:
    """The same cost model with another profile, and with another sharding if one is given."""
    budget = cost.budget_bytes / GIB
    return CostModel(cost.cluster, cost.model, profile, sharding or cost.sharding, budget, cost.max_length)


def scaled(profile: AnalyticProfile, factors: Mapping[str, float]) -> AnalyticProfile:
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
    priced = under(cost, replace(profile, overlap=0.0))
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
