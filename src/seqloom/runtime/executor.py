"""Runs a step: the plan's table of actions on one rank, forward, backward, reduction.

    bound = bind_plan(plan, transport, device=device)
    result = run_step(bound, parameters, rows, valid)    # gradients are in parameters.masters()

The loss of a step is the sum of all token losses over the valid tokens of the whole step, so every round's sum is
divided by the same number, and neither the loss nor a gradient depends on the plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from seqloom.comm import Context
from seqloom.errors import SeqloomError
from seqloom.plan import Action, ActionKind
from seqloom.runtime.bind import BoundPlan
from seqloom.runtime.clock import Clock
from seqloom.runtime.loss import valid_tokens
from seqloom.runtime.network import Part
from seqloom.runtime.parameters import Parameters

Rows = Callable[[Context], tuple[torch.Tensor, torch.Tensor]]
"""rows(context) -> ids and labels, int64[context.tokens] each, on its device, in the order of `context.spans`."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step was. Loss, norm and counts are of the whole step, the same on all ranks; times are this rank's.

    Attributes:
        loss: sum of the token losses / valid tokens.
        gradient_norm: of the whole model, every parameter once, before any clipping.
        valid: tokens that the loss counts.
        tokens: of this rank.
        step_s: seconds from the first action to the gradients.
        forward_s, backward_s, reduce_s: the same, by kind of action; recomputation is in backward.
    """

    loss: float
    gradient_norm: float
    valid: int
    tokens: int
    step_s: float
    forward_s: float
    backward_s: float
    reduce_s: float


def run_step(bound: BoundPlan, parameters: Parameters, rows: Rows, valid: int) -> StepResult:
    """Run a plan. All ranks call it; then the gradients of the whole step are in `parameters`.

    Args:
        bound: the plan as this rank sees it.
        parameters: those of the model; gradients of an earlier step are dropped.
        rows: reads this rank's tokens and labels of a round.
        valid: labels that count, in the whole step; known from the data before the first round.
    """
    _check(bound, parameters, valid)
    parameters.clear()
    run = _Run(bound, parameters, rows, valid, Clock(bound.device))
    for action, ends in zip(bound.actions, _reduced(bound.actions), strict=True):
        run.do(action, ends)
    return run.result()


def evaluate(bound: BoundPlan, parameters: Parameters, rows: Rows, valid: int) -> float:
    """Return the loss of a plan's documents, without gradients. All ranks call it."""
    _check(bound, parameters, valid)
    run = _Run(bound, parameters, rows, valid, Clock(bound.device))
    with torch.no_grad():
        for action in bound.actions:
            if action.kind == ActionKind.F:
                run.do(action, False)
    return run.whole_loss()


class _Run:
    """A step under way."""

    def __init__(self, bound: BoundPlan, parameters: Parameters, rows: Rows, valid: int, clock: Clock) -> None:
        self._bound, self._parameters, self._rows, self._valid, self._clock = bound, parameters, rows, valid, clock
        self._open: dict[int, torch.Tensor] = {}
        self._seen = torch.zeros(2, dtype=torch.float64, device=bound.device)  # sum of losses, labels that count

    def do(self, action: Action, reduce: bool) -> None:
        """Run one action; `reduce`: gradients are reduced with this backward."""
        with self._clock.measure(action.kind.value):
            if action.kind == ActionKind.F:
                self._forward(self._number(action))
            elif action.kind == ActionKind.B:
                self._parameters.backward(self._open.pop(self._number(action)) / self._valid, None, reduce=reduce)

    def result(self) -> StepResult:
        """End the step."""
        with self._clock.measure(ActionKind.REDUCE.value):
            self._parameters.finish()
        loss, norm = self.whole_loss(), float(self._parameters.gradient_norm())
        seconds = self._clock.seconds()
        return StepResult(
            loss,
            norm,
            self._valid,
            self._bound.tokens,
            step_s=seconds["step"],
            forward_s=seconds.get(ActionKind.F.value, 0.0),
            backward_s=seconds.get(ActionKind.B.value, 0.0),
            reduce_s=seconds[ActionKind.REDUCE.value],
        )

    def whole_loss(self) -> float:
        """Add up what all ranks saw; refuse a step whose labels are not as many as was said."""
        transport = self._bound.transport
        transport.all_reduce(self._seen, tuple(range(transport.ranks)))
        total, counted = self._seen.tolist()
        if counted != self._valid:
            raise SeqloomError(
                f"{int(counted)} labels of this step count, {self._valid} were announced: its gradients have the wrong "
                "scale and must not be used; count the labels that are not -100 over all documents of the step"
            )
        return total / self._valid

    def _forward(self, number: int) -> None:
        context = self._bound.rounds[number].context
        assert context is not None  # rounds without this rank are not among its actions
        ids, labels = self._rows(context)
        if ids.shape != (context.tokens,) or labels.shape != ids.shape:
            raise SeqloomError(
                f"ids {list(ids.shape)} and labels {list(labels.shape)} for round {number}: rank {context.rank} holds "
                f"{context.tokens} tokens in it; give one id and one label for every token of context.spans"
            )
        loss = self._parameters.run(Part(0, 1, 1), ids, labels, context)
        self._open[number] = loss
        self._seen += torch.stack((loss.detach(), valid_tokens(labels))).double()

    @staticmethod
    def _number(action: Action) -> int:
        assert action.round is not None  # every F and B of a valid plan has one
        return action.round


def _reduced(actions: tuple[Action, ...]) -> list[bool]:
    """Say for every action whether it is a backward after which gradients are reduced: its round's, or the last."""
    kinds = [action.kind for action in actions]
    per_round = {action.round for action in actions if action.kind == ActionKind.REDUCE and action.round is not None}
    last = len(kinds) - 1 - kinds[::-1].index(ActionKind.B) if ActionKind.B in kinds else -1
    return [
        action.kind == ActionKind.B and (place == last or action.round in per_round)
        for place, action in enumerate(actions)
    ]


def _check(bound: BoundPlan, parameters: Parameters, valid: int) -> None:
    if valid < 1:
        raise SeqloomError(
            f"{valid} valid tokens in the whole step: there is nothing to learn and the loss has no scale; leave such "
            "batches out, or count fewer labels as -100"
        )
    rank = bound.transport.rank
    if not set(parameters.sharers) <= {*bound.island, rank}:
        raise SeqloomError(
            f"a plan with {bound.plan.sharding} sharding, in which rank {rank} runs the rounds of ranks "
            f"{bound.island}, for parameters whose shards are on ranks {parameters.sharers}: some would wait for "
            "rounds that others skip; plan with the sharding and the node size of the parameters"
        )
