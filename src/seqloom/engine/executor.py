"""Seconds by name: the host's clock, or a GPU's own events, which nobody waits for until the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from seqloom.dist import Context
from seqloom.engine.microbatch import MicrobatchState, Offload
from seqloom.engine.rank_plan import RankMicroBatch, RankPlan
from seqloom.engine.stage_p2p import Arrival, RowSlice, StageP2P
from seqloom.errors import SeqloomError
from seqloom.models.loss import valid_tokens
from seqloom.params.interface import Parameters
from seqloom.plan import Action, ActionKind, Checkpoint, Plan, Sharding


class Clock:
    """Measures from its making on."""

    def __init__(self, device: torch.device) -> None:
        """Start; on a GPU, in the order of its current stream."""
        self._cuda = device.type == "cuda"
        self._begin = self._now()
        self._measured: list[tuple[str, float | torch.cuda.Event, float | torch.cuda.Event]] = []

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time of the block to that of `name`."""
        begin = self._now()
        yield
        self._measured.append((name, begin, self._now()))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of every name, and of all since the start as "step". Waits for the GPU."""
        end = self._now()
        if self._cuda:
            torch.cuda.synchronize()
        total = {"step": _between(self._begin, end)}
        for name, begin, stop in self._measured:
            total[name] = total.get(name, 0.0) + _between(begin, stop)
        return total

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return begin.elapsed_time(end) / 1000
    assert isinstance(begin, float) and isinstance(end, float)
    return end - begin


# ---- merged: runtime.executor
# Runs a step: the plan's table of actions on one rank, forward, backward, messages, reduction.
#
#     bound = bind_plan(plan, transport, device=device)
#     result = run_step(bound, parameters, rows, valid)    # gradients are in parameters.master_weights()
#
# The loss of a step is the sum of all token losses over the valid tokens of the whole step, so every round's sum is
# divided by the same number, and neither the loss nor a gradient depends on the plan.


Rows = Callable[[Context], tuple[torch.Tensor, torch.Tensor]]
"""rows(context) -> ids and labels, int64[context.tokens] each, on its device, in the order of `context.spans`."""

F, B, W = ActionKind.F, ActionKind.B, ActionKind.W
I = ActionKind.I  # noqa: E741 - the field's name for the input half of a backward
SEND_F, RECV_F = ActionKind.SEND_F, ActionKind.RECV_F
SEND_B, RECV_B = ActionKind.SEND_B, ActionKind.RECV_B
UNSHARD, REDUCE, RESHARD = ActionKind.UNSHARD, ActionKind.REDUCE, ActionKind.RESHARD
BACKWARD = (B, I)
FORWARD = (UNSHARD, F, SEND_F, RECV_F, RESHARD)
"""What is left of a row without backwards."""
WAIT = "wait"


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step was. Loss, norm and counts are of the whole step, the same on all ranks; times are this rank's.

    Attributes:
        loss: sum of the token losses / valid tokens.
        gradient_norm: of the whole model, every parameter once, before any clipping.
        valid: tokens that the loss counts.
        tokens: of this rank.
        step_s: seconds from the first action to the gradients.
        forward_s, backward_s, reduce_s: the same, by kind of action; recomputation is in backward, and so are both
            halves of one.
        wait_s: the same, for messages of other stages.
    """

    loss: float
    gradient_norm: float
    valid: int
    tokens: int
    step_s: float
    forward_s: float
    backward_s: float
    reduce_s: float
    wait_s: float = 0.0


def run_step(bound: RankPlan, parameters: Parameters, rows: Rows, valid: int) -> StepResult:
    """Run a plan. All ranks call it; then the gradients of the whole step are in `parameters`.

    Args:
        bound: the plan as this rank sees it.
        parameters: those of the model; gradients of an earlier step are dropped.
        rows: reads this rank's tokens and labels of a round.
        valid: labels that count, in the whole step; known from the data before the first round.
    """
    _check(bound, parameters, valid)
    parameters.zero_grad()
    parameters.prefetch(bound.plan)
    parameters.weight_gradients.clear()
    parameters.weight_gradients.enabled = any(action.kind == W for action in bound.actions)
    run = _Run(bound, parameters, rows, valid, backward=True)
    run.run()
    return run.result()


def evaluate(bound: RankPlan, parameters: Parameters, rows: Rows, valid: int) -> float:
    """Return the loss of a plan's documents, without gradients. All ranks call it."""
    _check(bound, parameters, valid)
    parameters.prefetch(bound.plan)
    run = _Run(bound, parameters, rows, valid, backward=False)
    with torch.no_grad():
        run.run()
    parameters.wait_prefetch()
    return run.whole_loss()


class _Run:
    """A step under way."""

    def __init__(self, bound: RankPlan, parameters: Parameters, rows: Rows, valid: int, *, backward: bool) -> None:
        self._bound, self._parameters, self._rows, self._valid = bound, parameters, rows, valid
        self._learns = backward
        self._actions = tuple(each for each in bound.actions if backward or each.kind in FORWARD)
        self._clock = Clock(bound.device)
        self._mail = StageP2P(
            bound.transport, parameters.empty_hidden_states, _arrivals(bound, self._actions), bound.progress
        )
        self._open: dict[tuple[int, int | None], MicrobatchState] = {}
        self._seen = torch.zeros(2, dtype=torch.float64, device=bound.device)  # sum of losses, labels that count
        self._stream = torch.cuda.Stream(bound.device) if bound.device.type == "cuda" else None
        bound.kv_cache.clear()  # an earlier step may have been given up
        bound.kv_cache.backward = backward

    def run(self) -> None:
        """Run the row."""
        progress, mail = self._bound.progress, self._mail
        for action, reduce in zip(self._actions, _reduced(self._actions, self._bound.plan), strict=True):
            progress.at(action)
            mail.look_after()
            self._do(action, reduce)
        progress.at(None)
        with self._clock.measure(WAIT):
            mail.close()
        self._bound.kv_cache.check_empty()

    def result(self) -> StepResult:
        """End the step."""
        with self._clock.measure(REDUCE.value):
            self._parameters.finish_gradients()
        loss, norm = self.whole_loss(), float(self._parameters.gradient_norm())
        seconds = self._clock.seconds()
        return StepResult(
            loss,
            norm,
            self._valid,
            self._bound.tokens,
            step_s=seconds["step"],
            forward_s=seconds.get(F.value, 0.0),
            backward_s=sum(seconds.get(kind.value, 0.0) for kind in (B, I, W)),
            reduce_s=seconds[REDUCE.value],
            wait_s=seconds[WAIT],
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

    def _do(self, action: Action, reduce: bool) -> None:
        kind = action.kind
        if kind == F:
            self._forward(action)
        elif kind in BACKWARD:
            self._backward(action, reduce)
        elif kind == W:
            with self._clock.measure(kind.value):
                self._parameters.weight_gradients.run((action.stage, action.round))
        elif kind in (SEND_F, SEND_B):
            self._mail.send(action, _shares(self._bound, action))
        elif kind in (RECV_F, RECV_B):
            self._mail.receive(action)
        elif action.round is None or self._per_pass(kind):  # the gradients of a round are reduced in its backward
            with self._clock.measure(kind.value):
                self._care(action)

    def _per_pass(self, kind: ActionKind) -> bool:
        """Whether an action of a round gathers or drops parameters; fixed layouts keep theirs for the step."""
        return kind in (UNSHARD, RESHARD) and self._bound.plan.sharding == Sharding.FREE

    def _care(self, action: Action) -> None:
        """Gather, reduce or release the parameters of a stage."""
        verbs = {UNSHARD: self._parameters.unshard, REDUCE: self._parameters.reduce, RESHARD: self._parameters.reshard}
        for first in self._bound.stages[action.stage][:1]:
            verbs[action.kind](first.part)

    def _forward(self, action: Action) -> None:
        unit = self._bound.at(action)
        part, context = unit.part, unit.context
        assert context is not None  # rounds without this rank are not among its actions
        ids, labels = self._read(context, unit.number) if part.has_embedding or part.has_head else (None, None)
        given = ids if part.has_embedding else self._take(Action(action.stage, RECV_F, action.round))
        assert given is not None
        with self._clock.measure(F.value):
            kept = self._kept(unit, given, labels)
            output = kept.forward()
            if part.has_head and labels is not None:
                self._seen += torch.stack((output, valid_tokens(labels))).double()
        if self._learns:
            self._open[action.stage, action.round] = kept
        if not part.has_head:
            here, there = Action(action.stage, SEND_F, action.round), Action(action.stage + 1, RECV_F, action.round)
            self._mail.put(there if unit.ahead is None else here, output)

    def _backward(self, action: Action, reduce: bool) -> None:
        unit, kept = self._bound.at(action), self._open.pop((action.stage, action.round))
        gradient = None if unit.part.has_head else self._take(Action(action.stage, RECV_B, action.round))
        with self._clock.measure(action.kind.value):
            edge, weights = kept.edge(), self._parameters.weight_gradients
            with weights.deferred((action.stage, action.round)) if action.kind == I else nullcontext():
                if edge is not None:
                    scale = torch.full((), 1 / self._valid, dtype=kept.dtype, device=self._bound.device)
                    self._parameters.backward(edge, scale if gradient is None else gradient, reduce=reduce)
        if not unit.part.has_embedding:
            here, there = Action(action.stage, SEND_B, action.round), Action(action.stage - 1, RECV_B, action.round)
            self._mail.put(there if unit.behind is None else here, kept.gradient())

    def _take(self, action: Action) -> torch.Tensor:
        """Return what comes from another stage."""
        with self._clock.measure(WAIT):
            return self._mail.take(action)

    def _read(self, context: Context, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids, labels = self._rows(context)
        if ids.shape != (context.tokens,) or labels.shape != ids.shape:
            raise SeqloomError(
                f"ids {list(ids.shape)} and labels {list(labels.shape)} for round {number}: rank {context.rank} holds "
                f"{context.tokens} tokens in it; give one id and one label for every token of context.spans"
            )
        return ids, labels

    def _kept(self, unit: RankMicroBatch, given: torch.Tensor, labels: torch.Tensor | None) -> MicrobatchState:
        parameters, part, context = self._parameters, unit.part, unit.context
        assert context is not None
        again = unit.checkpoint == Checkpoint.STAGE
        offload = Offload(parameters.compute_weights(), self._stream) if unit.offload and self._learns else None
        return MicrobatchState(
            lambda x: parameters.forward(part, x, labels, context), given, again=again, offload=offload
        )


def _shares(bound: RankPlan, action: Action) -> tuple[RowSlice, ...]:
    """Return the rows of a message of the row; a rank without tokens has none."""
    unit = bound.at(action)
    return (unit.ahead if action.kind in (SEND_F, RECV_B) else unit.behind) or ()


def _arrivals(bound: RankPlan, actions: tuple[Action, ...]) -> Iterator[Arrival]:
    """Yield what the RECVs of a row bring."""
    for action in actions:
        if action.kind in (RECV_F, RECV_B):
            context = bound.at(action).context
            assert context is not None
            yield Arrival(action, context.tokens, _shares(bound, action))


def _reduced(actions: tuple[Action, ...], plan: Plan) -> list[bool]:
    """Say for every action whether it is a backward after which gradients are reduced: its round's, or the last.

    Under free sharding they go to the optimiser's rows once, whenever the plan reduces.
    """
    per_round = {action.round for action in actions if action.kind == ActionKind.REDUCE and action.round is not None}
    per_round = set() if plan.sharding == Sharding.FREE else per_round
    backwards = [place for place, action in enumerate(actions) if action.kind in BACKWARD]
    wanted = {place for place in backwards if actions[place].round in per_round} | set(backwards[-1:])
    return [place in wanted for place in range(len(actions))]


def _check(bound: RankPlan, parameters: Parameters, valid: int) -> None:
    if valid < 1:
        raise SeqloomError(
            f"{valid} valid tokens in the whole step: there is nothing to learn and the loss has no scale; leave such "
            "batches out, or count fewer labels as -100"
        )
    rank = bound.transport.rank
    if not set(parameters.shard_ranks) <= {*bound.shard_group, rank}:
        raise SeqloomError(
            f"a plan with {bound.plan.sharding} sharding, in which rank {rank} runs the rounds of ranks "
            f"{bound.shard_group}, for parameters whose shards are on ranks {parameters.shard_ranks}: some would wait "
            "for rounds that others skip; plan with the sharding and the node size of the parameters"
        )
