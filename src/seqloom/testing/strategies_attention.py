"""Hypothesis strategies for attention: packs, head counts, masks, and the groups they are spread over."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from seqloom.plan import Group, Method, Span
from seqloom.testing.attention_cases import Case

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
    """Draw causal, full, or a window from `least` tokens to more than a document."""
    window = draw(st.none() | st.integers(least, 40))
    return {"causal": window is not None or draw(st.booleans()), "window": window}


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
