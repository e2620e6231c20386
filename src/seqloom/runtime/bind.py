"""What a plan is for one rank: its rounds with their contexts, and the row of actions to run.

A rank runs, in the plan's order, the rounds in which it or a rank of its island is in a group, with no tokens if
need be, and skips the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from seqloom.comm import Context, Transport, bind
from seqloom.errors import SeqloomError
from seqloom.plan import Action, ActionKind, Checkpoint, Plan, Work

RUN = (ActionKind.F, ActionKind.B, ActionKind.REDUCE)
"""The actions that a table of one stage needs."""


@dataclass(frozen=True, slots=True, eq=False)
class BoundRound:
    """A round as one rank sees it.

    Attributes:
        number: of the round in the plan.
        checkpoint: what is kept of its activations.
        context: for the model; None where this rank's island takes no part.
    """

    number: int
    checkpoint: Checkpoint
    context: Context | None

    @property
    def takes_part(self) -> bool:
        """Whether this rank runs the round, be it without tokens."""
        return self.context is not None


@dataclass(frozen=True, slots=True, eq=False)
class BoundPlan:
    """A plan as one rank sees it.

    Attributes:
        plan: what was bound; the same on all ranks.
        transport: this rank's.
        device: where its tensors live.
        island: ranks that run the same rounds as this one, itself among them; none where it is in no stage.
        rounds: all rounds of the plan, in its order.
        actions: what this rank runs, in order: the plan's table without the rounds it takes no part in.
    """

    plan: Plan
    transport: Transport
    device: torch.device
    island: tuple[int, ...]
    rounds: tuple[BoundRound, ...]
    actions: tuple[Action, ...]

    @property
    def tokens(self) -> int:
        """Tokens of this rank in all rounds."""
        return sum(each.context.tokens for each in self.rounds if each.context is not None)


def bind_plan(
    plan: Plan,
    transport: Transport,
    *,
    device: torch.device | str = "cpu",
    check: bool = True,
    prepare: Callable[[Context], None] | None = None,
) -> BoundPlan:
    """Work out what a plan means for the rank of `transport`. Called by all ranks, whatever they do in it.

    Args:
        plan: valid, of one pipeline with one stage.
        transport: this rank's; its world is the plan's.
        device: where the local tensors live.
        check: compare the plan's hash with that of all other ranks; one all-gather of 32 bytes.
        prepare: called with every context of this rank, to do the model's index work before the first layer
            (`Network.prepare`); None: the first layer of a round does it.
    """
    _check_plan(plan, transport)
    if check and transport.ranks > 1:  # looking at the answer waits for the device
        _check_hash(plan, transport, torch.device(device))
    pipeline = plan.pipelines[0]
    islands = plan.islands
    over = {"node_size": plan.limits.node_size, "islands": islands, "family": plan.limits.family}
    island = next((island for island in islands if transport.rank in island), ())
    rounds = []
    for number, current in enumerate(pipeline.rounds):
        work = current.work[0]
        part = _takes_part(work, island)
        context = bind(work, transport, device=device, **over) if part else None
        if prepare is not None and context is not None:
            prepare(context)
        rounds.append(BoundRound(number, work.checkpoint, context))
    actions = tuple(a for a in pipeline.actions[0] if a.round is None or rounds[a.round].takes_part)
    return BoundPlan(plan, transport, torch.device(device), island, tuple(rounds), actions)


def _takes_part(work: Work, island: tuple[int, ...]) -> bool:
    """Whether a rank of the island is in a group or carries its traffic, which it may be without tokens."""
    return any(not set(island).isdisjoint(group.party) for group in work.groups)


def _check_plan(plan: Plan, transport: Transport) -> None:
    if plan.limits.ranks != transport.ranks:
        raise SeqloomError(
            f"a plan for {plan.limits.ranks} ranks on {transport.ranks}: start {plan.limits.ranks} ranks, or plan for "
            f"a cluster of {transport.ranks}"
        )
    stages = [len(pipeline.stages) for pipeline in plan.pipelines]
    if stages != [1]:
        raise SeqloomError(
            f"a plan with {len(stages)} pipelines of {stages} stages: the runtime runs one pipeline with one stage; "
            "use a planner of sequence parallelism, such as flex, adaptive or static"
        )
    stage = plan.pipelines[0].stages[0]
    if stage.tensor > 1:
        raise SeqloomError(f"tensor degree {stage.tensor}: the runtime has no tensor parallelism; plan with 1")
    unknown = next((action for action in plan.pipelines[0].actions[0] if action.kind not in RUN), None)
    if unknown is not None:
        raise SeqloomError(
            f"action {unknown}: a table of one stage consists of F, B and REDUCE here; let Pipeline.single make it"
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
