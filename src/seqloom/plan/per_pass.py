"""Stages whose parameters are gathered for every pass, not for the step: under free sharding, a choice of the plan.

    0UNSHARD 0F0 0B0 0F1 0B1 0REDUCE 0RESHARD                       stay for the step

    0UNSHARD0 0F0 0RESHARD0 0UNSHARD0 0B0 0RESHARD0 ... 0REDUCE     gathered for every pass

Between passes the ranks with the same slice of such a stage's weights keep a share of it each, and of its gradients.
That is less memory for more messages. UNSHARD brings the shares together. RESHARD drops the copies; after a backward
it sums their gradients into the shares first. Gradients of weight halves (W) wait for the REDUCE.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import Enum

from seqloom.plan.action import Action, ActionKind
from seqloom.plan.pipeline import Pipeline

FRAME = (ActionKind.UNSHARD, ActionKind.RESHARD)
BACKWARD = (ActionKind.B, ActionKind.I)
COMPUTING = (ActionKind.F, *BACKWARD, ActionKind.W)


class PassMove(Enum):
    """What an action moves between shares and copies."""

    GATHER = "gather"  # parameters: the shares to all ranks
    SUM = "sum"  # gradients: of all ranks to the shares


def stages_per_pass(pipeline: Pipeline) -> frozenset[int]:
    """Return the stages that a pipeline gathers for every pass: those with an UNSHARD of a round."""
    actions = (action for row in pipeline.actions for action in row)
    return frozenset(each.stage for each in actions if each.kind is ActionKind.UNSHARD and each.round is not None)


def gathered_for_passes(pipeline: Pipeline, stages: Sequence[int] | None = None) -> Pipeline:
    """Return the pipeline with these stages gathered for every pass; None: all of them."""
    chosen = range(len(pipeline.stages)) if stages is None else stages

    def around(action: Action) -> tuple[Action, ...]:
        if action.stage not in chosen or action.kind not in (*FRAME, *COMPUTING):
            return (action,)
        first, last = (Action(action.stage, kind, action.round) for kind in FRAME)
        return () if action.kind in FRAME else (first, action, last)

    rows = (tuple(each for action in row for each in around(action)) for row in pipeline.actions)
    return replace(pipeline, actions=tuple(rows))


def pass_moves(row: Sequence[Action], stages: frozenset[int]) -> Iterator[PassMove | None]:
    """Yield for every action of a host's row what it moves.

    Args:
        row: of a pipeline.
        stages: those that are gathered for every pass.
    """
    halves = any(action.kind is ActionKind.W for action in row)
    owed: set[int] = set()  # stages with gradients that are not in the shares' yet
    for action in row:
        move = None
        if action.stage in stages:
            if action.kind is ActionKind.UNSHARD:
                move = PassMove.GATHER
            elif action.kind in BACKWARD:
                owed.add(action.stage)
            elif _sums(action, action.stage in owed, halves):
                move = PassMove.SUM
                owed.discard(action.stage)
        yield move


def _sums(action: Action, owed: bool, halves: bool) -> bool:
    if action.kind is ActionKind.RESHARD:
        return owed
    return action.kind is ActionKind.REDUCE and action.round is None and (owed or halves)
