"""Planning ahead: a process of its own plans the next steps from lengths alone, so that training does not wait.

It needs no torch and no data. Whoever trains submits the lengths of coming steps and takes the plan when a step begins.
A plan that is late, or that the planner could not make, never stops a step: the fallback planner, static unless another
was named, makes one at once, and the answer carries the reason.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
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
    """The plan of a step and how it came about.

    Attributes:
        step: number of the step.
        plan: validated.
        plan_ns: how long it took to make.
        wait_ns: how long whoever took it waited.
        predicted_ns: step time by the cost model.
        fallback_reason: why the fallback planner made it; "" when it did not.
        bound_ns: lower bound of the step's time on the same stages, under the cost model; None: not computed.
        idle_share: share of the ranks' time in the step that they wait, by the simulator; None: not computed.
    """

    step: int
    plan: Plan
    plan_ns: int
    wait_ns: int
    predicted_ns: int
    fallback_reason: str = ""
    bound_ns: int | None = None
    idle_share: float | None = None


class PlanAhead:
    """Plans of coming steps, made in another process.

    A plan that was asked for but never taken is forgotten when a later step is taken.
    """

    def __init__(
        self,
        cost: CostModel,
        planner: str | PlannerChoice = "auto",
        *,
        seed: int = 0,
        fallback: PlannerChoice = PlannerChoice("static"),  # noqa: B008 - frozen
        patience_s: float = 1.0,
        first_patience_s: float | None = None,
    ) -> None:
        """Start the process.

        Args:
            cost: prices the plans.
            planner: a name, see `make_plan`, or a planner with its options.
            seed: of a planner that is given by its name.
            fallback: plans in this process, at once, a step that the planner is late for or cannot plan.
            patience_s: how long `take` waits for a plan before that.
            first_patience_s: the same until the process has answered once: it starts, and may compile; None: as long.
        """
        self._cost, self._fallback, self._patience_s = cost, fallback, patience_s
        chosen = PlannerChoice(planner, seed=seed) if isinstance(planner, str) else planner
        self._now_s = patience_s if first_patience_s is None else first_patience_s
        self._made: dict[int, _Made] = {}
        self._asked: set[int] = set()
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, cost, chosen), daemon=True)
        self._process.start()
        theirs.close()

    def submit(self, step: int, lengths: Sequence[int] | np.ndarray) -> None:
        """Have the plan of a step made. A planner that has died is noticed when the step is taken."""
        try:
            self._connection.send((step, np.asarray(lengths, dtype=np.int64)))
            self._asked.add(step)
        except (BrokenPipeError, OSError):
            self._made[step] = _Made(None, 0, self._obituary())

    def take(self, step: int, lengths: Sequence[int] | np.ndarray) -> StepPlan:
        """Return the plan of a step, waiting for it if need be; the plain one if it is late or cannot be made.

        Args:
            step: its number; submitted before, or planned now.
            lengths: tokens of its sequences, the same as submitted.
        """
        begin = time.monotonic_ns()
        if step not in self._asked and step not in self._made:
            self.submit(step, lengths)
        self._receive_until(step, begin + round(self._now_s * 1e9))
        late = f"no plan within {self._now_s:g} s"
        made = self._made.pop(step, _Made(None, 0, late))
        self._made = {other: kept for other, kept in self._made.items() if other > step}
        if made.text is None:
            plan = self._fallback.plan(lengths, self._cost)
            predicted = predicted_ns(plan, self._cost)
        else:
            plan, predicted = Plan.from_json(made.text), made.predicted_ns
        waited = time.monotonic_ns() - begin
        return StepPlan(step, plan, made.plan_ns, waited, predicted, made.why_not, made.bound_ns, made.idle_share)

    def close(self) -> None:
        """Stop the process."""
        self._connection.close()
        self._process.join(timeout=0.2)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()

    def _receive_until(self, step: int, deadline_ns: int) -> None:
        """Take in what the process sends, until the plan of a step is there or time is up."""
        while step not in self._made:
            left_s = (deadline_ns - time.monotonic_ns()) / 1e9
            try:
                if not self._connection.poll(max(0.0, left_s)):
                    return
                done, made = self._connection.recv()
            except (EOFError, OSError):
                self._made[step] = _Made(None, 0, self._obituary())
                return
            if done in self._asked:
                self._asked.discard(done)
                self._made[done] = made
                self._now_s = self._patience_s

    def _obituary(self) -> str:
        self._process.join(timeout=1.0)
        return f"the planner's process has died (exit code {self._process.exitcode})"


class _Made(NamedTuple):
    """What the process answers: the plan as JSON or why there is none, how long it took, and what is known of it."""

    text: str | None
    plan_ns: int
    why_not: str
    predicted_ns: int = 0
    bound_ns: int | None = None
    idle_share: float | None = None


def _serve(connection: Connection, cost: CostModel, chosen: PlannerChoice) -> None:
    """Answer (step, lengths) with (step, what was made) until the pipe closes."""
    while True:
        try:
            step, lengths = connection.recv()
            connection.send((step, _make(cost, chosen, lengths)))
        except (EOFError, OSError):
            return


def _make(cost: CostModel, chosen: PlannerChoice, lengths: np.ndarray) -> _Made:
    begin = time.monotonic_ns()
    try:
        plan = chosen.plan(lengths, cost)
        text, took = plan.to_json(), time.monotonic_ns() - begin
        return _Made(text, took, "", predicted_ns(plan, cost), plan_bound(plan, cost), simulate(plan, cost).idle_share)
    except SeqloomError as error:
        why_not = f"planner {chosen.name!r}: {error}"
    except Exception as error:  # a defect of the planner must not stop training; the reason is logged
        why_not = f"planner {chosen.name!r} failed: {type(error).__name__}: {error}"
    return _Made(None, time.monotonic_ns() - begin, why_not)
