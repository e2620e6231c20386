"""Runs a step on one rank: its row of the plan's actions (forward, backward, messages, reduction).

    rank_plan = bind_plan(plan, transport, device=device)
    result = run_step(rank_plan, parameters, rows, valid)    # gradients are in parameters.device_shards()

The loss of a step is the sum of all token losses over the valid tokens of the whole step. So every round's sum is
divided by the same number, and neither the loss nor a gradient depends on the plan. To this comes the loss of routers,
for which a step is run forward once before, to count where they send tokens (`models.router_loss`).

Between the forward and the backward of a microbatch `MicrobatchState` keeps the stage's input and the graph, but not
the output: its edge in the graph is enough to start the backward. A recomputed stage keeps the input only. What is
offloaded is in host memory meanwhile: see `models.offload`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from seqloom.dist import Context
from seqloom.dist.layer_times import LayerSeconds, LayerTimes, Timer, TimeSlice
from seqloom.engine.rank_actions import RankPlan
from seqloom.engine.stage_p2p import RECV_B, RECV_F, SEND_B, SEND_F, B, F, I, RowSlice, StageP2P
from seqloom.errors import SeqloomError
from seqloom.models.loss import valid_tokens
from seqloom.models.offload import HostCopies, Offload
from seqloom.models.router_loss import RouterLoss
from seqloom.params.interface import Parameters, scale_gradients
from seqloom.plan import Action, ActionKind, Checkpoint, Sharding
from seqloom.plan.action import EVALUATION_KINDS

Rows = Callable[[Context], tuple[torch.Tensor, torch.Tensor]]
"""rows(context) -> ids and labels, int64[context.tokens] each, on its device, in the order of `context.spans`."""

W = ActionKind.W
UNSHARD, REDUCE, RESHARD = ActionKind.UNSHARD, ActionKind.REDUCE, ActionKind.RESHARD
MESSAGES, ROWS = "messages", "rows"


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step: loss, norm and counts are the whole step's, the same on all ranks; times are this rank's.

    Attributes:
        loss: sum of the token losses / valid tokens, and the loss of routers.
        gradient_norm: of the whole model, every parameter once, before clipping.
        valid: tokens that the loss counts.
        tokens: of this rank.
        step_s: seconds from the call to the gradients and their norm; those below are its parts, what is left is host
            work between actions. On a GPU they are times of its stream, so that host work shows only where the GPU
            waits for it.
        forward_s, backward_s: seconds of these actions, with the collectives inside of them: exchanges of attention,
            and of layers that gather and reduce their own parameters (FSDP2). Backward contains recomputation and both
            halves of a split backward.
        parameters_s: seconds of gathering and releasing the parameters of a stage, moving them to where the plan
            computes, and reducing gradients, their norm and the loss.
        messages_s: seconds of starting messages to other stages and waiting for theirs.
        rows_s: seconds for ids and labels.
        slices: when this rank did what, in order; the parts above are their sums.
        layers: parts of forward and backward, by what layers did.
        expert_tokens: int64[layers with experts, experts] tokens of the step that each expert got, on the CPU; None:
            the model has no experts that are counted.
        expert_imbalance: by layer with experts, pairs of a token and an expert at the busiest rank of an EP group over
            the mean of the group, of all calls of the layer in the step; (): nothing was sent to experts.
    """

    loss: float
    gradient_norm: float
    valid: int
    tokens: int
    step_s: float
    forward_s: float
    backward_s: float
    parameters_s: float
    messages_s: float = 0.0
    rows_s: float = 0.0
    slices: tuple[TimeSlice, ...] = ()
    expert_tokens: torch.Tensor | None = None
    layers: LayerSeconds = LayerSeconds()  # noqa: RUF009 - a named tuple
    expert_imbalance: tuple[float, ...] = ()


def run_step(
    rank_plan: RankPlan, parameters: Parameters, rows: Rows, valid: int, *, max_norm: float | None = None
) -> StepResult:
    """Run a plan. All ranks call it; then the gradients of the whole step are in `parameters`.

    Args:
        parameters: of the model; gradients of an earlier step are dropped.
        rows: reads this rank's tokens and labels of a round.
        valid: labels that count, in the whole step; known from the data before the first round.
        max_norm: scale the gradients down to this norm of the whole model's gradient; None: leave them as they are.
    """
    _check(rank_plan, parameters, valid)
    timer = Timer(rank_plan.device)
    parameters.zero_grad()
    routers = parameters.router_loss
    if routers is None:
        return _run_training(rank_plan, parameters, rows, valid, timer, max_norm)
    counted, kept_rows = _count_routing(routers, rank_plan, parameters, rows, valid, timer)
    with routers.step(counted) as loss:
        result = _run_training(rank_plan, parameters, kept_rows, valid, timer, max_norm)
    return replace(result, loss=result.loss + float(loss))


def _run_training(
    rank_plan: RankPlan, parameters: Parameters, rows: Rows, valid: int, timer: Timer, max_norm: float | None
) -> StepResult:
    """Run forward and backward of a plan."""
    with timer.measure(UNSHARD.value):
        parameters.prefetch(rank_plan.plan)
    weights = parameters.weight_gradients
    if weights.enabled:
        weights.clear()  # an earlier step may have failed
    weights.enabled = any(action.kind == W for action in rank_plan.actions)
    if parameters.expert_load is not None:
        parameters.expert_load.start(rank_plan.device)
    run = _Run(rank_plan, parameters, rows, valid, timer, training=True)
    run.run_actions()
    return run.finish(max_norm)


def _count_routing(
    routers: RouterLoss, rank_plan: RankPlan, parameters: Parameters, rows: Rows, valid: int, timer: Timer
) -> tuple[torch.Tensor, Rows]:
    """Run a plan forward to count where routers send its tokens, on all ranks; return the counts, and the rows read.

    Readers give the rows of a round once.
    """
    kept, transport = {}, rank_plan.transport

    def read(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        kept[context.spans] = rows(context)
        return kept[context.spans]

    with routers.counting(rank_plan.device) as counted:
        _run_forward(rank_plan, parameters, read, valid, timer)
        transport.all_reduce(counted, tuple(range(transport.ranks)))
    return counted, lambda context: kept[context.spans]


def evaluate(rank_plan: RankPlan, parameters: Parameters, rows: Rows, valid: int) -> float:
    """Return the loss of a plan's documents, without gradients and without that of routers. All ranks call it."""
    _check(rank_plan, parameters, valid)
    return _run_forward(rank_plan, parameters, rows, valid, Timer(rank_plan.device)).global_loss()


def rank_losses(rank_plan: RankPlan, parameters: Parameters, rows: Rows, valid: int) -> torch.Tensor:
    """Return the sum of this rank's token losses and how many they are, float64[2]. All ranks call it.

    `valid` labels of the whole step count; as in `evaluate` there are no gradients.
    """
    _check(rank_plan, parameters, valid)
    return _run_forward(rank_plan, parameters, rows, valid, Timer(rank_plan.device)).totals


def _run_forward(rank_plan: RankPlan, parameters: Parameters, rows: Rows, valid: int, timer: Timer) -> _Run:
    """Run all rounds of a plan forward, without gradients."""
    parameters.prefetch(rank_plan.plan)
    run = _Run(rank_plan, parameters, rows, valid, timer, training=False)
    with torch.no_grad():
        run.run_actions()
    parameters.wait_prefetch()
    return run


class _Run:
    """A step in progress."""

    def __init__(
        self, rank_plan: RankPlan, parameters: Parameters, rows: Rows, valid: int, timer: Timer, *, training: bool
    ) -> None:
        self._rank_plan, self._parameters, self._rows, self._valid = rank_plan, parameters, rows, valid
        self._timer, self._training = timer, training
        self._actions = tuple(each for each in rank_plan.actions if training or each.kind in EVALUATION_KINDS)
        self._p2p = StageP2P(
            rank_plan.transport,
            parameters.empty_hidden_states,
            rank_plan.pipeline,
            self._actions,
            rank_plan.progress,
            rank_plan.device,
        )
        self._states: dict[tuple[int, int | None], MicrobatchState] = {}
        self._totals = torch.zeros(2, dtype=torch.float64, device=rank_plan.device)  # sum of losses, valid labels
        self._host_copies = HostCopies(rank_plan.device)
        self._layer_times = rank_plan.layer_times if training else LayerTimes(rank_plan.device)
        self._layer_times.start()
        if rank_plan.kv_cache is not None:
            rank_plan.kv_cache.clear()  # an earlier step may have failed
            rank_plan.kv_cache.backward = training

    def run_actions(self) -> None:
        progress, reducing = self._rank_plan.progress, _reducing_backwards(self._actions, self._rank_plan)
        for index, action in enumerate(self._actions):
            progress.start(action)
            self._p2p.poll()
            self._run_action(action, reduce=index in reducing)
        progress.start(None)
        with self._timer.measure(MESSAGES):
            self._p2p.close()
        if self._rank_plan.kv_cache is not None:
            self._rank_plan.kv_cache.check_empty()

    def finish(self, max_norm: float | None) -> StepResult:
        with self._timer.measure(REDUCE.value):
            self._parameters.finish_gradients()
            norm = self._parameters.gradient_norm().to(self._totals)
            self._reduce_totals()
            experts, busiest = self._expert_loads()
        counts = (each.to(self._totals).view(-1) for each in (busiest, experts))
        numbers = _start_copy_to_host(torch.cat((self._totals, norm[None], *counts)))
        self._timer.stop()
        self._layer_times.stop()
        if max_norm is not None:  # not waited for: the GPU is busy while the host goes on to the optimiser
            scale_gradients(self._parameters, (max_norm / norm).clamp(max=1.0))
        seconds, layers = self._timer.seconds(), self._layer_times.seconds()
        (total, counted, norm_found), most = numbers[:3].tolist(), numbers[3 : 3 + busiest.numel()].view(-1, 2)
        return StepResult(
            self._mean_loss(total, counted),
            norm_found,
            self._valid,
            self._rank_plan.tokens,
            step_s=seconds["step"],
            forward_s=seconds[F.value],
            backward_s=sum(seconds[kind.value] for kind in (B, I, W)),
            parameters_s=sum(seconds[kind.value] for kind in (UNSHARD, REDUCE, RESHARD)),
            messages_s=seconds[MESSAGES],
            rows_s=seconds[ROWS],
            slices=self._timer.slices(),
            expert_tokens=numbers[3 + busiest.numel() :].long().view(experts.shape) if experts.numel() else None,
            layers=layers,
            expert_imbalance=tuple(most[:, 0].div(most[:, 1]).tolist()) if most.numel() and most.all() else (),
        )

    @property
    def totals(self) -> torch.Tensor:
        """Sum of losses and valid labels, of this rank until `global_loss`."""
        return self._totals

    def global_loss(self) -> float:
        """Return the loss of the step; waits for the device."""
        self._reduce_totals()
        return self._mean_loss(*self._totals.tolist())

    def _reduce_totals(self) -> None:
        transport = self._rank_plan.transport
        transport.all_reduce(self._totals, tuple(range(transport.ranks)))

    def _expert_loads(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `ExpertLoad.stop` does, over all ranks; both empty where nothing is counted."""
        load, transport = self._parameters.expert_load, self._rank_plan.transport
        if load is None:
            nothing = torch.empty(0, dtype=torch.int64, device=self._rank_plan.device)
            return nothing, nothing
        experts, busiest = load.stop()
        counts = torch.cat((experts.view(-1), busiest.view(-1)))
        transport.all_reduce(counts, tuple(range(transport.ranks)))
        return counts[: experts.numel()].view_as(experts), counts[experts.numel() :].view_as(busiest)

    def _mean_loss(self, total: float, counted: float) -> float:
        """Divide by the valid labels; refuse a step with another number of them than announced."""
        if counted != self._valid:
            raise SeqloomError(
                f"{int(counted)} labels of this step count, {self._valid} were announced: its gradients have the wrong "
                "scale and must not be used; count the labels that are not -100 over all documents of the step"
            )
        return total / self._valid

    def _run_action(self, action: Action, *, reduce: bool) -> None:
        kind, parameters = action.kind, self._parameters
        if kind == F:
            self._forward(action)
        elif kind in (B, I):
            self._backward(action, reduce)
        elif kind == W:
            with self._timer.measure(kind.value, action):
                parameters.weight_gradients.run((action.stage, action.round))
        elif kind in (SEND_F, SEND_B):
            with self._timer.measure(MESSAGES, action):
                self._p2p.send(action, _row_slices(self._rank_plan, action))
        elif kind in (RECV_F, RECV_B):
            context = self._rank_plan.microbatch(action).context
            assert context is not None  # actions of skipped rounds are left out
            with self._timer.measure(MESSAGES, action):
                self._p2p.receive(action, context.tokens, _row_slices(self._rank_plan, action))
        elif action.round is None or (kind != REDUCE and self._rank_plan.plan.sharding == Sharding.FREE):
            # Actions of a round: its backward has reduced the gradients, and fixed layouts stay gathered for the step.
            run = {UNSHARD: parameters.unshard, REDUCE: parameters.reduce, RESHARD: parameters.reshard}[kind]
            with self._timer.measure(kind.value, action):
                for first in self._rank_plan.stages[action.stage][:1]:
                    run(first.layers)

    def _forward(self, action: Action) -> None:
        microbatch = self._rank_plan.microbatch(action)
        layers, context, parameters = microbatch.layers, microbatch.context, self._parameters
        offload = Offload(self._host_copies) if microbatch.offload and self._training else None
        assert context is not None  # actions of skipped rounds are left out
        ids, labels = self._read(context, microbatch.round) if layers.has_embedding or layers.has_head else (None, None)
        inputs = ids if layers.has_embedding else self._receive(Action(action.stage, RECV_F, action.round))
        assert inputs is not None
        recompute = microbatch.checkpoint == Checkpoint.STAGE and layers.first < layers.stop  # no logits twice
        if offload is None:
            self._host_copies.release()
        elif not recompute:
            context = offload.context(context)
        with self._timer.measure(F.value, action):
            state = MicrobatchState(
                lambda x: parameters.forward(layers, x, labels, context), inputs, recompute=recompute, offload=offload
            )
            output = state.forward()
            if layers.has_head and labels is not None:
                self._totals += torch.stack((output, valid_tokens(labels))).double()
        if self._training:
            self._states[action.stage, action.round] = state
        if not layers.has_head:
            send, receive = Action(action.stage, SEND_F, action.round), Action(action.stage + 1, RECV_F, action.round)
            self._p2p.put(receive if microbatch.to_next is None else send, output)

    def _backward(self, action: Action, reduce: bool) -> None:
        microbatch, state = self._rank_plan.microbatch(action), self._states.pop((action.stage, action.round))
        layers, weights = microbatch.layers, self._parameters.weight_gradients
        gradient = None if layers.has_head else self._receive(Action(action.stage, RECV_B, action.round))
        with self._timer.measure(action.kind.value, action):
            edge = state.backward_edge()
            self._host_copies.release()
            with weights.deferred((action.stage, action.round)) if action.kind == I else nullcontext():
                if edge is not None:
                    scale = torch.full((), 1 / self._valid, dtype=state.dtype, device=self._rank_plan.device)
                    self._parameters.backward(edge, scale if gradient is None else gradient, reduce=reduce)
        if not layers.has_embedding:
            send, receive = Action(action.stage, SEND_B, action.round), Action(action.stage - 1, RECV_B, action.round)
            self._p2p.put(receive if microbatch.from_previous is None else send, state.input_gradient())

    def _receive(self, action: Action) -> torch.Tensor:
        with self._timer.measure(MESSAGES, action):
            rows = self._p2p.wait(action)
        context = self._rank_plan.microbatch(action).context
        assert context is not None and len(rows) == context.tokens, f"{action}: {len(rows)} rows"  # received in time
        return rows

    def _read(self, context: Context, round_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        with self._timer.measure(ROWS):
            ids, labels = self._rows(context)
        if ids.shape != (context.tokens,) or labels.shape != ids.shape:
            raise SeqloomError(
                f"ids {list(ids.shape)} and labels {list(labels.shape)} for round {round_index}: rank {context.rank} "
                f"holds {context.tokens} tokens in it; give one id and one label for every token of context.spans"
            )
        return ids, labels


class MicrobatchState:
    """One microbatch on one stage, from forward to backward."""

    def __init__(
        self,
        stage_forward: Callable[[torch.Tensor], torch.Tensor],
        inputs: torch.Tensor,
        *,
        recompute: bool,
        offload: Offload | None,
    ) -> None:
        """Take the stage's input.

        Args:
            stage_forward: from token ids or hidden states to hidden states or a loss; called again if `recompute`.
            inputs: token ids, or hidden states that are in no graph.
            recompute: keep the input only, and run forward again before the backward.
            offload: takes the input of a recomputed stage, and what layers save, to host memory; None: they stay.
        """
        self._stage_forward, self._inputs, self._recompute, self._offload = stage_forward, inputs, recompute, offload
        self.dtype = inputs.dtype  # of the output, once there is a graph
        self._edge: GradientEdge | None = None
        self._offloaded_input: Any = None

    def forward(self) -> torch.Tensor:
        """Run the stage and return its output, detached."""
        if not self._recompute:
            return self._forward_with_graph()
        with torch.no_grad():
            output = self._stage_forward(self._inputs)
        if self._offload is not None and self._inputs.is_floating_point():
            self._offloaded_input = self._offload.put(self._inputs)
            self._inputs = torch.empty(0)
        return output

    def backward_edge(self) -> GradientEdge | None:
        """Fetch or recompute what the backward needs; return where it starts, None if nothing needs a gradient."""
        offload, self._offload = self._offload, None
        if offload is not None:
            offload.begin_backward()
            if self._offloaded_input is not None:
                self._inputs = offload.get(self._offloaded_input)
        if self._recompute:
            self._forward_with_graph()
        return self._edge

    def input_gradient(self) -> torch.Tensor:
        """Return the gradient of the stage's input hidden states, after the backward."""
        gradient = self._inputs.grad
        return torch.zeros_like(self._inputs) if gradient is None else gradient

    def _forward_with_graph(self) -> torch.Tensor:
        if self._inputs.is_floating_point():
            self._inputs.requires_grad_()
        output = self._stage_forward(self._inputs)
        self.dtype = output.dtype
        self._edge = get_gradient_edge(output) if output.requires_grad else None
        return output.detach()


def _start_copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory, which is complete once the current stream has come to this point."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def _row_slices(rank_plan: RankPlan, action: Action) -> tuple[RowSlice, ...]:
    """Return the rows of a SEND or RECV; () where the rank has no tokens."""
    microbatch = rank_plan.microbatch(action)
    return (microbatch.to_next if action.kind in (SEND_F, RECV_B) else microbatch.from_previous) or ()


def _reducing_backwards(actions: tuple[Action, ...], rank_plan: RankPlan) -> set[int]:
    """Return the indices of the backwards that reduce gradients: those of rounds with a REDUCE, and the last.

    Under free sharding gradients go to the optimiser's rows once, wherever the plan has a REDUCE.
    """
    if rank_plan.plan.sharding == Sharding.FREE:
        return {index for index, action in enumerate(actions) if action == rank_plan.gradients_leave_in}
    rounds = {action.round for action in actions if action.kind == REDUCE and action.round is not None}
    backwards = [index for index, action in enumerate(actions) if action.kind in (B, I)]
    return {index for index in backwards if actions[index].round in rounds} | set(backwards[-1:])


def _check(rank_plan: RankPlan, parameters: Parameters, valid: int) -> None:
    if valid < 1:
        raise SeqloomError(
            f"{valid} valid tokens in the whole step: there is nothing to learn and the loss has no scale; leave such "
            "batches out, or count fewer labels as -100"
        )
    rank = rank_plan.transport.rank
    if not set(parameters.shard_ranks) <= {*rank_plan.shard_group, rank}:
        raise SeqloomError(
            f"a plan with {rank_plan.plan.sharding} sharding, in which rank {rank} runs the rounds of ranks "
            f"{rank_plan.shard_group}, for parameters whose shards are on ranks {parameters.shard_ranks}: some would "
            "wait for rounds that others skip; plan with the sharding and the node size of the parameters"
        )
