"""Hypothesis strategies for limits and groups: every legal shape, method and route."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from hypothesis import strategies as st

from seqloom.layout import Route, Span
from seqloom.plan import Checkpoint, Group, Limits, Method, StageMicroBatch

Shape = tuple[tuple[int, ...], int, int]
"""Ranks, ulysses and ring of a group."""


@st.composite
def limits(draw: st.DrawFn, *, max_nodes: int = 3) -> Limits:
    """Draw limits of a small cluster; the capacity is ample."""
    node_size = draw(st.sampled_from((1, 2, 3, 4)))
    return Limits(
        ranks=node_size * (1 + draw(st.integers(0, max_nodes - 1))),
        node_size=node_size,
        heads=draw(st.integers(1, 8)),
        capacity=tuple((checkpoint, 10**9) for checkpoint in Checkpoint),
        pad_multiple=draw(st.sampled_from((1, 1, 2, 4))),
        communicators=draw(st.sampled_from((16, 16, 3, 0))),
    )


@st.composite
def group_shapes(draw: st.DrawFn, own: Limits, ranks: Sequence[int], tensor: int = 1) -> Shape:
    """Draw ranks, ulysses and ring of a legal group inside `ranks`, which keeps tensor ranks together."""
    allowed = set(cut(ranks, tensor))
    blocks = {
        size: [tuple(block) for block in own.family.blocks(size) if allowed.issuperset(cut(block, tensor))]
        for size in own.family.sizes
        if size <= own.heads and size % tensor == 0
    }
    ulysses = draw(st.sampled_from([size for size, found in blocks.items() if found]))
    chosen = draw(st.lists(st.sampled_from(blocks[ulysses]), min_size=1, max_size=3, unique=True))
    return tuple(rank for block in chosen for rank in block), ulysses, len(chosen)


def cut(ranks: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """Cut ranks every `size`."""
    return [tuple(ranks[k : k + size]) for k in range(0, len(ranks), size)]


@st.composite
def groups(draw: st.DrawFn, *, documents: int = 4, longest: int = 40) -> Group:
    """Draw a group of a small cluster with up to `documents` spans, whole documents or pieces."""
    own = draw(limits())
    shape = draw(group_shapes(own, range(own.ranks)))
    spans = []
    for document in range(draw(st.integers(1, documents))):
        start = draw(st.integers(0, 5))
        spans.append(Span(document, start, start + draw(st.integers(1, longest))))
    group = Group(*shape, tuple(draw(st.permutations(spans))))
    return draw(shared(group, own.node_size, range(own.ranks)))


@st.composite
def shared(draw: st.DrawFn, group: Group, node_size: int, awake: Collection[int]) -> Group:
    """Draw how a group shares keys and values: any method with a ring, any route through ranks that are awake."""
    if group.ring == 1:
        return group
    group = replace(group, method=draw(st.sampled_from(Method)))
    nodes = sorted({rank // node_size for rank in group.ranks})
    places = [place for place in range(node_size) if all(node * node_size + place in awake for node in nodes)]
    if len(nodes) == 1 or not places or draw(st.booleans()):
        return group
    chosen = sorted(draw(st.sets(st.sampled_from(places), min_size=1)))
    proxies = tuple(node * node_size + place for node in nodes for place in chosen)
    return replace(group, route=Route(proxies, draw(st.integers(1, 3))))


def lighter_layers(work: StageMicroBatch, layers: int) -> st.SearchStrategy[StageMicroBatch]:
    """Draw how many of a stage's layers recompute less, where some can."""
    if work.checkpoint.lighter is None or work.offload or layers < 2:
        return st.just(work)
    return st.integers(0, layers - 1).map(lambda count: replace(work, lighter_layers=count))


def offloaded_layers(work: StageMicroBatch, layers: int) -> st.SearchStrategy[StageMicroBatch]:
    """Draw how many of a stage's layers are offloaded."""
    counts = st.sampled_from((0, layers)) if work.checkpoint == Checkpoint.STAGE else st.integers(0, layers)
    return counts.map(lambda count: replace(work, offloaded_layers=count))


def layer_choices(work: StageMicroBatch, layers: int) -> st.SearchStrategy[StageMicroBatch]:
    """Draw how many of a stage's layers recompute less, or are offloaded."""
    return st.one_of(lighter_layers(work, layers), offloaded_layers(work, layers))
