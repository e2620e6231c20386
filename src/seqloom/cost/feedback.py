"""Feedback: refit a few factors of a profile to the steps that a run has measured, so that the next plans are better.

A factor says how many times as long as by its profile a part of a step takes. Around the factors f0 by which a step was
planned its time is

    time(f) = predicted + sum over factors of (f - f0) * d time / d f

whatever waits for whom in the plan. So is that of every phase that ranks measure by itself. `FactorCosts` gives the
derivatives of a plan and of its phases, `refit` finds the factors for which these times are nearest to the measured
ones. What something else has slowed down must not count: an iteration weighs down whatever is far off (Huber's weights,
then Tukey's). Equal inputs give equal factors.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from seqloom.cost.calibrate import CONSTANTS, non_negative_least_squares, scale_constants
from seqloom.cost.model import CostModel
from seqloom.cost.profile import AnalyticProfile, require_analytic
from seqloom.cost.speeds import BusyTime, SpeedFeedback
from seqloom.plan import Plan, Sharding

WINDOW, LEAST_STEPS, EVERY = 32, 8, 4
"""Latest steps that count, how many there must be for the first refit, and steps from one refit to the next."""
ADOPTED_CHANGE, ADOPTED_ERROR = 0.02, 0.9
"""New factors are used if predictions change by this share of a step, and their error falls to that share of what it
was: else plans would change with the noise. So are factors that predict steps as well, if predictions of their phases
change by `PHASE_NOISE`, and their error falls as much.
"""
LEAST_FACTOR, MOST_FACTOR = 0.02, 50.0
PRIOR_SPREAD = 0.5
"""Standard deviation of a factor from the common one, as a share of it, before any step is known: profiles of the same
machine measured at different times, and published figures beside measured ones, differ by about as much."""
LEAST_NOISE, PHASE_NOISE = 0.005, 0.05
"""Standard deviation of the time of a step, and of a phase, as a share of it, that is assumed at least. A profile knows
phases less well than steps: what it counts to one of them may be in another."""
DIFFERENCE = 0.02
"""Share by which a factor is changed to find a derivative."""
HUBER, TUKEY = 1.345, 4.685
"""Residuals, in standard deviations, from which weights fall: 95 % efficient where the noise is normal."""
ITERATIONS = 6
"""Of either kind of weights."""


class Factors(NamedTuple):
    """How many times as long as by its profile each part of a step takes."""

    attention: float = 1.0  # kernels, and what a document or piece costs however short
    linear: float = 1.0  # linear layers, loss and optimiser: products, memory
    exchange: float = 1.0  # all-to-all and ring messages
    gather: float = 1.0  # parameters gathered, gradients reduced
    overhead: float = 1.0  # host and launch time of a layer, round and step, whatever is in them
    imbalance: float = 0.0  # no multiple, and measured, not fitted: `expert_imbalance` of the profile; 0: as it is

    @property
    def digest(self) -> str:
        """Eight hex digits; "" for factors that change nothing."""
        return "" if self == NO_CHANGE else hashlib.sha256(repr(tuple(self)).encode()).hexdigest()[:8]

    def digest_with(self, speeds: Sequence[float]) -> str:
        """Eight hex digits of these and learned speeds of ranks; without such speeds, `digest`."""
        both = repr((tuple(self), tuple(speeds)))
        return hashlib.sha256(both.encode()).hexdigest()[:8] if speeds else self.digest

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:.3g}" for name, value in self._asdict().items())

    def scale(self, profile: AnalyticProfile) -> AnalyticProfile:
        """Return the profile with its constants multiplied."""
        scaled = scale_constants(profile, {name: getattr(self, FACTOR_OF[name]) for name in CONSTANTS})
        return replace(scaled, expert_imbalance=self.imbalance) if self.imbalance else scaled

    def resolved(self, cost: CostModel) -> Factors:
        """Return these with the imbalance by which they price plans of a cost model."""
        return self if self.imbalance else self._replace(imbalance=require_analytic(cost.profile).expert_imbalance)


NO_CHANGE = Factors()
"""The profile as it is."""


def _factor_of(constant: str) -> str:
    if constant.startswith(("intra.", "network.")):
        return "gather" if ".collective." in constant else "exchange"
    known = {"matmul": "linear", "memory": "linear", "layer": "overhead", "step": "overhead"}
    return known.get(constant, "attention")


FACTOR_OF = {constant: _factor_of(constant) for constant in CONSTANTS}
"""The factor that scales each constant of a profile."""


class FactorCosts:
    """A cost model under factors, and the derivatives of its times by each of them."""

    def __init__(self, profiled: CostModel, factors: Factors = NO_CHANGE, speeds: Sequence[float] = ()) -> None:
        """Scale the profile of a cost model, which `can_refit` unless factors change nothing.

        `speeds` of ranks are those that a run has learned (`speeds.SpeedFeedback`); none: all are as described.
        """
        self.profiled, self.factors, self.speeds = profiled, factors, tuple(speeds)
        self._unscaled = profiled.with_speeds(self.speeds) if self.speeds else profiled
        self.cost = self._unscaled if factors == NO_CHANGE else _scaled(self._unscaled, factors)

    def with_factors(self, factors: Factors, speeds: Sequence[float] = ()) -> FactorCosts:
        """Return these if they have the factors and speeds already, else others."""
        same = (factors, tuple(speeds)) == (self.factors, self.speeds)
        return self if same else FactorCosts(self.profiled, factors, speeds)

    @cached_property
    def _changed(self) -> dict[str, CostModel]:
        factors = self.factors.resolved(self.profiled)
        own = {name: value for name, value in factors._asdict().items() if name != "imbalance" or self.cost.expert > 1}
        more = {name: factors._replace(**{name: value * (1 + DIFFERENCE)}) for name, value in own.items()}
        return {name: _scaled(self._unscaled, factors) for name, factors in more.items()}

    def derivatives(self, plan: Plan, price: Callable[[Plan, CostModel], int]) -> Factors:
        """Return ns that the plan takes more for each factor that is larger by 1; `price` predicts a step."""
        here = price(plan, self.cost)
        found = self._by_factor(lambda cost: np.array([price(plan, cost) - here]))
        return Factors(*found[:, 0].tolist())

    def phases(self, plan: Plan, price: Callable[[Plan, CostModel], np.ndarray]) -> list[PhaseCost]:
        """Return what the phases of a plan that ranks measure should take; `price` predicts the computing of ranks, ns.

        Attention of the ranks of every stage, in the mean, unless its calls also make keys and values from latents. All
        computing of a stage only in pipelines whose ranks keep their stages, and on one rank: elsewhere layers gather
        parameters and reduce gradients in the same time.
        """
        here, latent = price(plan, self.cost), self.profiled.model.latent > 0
        more, found = self._by_factor(lambda cost: price(plan, cost) - here), []
        for pipeline in plan.pipelines:
            alone = len(here) == 1 or (len(pipeline.stages) > 1 and plan.sharding != Sharding.FREE)
            for ranks in map(list, pipeline.ranks_by_pp_rank):
                whole = Factors(*more[:, ranks].mean(axis=1).tolist())
                if whole.attention and not latent:
                    attention = Factors(whole.attention, 0.0, 0.0, 0.0, 0.0, 0.0)
                    found.append(PhaseCost("attention", ranks, attention, whole.attention * self.factors.attention))
                if any(whole) and alone:
                    found.append(PhaseCost("computing", ranks, whole, float(here[ranks].mean())))
        return found

    def _by_factor(self, more: Callable[[CostModel], np.ndarray]) -> np.ndarray:
        """float64[factors, n]: derivatives of n times, given how much `more` they are under another cost model."""
        own = self.factors.resolved(self.profiled)._asdict()
        found = {name: np.maximum(0.0, more(cost) / (own[name] * DIFFERENCE)) for name, cost in self._changed.items()}
        nothing = np.zeros_like(next(iter(found.values())))
        return np.array([found.get(name, nothing) for name in Factors._fields])


def can_refit(cost: CostModel) -> bool:
    """Whether factors can change the prices of a cost model; published constants stay what they are."""
    return isinstance(cost.profile, AnalyticProfile)


def _scaled(cost: CostModel, factors: Factors) -> CostModel:
    """Memory stays that of the profile: a run that fits must not be refused for an imbalance that it has had."""
    profile = require_analytic(cost.profile)
    return cost.with_profile(factors.scale(profile), memory_imbalance=profile.expert_imbalance)


class PhaseCost(NamedTuple):
    """What a phase of a step should take on some ranks, in the mean: its time, and the derivatives by every factor."""

    phase: str  # attention or computing
    ranks: Sequence[int]
    derivatives: Factors
    predicted_ns: float

    @classmethod
    def of(cls, content: Sequence[Any]) -> PhaseCost:
        """Read what JSON has made of one."""
        phase, ranks, derivatives, predicted_ns = content
        return cls(phase, ranks, Factors(*derivatives), predicted_ns)


class Measurement(NamedTuple):
    """A step that was run: derivatives of its time by every factor, the rest of it, and what it took. ns.

    `imbalance` is what it has measured of tokens at the busiest rank of an EP group over the mean; 0: nothing.
    `phases` are measurements of its phases, in the same form.
    """

    derivatives: Factors
    rest_ns: float
    measured_ns: float
    imbalance: float = 0.0
    phases: tuple[Measurement, ...] = ()

    @classmethod
    def of(
        cls, factors: Factors, derivatives: Factors, predicted_ns: float, measured_ns: float, imbalance: float = 0.0
    ) -> Measurement:
        """Of a step that was planned and predicted by these factors, which are `resolved`."""
        return cls(derivatives, predicted_ns - float(np.dot(derivatives, factors)), measured_ns, imbalance)

    def as_list(self) -> list[Any]:
        """Return it as JSON can hold it."""
        return [list(self.derivatives), *self[1:-1], [phase.as_list() for phase in self.phases]]

    @classmethod
    def from_list(cls, content: Sequence[Any]) -> Measurement:
        """Read what `as_list` has written, or an earlier version, without phases."""
        derivatives, rest, measured, imbalance = content[:4]
        phases = tuple(map(cls.from_list, content[4] if len(content) > 4 else ()))
        return cls(Factors(*derivatives), rest, measured, imbalance, phases)

    def relative_error(self, factors: Factors) -> float:
        """Predicted / measured - 1."""
        return (float(np.dot(self.derivatives, factors)) + self.rest_ns) / self.measured_ns - 1


def refit(steps: Sequence[Measurement]) -> Factors:
    """Return the factors that explain measured steps best, by weighted non-negative least squares of relative errors.

    Beside the steps stand their phases, and what is known before: factors lie around a common one, that of the median
    step, with `PRIOR_SPREAD`. A step or phase says as much as the noise of its kind lets it, so factors that neither
    tells apart keep the common one. The imbalance of experts is the median of what steps have measured.
    """
    imbalances = [step.imbalance for step in steps if step.imbalance]
    imbalance = round(float(np.median(imbalances)), 4) if imbalances else 0.0
    whole = _Rows.of(steps, imbalance, LEAST_NOISE)
    parts = _Rows.of([phase for step in steps for phase in step.phases], imbalance, PHASE_NOISE)
    scaled = whole.design.sum(axis=1)
    if not (scaled > 0).any():
        return NO_CHANGE
    common = float(np.median((whole.target / np.where(scaled > 0, scaled, np.inf))[scaled > 0]))
    common = min(max(common, LEAST_FACTOR), MOST_FACTOR)
    found, spread = np.full(whole.design.shape[1], common), common * PRIOR_SPREAD
    for iteration in range(2 * ITERATIONS):
        weighted = [rows.weighted(found, clipped=iteration < ITERATIONS) for rows in (whole, parts) if len(rows.target)]
        rows = np.concatenate([*(design for design, _ in weighted), np.eye(len(found)) / spread])
        targets = np.concatenate([*(target for _, target in weighted), np.full(len(found), common / spread)])
        found = non_negative_least_squares(rows, targets)
    fitted = Factors(*(round(min(max(value, LEAST_FACTOR), MOST_FACTOR), 4) for value in found.tolist()))
    return fitted._replace(imbalance=imbalance)


class _Rows(NamedTuple):
    """Measurements of one kind as equations ``design @ factors = target``, relative to what was measured."""

    design: np.ndarray  # [measurements, factors] without the imbalance
    target: np.ndarray  # [measurements]
    least_noise: float

    @classmethod
    def of(cls, measured: Sequence[Measurement], imbalance: float, least_noise: float) -> _Rows:
        times = np.array([each.measured_ns for each in measured])
        derivatives = np.array([each.derivatives for each in measured]).reshape(-1, len(Factors._fields))
        relative = derivatives / times[:, None]
        target = 1.0 - np.array([each.rest_ns for each in measured]) / times - relative[:, -1] * imbalance
        return cls(relative[:, :-1], target, least_noise)

    def weighted(self, found: np.ndarray, *, clipped: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return design and target in deviations of the noise, weighed down where `found` is far off."""
        residual = np.abs(self.design @ found - self.target)
        noise = max(1.4826 * float(np.median(residual)), self.least_noise)  # of normal noise, from its median deviation
        if clipped:
            weights = np.minimum(1.0, HUBER * noise / np.maximum(residual, 1e-12))
        else:
            weights = np.maximum(0.0, 1.0 - (residual / (TUKEY * noise)) ** 2) ** 2
        root = np.sqrt(weights) / noise
        return self.design * root[:, None], self.target * root


class Feedback:
    """The factors of a run: those in use, and the latest steps that they are refitted to.

    Attributes:
        about: whose factors they are: profile and cluster.
        factors: in use.
        speeds: of the ranks, learned from their busy times.
        error: median relative error of predictions of the latest steps by these factors; None: too few steps yet.
    """

    def __init__(self, cost: CostModel, state: Mapping[str, Any] | None = None) -> None:
        """Begin with what `state_dict` returned; None, or one of another profile or cluster: with none changed."""
        digest = hashlib.sha256(repr(cost.profile).encode()).hexdigest()[:8]
        self._cost = cost
        self.about = f"profile {cost.profile.name} ({digest}) on {cost.cluster.name}"
        if cost.speeds:
            self.about += f" with speeds {hashlib.sha256(repr(cost.speeds.values).encode()).hexdigest()[:8]}"
        state = state if state is not None and state["about"] == self.about else {}
        self.factors = Factors(*state.get("factors", ()))
        self.error: float | None = state.get("error")
        self._seen: int = state.get("seen", 0)
        self._steps: deque[Measurement] = deque(map(Measurement.from_list, state.get("steps", ())), maxlen=WINDOW)
        self.speeds = SpeedFeedback(cost.speeds, cost.ranks, state.get("speeds"))

    def state_dict(self) -> dict[str, Any]:
        """Return everything as JSON can hold it."""
        steps = [step.as_list() for step in self._steps]
        own = {"factors": list(self.factors), "error": self.error, "seen": self._seen, "steps": steps}
        return {"about": self.about, **own, "speeds": self.speeds.state_dict()}

    def observe(self, step: Measurement, busy: Sequence[BusyTime] = ()) -> str:
        """Count a step, and refit when that is due; return what has changed, "" where nothing has.

        `busy` are the busy times of all ranks. Steps that were predicted by other speeds do not count for factors.
        """
        if busy and (drift := self.speeds.observe(busy)):
            self._steps.clear()
            self.error = None
            return drift
        self._steps.append(step)
        self._seen += 1
        if len(self._steps) < LEAST_STEPS or self._seen % EVERY:
            return ""
        before, found = self.factors.resolved(self._cost), refit(self._steps)
        phases = [phase for step in self._steps for phase in step.phases]
        steps_off, phases_off = _ErrorChange.of(self._steps, before, found), _ErrorChange.of(phases, before, found)
        same_steps = steps_off.after <= steps_off.before + LEAST_NOISE
        if not steps_off.improves(ADOPTED_CHANGE) and not (same_steps and phases_off.improves(PHASE_NOISE)):
            self.error = steps_off.before
            return ""
        self.factors, self.error = found, steps_off.after
        moved = ((name, old, getattr(found, name)) for name, old in before._asdict().items())
        drift = ", ".join(f"{name} {old:.3g} -> {new:.3g}" for name, old, new in moved if new not in (old, 0))
        phases_too = f", of their phases {phases_off.before:.1%} and {phases_off.after:.1%}" if phases else ""
        latest = f"predictions of the latest {len(self._steps)} steps were {steps_off.before:.1%} off"
        return f"{latest}, and {steps_off.after:.1%} with new factors {found.digest}{phases_too}: {drift}"


class _ErrorChange(NamedTuple):
    """What other factors change in the predictions of measurements, all medians of relative figures."""

    before: float  # error by the factors in use
    after: float  # error by the others
    moved: float  # difference of the predictions

    @classmethod
    def of(cls, measured: Iterable[Measurement], before: Factors, found: Factors) -> _ErrorChange:
        """Compare two sets of factors; nothing changes where nothing was measured."""
        pairs = [(each.relative_error(before), each.relative_error(found)) for each in measured] or [(0.0, 0.0)]
        rows = [(abs(here), abs(there), abs(there - here)) for here, there in pairs]
        own, others, moved = (float(np.median(column)) for column in zip(*rows, strict=True))
        return cls(own, others, moved)

    def improves(self, least_change: float) -> bool:
        """Whether predictions change by so much, and are clearly better."""
        return self.moved >= least_change and self.after <= ADOPTED_ERROR * self.before
