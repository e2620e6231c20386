from __future__ import annotations

import pytest

from seqloom.layout import Span
from seqloom.plan import (
    Action,
    Checkpoint,
    Group,
    Limits,
    Pipeline,
    Plan,
    Reduce,
    Round,
    Sharding,
    Stage,
    StageMicroBatch,
)

LENGTHS = (100, 60, 40, 8)


def limits(**changes: object) -> Limits:
    defaults = {
        "ranks": 8,
        "node_size": 4,
        "heads": 8,
        "capacity": ((Checkpoint.SELECTIVE, 64), (Checkpoint.FULL, 128)),
    }
    return Limits(**{**defaults, **changes})  # type: ignore[arg-type]


@pytest.fixture
def plain() -> Plan:
    """Two nodes of four ranks, one stage, two rounds; ranks 4-5 share two groups in round 1."""
    first = StageMicroBatch((Group((0, 1, 2, 3), 4, 1, (Span(0, 0, 100),)),), Checkpoint.SELECTIVE)
    groups = (
        Group((4, 5, 6, 7), 2, 2, (Span(1, 0, 60),)),
        Group((4, 5), 2, 1, (Span(2, 0, 40),)),
        Group((0,), 1, 1, (Span(3, 0, 8),)),
    )
    rounds = (Round((first,)), Round((StageMicroBatch(groups, Checkpoint.FULL),)))
    pipeline = Pipeline.single(range(8), 4, rounds, Reduce.STEP)
    return Plan(limits(), Sharding.FULL, Reduce.STEP, LENGTHS, (pipeline,), "hand")


@pytest.fixture
def staged() -> Plan:
    """One pipeline of two stages, a node each; document 0 is in two pieces."""
    rounds = []
    for spans in ((Span(0, 0, 70),), (Span(0, 70, 100), Span(1, 0, 60), Span(2, 0, 40), Span(3, 0, 8))):
        work = [
            StageMicroBatch((Group(ranks, 2, 2, spans),), Checkpoint.FULL) for ranks in ((0, 1, 2, 3), (4, 5, 6, 7))
        ]
        rounds.append(Round(tuple(work)))
    stages = (Stage((0, 1, 2, 3), (0, 2)), Stage((4, 5, 6, 7), (2, 4), tensor=2))
    rows = tuple(
        tuple(map(Action.parse, row.split()))
        for row in (
            "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B1 0B1 0RECV_B0 0B0 0REDUCE",
            "1RECV_F0 1F0 1RECV_F1 1F1 1B1 1SEND_B1 1B0 1SEND_B0 1REDUCE",
        )
    )
    return Plan(limits(), Sharding.HYBRID, Reduce.STEP, LENGTHS, (Pipeline(stages, tuple(rounds), rows),), "hand")
