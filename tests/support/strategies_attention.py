"""Hypothesis strategies for attention: packs, head counts, masks, and the groups they are spread over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from seqloom.layout import Span
from seqloom.plan import Group, Method
from support.attention_cases import Case
from support.strategies_groups import shared

SHAPES = tuple((ulysses, ring) for ulysses in range(1, 9) for ring in range(1, 9) if ulysses * ring <= 8)
"""Every (ulysses, ring) on at most 8 ranks."""


@st.composite
def packs(draw: st.DrawFn, *, longest: int = 60) -> tuple[int, ...]:
    """Draw lengths of documents: anything, many tiny ones, or one document alone; up to about 150 tokens."""
    kind = draw(st.sampled_from(("any", "tiny", "one")))
    if kind == "one":
        return (draw(st.integers(1, longest)),)
    if kind == "tiny":
        return tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=30)))
    return tuple(draw(st.lists(st.integers(1, longest // 2), min_size=1, max_size=5)))


@st.composite
def head_counts(draw: st.DrawFn, least: int = 1) -> tuple[int, int]:
    """Draw (heads, kv_heads), at least so many heads: as many of both, groups that share one, or one for all."""
    kind = draw(st.sampled_from(("grouped", "all", "one")))
    if kind == "grouped":
        shared = draw(st.integers(2, 4))
        kv_heads = draw(st.integers(-(-least // shared), -(-least // shared) + 2))
        return kv_heads * shared, kv_heads
    heads = draw(st.integers(least, least + 3))
    return heads, heads if kind == "all" else 1


@st.composite
def masks(draw: st.DrawFn, least: int = 1) -> dict[str, Any]:
    """Draw causal, full, or a window from `least` tokens to more than a document; all of these also in chunks."""
    window = draw(st.none() | st.integers(least, 40))
    chunk = draw(st.none() | st.none() | st.integers(least, 40))
    return {"causal": window is not None or draw(st.booleans()), "window": window, "attention_chunk": chunk}


@st.composite
def with_prefixes(draw: st.DrawFn, chosen: st.SearchStrategy[Case]) -> Case:
    """Draw a causal case, without chunks, in which the first tokens of some documents see each other."""
    case = draw(chosen)
    prefixes = tuple(draw(st.just(0) | st.integers(0, length)) for length in case.lengths)
    return replace(case, causal=True, attention_chunk=None, prefixes=prefixes)


@st.composite
def cases(draw: st.DrawFn, shape: tuple[int, int] | None = None) -> Case:
    """Draw a case in which one group, of this (ulysses, ring) or a drawn one, works on all documents."""
    ulysses, ring = draw(st.sampled_from(SHAPES)) if shape is None else shape
    lengths = draw(packs())
    world = ulysses * ring
    documents = draw(st.permutations(range(len(lengths))))
    spans = tuple(Span(k, 0, lengths[k]) for k in documents)
    group = Group(tuple(range(world)), ulysses, ring, spans, draw(st.sampled_from(Method)))
    return draw(_completed(lengths, world, (group,), ulysses))


@st.composite
def cases_of_many_groups(draw: st.DrawFn) -> Case:
    """Draw a case in which documents are dealt to up to four groups that share ranks; some ranks may have none."""
    world = draw(st.integers(2, 8))
    lengths = draw(packs())
    shapes = draw(st.lists(_places(world), min_size=2, max_size=4))
    homes = [draw(st.integers(0, len(shapes) - 1)) for _ in lengths]
    groups = []
    for number, (ranks, ulysses, ring) in enumerate(shapes):
        documents = draw(st.permutations([k for k, home in enumerate(homes) if home == number]))
        spans = tuple(Span(k, 0, lengths[k]) for k in documents)
        groups.append(Group(ranks, ulysses, ring, spans, draw(st.sampled_from(Method))))
    return draw(_completed(lengths, world, tuple(groups), max(group.ulysses for group in groups)))


@st.composite
def cases_of_zones(draw: st.DrawFn) -> Case:
    """Draw a case on 2 or 3 nodes: documents across nodes, some routed, some inside a node, some on one rank.

    A rank may be in groups of all three kinds at once, or only pass on what others send.
    """
    node_size, nodes = draw(st.sampled_from(((1, 3), (2, 2), (2, 3), (3, 2), (4, 2))))
    zones = draw(st.lists(st.integers(0, 2), min_size=2, max_size=9).map(sorted))
    lengths = tuple(draw(st.integers(1, (60, 30, 12)[zone])) for zone in zones)
    placements: dict[Group, list[Span]] = {}
    for document, zone in enumerate(zones):
        home = draw(_zone_groups(node_size, nodes, zone))
        placements.setdefault(home, []).append(Span(document, 0, lengths[document]))
    groups = tuple(replace(group, spans=tuple(spans)) for group, spans in placements.items())
    case = draw(_completed(lengths, node_size * nodes, groups, max(group.ulysses for group in groups)))
    return replace(case, node_size=node_size)


@st.composite
def _zone_groups(draw: st.DrawFn, node_size: int, nodes: int, zone: int) -> Group:
    """Draw a group without spans that joins nodes (zone 0, perhaps routed), is inside a node (1) or one rank (2)."""
    if zone == 2:
        return Group((draw(st.integers(0, node_size * nodes - 1)),), 1, 1, ())
    ulysses = draw(st.integers(1, node_size))
    starts = [n * node_size + k for n in range(nodes) for k in range(0, node_size - ulysses + 1, ulysses)]
    if zone == 1:
        node = draw(st.integers(0, nodes - 1))
        starts = [start for start in starts if start // node_size == node]
    chosen = draw(st.lists(st.sampled_from(starts), min_size=1 if zone else 2, max_size=4, unique=True))
    ranks = tuple(start + k for start in chosen for k in range(ulysses))
    return draw(shared(Group(ranks, ulysses, len(chosen), ()), node_size, range(node_size * nodes)))


@st.composite
def _places(draw: st.DrawFn, world: int) -> tuple[tuple[int, ...], int, int]:
    """Draw ranks, ulysses and ring of a group: blocks of the family, in any order."""
    ulysses = draw(st.integers(1, min(world, 4)))
    blocks = [tuple(range(start, start + ulysses)) for start in range(0, world - ulysses + 1, ulysses)]
    chosen = draw(st.lists(st.sampled_from(blocks), min_size=1, max_size=4, unique=True))
    return tuple(rank for block in chosen for rank in block), ulysses, len(chosen)


@st.composite
def _completed(draw: st.DrawFn, lengths: tuple[int, ...], world: int, groups: tuple[Group, ...], widest: int) -> Case:
    heads, kv_heads = draw(head_counts(widest))
    return Case(
        lengths,
        heads,
        kv_heads,
        dim=draw(st.sampled_from((1, 4, 8))),
        world=world,
        groups=groups,
        **draw(masks()),
        scale=draw(st.none() | st.floats(0.05, 1.0)),
    )
