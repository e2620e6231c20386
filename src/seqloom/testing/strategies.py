"""Hypothesis strategies for the values of `seqloom.plan`. Every plan they draw is valid.

`plans` draws several pipelines and stages, documents in pieces, groups that share ranks, tensor degrees,
split backwards and explicit layouts, all small: what a rule can break on, it breaks on with few ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from seqloom.plan import (
    Action,
    ActionKind,
    Checkpoint,
    Group,
    Layout,
    Limits,
    Pipeline,
    Plan,
    Reduce,
    Round,
    Sharding,
    Span,
    Stage,
    Work,
)

Shape = tuple[tuple[int, ...], int, int]
"""Ranks, ulysses and ring of a group."""


@st.composite
def layouts(
    draw: st.DrawFn,
    *,
    ranks: int = 5,
    items: int = 3,
    extent: int = 12,
    axes: int | None = None,
    complete: bool = False,
) -> Layout:
    """Draw a layout with replication.

    Args:
        draw: given by hypothesis.
        ranks: holders are below this.
        items: items are below this.
        extent: every axis of every item is 0 .. extent.
        axes: 1 or 2; None draws it.
        complete: every element of every item has at least one holder.
    """
    axes = draw(st.sampled_from((1, 2))) if axes is None else axes
    boxes = []
    for item in range(items):
        grid = [draw(_cuts(extent)) for _ in range(axes)]
        for row in grid[0]:
            for column in grid[1] if axes == 2 else [()]:
                holders = draw(st.sets(st.integers(0, ranks - 1), min_size=int(complete), max_size=3))
                boxes += [(rank, item, *row, *column) for rank in sorted(holders)]
    return Layout.of(boxes) if boxes else Layout.empty(axes)


def _cuts(extent: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    inner = st.sets(st.integers(1, extent - 1), max_size=4)
    return inner.map(lambda cuts: list(pairwise([0, *sorted(cuts), extent])))


@st.composite
def limits(draw: st.DrawFn, *, max_nodes: int = 3) -> Limits:
    """Draw limits of a small cluster; the capacity is ample."""
    node_size = draw(st.sampled_from((1, 2, 3, 4)))
    return Limits(
        ranks=node_size * (1 + draw(st.integers(0, max_nodes - 1))),
        node_size=node_size,
        heads=draw(st.integers(1, 8)),
        capacity=tuple((checkpoint, 10**9) for checkpoint in Checkpoint),
        granule=draw(st.sampled_from((1, 1, 2, 4))),
        communicators=draw(st.sampled_from((16, 16, 3, 0))),
    )


@st.composite
def group_shapes(draw: st.DrawFn, own: Limits, ranks: Sequence[int], tensor: int = 1) -> Shape:
    """Draw ranks, ulysses and ring of a legal group inside `ranks`."""
    allowed = set(ranks)
    blocks = {
        size: [tuple(block) for block in own.family.blocks(size) if allowed.issuperset(block)]
        for size in own.family.sizes
        if size <= own.heads and size % tensor == 0
    }
    ulysses = draw(st.sampled_from([size for size, found in blocks.items() if found]))
    chosen = draw(st.lists(st.sampled_from(blocks[ulysses]), min_size=1, max_size=3, unique=True))
    return tuple(rank for block in chosen for rank in block), ulysses, len(chosen)


@st.composite
def groups(draw: st.DrawFn, *, documents: int = 4, longest: int = 40) -> Group:
    """Draw a group of a small cluster with up to `documents` spans, whole documents or pieces."""
    own = draw(limits())
    shape = draw(group_shapes(own, range(own.ranks)))
    spans = []
    for document in range(draw(st.integers(1, documents))):
        start = draw(st.integers(0, 5))
        spans.append(Span(document, start, start + draw(st.integers(1, longest))))
    return Group(*shape, tuple(draw(st.permutations(spans))))


@st.composite
def rounds(draw: st.DrawFn, **options: int) -> Round:
    """Draw a valid round: one of a valid plan."""
    plan = draw(plans(**options))
    return draw(st.sampled_from([current for line in plan.pipelines for current in line.rounds]))


@st.composite
def plans(draw: st.DrawFn, *, max_documents: int = 8, longest: int = 40, max_nodes: int = 3) -> Plan:
    """Draw a valid plan."""
    own = draw(limits(max_nodes=max_nodes))
    sharding = draw(st.sampled_from((Sharding.HYBRID, Sharding.NONE, Sharding.FULL)))
    reduce = draw(st.sampled_from(Reduce))
    documents = tuple(draw(st.lists(st.integers(1, longest), min_size=1, max_size=max_documents)))
    stages = draw(_stages(own, sharding))
    home = [draw(st.integers(0, len(stages) - 1)) for _ in documents]
    pipelines = []
    for number, line in enumerate(stages):
        mine = [document for document, pipeline in enumerate(home) if pipeline == number]
        islands = own.islands(sharding)
        pipelines.append(draw(_pipelines(own, line, {k: documents[k] for k in mine}, islands, reduce)))
    plan = Plan(own, sharding, reduce, documents, tuple(pipelines), draw(st.sampled_from(("drawn", "", "a b\n"))))
    slack = draw(st.integers(0, 3))
    capacity = tuple((checkpoint, need + slack) for checkpoint, need in _needs(plan).items())
    return replace(plan, limits=replace(own, capacity=capacity))


def _needs(plan: Plan) -> dict[Checkpoint, int]:
    """Return, for every checkpoint in use, the tokens on the fullest rank."""
    needs: dict[Checkpoint, int] = {}
    for work in (work for line in plan.pipelines for current in line.rounds for work in current.work):
        held: dict[int, int] = {}
        for group in work.groups:
            tokens = sum(plan.limits.padded(span.tokens) for span in group.spans)
            for rank in group.ranks:
                held[rank] = held.get(rank, 0) + -(-tokens // group.degree)
        most = [*held.values()]
        for layout in (work.attention, work.linear):
            most += [] if layout is None else np.bincount(layout.rank, weights=layout.sizes).astype(int).tolist()
        needs[work.checkpoint] = max(needs.get(work.checkpoint, 1), *most)
    return needs


@st.composite
def _stages(draw: st.DrawFn, own: Limits, sharding: Sharding) -> list[tuple[Stage, ...]]:
    """Draw pipelines as tuples of stages, each of whole islands; some islands may stay unused."""
    islands = own.islands(sharding)
    cuts = draw(st.sets(st.integers(1, len(islands) - 1), min_size=1, max_size=3)) if len(islands) > 1 else set()
    blocks = [islands[low:high] for low, high in pairwise([0, *sorted(cuts), len(islands)])]
    if len(blocks) > 2 and draw(st.booleans()):
        blocks.pop()
    blocks = draw(st.permutations(blocks))
    ends = draw(st.sets(st.sampled_from(range(1, len(blocks))), max_size=1)) if len(blocks) > 1 else set()
    lines = [blocks[low:high] for low, high in pairwise([0, *sorted(ends), len(blocks)])]
    layers = max(map(len, lines)) + draw(st.integers(0, 3))
    return [tuple(draw(_line(own, line, layers))) for line in lines]


@st.composite
def _line(draw: st.DrawFn, own: Limits, blocks: Sequence[Sequence[range]], layers: int) -> list[Stage]:
    """Draw one pipeline's stages over `layers` layers, one per block of islands."""
    inner = draw(st.permutations(range(1, layers)))[: len(blocks) - 1]
    extents = pairwise([0, *sorted(inner), layers])
    stages = []
    for block, extent in zip(blocks, extents, strict=True):
        ranks = tuple(rank for island in block for rank in island)
        degrees = [
            size
            for size in own.family.sizes
            if size <= own.heads
            and len(ranks) % size == 0
            and any(set(ranks).issuperset(b) for b in own.family.blocks(size))
        ]
        stages.append(Stage(ranks, extent, draw(st.sampled_from([1, *degrees]))))
    return stages


@st.composite
def _pipelines(
    draw: st.DrawFn,
    own: Limits,
    stages: tuple[Stage, ...],
    documents: dict[int, int],
    islands: tuple[range, ...],
    reduce: Reduce,
) -> Pipeline:
    """Draw the rounds and the table of one pipeline; `documents` maps ids to lengths."""
    count = draw(st.integers(1, 4))
    pieces: list[list[Span]] = [[] for _ in range(count)]
    for document, length in documents.items():
        cuts = draw(st.sets(st.integers(1, length - 1), max_size=count - 1)) if length > 1 and count > 1 else set()
        where = sorted(draw(st.permutations(range(count)))[: len(cuts) + 1])
        for number, (start, stop) in zip(where, pairwise([0, *sorted(cuts), length]), strict=True):
            pieces[number].append(Span(document, start, stop))
    shapes = [
        [draw(group_shapes(own, stage.ranks, stage.tensor)) for _ in range(draw(st.integers(1, 3)))] for stage in stages
    ]
    home = {document: [draw(st.sampled_from(choice)) for choice in shapes] for document in documents}
    found = [
        Round(
            tuple(draw(_works(spans, [home[span.document][s] for span in spans], islands)) for s in range(len(stages)))
        )
        for spans in pieces
        if spans
    ]
    apart = all(span.tokens == documents[span.document] for spans in pieces for span in spans)
    if len(stages) == 1 and draw(st.booleans()):
        return replace(Pipeline.single(stages[0].ranks, stages[0].layers, found, reduce), stages=stages)
    style = {
        "split": draw(st.booleans()),
        "unshard": draw(st.booleans()),
        "alternate": apart and draw(st.booleans()),
    }
    rows = tuple(tuple(table_row(s, len(stages), len(found), reduce, **style)) for s in range(len(stages)))
    return Pipeline(stages, tuple(found), rows)


@st.composite
def _works(draw: st.DrawFn, spans: list[Span], shapes: list[Shape], islands: tuple[range, ...]) -> Work:
    """Draw one stage's share: spans of equal shape form a group; layouts are explicit now and then."""
    by_shape: dict[Shape, list[Span]] = {}
    for span, shape in zip(spans, shapes, strict=True):
        by_shape.setdefault(shape, []).append(span)
    work = Work(
        tuple(Group(*shape, tuple(members)) for shape, members in by_shape.items()),
        draw(st.sampled_from(Checkpoint)),
    )
    kind = draw(st.sampled_from(("derived", "derived", "attention", "linear", "both")))
    if kind == "derived":
        return work
    attention = work.attention_layout()
    size = len(islands[0])
    shift = draw(st.integers(0, size - 1))
    moved = attention.rank // size * size + (attention.rank % size + shift) % size
    linear = Layout(moved, attention.item, attention.start, attention.stop)
    explicit = {"attention": (attention, None), "linear": (None, linear), "both": (attention, linear)}[kind]
    return replace(work, attention=explicit[0], linear=explicit[1])


def table_row(
    stage: int,
    stages: int,
    rounds: int,
    reduce: Reduce,
    *,
    split: bool = False,
    unshard: bool = False,
    alternate: bool = False,
) -> Iterable[Action]:
    """Yield a simple valid row: all forwards, then all backwards in reverse; or round by round.

    Args:
        stage: the row's stage.
        stages: stages of the pipeline.
        rounds: rounds of the pipeline.
        reduce: when gradients are reduced.
        split: I and W instead of B.
        unshard: put UNSHARD and RESHARD around the computation.
        alternate: forward and backward of one round before the next; not for documents in pieces.
    """
    first, last = stage == 0, stage == stages - 1
    forward = ([] if first else ["RECV_F"]) + ["F"] + ([] if last else ["SEND_F"])
    backward = ([] if last else ["RECV_B"]) + (["I"] if split else ["B"]) + ([] if first else ["SEND_B"])
    backward += ["W"] * split + ["REDUCE"] * (reduce == Reduce.ROUND)
    order = [(words, r) for r in range(rounds) for words in (forward, backward)]
    if not alternate:
        order = [(forward, r) for r in range(rounds)] + [(backward, r) for r in reversed(range(rounds))]
    if unshard and rounds:
        yield Action(stage, ActionKind.UNSHARD)
    for words, number in order:
        for word in words:
            yield Action(stage, ActionKind(word), number)
    if unshard and rounds:
        yield Action(stage, ActionKind.RESHARD)
    if reduce == Reduce.STEP:
        yield Action(stage, ActionKind.REDUCE)
