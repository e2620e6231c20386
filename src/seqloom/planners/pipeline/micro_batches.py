"""Micro-batches of a batch in forward order: pieces of long sequences first, then packs of short documents.

Every short document gets the cheapest group shape among those that are fast enough. Documents go, the widest and
longest first, to the ranks that are free earliest over all packs: so packs take equal time, and so do the ranks of a
pack. Micro-batches with pieces of long sequences take short documents on ranks that would wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from seqloom.layout import Span
from seqloom.planners.pipeline.long_sequences import DocumentCosts, StageGroup, StageGroups, place_long_sequences
from seqloom.schedules import Unit, units_of

SLACK_PERCENT = 105
"""If packs take more than this much of a micro-batch's target time, packing tries one pack more."""
TRIES = 6
"""Numbers of packs to try."""
WARMUP_SHARES = (16, 8, 4)
"""Warm-up micro-batches take a 16th of a micro-batch's time, then an 8th, then a 4th."""
NEVER = np.iinfo(np.int64).max


class MicroBatchSize(NamedTuple):
    """Target size of micro-batches.

    When pieces of shorter sequences run, the pipeline is full: other work hides the latency of a longer piece.
    """

    degree: int  # Degree of groups of sequences in pieces; no group is wider
    target_ns: int  # Time of a micro-batch, forward and backward of all layers
    max_tokens: int  # Tokens of a micro-batch on a rank, at most
    warmup: int = 0  # Small micro-batches of each of `WARMUP_SHARES`, so that the last stage has work sooner
    pack_percent: int = 100  # Time of packs, in percent of the target; a document that takes no more stays whole
    later_percent: int = 100  # The same of pieces of sequences with less than half the work of the longest
    equal_tokens: bool = False  # Pieces have equal tokens, as many as fit, in place of equal time


class MicroBatches(NamedTuple):
    """Micro-batches in forward order."""

    size: MicroBatchSize
    groups: tuple[StageGroups, ...]
    units: tuple[Unit, ...]  # Units of a schedule: a chain of pieces is one sequence


def make_micro_batches(costs: DocumentCosts, size: MicroBatchSize) -> MicroBatches:
    """Cut and pack a batch into micro-batches of about this size."""
    degree, target_ns, max_tokens, warmup = size[:4]
    pack_ns = max(1, target_ns * size.pack_percent // 100)
    shape_of = fitting_shapes(costs, degree, pack_ns, max_tokens)
    long = {k: costs.least_ns(k, degree) for k in np.flatnonzero(shape_of < 0).tolist()}
    half = max(long.values(), default=0) // 2
    later_ns = max(1, target_ns * size.later_percent // 100)
    targets = {k: target_ns if time >= half else later_ns for k, time in long.items()}
    chains = place_long_sequences(costs, targets, degree, max_tokens, equal_tokens=size.equal_tokens)
    in_pieces = [groups for chain in chains for groups in chain]
    short = sorted(np.flatnonzero(shape_of >= 0).tolist(), key=lambda k: (-int(costs.tokens[k]), k))
    first = [
        groups
        for share in WARMUP_SHARES[: 3 if warmup else 0]
        for groups in _warmup(costs, short, shape_of, pack_ns // share, max_tokens, warmup)
    ]
    packed = pack_documents(costs, short, shape_of, in_pieces, pack_ns, max_tokens)
    pieces = [1] * len(first) + [len(chain) for chain in chains] + [1] * (len(packed) - len(in_pieces))
    return MicroBatches(size, (*first, *packed), units_of(pieces))


def fitting_shapes(costs: DocumentCosts, degree: int, target_ns: int, max_tokens: int) -> np.ndarray:
    """int64[n]: the cheapest shape, up to this degree, in which a document fits in time and memory; -1: none."""
    held = -(-costs.tokens[None, :] // costs.degree[:, None])
    fits = (costs.document_ns <= target_ns) & (held <= max_tokens) & (costs.degree <= degree)[:, None]
    work = np.where(fits, costs.degree[:, None] * costs.document_ns, NEVER)
    return np.where(work.min(axis=0) < NEVER, work.argmin(axis=0), -1)


def _warmup(
    costs: DocumentCosts, short: list[int], shape_of: np.ndarray, target_ns: int, max_tokens: int, count: int
) -> Iterator[StageGroups]:
    """Take the shortest documents off the end of `short` for `count` micro-batches of this time."""
    for _ in range(count):
        taken: list[int] = []
        left = costs.layout.ranks_per_stage * target_ns
        while short and (time := int(costs.document_ns[shape_of[short[-1]], short[-1]])) <= target_ns:
            left -= int(costs.degree[shape_of[short[-1]]]) * time
            if left < 0:
                break
            taken.append(short.pop())
        if taken:
            first, *rest = pack_documents(costs, taken, shape_of, [], target_ns, max_tokens)
            short += [span.document for groups in rest for group in groups for span in group.spans]
            yield first


def pack_documents(
    costs: DocumentCosts,
    documents: Sequence[int],
    shape_of: np.ndarray,
    in_pieces: Sequence[Sequence[StageGroup]],
    target_ns: int,
    max_tokens: int,
) -> list[StageGroups]:
    """Pack whole documents into micro-batches with pieces and into new ones, which follow by falling time.

    ``shape_of`` is int64[n]; ``in_pieces`` has the groups of the micro-batches with pieces of long sequences.
    """

    def key(k: int) -> tuple[int, int, int]:
        return -costs.degree[shape_of[k]], -costs.document_ns[shape_of[k], k], k

    order, width = sorted(documents, key=key), costs.layout.ranks_per_stage
    work = sum(int(costs.degree[shape_of[k]] * costs.document_ns[shape_of[k], k]) for k in order)
    first = _packs_with_pieces(width, in_pieces, target_ns)
    idle = sum(max(0, target_ns - int(time)) for time in first.load.ravel())
    count = max(0, -(-(work - idle) // (width * target_ns)))
    for _ in range(TRIES):
        packs = _pack(costs, order, shape_of, first.with_empty(count), len(in_pieces), target_ns, max_tokens)
        if packs.load[len(in_pieces) :].max(initial=0) * 100 <= target_ns * SLACK_PERCENT:
            break
        count = len(packs.load) - len(in_pieces) + 1
    time = packs.load.max(axis=1).tolist()
    new = sorted((p for p in range(len(in_pieces), len(time)) if packs.documents[p]), key=lambda p: (-time[p], p))
    packed = [(*groups, *_groups(costs, packs.documents[p])) for p, groups in enumerate(in_pieces)]
    return packed + [_groups(costs, packs.documents[p]) for p in new]


class _Packs(NamedTuple):
    load: np.ndarray  # int64[micro-batches, ranks] ns
    held: np.ndarray  # int64[micro-batches, ranks] tokens
    documents: list[dict[tuple[int, int], list[int]]]  # of each: (shape, offset) -> documents

    def with_empty(self, count: int) -> _Packs:
        """A copy with `count` empty micro-batches more."""
        empty = np.zeros((count, self.load.shape[1]), dtype=np.int64)
        documents = [{place: list(members) for place, members in each.items()} for each in self.documents]
        load, held = np.concatenate([self.load, empty]), np.concatenate([self.held, empty])
        return _Packs(load, held, documents + [{} for _ in range(count)])


def _packs_with_pieces(width: int, in_pieces: Sequence[Sequence[StageGroup]], target_ns: int) -> _Packs:
    """Micro-batches that hold only their pieces, which all count as `target_ns`."""
    nothing = np.zeros((0, width), dtype=np.int64)
    packs = _Packs(nothing, nothing, []).with_empty(len(in_pieces))
    for number, groups in enumerate(in_pieces):
        for shape, offset, spans in groups:
            packs.load[number, offset : offset + shape.degree] = target_ns
            tokens = sum(span.tokens for span in spans)
            packs.held[number, offset : offset + shape.degree] += -(-tokens // shape.degree)
    return packs


def _pack(
    costs: DocumentCosts,
    order: Sequence[int],
    shape_of: np.ndarray,
    packs: _Packs,
    in_pieces: int,
    target_ns: int,
    max_tokens: int,
) -> _Packs:
    """Put documents, in this order, on the ranks that are free earliest; add micro-batches where memory requires it.

    A micro-batch with pieces takes a document only if that does not make it longer.
    """
    ranks: dict[int, np.ndarray] = {}  # int64[offsets, degree] of every shape
    for k in order:
        shape = int(shape_of[k])
        degree, offsets, time = int(costs.degree[shape]), costs.offsets[shape], int(costs.document_ns[shape, k])
        tokens = -(-int(costs.tokens[k]) // degree)
        if not len(packs.load):
            packs = packs.with_empty(1)
        if shape not in ranks:
            ranks[shape] = np.add.outer(offsets, range(degree))
        ready = _most_of_blocks(packs.load, ranks[shape])
        closed = _most_of_blocks(packs.held, ranks[shape]) + tokens > max_tokens
        closed[:in_pieces] |= ready[:in_pieces] + time > target_ns
        number, place = divmod(int(np.where(closed, NEVER, ready).argmin()), len(offsets))
        if closed[number, place]:
            packs = packs.with_empty(1)
            number, place = len(packs.load) - 1, 0
        at = offsets[place]
        packs.load[number, at : at + degree] = packs.load[number, at : at + degree].max() + time
        packs.held[number, at : at + degree] += tokens
        packs.documents[number].setdefault((shape, at), []).append(k)
    return packs


def _most_of_blocks(values: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """int64[micro-batches, offsets]: the most of any of int64[offsets, degree] ranks; not a copy for single ranks."""
    return values if ranks.shape == (values.shape[1], 1) else values[:, ranks].max(axis=2)


def _groups(costs: DocumentCosts, documents: dict[tuple[int, int], list[int]]) -> StageGroups:
    return tuple(
        StageGroup(costs.shapes[shape], at, tuple(Span(k, 0, int(costs.lengths[k])) for k in sorted(members)))
        for (shape, at), members in sorted(documents.items(), key=lambda item: (item[0][1], item[0][0]))
    )
