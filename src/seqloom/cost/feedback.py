"""Feedback: refit a few factors of a profile to the steps that a run has measured, so that the next plans are better.

A factor says how many times as long as by its profile a part of a step takes. Around the factors f0 by which a step was
planned its time is

    time(f) = predicted + sum over factors of (f - f0) * d time / d f

whatever waits for whom in the plan. `FactorCosts.derivatives` gives the derivatives of a plan, `refit` finds the
factors for which these times are nearest to the measured ones. Steps that something else has slowed down must not
count: an iteration weighs down whatever is far off (Huber's weights, then Tukey's). Equal inputs give equal factors.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from seqloom.cost.calibrate import CONSTANTS, non_negative_least_squares, scale_constants
from seqloom.cost.model import CostModel
from seqloom.cost.profile import AnalyticProfile, require_analytic
from seqloom.cost.speeds import BusyTime, SpeedFeedback
from seqloom.plan import Plan

WINDOW, LEAST_STEPS, EVERY = 32, 8, 4
"""Latest steps that count, how many there must be for the first refit, and steps from one refit to the next."""
ADOPTED_CHANGE, ADOPTED_ERROR = 0.02, 0.9
"""New factors are used if predictions change by this share of a step, and their error falls to that share of what it
was: else plans would change with the noise."""
LEAST_FACTOR, MOST_FACTOR = 0.02, 50.0
PRIOR_SPREAD = 0.5
"""Standard deviation of a factor from the common one, as a share of it, before any step is known: profiles of the same
machine measured at different times, and published figures beside measured ones, differ by about as much."""
LEAST_NOISE = 0.005
"""Standard deviation of a step's time, as a share of it, that is assumed at least."""
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
        here, own = price(plan, self.cost), self.factors.resolved(self.profiled)._asdict()
        found = {name: price(plan, cost) - here for name, cost in self._changed.items()}
        return Factors(**{name: max(0.0, more / (own[name] * DIFFERENCE)) for name, more in found.items()})


def can_refit(cost: CostModel) -> bool:
    """Whether factors can change the prices of a cost model; published constants stay what they are."""
    return isinstance(cost.profile, AnalyticProfile)


def _scaled(cost: CostModel, factors: Factors) -> CostModel:
    """Memory stays that of the profile: a run that fits must not be refused for an imbalance that it has had."""
    profile = require_analytic(cost.profile)
    return cost.with_profile(factors.scale(profile), memory_imbalance=profile.expert_imbalance)


class Measurement(NamedTuple):
    """A step that was run: derivatives of its time by every factor, the rest of it, and what it took. ns.

    `imbalance` is what it has measured of tokens at the busiest rank of an EP group over the mean; 0: nothing.
    """

    derivatives: Factors
    rest_ns: float
    measured_ns: float
    imbalance: float = 0.0

    @classmethod
    def of(
        cls, factors: Factors, derivatives: Factors, predicted_ns: float, measured_ns: float, imbalance: float = 0.0
    ) -> Measurement:
        """Of a step that was planned and predicted by these factors, which are `resolved`."""
        return cls(derivatives, predicted_ns - float(np.dot(derivatives, factors)), measured_ns, imbalance)

    def relative_error(self, factors: Factors) -> float:
        """Predicted / measured - 1."""
        return (float(np.dot(self.derivatives, factors)) + self.rest_ns) / self.measured_ns - 1


def refit(steps: Sequence[Measurement]) -> Factors:
    """Return the factors that explain measured steps best, by weighted non-negative least squares of relative errors.

    Beside the steps stands what is known before: factors lie around a common one, that of the median step, with
    `PRIOR_SPREAD`. A step says as much against that as the noise of steps lets it, so factors that steps do not tell
    apart keep the common one. The imbalance of experts is the median of what steps have measured.
    """
    imbalances = [step.imbalance for step in steps if step.imbalance]
    imbalance = round(float(np.median(imbalances)), 4) if imbalances else 0.0
    times = np.array([step.measured_ns for step in steps])
    derivatives = np.array([step.derivatives for step in steps]) / times[:, None]
    design, known = derivatives[:, :-1], derivatives[:, -1] * imbalance
    target = 1.0 - np.array([step.rest_ns for step in steps]) / times - known
    scaled = design.sum(axis=1)
    if not (scaled > 0).any():
        return NO_CHANGE
    common = float(np.median((target / np.where(scaled > 0, scaled, np.inf))[scaled > 0]))
    common = min(max(common, LEAST_FACTOR), MOST_FACTOR)
    found = np.full(design.shape[1], common)
    for iteration in range(2 * ITERATIONS):
        residual = np.abs(design @ found - target)
        noise = max(1.4826 * float(np.median(residual)), LEAST_NOISE)  # of normal noise, from its median deviation
        if iteration < ITERATIONS:
            weights = np.minimum(1.0, HUBER * noise / np.maximum(residual, 1e-12))
        else:
            weights = np.maximum(0.0, 1.0 - (residual / (TUKEY * noise)) ** 2) ** 2
        root, prior = np.sqrt(weights), noise / PRIOR_SPREAD
        rows = np.concatenate([design * root[:, None], prior / common * np.eye(len(found))])
        found = non_negative_least_squares(rows, np.concatenate([target * root, np.full(len(found), prior)]))
    fitted = Factors(*(round(min(max(value, LEAST_FACTOR), MOST_FACTOR), 4) for value in found.tolist()))
    return fitted._replace(imbalance=imbalance)


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
        steps = (Measurement(Factors(*derivatives), *ns) for derivatives, *ns in state.get("steps", ()))
        self._steps: deque[Measurement] = deque(steps, maxlen=WINDOW)
        self.speeds = SpeedFeedback(cost.speeds, cost.ranks, state.get("speeds"))

    def state_dict(self) -> dict[str, Any]:
        """Return everything as JSON can hold it."""
        steps = [[list(step.derivatives), *step[1:]] for step in self._steps]
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
        error_before, error = self._median_error(before), self._median_error(found)
        changes = [abs(each.relative_error(found) - each.relative_error(before)) for each in self._steps]
        if float(np.median(changes)) < ADOPTED_CHANGE or error > ADOPTED_ERROR * error_before:
            self.error = error_before
            return ""
        self.factors, self.error = found, error
        moved = ((name, old, getattr(found, name)) for name, old in before._asdict().items())
        drift = ", ".join(f"{name} {old:.3g} -> {new:.3g}" for name, old, new in moved if new != old)
        latest = f"predictions of the latest {len(self._steps)} steps were {error_before:.1%} off"
        return f"{latest}, and {error:.1%} with new factors {found.digest}: {drift}"

    def _median_error(self, factors: Factors) -> float:
        return float(np.median([abs(step.relative_error(factors)) for step in self._steps]))
