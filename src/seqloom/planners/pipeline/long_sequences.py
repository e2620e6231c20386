"""Long sequences in a pipeline (Seq1F1B): cut each into pieces of equal time, and place several side by side.

A token attends to all tokens before it, so equal time means ever shorter pieces. With C(x) the cost of the first x
tokens, a piece from x to y costs C(y) - C(x), and the borders of k pieces of n tokens are where C(x) = C(n) * i / k:

    C(x)  |                /      n = 8, k = 3
          |- - - - - - - -/       borders 0 4 6 8
          |            . /
          |- - - - - -/
          |      . /
          |__/________________ x
             0     4   6 8

A sequence in pieces stays in one group from its first piece to its last. Groups narrower than a stage leave ranks for
other sequences: with groups of half a stage, a chain of six micro-batches may hold

    first half    A1 A2 A3 A4 A5 A6        A in six pieces,
    second half   B1 B2 B3 C1 C2           B in three and then C in two; short documents take what is left

The schedule treats a chain as one sequence: forward through its micro-batches, backward from the last to the first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel, GroupShape, MemoryPolicy
from seqloom.cost.shapes import STREAMS, CostTables
from seqloom.errors import PlanError
from seqloom.layout import Span
from seqloom.plan import Method
from seqloom.planners.pipeline.stage_layout import StageLayout, stage_group_shapes

GRID = 512
"""Points at which the cost of a sequence up to a token is computed, with linear interpolation between them."""


class StageGroup(NamedTuple):
    """A group of a micro-batch, on the same ranks of every stage."""

    shape: GroupShape
    offset: int  # First rank, relative to the stage
    spans: tuple[Span, ...]


StageGroups = tuple[StageGroup, ...]
"""Groups of one micro-batch, side by side."""
Chain = list[list[StageGroup]]
"""Groups of consecutive micro-batches that pieces flow through."""


@dataclass(frozen=True, eq=False)
class DocumentCosts:
    """Time of every document of a batch in every group shape S that fits in a stage.

    Times are ns of forward and backward of all layers, without the fixed cost of a micro-batch; see `stage_tables`.
    """

    cost: CostModel
    layout: StageLayout
    policy: MemoryPolicy
    lengths: np.ndarray  # int64[n] tokens
    tokens: np.ndarray  # int64[n] tokens, padding included
    shapes: tuple[GroupShape, ...]
    offsets: tuple[tuple[int, ...], ...]  # of every shape: first ranks of its groups in a stage
    degree: np.ndarray  # int64[S]
    streams: np.ndarray  # int64[streams, S, n] ns that a document adds to every stream of its group
    prefix: np.ndarray  # float64[streams, S] ns that every token before a piece adds

    @classmethod
    def of(cls, lengths: np.ndarray, cost: CostModel, layout: StageLayout, policy: MemoryPolicy) -> DocumentCosts:
        """Price the documents under a policy."""
        shapes = stage_group_shapes(cost, layout)
        tables = stage_tables(lengths, cost, layout, policy, tuple(shapes))
        prefix = np.array([_prefix_rates(cost, shape, policy) for shape in tables.shapes]).T
        tokens, offsets = tables.tokens, tuple(shapes.values())
        return cls(cost, layout, policy, lengths, tokens, tables.shapes, offsets, tables.degree, tables.cost, prefix)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Degrees of groups for documents in pieces."""
        rings = (shape for shape in self.shapes if shape.method == Method.RING and not shape.states)
        return tuple(sorted({shape.degree for shape in rings}))

    @cached_property
    def document_ns(self) -> np.ndarray:
        """int64[S, n]: time of a whole document."""
        return self.streams.max(axis=0)

    @property
    def total_work(self) -> int:
        """rank-ns of all documents, each in its cheapest shape."""
        return int((self.degree[:, None] * self.document_ns).min(axis=0).sum())

    def least_ns(self, document: int, degree: int) -> int:
        """ns of a whole document in its fastest group of this degree."""
        return int(self.document_ns[self._shapes_of(degree), document].min())

    def longest_ns(self, degree: int) -> int:
        """`least_ns` of the longest document."""
        return self.least_ns(int(self.lengths.argmax()), degree)

    def fastest_shape(self, document: int, degree: int, target_ns: int) -> int:
        """The shape of this degree that is fastest for a document in pieces of about `target_ns`.

        A ring sends the prefix of every piece round once more: of k pieces about (k - 1) / 2 times the document.
        """
        rows = self._shapes_of(degree)
        pieces = -(-self.document_ns[rows, document] // target_ns)
        again = (pieces - 1) * int(self.tokens[document]) / 2
        streams = self.streams[:, rows, document] + np.rint(self.prefix[:, rows] * again)
        return rows[int(streams.max(axis=0).argmin())]

    def _shapes_of(self, degree: int) -> list[int]:
        """Shapes of groups for documents in pieces: those that keep latents, where the model has some.

        Keys and values made from them would take tens of times their memory until the last piece is done.
        """
        rings = [s for s, shape in enumerate(self.shapes) if shape.method == Method.RING and not shape.states]
        every = [s for s in rings if self.shapes[s].degree == degree]
        return [s for s in every if self.shapes[s].latent] or every


def stage_tables(
    lengths: np.ndarray, cost: CostModel, layout: StageLayout, policy: MemoryPolicy, shapes: tuple[GroupShape, ...]
) -> CostTables:
    """Tables of documents, int64[n] tokens, through all stages.

    Where layers differ, stages take longest for documents of different lengths. Every document has as long on all
    stages as on its slowest, so pieces are equally long there, and a micro-batch is as full as that stage is.
    """
    ranges = layout.layer_ranges[: len(layout.layers) - layout.heads]
    stages = dict.fromkeys((cost.for_layers(layers), layers.has_head) for layers in ranges)
    if all(own is cost for own, _ in stages):
        return cost.tables(lengths, policy, shapes)
    tables = [own.tables(lengths, policy, shapes, head=head) for own, head in stages]
    return replace(tables[0], cost=len(ranges) * np.max([each.cost for each in tables], axis=0))


def _prefix_rates(cost: CostModel, shape: GroupShape, policy: MemoryPolicy) -> list[float]:
    """ns per token of a prefix, by stream."""
    if shape.ring == 1:
        return [0.0] * len(STREAMS)
    rates = cost.engine.prefix_token_ns(shape, policy, cost.aligned_traffic(shape))
    return [sum(rate for name, rate in rates.items() if name in stream) for stream in STREAMS]


def equal_cuts(
    length: int, pieces: int, cost: Callable[[int], int], *, multiple: int = 1, floor: int = 1
) -> tuple[int, ...]:
    """Borders 0, .., `length` of pieces of equal cost, by bisection in integers: the same on every machine.

    Args:
        pieces: their number; the result has fewer if they would be shorter than `floor`.
        cost: of the first x tokens: 0 for none, never falling, in any unit.
        multiple: borders inside the document are rounded to multiples of this; equal borders become one.
        floor: least tokens of a piece, below which kernels lose efficiency; a shorter document stays whole.
    """
    if not 1 <= pieces <= length:
        raise PlanError(
            f"{length:,} tokens cannot be cut into {pieces:,} pieces; take between 1 and {max(1, length):,} pieces",
            rule="pieces",
        )
    total, count = cost(length), 1
    if length >= 2 * floor:  # the last piece is the shortest
        last = total - cost(length - floor)
        count = max(1, min(pieces, length // floor, total // last if last else pieces))
    while True:
        ideal = [bisect_right(range(length + 1), total * i, key=lambda x: cost(x) * count) - 1 for i in range(1, count)]
        inner = {(border + multiple // 2) // multiple * multiple for border in ideal}
        borders = (0, *sorted(border for border in inner if 0 < border < length), length)
        if count == 1 or min(end - begin for begin, end in pairwise(borders)) >= floor:
            return borders
        count -= 1


def even_tokens(costs: DocumentCosts, document: int, shape: GroupShape, max_tokens: int) -> tuple[Span, ...]:
    """Cut a document into the fewest pieces of equal tokens that fit, at multiples as `cut_document` does."""
    length, multiple = int(costs.lengths[document]), _shared_multiple(costs.cost, shape)
    pieces = -(-length // max(1, max_tokens * shape.degree))
    step = -(-length // (pieces * multiple)) * multiple
    return tuple(Span(document, start, min(start + step, length)) for start in range(0, length, step))


def _shared_multiple(cost: CostModel, shape: GroupShape) -> int:
    """Tokens whose multiples the ranks of a group of this shape share evenly."""
    return cost.pad_multiple * shape.degree * (2 if shape.ring > 1 else 1)


def cut_document(
    costs: DocumentCosts, document: int, shape: GroupShape, pieces: int, max_tokens: int
) -> tuple[Span, ...]:
    """Cut a document into pieces of equal time, at multiples that the ranks of its group share evenly.

    The result has more than `pieces` pieces if one would exceed `max_tokens` per rank, and fewer if they would be too
    short. Where pieces of equal time cannot be so short, since time hardly depends on tokens, they have equal tokens.
    """
    length = int(costs.lengths[document])
    multiple = _shared_multiple(costs.cost, shape)
    step = max(multiple, -(-length // GRID))
    grid = np.minimum(np.arange(0, length + step, step), length)
    time = stage_tables(grid, costs.cost, costs.layout, costs.policy, (shape,)).cost.max(axis=0)[0].tolist()

    def upto(tokens: int) -> int:
        at = min(tokens // step, len(time) - 2)
        width = min(length, (at + 1) * step) - at * step
        return time[at] + (time[at + 1] - time[at]) * (tokens - at * step) // width

    most = max_tokens * shape.degree
    while True:
        edges = equal_cuts(length, min(pieces, length), upto, multiple=multiple, floor=min(multiple, length))
        longest = max(b - a for a, b in pairwise(edges))
        if longest <= most or longest <= multiple:
            break
        if pieces >= length:
            edges = (*range(0, length, max(multiple, most - most % multiple)), length)
            break
        pieces = max(pieces + 1, min(length, -(-pieces * longest // most)))
    return tuple(Span(document, a, b) for a, b in pairwise(edges))


def place_long_sequences(
    costs: DocumentCosts, targets_ns: Mapping[int, int], degree: int, max_tokens: int, *, equal_tokens: bool = False
) -> list[Chain]:
    """Cut the documents that are too long for one micro-batch, and place them in chains, those with most pieces first.

    ``targets_ns`` has the time of a piece of every such document; a micro-batch has ``max_tokens`` on a rank. Or pieces
    are as few as memory allows, with ``equal_tokens``.
    """
    cuts = {}
    for k, target_ns in targets_ns.items():
        shape = costs.fastest_shape(k, degree, target_ns)
        if equal_tokens:
            cuts[k] = shape, even_tokens(costs, k, costs.shapes[shape], max_tokens)
            continue
        by_memory = -(-int(costs.tokens[k]) // (max_tokens * degree))
        pieces = max(-(-int(costs.document_ns[shape, k]) // target_ns), by_memory)
        cuts[k] = shape, cut_document(costs, k, costs.shapes[shape], pieces, max_tokens)
    chains: list[Chain] = []
    used: list[list[int]] = []  # micro-batches of every chain that pieces occupy, by place in the stage
    for k in sorted(cuts, key=lambda k: (-len(cuts[k][1]), -int(costs.tokens[k]), k)):
        shape, spans = cuts[k]
        offsets = costs.offsets[shape]
        for number, taken in enumerate(used):
            place = min(range(len(taken)), key=lambda o: (taken[o], o))
            if taken[place] + len(spans) <= len(chains[number]):
                break
        else:
            number, place = len(chains), 0
            chains.append([[] for _ in spans])
            used.append([0] * len(offsets))
        for micro_batch, span in enumerate(spans, used[number][place]):
            chains[number][micro_batch].append(StageGroup(costs.shapes[shape], offsets[place], (span,)))
        used[number][place] += len(spans)
    return chains
