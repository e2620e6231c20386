"""Whole pipeline plans for tests: documents in pieces on several stages, packs beside them, in any order that ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from random import Random

from hypothesis import strategies as st

from seqloom.layout import Span
from seqloom.models import TransformerOptions
from seqloom.plan import (
    Action,
    ActionKind,
    Checkpoint,
    Group,
    Limits,
    Pipeline,
    Plan,
    Reduce,
    Remap,
    Round,
    Sharding,
    Stage,
    StageMicroBatch,
    sort_groups,
)
from support.steps import Step, tiny_spec
from support.strategies_groups import Shape, group_shapes, layer_choices
from support.tables import Table, later_pieces, rows_in_order
from support.two_layouts import Box, with_layout

F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W  # noqa: E741 - the field's names
FRAME = (ActionKind.UNSHARD, ActionKind.REDUCE, ActionKind.RESHARD)

PLACEMENTS = {
    "once": lambda hosts: [*range(hosts)],
    "in turn": lambda hosts: [*range(hosts), *range(hosts)],
    "V": lambda hosts: [*range(hosts), *reversed(range(hosts))],
}
"""The host of every stage, by the number of hosts."""


def stages_on(places: Sequence[int], width: int, layers: int) -> tuple[Stage, ...]:
    """Cut the layers as evenly as it goes, the last stages one more; host h has ranks `h * width` and on."""
    cuts = [s * layers // len(places) for s in range(len(places) + 1)]
    ranks = [tuple(range(host * width, (host + 1) * width)) for host in places]
    return tuple(Stage(*each) for each in zip(ranks, pairwise(cuts), strict=True))


def framed(stages: Sequence[Stage], table: Table) -> Table:
    """Put the gathering of parameters before every row, the reduction and the release behind it."""
    line = Pipeline(tuple(stages), (), ())
    return tuple(
        (
            *(Action(s, FRAME[0]) for s in line.stages_of(h)),
            *row,
            *(Action(s, kind) for kind in FRAME[1:] for s in line.stages_of(h)),
        )
        for h, row in enumerate(table)
    )


def any_order(stages: int, rounds: Sequence[Round], split: Sequence[bool], random: Random) -> Iterator[Action]:
    """Yield the computations of all stages in a random order that respects every dependency.

    Args:
        stages: number of stages.
        rounds: rounds of the pipeline.
        split: stages with I and W instead of B.
        random: chooses among what is ready.
    """
    later = later_pieces(rounds)
    waits: dict[Action, set[Action]] = {}
    for stage in range(stages):
        back = [I if divided else B for divided in split]
        for r in range(len(rounds)):
            forward = [Action(stage, F, r - 1)] * (r > 0) + [Action(stage - 1, F, r)] * (stage > 0)
            beyond = [Action(stage + 1, back[stage + 1], r)] if stage + 1 < stages else []
            waits[Action(stage, F, r)] = set(forward)
            pieces = [Action(stage, back[stage], other) for other in later[r]]
            waits[Action(stage, back[stage], r)] = {Action(stage, F, r), *beyond, *pieces}
            if split[stage]:
                waits[Action(stage, W, r)] = {Action(stage, I, r)}
    while waits:
        chosen = random.choice([action for action, before in waits.items() if not before])
        del waits[chosen]
        for before in waits.values():
            before.discard(chosen)
        yield chosen


def pipeline_plan(
    lengths: Sequence[int],
    stages: Sequence[Stage],
    rounds: Iterable[Round],
    table: Table,
    limits: Limits,
    sharding: Sharding = Sharding.FULL,
) -> Plan:
    """Build a valid plan of one pipeline from its rounds and the rows of its computations and messages."""
    line = Pipeline(tuple(stages), tuple(rounds), framed(stages, table))
    plan = Plan(limits, sharding, Reduce.STEP, tuple(lengths), (line,), "drawn")
    plan.validate()
    return plan


def ample(ranks: int, heads: int, node_size: int | None = None) -> Limits:
    """Return limits with room for everything."""
    return Limits(ranks, node_size or ranks, heads, tuple((kind, 10**9) for kind in Checkpoint))


@st.composite
def pipeline_steps(draw: st.DrawFn, *, longest: int = 24, chunked: bool = False) -> Step:
    """Draw a step of one to five layers: grouped heads, windows, biases, tied and untied heads, masked labels.

    `chunked`: layers may also have attention chunks.
    """
    layers = draw(st.integers(1, 5))
    kv_heads = draw(st.integers(1, 2))
    spec = tiny_spec(
        layers=layers,
        heads=kv_heads * draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        tied=draw(st.booleans()),
        windows=tuple(draw(st.sampled_from((None, None, 3, 11))) for _ in range(layers)),
        attention_chunks=tuple(draw(st.sampled_from((None, None, 4, 9))) for _ in range(layers if chunked else 0)),
    )
    details = TransformerOptions(qk_norm=draw(st.booleans()), qkv_bias=draw(st.booleans()))
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=5))
    return Step(tuple(lengths), spec, details, masked=draw(st.sampled_from((0.0, 0.4, 1.1))))


@st.composite
def pipeline_plans(draw: st.DrawFn, step: Step, *, max_hosts: int = 4) -> Plan:
    """Draw a plan of a step: hosts, stages on them, pieces, groups, checkpointing, layouts, and a random order."""
    layers = step.spec.layers
    fits = [
        (hosts, name)
        for hosts in range(1, max_hosts + 1)
        for name, place in PLACEMENTS.items()
        if len(place(hosts)) <= layers
    ]
    hosts, name = draw(st.sampled_from(fits))
    width = draw(st.integers(1, 2))
    stages = stages_on(PLACEMENTS[name](hosts), width, layers)
    node_size = draw(st.sampled_from([size for size in (hosts * width, width, 1) if hosts * width % size == 0]))
    own = ample(hosts * width, step.spec.heads, node_size)
    sharding = draw(st.sampled_from(Sharding))
    rounds = draw(piece_rounds(step.lengths, stages, own, sharding))
    split = [draw(st.booleans()) for _ in stages]
    random = Random(draw(st.integers(0, 2**16)))
    table = rows_in_order(stages, any_order(len(stages), rounds, split, random))
    return pipeline_plan(step.lengths, stages, rounds, table, own, sharding)


@st.composite
def piece_rounds(
    draw: st.DrawFn, lengths: Sequence[int], stages: Sequence[Stage], own: Limits, sharding: Sharding
) -> tuple[Round, ...]:
    """Draw the rounds of a pipeline: documents whole or in pieces, in any group of each stage, the same for all pieces.

    Args:
        draw: given by hypothesis.
        lengths: of the documents.
        stages: that work on them.
        own: limits of the plan.
        sharding: of the plan.
    """
    count = draw(st.integers(1, 5))
    placements: list[list[Span]] = [[] for _ in range(count)]
    for document, length in enumerate(lengths):
        cuts = draw(st.sets(st.integers(1, length - 1), max_size=count - 1)) if min(length, count) > 1 else set()
        where = sorted(draw(st.permutations(range(count)))[: len(cuts) + 1])
        for number, (start, stop) in zip(where, pairwise([0, *sorted(cuts), length]), strict=True):
            placements[number].append(Span(document, start, stop))
    return draw(grouped_rounds([spans for spans in placements if spans], len(lengths), stages, own, sharding))


@st.composite
def grouped_rounds(
    draw: st.DrawFn,
    placements: Sequence[list[Span]],
    documents: int,
    stages: Sequence[Stage],
    own: Limits,
    sharding: Sharding,
) -> tuple[Round, ...]:
    """Draw the groups of every stage for the spans of every round."""
    shapes = [[draw(group_shapes(own, stage.ranks, stage.tensor)) for _ in range(2)] for stage in stages]
    home = [[draw(st.sampled_from(choice)) for choice in shapes] for _ in range(documents)]
    shard_groups = {
        rank: shard_group
        for stage in stages
        for shard_group in own.shard_groups(sharding, stage.ranks)
        for rank in shard_group
    }
    return tuple(
        Round(
            tuple(
                draw(
                    _works(spans, [home[span.document][s] for span in spans], own, shard_groups, stage.tensor).flatmap(
                        partial(layer_choices, layers=stage.layer_count)
                    )
                )
                for s, stage in enumerate(stages)
            )
        )
        for spans in placements
    )


@st.composite
def _works(
    draw: st.DrawFn,
    spans: list[Span],
    shapes: list[Shape],
    own: Limits,
    shard_groups: dict[int, tuple[int, ...]],
    tensor: int,
) -> StageMicroBatch:
    """Draw one stage's share: spans of one shape form a group; now and then linear layers have their own layout.

    In tp_groups they never have.
    """
    by_shape: dict[Shape, list[Span]] = {}
    for span, shape in zip(spans, shapes, strict=True):
        by_shape.setdefault(shape, []).append(span)
    groups = [Group(*shape, tuple(members)) for shape, members in by_shape.items()]
    work = StageMicroBatch(sort_groups(groups, own.node_size), draw(st.sampled_from(Checkpoint)))
    if tensor > 1 or draw(st.integers(0, 3)):
        return work
    shift = draw(st.integers(0, 1))

    def move(box: Box) -> list[Box]:
        rank, document, start, stop = box
        shard_group = shard_groups[rank]
        other = shard_group[(shard_group.index(rank) + shift) % len(shard_group)]
        middle = (start + stop) // 2
        return [(other, document, start, middle), (rank, document, middle, stop)]

    return with_layout(work, move, draw(st.sampled_from(Remap)))
