"""Planning ahead: a second process plans the next steps from lengths alone, so that training does not wait.

It needs no torch and no data. The trainer submits the lengths of coming steps and takes the plan when a step begins. A
plan that is late, or that the planner could not make, never stops a step: the fallback planner, static unless another
is named, makes one at once, and the `StepPlan` carries the reason.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from typing import NamedTuple, Self

import numpy as np

from seqloom.cost import CostModel
from seqloom.errors import SeqloomError
from seqloom.plan import Plan
from seqloom.planners.bounds import plan_bound
from seqloom.planners.registry import PlannerChoice
from seqloom.simulate import predicted_ns, simulate


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of a step as it travels to the ranks, its cost and its prediction; JSON can hold every field.

    The planner's process computes all of it. A rank only parses the plan, once, when it first asks for `plan`.
    """

    step: int  # number of the step
    plan_json: str  # the validated plan, by `Plan.to_json`
    plan_hash: str  # `Plan.hash`
    predicted_ns: int  # step time by the cost model
    plan_ns: int = 0  # planning time
    wait_ns: int = 0  # how long the trainer waited for it
    fallback_reason: str = ""  # why the fallback planner made it; "" when it did not
    bound_ns: int | None = None  # lower bound of the step on the same stages; None: not computed
    idle_share: float | None = None  # share of the ranks' time that they wait, by the simulator; None: not computed
    _plan: Plan | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def plan(self) -> Plan:
        """The plan."""
        known = self._plan or Plan.from_json(self.plan_json)
        object.__setattr__(self, "_plan", known)
        return known


class PlanAhead:
    """Plans coming steps in another process.

    `take` drops the plans of earlier steps that were submitted but never taken.
    """

    def __init__(
        self,
        cost: CostModel,
        planner: str | PlannerChoice = "auto",
        *,
        fallback: PlannerChoice = PlannerChoice("static"),  # noqa: B008 - frozen
        patience_s: float = 1.0,
        first_patience_s: float | None = None,
    ) -> None:
        """Start the process.

        Args:
            planner: a name, see `make_plan`, or a planner with its options.
            fallback: plans in this process, at once, a step that the planner is late for or cannot plan.
            patience_s: how long `take` waits for a plan before that.
            first_patience_s: the same until the process has answered once: it starts, and may compile; None: as long.
        """
        self._cost, self._fallback, self._patience_s = cost, fallback, patience_s
        chosen = PlannerChoice(planner) if isinstance(planner, str) else planner
        self._timeout_s = patience_s if first_patience_s is None else first_patience_s
        self._answers: dict[int, StepPlan | _Failure] = {}
        self._submitted: set[int] = set()
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, cost, chosen), daemon=True)
        self._process.start()
        theirs.close()

    def submit(self, step: int, lengths: Sequence[int] | np.ndarray) -> None:
        """Ask for the plan of a step. `take` reports a planner's process that has died."""
        try:
            self._connection.send((step, np.asarray(lengths, dtype=np.int64)))
            self._submitted.add(step)
        except (BrokenPipeError, OSError):
            self._answers[step] = self._died()

    def take(self, step: int, lengths: Sequence[int] | np.ndarray) -> StepPlan:
        """Return the plan of a step, waiting for it if need be; that of the fallback planner if it is late or fails.

        A step that was not submitted is planned now. ``lengths`` are the same as submitted.
        """
        begin = time.monotonic_ns()
        if step not in self._submitted and step not in self._answers:
            self.submit(step, lengths)
        self._receive_until(step, begin + round(self._timeout_s * 1e9))
        found = self._answers.pop(step, _Failure(0, f"no plan within {self._timeout_s:g} s"))
        self._answers = {other: answer for other, answer in self._answers.items() if other > step}
        if isinstance(found, _Failure):
            plan = self._fallback.plan(lengths, self._cost)
            predicted = predicted_ns(plan, self._cost)
            options = {"plan_ns": found.plan_ns, "fallback_reason": found.reason}
            found = StepPlan(step, plan.to_json(), plan.hash, predicted, **options)
        return replace(found, wait_ns=time.monotonic_ns() - begin)

    def close(self) -> None:
        """Stop the process, which may not react to SIGTERM."""
        self._connection.close()
        self._process.join(timeout=0.2)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _receive_until(self, step: int, deadline_ns: int) -> None:
        while step not in self._answers:
            left_s = (deadline_ns - time.monotonic_ns()) / 1e9
            try:
                if not self._connection.poll(max(0.0, left_s)):
                    return
                answered, answer = self._connection.recv()
            except (EOFError, OSError):
                self._answers[step] = self._died()
                return
            if answered in self._submitted:
                self._submitted.discard(answered)
                self._answers[answered] = answer
                self._timeout_s = self._patience_s

    def _died(self) -> _Failure:
        self._process.join(timeout=1.0)
        return _Failure(0, f"the planner's process has died (exit code {self._process.exitcode})")


class _Failure(NamedTuple):
    """Why there is no plan, and how long planning took."""

    plan_ns: int
    reason: str


def _serve(connection: Connection, cost: CostModel, chosen: PlannerChoice) -> None:
    """Answer every (step, lengths) with (step, `StepPlan` or `_Failure`) until pipe or trainer are gone."""
    end_with_parent(1)
    while True:
        try:
            step, lengths = connection.recv()
            connection.send((step, _answer(step, cost, chosen, lengths)))
        except (EOFError, OSError):
            return


def _answer(step: int, cost: CostModel, chosen: PlannerChoice, lengths: np.ndarray) -> StepPlan | _Failure:
    begin = time.monotonic_ns()
    try:
        plan = chosen.plan(lengths, cost)
        text, took = plan.to_json(), time.monotonic_ns() - begin
        bound_ns, idle_share = plan_bound(plan, cost), simulate(plan, cost).idle_share
        predicted, figures = predicted_ns(plan, cost), {"bound_ns": bound_ns, "idle_share": idle_share}
        return StepPlan(step, text, plan.hash, predicted, plan_ns=took, **figures)
    except SeqloomError as error:
        reason = f"planner {chosen.name!r}: {error}"
    except Exception as error:  # a defect of the planner must not stop training; the reason is logged
        reason = f"planner {chosen.name!r} failed: {type(error).__name__}: {error}"
    return _Failure(time.monotonic_ns() - begin, reason)


def end_with_parent(code: int) -> None:
    """End this process as soon as the one that has started it is gone, however that ends and whatever this one does."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(code)

    threading.Thread(target=watch, daemon=True).start()
