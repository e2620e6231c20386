"""What a plan is for one rank: its rounds on its stages with their contexts, and the row of actions to run.

A rank runs, in the plan's order, the rounds in which it or a rank of its shard group is in a group, with no tokens if
need be, and skips the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from seqloom.attention.context_parallel import KVCache
from seqloom.dist import Context, Transport, bind, pieces_of_plan
from seqloom.engine.stage_p2p import Progress, RowSlice, StageBoundary, ways_of
from seqloom.errors import SeqloomError
from seqloom.plan import Action, Checkpoint, LayerRange, Pipeline, Plan, StageMicroBatch


@dataclass(frozen=True, slots=True, eq=False)
class RankMicroBatch:
    """A round on one stage, as one rank sees it.

    Attributes:
        number: of the round in its pipeline.
        checkpoint: what is kept of its activations.
        context: for the model; None where this rank's shard group takes no part.
        stage: of the pipeline.
        part: layers of the stage.
        offload: whether what is kept lies in host memory.
        behind, ahead: rows that come from the stage before and go to the stage after; None: they change no place, or
            there is no such stage.
    """

    number: int
    checkpoint: Checkpoint
    context: Context | None
    stage: int
    part: LayerRange
    offload: bool
    behind: tuple[RowSlice, ...] | None
    ahead: tuple[RowSlice, ...] | None

    @property
    def takes_part(self) -> bool:
        """Whether this rank runs the round, be it without tokens."""
        return self.context is not None


@dataclass(frozen=True, slots=True, eq=False)
class RankPlan:
    """A plan as one rank sees it.

    Attributes:
        plan: what was bound; the same on all ranks.
        pipeline: the one that this rank is in; None: it is in none.
        transport: this rank's.
        device: where its tensors live.
        shard group: ranks that run the same rounds as this one, itself among them; none where it is in no stage.
        stages: all rounds of its pipeline, in order, on every stage of this rank, by the number of the stage.
        actions: what this rank runs, in order: its host's row without the rounds it takes no part in, and with the
            messages among the host's ranks where two of its stages deal tokens differently.
        kv_cache: keys and values of documents in pieces, while a step runs.
        progress: where the rank is in its row, while a step runs.
    """

    plan: Plan
    pipeline: Pipeline | None
    transport: Transport
    device: torch.device
    shard_group: tuple[int, ...]
    stages: dict[int, tuple[RankMicroBatch, ...]]
    actions: tuple[Action, ...]
    kv_cache: KVCache
    progress: Progress

    @property
    def rounds(self) -> tuple[RankMicroBatch, ...]:
        """All rounds of its pipeline, in order, on the first stage of this rank; none where it has no stage."""
        return next(iter(self.stages.values()), ())

    @property
    def tokens(self) -> int:
        """Tokens of this rank in all rounds, on the stage where it has the most."""
        held = [sum(each.context.tokens for each in own if each.context is not None) for own in self.stages.values()]
        return max(held, default=0)

    def at(self, action: Action) -> RankMicroBatch:
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
) -> RankPlan:
    """Work out what a plan means for the rank of `transport`. Called by all ranks, whatever they do in it.

    A rank is in one pipeline of the plan, or in none; then it has no stages and no actions.

    Args:
        plan: valid.
        transport: this rank's; its world is the plan's.
        device: where the local tensors live.
        check: compare the plan's hash with that of all other ranks; one all-gather of 32 bytes.
        prepare: called with every context of this rank, to do the model's index work before the first layer
            (`Network.prepare`); None: the first layer of a round does it.
    """
    _check_plan(plan, transport)
    if check and transport.ranks > 1:  # looking at the answer waits for the device
        _check_hash(plan, transport, torch.device(device))
    shard_groups, rank, kv_cache, device = plan.shard_groups, transport.rank, KVCache(), torch.device(device)
    bind_work = partial(
        bind,
        transport=transport,
        device=device,
        node_size=plan.limits.node_size,
        shard_groups=shard_groups,
        family=plan.limits.family,
        pieces=pieces_of_plan(plan),
        kv_cache=kv_cache,
    )
    shard_group = next((shard_group for shard_group in shard_groups if rank in shard_group), ())
    pipeline, name = _own_pipeline(plan, rank)
    progress = Progress(pipeline, rank, name)
    if pipeline is None:
        return RankPlan(plan, pipeline, transport, device, shard_group, {}, (), kv_cache, progress)
    host = next(h for h, ranks in enumerate(pipeline.ranks_by_pp_rank) if rank in ranks)
    handovers = StageBoundary(pipeline, rank, device)
    stages: dict[int, tuple[RankMicroBatch, ...]] = {}
    for stage in pipeline.stages_of(host):
        part, tensor, rounds = pipeline.layer_ranges[stage], pipeline.stages[stage].tensor, []
        for number, current in enumerate(pipeline.rounds):
            work = current.by_stage[stage]
            context = bind_work(work, tensor=tensor) if _takes_part(work, shard_group) else None
            if prepare is not None and context is not None:
                prepare(context)
            sides = (None, None) if context is None else handovers.of(stage, number, context.tokens)
            rounds.append(RankMicroBatch(number, work.checkpoint, context, stage, part, work.offload, *sides))
        stages[stage] = tuple(rounds)
    row = handovers.with_own(pipeline.actions[host])
    actions = tuple(a for a in row if a.round is None or stages[a.stage][a.round].takes_part)
    every = [each for rounds in stages.values() for each in rounds]
    transport.connect(way for each in every for way in ways_of(rank, each.ahead or (), each.behind or ()))
    return RankPlan(plan, pipeline, transport, device, shard_group, stages, actions, kv_cache, progress)


def _own_pipeline(plan: Plan, rank: int) -> tuple[Pipeline | None, str]:
    """Return the pipeline that a rank is in, None if there is none, and a name for it where there are others."""
    for number, pipeline in enumerate(plan.pipelines):
        if rank in pipeline.ranks:
            return pipeline, f"pipeline {number}" if len(plan.pipelines) > 1 else ""
    return None, ""


def _takes_part(work: StageMicroBatch, shard_group: tuple[int, ...]) -> bool:
    """Whether a rank of the shard group is in a group or carries its traffic, which it may be without tokens."""
    return any(not set(shard_group).isdisjoint(group.participants) for group in work.groups)


def _check_plan(plan: Plan, transport: Transport) -> None:
    if plan.limits.ranks != transport.ranks:
        raise SeqloomError(
            f"a plan for {plan.limits.ranks} ranks on {transport.ranks}: start {plan.limits.ranks} ranks, or plan for "
            f"a cluster of {transport.ranks}"
        )


def _check_hash(plan: Plan, transport: Transport, device: torch.device) -> None:
    """Compare the plans of all ranks. Raises on all of them when one differs."""
    digest = hashlib.sha256(plan.hash.encode()).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    every = torch.empty(transport.ranks * len(digest), dtype=torch.uint8, device=device)
    transport.all_gather(every, mine, tuple(range(transport.ranks)))
    found = [bytes(row) for row in every.view(transport.ranks, -1).cpu().tolist()]
    others = [rank for rank, other in enumerate(found) if other != digest]
    if others:
        raise SeqloomError(
            f"rank {transport.rank} has plan {plan.hash[:12]}, rank {others[0]} another one; plan on one rank and send "
            "the plan to all, and use the same version of Seqloom everywhere"
        )
