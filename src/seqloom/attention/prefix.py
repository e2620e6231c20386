"""Documents in pieces: where the keys of earlier pieces lie, and which tiles a piece computes with them.

Every piece is dealt to the ring indices by itself, so index j holds two chunks of each piece, one after the other:

    rows of index 0, ring 2    piece 0: 0 .. 4 | 12 .. 16    piece 1: 16 .. 20 | 28 .. 32    ...

All of them are before every query of a later piece: without a window the tile of a piece with its prefix is full,
whatever the index. A window cuts both sides, run by run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from seqloom.attention.carry import Piece
from seqloom.attention.schedule import Tile
from seqloom.attention.segments import Segments
from seqloom.plan import Group, Span


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens `start .. stop` of a document in rows from `row` of a buffer."""

    start: int
    stop: int
    row: int


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """What a piece reads of the pieces before it.

    Attributes:
        piece: as this index sees it.
        begins: the first row that is read, at every ring index; the last one is the piece's `start` there.
        counts: rows that are read, at every ring index.
        steps: the tiles of every ring step; key rows count from the first that is read.
    """

    piece: Piece
    begins: tuple[int, ...]
    counts: tuple[int, ...]
    steps: tuple[tuple[Tile, ...], ...]


def pieces_of(group: Group, index: int, spans: Sequence[Span], pieces: dict[int, tuple[Span, ...]]) -> list[Piece]:
    """Return the documents in pieces that a group works on, as ring index `index` sees them.

    Args:
        group: of a round.
        index: of the ring.
        spans: of the index, sorted by document and position.
        pieces: all pieces of every document that has several, in order.
    """
    found, row = [], 0
    own = {span.document: span for span in group.spans}
    for document in sorted(own):
        rows = sum(span.tokens for span in spans if span.document == document)
        if document in pieces:
            every = pieces[document]
            number = every.index(own[document])
            held = [sum(run.tokens for run in _dealt(group, index, each)) for each in every]
            start = sum(held[:number])
            place = slice(row, row + rows)
            found.append(Piece(document, number, len(every), place, start, start + held[number], sum(held)))
        row += rows
    return found


def prefix_of(group: Group, index: int, piece: Piece, pieces: Sequence[Span], window: int | None) -> Prefix | None:
    """Return what a piece reads of the earlier ones; None where that is nothing at any index.

    Args:
        group: the piece's.
        index: of the ring.
        piece: as this index sees it.
        pieces: all pieces of its document.
        window: how many tokens a query sees, itself included; None: all.
    """
    current = pieces[piece.number]
    seen_from = 0 if window is None else max(0, current.start - window + 1)
    keys = [_runs(group, other, pieces[: piece.number]) for other in range(group.ring)]
    begins = tuple(sum(min(max(seen_from - run.start, 0), run.stop - run.start) for run in runs) for runs in keys)
    counts = tuple(sum(run.stop - run.start for run in runs) - first for runs, first in zip(keys, begins, strict=True))
    if not any(counts):
        return None
    queries = [Run(run.start, run.stop, run.row + piece.rows.start) for run in _runs(group, index, [current])]
    steps = []
    for step in range(group.ring):
        other = (index - step) % group.ring
        if window is None:
            steps.append(_full(piece.rows, counts[other]))
        else:
            steps.append(_windowed(queries, keys[other], begins[other], window))
    return Prefix(piece, begins, counts, tuple(steps))


def _full(queries: slice, keys: int) -> tuple[Tile, ...]:
    """All queries of the piece over all keys before it."""
    rows = queries.stop - queries.start
    if not rows or not keys:
        return ()
    return (Tile(Segments.of([(0, rows, 0, keys, 0)], causal=False), queries, slice(0, keys)),)


def _windowed(queries: Sequence[Run], keys: Sequence[Run], first: int, window: int) -> tuple[Tile, ...]:
    """A tile for every pair of runs that see each other; `first` is the row from which keys count."""
    tiles = []
    for query in queries:
        for key in keys:
            q_stop = min(query.stop, key.stop + window - 1)
            k_start = max(key.start, query.start - window + 1)
            if q_stop <= query.start or key.stop <= k_start:
                continue
            rows, columns, row = q_stop - query.start, key.stop - k_start, key.row + k_start - key.start - first
            one = Segments.of([(0, rows, 0, columns, query.start - k_start)], causal=True, window=window)
            tiles.append(Tile(one, slice(query.row, query.row + rows), slice(row, row + columns)))
    return tuple(tiles)


def _runs(group: Group, index: int, pieces: Sequence[Span]) -> list[Run]:
    """Return the runs of tokens that a ring index holds of these pieces, those that touch joined, and their rows."""
    held = [span for piece in pieces for span in _dealt(group, index, piece)]
    rows = accumulate((span.tokens for span in held), initial=0)
    found: list[Run] = []
    for (_, start, stop), row in zip(held, rows, strict=False):
        if found and found[-1].stop == start:
            found[-1] = replace(found[-1], stop=stop)
        else:
            found.append(Run(start, stop, row))
    return found


def _dealt(group: Group, index: int, piece: Span) -> list[Span]:
    """The chunks of one piece that a ring index holds, in order."""
    return replace(group, spans=(piece,)).ring_spans(index)
