"""Hypothesis strategies for documents in pieces: cuts, rounds, groups, and any legal order of their passes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from hypothesis import strategies as st

from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group
from support.attention_cases import Case
from support.kv_cache_cases import Order, PiecesCase
from support.strategies_attention import head_counts

SHAPES = tuple((ulysses, ring) for ulysses in range(1, 5) for ring in range(1, 5) if ulysses * ring <= 6)
"""(ulysses, ring) of the group that works on a document in pieces."""
CHECKPOINTS = (Checkpoint.NONE, Checkpoint.STAGE, Checkpoint.SELECTIVE, Checkpoint.FULL)


class _Place(NamedTuple):
    """Ranks, ulysses and ring of a group."""

    ranks: tuple[int, ...]
    ulysses: int
    ring: int


@st.composite
def pieces_cases(draw: st.DrawFn, *, longest: int = 50) -> PiecesCase:
    """Draw up to two documents in pieces, and whole ones beside them in their group, in another, or on one rank."""
    ulysses, ring = draw(st.sampled_from(SHAPES))
    world = ulysses * ring + draw(st.integers(0, 1))
    main = _Place(tuple(range(ulysses * ring)), ulysses, ring)
    count = draw(st.integers(2, 4))
    spans: list[list[tuple[Span, _Place]]] = [[] for _ in range(count)]
    lengths = []
    for document in range(draw(st.integers(1, 2))):
        pieces = draw(st.integers(2, count))
        lengths.append(draw(st.integers(pieces, longest)))
        cuts = sorted(draw(st.sets(st.integers(1, lengths[-1] - 1), min_size=pieces - 1, max_size=pieces - 1)))
        where = sorted(draw(st.permutations(range(count)))[:pieces])
        place = draw(st.sampled_from((main, main, _Place((world - 1,), 1, 1))))
        for number, (start, stop) in zip(where, pairwise([0, *cuts, lengths[-1]]), strict=True):
            spans[number].append((Span(document, start, stop), place))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.sampled_from((main, main, _Place((0,), 1, 1), _Place((world - 1,), 1, 1))))
        lengths.append(draw(st.integers(1, 12)))
        draw(st.sampled_from(spans)).append((Span(len(lengths) - 1, 0, lengths[-1]), place))
    names = draw(st.permutations(range(len(lengths))))  # so that whole documents lie before and behind pieces
    renamed = [[(Span(names[span.document], span.start, span.stop), place) for span, place in own] for own in spans]
    rounds = tuple(draw(_groups(own)) for own in renamed if own)
    heads, kv_heads = draw(head_counts(ulysses))
    by_name = tuple(length for _, length in sorted(zip(names, lengths, strict=True)))
    mask = {"window": draw(_windows()), "attention_chunk": draw(st.none() | _windows())}
    whole = Case(by_name, heads, kv_heads, draw(st.sampled_from((1, 4))), world, (), **mask)
    chosen = {"checkpoint": draw(st.sampled_from(CHECKPOINTS))}
    return PiecesCase(whole, rounds, draw(_orders(rounds)), **chosen, layers=draw(st.integers(1, 2)))


@st.composite
def pieces_cases_with_prefixes(draw: st.DrawFn) -> PiecesCase:
    """Draw a case without chunks in which the first tokens of some documents, of one piece at most, see each other."""
    case = draw(pieces_cases())
    most = [case.pieces[number][0].stop if number in case.pieces else n for number, n in enumerate(case.whole.lengths)]
    prefixes = tuple(draw(st.just(0) | st.integers(0, length)) for length in most)
    return replace(case, whole=replace(case.whole, attention_chunk=None, prefixes=prefixes))


def _windows() -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(1, 40)


@st.composite
def _groups(draw: st.DrawFn, spans: list[tuple[Span, _Place]]) -> tuple[Group, ...]:
    """The groups of a round, those of several ranks first; spans in any order."""
    places = sorted({place for _, place in spans}, key=lambda place: -len(place.ranks))
    own = [draw(st.permutations([span for span, home in spans if home == place])) for place in places]
    return tuple(Group(*place, tuple(some)) for place, some in zip(places, own, strict=True))


@st.composite
def _orders(draw: st.DrawFn, rounds: tuple[tuple[Group, ...], ...]) -> Order:
    """Draw an order: forwards ascend; a round goes backward when all pieces of its documents have been forward, and
    all later ones backward."""
    held = [{span.document for group in groups for span in group.spans} for groups in rounds]
    later = [{m for m in range(n + 1, len(rounds)) if held[n] & held[m]} for n in range(len(rounds))]
    order: list[tuple[str, int]] = []
    forward, back = 0, set[int]()
    while len(back) < len(rounds):
        ready = [("B", n) for n in range(forward) if n not in back and later[n] <= back]
        ready += [("F", forward)] if forward < len(rounds) else []
        kind, number = draw(st.sampled_from(ready))
        order.append((kind, number))
        forward += kind == "F"
        back |= {number} if kind == "B" else set()
    return tuple(order)
