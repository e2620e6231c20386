"""A plan as one rank sees it: its microbatches with their contexts, and the row of actions that it runs.

A rank runs, in the plan's order, the rounds in which it or a rank of its shard group is in a group, if need be without
tokens, and skips the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from seqloom.attention.context_parallel import KVCache
from seqloom.dist import Context, Transport, bind, pieces_of_plan
from seqloom.dist.layer_times import LayerTimes, TimedTransport
from seqloom.engine.stage_p2p import SEND_B, SEND_F, B, I, Progress, RowSlices, StageBoundary, W, place_messages
from seqloom.errors import SeqloomError
from seqloom.plan import Action, Checkpoint, LayerRange, Pipeline, Plan, Sharding, StageMicroBatch


@dataclass(frozen=True, slots=True, eq=False)
class RankMicroBatch:
    """A round on one stage, as one rank sees it.

    Attributes:
        round: index in the pipeline.
        checkpoint: which activations are recomputed.
        context: for the model; None where this rank's shard group takes no part.
        offload: whether activations of some layers are in host memory.
        from_previous, to_next: rows received from the previous stage and sent to the next one; None: they stay on this
            rank, or there is no such stage.
    """

    round: int
    checkpoint: Checkpoint
    context: Context | None
    layers: LayerRange
    offload: bool
    from_previous: RowSlices
    to_next: RowSlices


@dataclass(frozen=True, slots=True, eq=False)
class RankPlan:
    """A plan as one rank sees it.

    Attributes:
        pipeline: the one that this rank is in; None: it is in none.
        shard_group: ranks that run the same rounds as this one, which is among them; () where it is in no stage.
        stages: {stage of this rank: all rounds of its pipeline, in order}.
        actions: what this rank runs, in order: the row of its pp rank without the rounds that it skips, its messages
            where `stage_p2p.place_messages` puts them.
        gradients_leave_in: the backward in which gradients of free sharding may leave already; None: after all, or
            another sharding.
        kv_cache: keys and values of documents in pieces, while a step runs; None: none is in pieces.
        progress: where the rank is in its row, while a step runs.
        layer_times: measures what its layers do, while a step trains.
    """

    plan: Plan
    pipeline: Pipeline | None
    transport: Transport
    device: torch.device
    shard_group: tuple[int, ...]
    stages: dict[int, tuple[RankMicroBatch, ...]]
    actions: tuple[Action, ...]
    gradients_leave_in: Action | None
    kv_cache: KVCache | None
    progress: Progress
    layer_times: LayerTimes

    @property
    def rounds(self) -> tuple[RankMicroBatch, ...]:
        """All rounds of its pipeline, in order, on the first stage of this rank; () where it has no stage."""
        return next(iter(self.stages.values()), ())

    @property
    def tokens(self) -> int:
        """Tokens of this rank in all rounds, on the stage where it has the most."""
        contexts = ([each.context for each in microbatches] for microbatches in self.stages.values())
        return max((sum(each.tokens for each in stage if each is not None) for stage in contexts), default=0)

    def microbatch(self, action: Action) -> RankMicroBatch:
        """Return the round of an action, on its stage."""
        assert action.round is not None
        return self.stages[action.stage][action.round]


def bind_plan(
    plan: Plan,
    transport: Transport,
    *,
    device: torch.device | str = "cpu",
    check: bool = True,
    prepare: Callable[[Context], None] | None = None,
    dropout_seed: int | None = None,
    prefixes: Mapping[int, int] | None = None,
) -> RankPlan:
    """Work out what the rank of `transport` does in a plan; all ranks call it.

    A rank is in one pipeline of the plan, or in none; then it has no stages and no actions.

    Args:
        transport: this rank's; its world is the plan's.
        check: compare the plan's hash with that of all other ranks; one all-gather of 32 bytes.
        prepare: called with every context of this rank, to do the model's index work before the first layer
            (`ModelAdapter.prepare`); None: the first layer of a round does it.
        dropout_seed: see `bind`; such as the number of the step.
        prefixes: see `bind`.
    """
    device = torch.device(device)
    if plan.limits.ranks != transport.ranks:
        raise SeqloomError(
            f"a plan for {plan.limits.ranks} ranks on {transport.ranks}: start {plan.limits.ranks} ranks, or plan for "
            f"a cluster of {transport.ranks}"
        )
    if check and transport.ranks > 1:  # reading the hashes waits for the device
        _check_hash(plan, transport, device)
    rank, pieces = transport.rank, pieces_of_plan(plan)
    kv_cache = KVCache() if pieces else None
    shard_group = next((group for group in plan.shard_groups if rank in group), ())
    index, pipeline = next(((i, each) for i, each in enumerate(plan.pipelines) if rank in each.ranks), (0, None))
    progress = Progress(pipeline, rank, f"pipeline {index}" if pipeline and len(plan.pipelines) > 1 else "")
    times = LayerTimes(device)
    if pipeline is None:
        return RankPlan(plan, pipeline, transport, device, shard_group, {}, (), None, kv_cache, progress, times)
    timed = TimedTransport(transport, times)
    bind_round = partial(
        bind,
        transport=timed,
        device=device,
        node_size=plan.limits.node_size,
        shard_groups=plan.shard_groups,
        family=plan.limits.family,
        pieces=pieces,
        kv_cache=kv_cache,
        dropout_seed=dropout_seed,
        prefixes=prefixes,
    )
    pp_rank = next(index for index, ranks in enumerate(pipeline.ranks_by_pp_rank) if rank in ranks)
    boundary = StageBoundary(pipeline, rank, device)
    stages: dict[int, tuple[RankMicroBatch, ...]] = {}
    for stage in pipeline.stages_of(pp_rank):
        layers, tensor, microbatches = pipeline.layer_ranges[stage], pipeline.stages[stage].tensor, []
        ep_ranks = next(ranks for ranks in pipeline.ep_groups(stage) if rank in ranks)
        tp_ranks = next(ranks for ranks in pipeline.tp_groups(stage) if rank in ranks)
        for number, current in enumerate(pipeline.rounds):
            work = current.by_stage[stage]
            context = None
            if _takes_part(work, shard_group) and pipeline.chain.is_head(stage):
                context = _bind_head(work, timed, device)
            elif _takes_part(work, shard_group):
                span, peers = (layers.first, layers.stop), {"ep_ranks": ep_ranks, "tp_ranks": tp_ranks}
                context = bind_round(work, tensor=tensor, layers=span, **peers)
                if prepare is not None:
                    prepare(context)
            slices = (None, None) if context is None else boundary.slices(stage, number, context.tokens)
            microbatches.append(RankMicroBatch(number, work.checkpoint, context, layers, work.offload, *slices))
        stages[stage] = tuple(microbatches)
    free = plan.sharding == Sharding.FREE
    row = place_messages(pipeline, pipeline.actions, boundary, reduce_last=free)[pp_rank]
    actions = tuple(each for each in row if each.round is None or stages[each.stage][each.round].context is not None)
    leaves = _shared_last_backward(pipeline, row, rank) if free else None
    ends = actions, leaves, kv_cache, progress, times
    return RankPlan(plan, pipeline, transport, device, shard_group, stages, *ends)


def _bind_head(work: StageMicroBatch, transport: Transport, device: torch.device) -> Context:
    """Bind a round of a head stage: the rank's own tokens, since no token needs another one there."""
    own = tuple(group for group in work.groups if transport.rank in group.ranks)
    return bind(replace(work, groups=own), transport, device=device, independent_tokens=True)


def _takes_part(work: StageMicroBatch, shard_group: tuple[int, ...]) -> bool:
    """Whether a rank of the shard group is in a group or forwards its traffic; it may have no tokens."""
    return any(not set(shard_group).isdisjoint(group.participants) for group in work.groups)


def _shared_last_backward(pipeline: Pipeline, row: Sequence[Action], rank: int) -> Action | None:
    """Return the last backward of a rank, if it is that of all ranks of its round, and they have nothing to send after.

    Then they all compute the same layers in it, between the same exchanges. A rank without tokens would not. Where the
    row has split backwards there is none: a rank that runs one has weight gradients later, another may skip its round.
    """
    if any(each.kind == W for each in row):
        return None
    ends, later = [each for each in row if each.kind in (SEND_F, SEND_B, B, I)], set[int]()
    while ends and ends[-1].kind in (B, I):
        action = ends.pop()
        assert action.round is not None
        work = pipeline.rounds[action.round].by_stage[action.stage]
        ranks = {each for group in work.groups for each in group.participants}
        ranks |= {each for peers in pipeline.ep_groups(action.stage) if not ranks.isdisjoint(peers) for each in peers}
        if rank in ranks:
            layouts = [work.attention_layout(), *([] if work.linear is None else [work.linear])]
            return action if all(ranks == {*layout.rank.tolist()} for layout in layouts) and not ranks & later else None
        later |= ranks
    return None


def _check_hash(plan: Plan, transport: Transport, device: torch.device) -> None:
    """Compare the plans of all ranks; all of them raise when one differs."""
    digest = hashlib.sha256(plan.hash.encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    gathered = torch.empty(transport.ranks * len(digest), dtype=torch.uint8, device=device)
    transport.all_gather(gathered, mine, tuple(range(transport.ranks)))
    digests = [bytes(row) for row in gathered.view(transport.ranks, -1).cpu().tolist()]
    others = [rank for rank, other in enumerate(digests) if other != digest]
    if others:
        raise SeqloomError(
            f"rank {transport.rank} has plan {plan.hash[:12]}, rank {others[0]} another one; plan on one rank and send "
            "the plan to all, and use the same version of Seqloom everywhere"
        )
