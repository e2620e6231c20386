"""Planning ahead: a second process plans the next steps from lengths alone, so that training does not wait.

It needs no torch and no data. The trainer submits the lengths of coming steps and takes the plan when a step begins. A
plan that is late, or that the planner could not make, never stops a step: the fallback planner, static unless another
is named, makes one at once, and the `StepPlan` carries the reason. Its plan also runs where the gain that is predicted
over it is smaller than the error of predictions. A process that dies or hangs is replaced.

Every request carries the factors of the profile by which it is planned and priced (`cost.feedback`), and the speeds of
ranks (`cost.speeds`); the plan says which they were.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any, NamedTuple, Self

import numpy as np

from seqloom.cost import CostModel
from seqloom.cost.feedback import NO_CHANGE, FactorCosts, Factors
from seqloom.errors import SeqloomError
from seqloom.plan import Plan
from seqloom.planners.bounds import plan_bound
from seqloom.planners.registry import PlannerChoice
from seqloom.simulate import predicted_ns, simulate
from seqloom.simulate.microbatch import computing_by_rank

MOST_ENDS = 3
"""Planning processes that may end in a row, before they answer anything, until none replaces them any more."""
PARENT_S = 0.5
"""Seconds between two looks at who a process is a child of."""


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
    factors: Sequence[float] = NO_CHANGE  # of the profile by which it was planned and priced
    within_error: str = ""  # why the fallback planner's plan is used though another is predicted to be faster
    speeds: Sequence[float] = ()  # of the ranks, as the run has learned them; none: as described
    factor_ns: Sequence[float] | None = None  # derivatives of `predicted_ns` by each factor; None: not computed
    phases: Sequence[Sequence[Any]] = ()  # `PhaseCost` of what ranks measure in the step
    _plan: Plan | None = field(default=None, init=False, compare=False, repr=False)

    @property
    def plan(self) -> Plan:
        """The plan."""
        known = self._plan or Plan.from_json(self.plan_json)
        object.__setattr__(self, "_plan", known)
        return known


class PlanAhead:
    """Plans coming steps in another process.

    A thread sends the process one request at a time and waits for its answer, so that neither side ever waits for the
    other to read, and the trainer waits for no pipe. `take` drops the plans of earlier steps that were submitted but
    never taken. Numbers below 0 are batches beside the steps (evaluation), in any order and again and again.
    """

    def __init__(
        self,
        cost: CostModel,
        planner: str | PlannerChoice = "auto",
        *,
        fallback: PlannerChoice = PlannerChoice("static"),  # noqa: B008 - frozen
        patience_s: float = 1.0,
        first_patience_s: float | None = None,
        hang_s: float = 300.0,
        feedback: bool = False,
    ) -> None:
        """Start the process.

        Args:
            planner: a name, see `make_plan`, or a planner with its options.
            fallback: plans in this process, at once, a step that the planner is late for or cannot plan.
            patience_s: how long `take` waits for a plan before that; not again before the process has answered.
            first_patience_s: the same until the process has answered once: it starts, and may compile; None: as long.
            hang_s: how long the process may take for one answer; then another one replaces it.
            feedback: whether plans carry what a refit of the factors needs, `StepPlan.factor_ns`.

        Attributes:
            factors, speeds: of the plans that are submitted from now on.
            error: median relative error of predictions now; a plan must be predicted to gain more over the fallback
                planner's than that. None: not known, so that every gain counts.
        """
        self.speeds: Sequence[float] = ()
        self.error: float | None = None
        self.factors, self._costs, self._feedback = NO_CHANGE, FactorCosts(cost), feedback
        self._fallback, self._patience_s, self._hang_s = fallback, patience_s, hang_s
        self._chosen = PlannerChoice(planner) if isinstance(planner, str) else planner
        self._first_patience_s = patience_s if first_patience_s is None else first_patience_s
        self._timeout_s = self._first_patience_s
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._changed = threading.Condition()  # guards what follows
        self._answers: dict[int, StepPlan | _Failure] = {}
        self._submitted: set[int] = set()
        self._taken = -1  # the latest step that `take` has returned
        self._closed = False
        self._process, self._connection = self._start()
        self._thread = threading.Thread(target=self._exchange, daemon=True)
        self._thread.start()

    def submit(self, step: int, lengths: Sequence[int] | np.ndarray) -> None:
        """Ask for the plan of a step; returns at once."""
        with self._changed:
            self._submitted.add(step)
        self._requests.put(_Request(step, np.asarray(lengths, dtype=np.int64), self.factors, self.speeds, self.error))

    def take(self, step: int, lengths: Sequence[int] | np.ndarray) -> StepPlan:
        """Return the plan of a step, waiting for it if need be; that of the fallback planner if it is late or fails.

        A step that was not submitted is planned now. ``lengths`` are the same as submitted.
        """
        begin = time.monotonic_ns()
        if step not in self._submitted:
            self.submit(step, lengths)
        with self._changed:
            timeout_s = self._timeout_s
            if not self._changed.wait_for(lambda: step in self._answers, timeout_s):
                self._timeout_s = 0.0
            found = self._answers.get(step, _Failure(0, f"no plan within {timeout_s:g} s"))
            self._taken = max(step, self._taken)
            gone = [other for other in {*self._answers, *self._submitted} if other == step or self._is_over(other)]
            for other in gone:
                self._answers.pop(other, None)
                self._submitted.discard(other)
        if isinstance(found, _Failure):
            self._costs = self._costs.with_factors(self.factors, self.speeds)
            plan = self._fallback.plan(lengths, self._costs.cost)
            predicted = predicted_ns(plan, self._costs.cost)
            learned = {"factors": tuple(self.factors), "speeds": tuple(self.speeds)}
            reason = {"plan_ns": found.plan_ns, "fallback_reason": found.reason}
            found = StepPlan(step, plan.to_json(), plan.hash, predicted, **reason, **learned)
        return replace(found, wait_ns=time.monotonic_ns() - begin)

    def _is_over(self, step: int) -> bool:
        """Whether nobody will take a plan of this step any more."""
        return 0 <= step <= self._taken

    def close(self) -> None:
        """Stop the process, which may not react to SIGTERM."""
        with self._changed:
            self._closed = True
            self._process.kill()
        self._requests.put(None)
        self._thread.join()
        self._process.join()
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> tuple[BaseProcess, Connection]:
        """Start a process; it inherits the signals that the calling thread has blocked."""
        context = get_context("spawn")
        connection, theirs = context.Pipe()
        start = (theirs, self._costs.profiled, self._chosen, self._fallback, self._feedback)
        process = context.Process(target=_serve, args=start, daemon=True)
        process.start()
        theirs.close()
        return process, connection

    def _exchange(self) -> None:
        """Have requests answered one after the other, but for those of steps that are over."""
        ends = 0  # processes in a row that ended before they answered anything
        while (request := self._requests.get()) is not None:
            step = request.step
            if self._is_over(step):
                continue
            answer = self._ask(request)
            with self._changed:
                if self._closed:
                    return
                self._timeout_s, ended = self._patience_s, isinstance(answer, _Failure) and answer.process_ended
                ends = ends + 1 if ended else 0
                if ended:
                    self._connection.close()
                if 0 < ends < MOST_ENDS:
                    self._process, self._connection = self._start()
                    self._timeout_s = self._first_patience_s
                if not self._is_over(step):
                    self._answers[step] = answer
                self._changed.notify_all()

    def _ask(self, request: _Request) -> StepPlan | _Failure:
        """Return the answer of the process, or that it has ended."""
        try:
            self._connection.send(request)
            if self._connection.poll(self._hang_s):
                return self._connection.recv()
        except (EOFError, OSError):
            self._process.join(timeout=1.0)
            reason = f"the planner's process has died (exit code {self._process.exitcode})"
            return _Failure(0, reason, process_ended=True)
        self._process.kill()
        self._process.join()
        return _Failure(0, f"the planner's process did not answer within {self._hang_s:g} s", process_ended=True)


class _Request(NamedTuple):
    """What the process is asked for: the plan of a step with documents of these lengths, under these factors."""

    step: int
    lengths: np.ndarray
    factors: Factors
    speeds: Sequence[float]
    error: float | None


class _Failure(NamedTuple):
    """Why there is no plan, and how long planning took."""

    plan_ns: int
    reason: str
    process_ended: bool = False


def _serve(
    connection: Connection, cost: CostModel, chosen: PlannerChoice, fallback: PlannerChoice, feedback: bool
) -> None:
    """Answer every `_Request` with a `StepPlan` or `_Failure` until pipe or trainer are gone."""
    end_with_parent(1)
    costs = FactorCosts(cost)
    while True:
        try:
            request: _Request = connection.recv()
            costs = costs.with_factors(request.factors, request.speeds)
            connection.send(_answer(request, costs, chosen, fallback, feedback))
        except (EOFError, OSError):
            return


def _answer(
    request: _Request, costs: FactorCosts, chosen: PlannerChoice, fallback: PlannerChoice, feedback: bool
) -> StepPlan | _Failure:
    begin, cost = time.monotonic_ns(), costs.cost
    try:
        plan, within_error = chosen.plan(request.lengths, cost), ""
        if request.error is not None and chosen.name.partition(":")[0] != fallback.name.partition(":")[0]:
            plan, within_error = _surely_faster(plan, request, cost, fallback)
        text, took = plan.to_json(), time.monotonic_ns() - begin
        return StepPlan(
            request.step,
            text,
            plan.hash,
            predicted_ns(plan, cost),
            plan_ns=took,
            bound_ns=plan_bound(plan, cost),
            idle_share=simulate(plan, cost).idle_share,
            factors=tuple(request.factors),
            within_error=within_error,
            speeds=tuple(request.speeds),
            factor_ns=tuple(costs.derivatives(plan, predicted_ns)) if feedback else None,
            phases=costs.phases(plan, computing_by_rank) if feedback else (),
        )
    except SeqloomError as error:
        reason = f"planner {chosen.name!r}: {error}"
    except Exception as error:  # a defect of the planner must not stop training; the reason is logged
        reason = f"planner {chosen.name!r} failed: {type(error).__name__}: {error}"
    return _Failure(time.monotonic_ns() - begin, reason)


def _surely_faster(plan: Plan, request: _Request, cost: CostModel, fallback: PlannerChoice) -> tuple[Plan, str]:
    """Return the plan, or that of the fallback planner with the reason if the predicted gain is inside the error."""
    assert request.error is not None
    try:
        plain = fallback.plan(request.lengths, cost)
    except SeqloomError:  # it may refuse what the planner holds
        return plan, ""
    here, there = predicted_ns(plan, cost), predicted_ns(plain, cost)
    gain = 1 - here / there
    if gain >= request.error or plain.pipelines == plan.pipelines:
        return plan, ""
    return plain, (
        f"{plan.planner} is predicted to gain {gain:.1%} over {plain.planner}, inside the cost model's error of "
        f"{request.error:.1%}: the {plain.planner} plan runs"
    )


def end_with_parent(code: int) -> None:
    """End this process as soon as the one that has started it is gone, however that ends and whatever this one does."""
    parent, number = parent_process(), os.getppid()

    def watch() -> None:
        if parent is not None:
            parent.join()
        else:  # another program has started it, whose end cannot be waited for
            while os.getppid() == number:
                time.sleep(PARENT_S)
        os._exit(code)

    threading.Thread(target=watch, daemon=True).start()
