"""Scans over packed documents that are spread over ranks: linear attention and state spaces.

A scan goes through the tokens of a document in order, every head by itself. So all ranks of a group, its Ulysses and
its ring axis alike, exchange tokens for heads. Then each has every token of the group's documents, in order, and scans
its heads as one process would:

    own tokens, all heads -> all-to-all -> all tokens, own heads -> scan -> all-to-all -> own tokens, all heads

Of a document in pieces a rank has the same heads in every piece, so its states stay on the rank
(`context_parallel/scan_states.py`). Where the plan says so (`Group.states`), ranks scan their own tokens of all heads
instead, and pass states (`context_parallel/state_passing.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from seqloom.attention.context_parallel.kv_cache import KVCache
from seqloom.attention.context_parallel.scan_states import document_piece
from seqloom.attention.context_parallel.state_passing import ScanRuns, StatePassing, StateShape, WithBackward
from seqloom.attention.context_parallel.ulysses import Ranges
from seqloom.attention.merge import sum_dtype
from seqloom.attention.plan import AttentionOptions, check_pieces
from seqloom.dist.rank_tokens import BoundGroup, Context, RowExchange, TokenRedistribute
from seqloom.dist.rows import inverse_permutation, on_device, sort_order, take
from seqloom.dist.tensor_parallel import RowFunction
from seqloom.dist.transport import Transport, all_to_all
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.plan.round import even_ranges

Tensors = tuple[torch.Tensor, ...]


class WholeDocuments(NamedTuple):
    """Documents of a scan that begin with zeros and leave nothing behind: a kernel takes all of them in one call.

    Attributes:
        numbers: which they are.
        cu_seqlens: int64[documents + 1], where they begin among their own tokens.
        seq_idx: int32[1, tokens], the number of every token's document among them.
    """

    numbers: tuple[int, ...]
    cu_seqlens: torch.Tensor
    seq_idx: torch.Tensor

    @classmethod
    def of(cls, lengths: Sequence[int], pieces: Sequence[bool], device: torch.device) -> WholeDocuments:
        """Find them among documents of these lengths, of which some are in pieces."""
        numbers = tuple(number for number, piece in enumerate(pieces) if not piece)
        own = np.array([lengths[number] for number in numbers], dtype=np.int64)
        seq_idx = np.repeat(np.arange(len(own), dtype=np.int32), own)[None]
        return cls(numbers, *(on_device(each, device) for each in (np.concatenate([[0], np.cumsum(own)]), seq_idx)))


class PackedDocuments(NamedTuple):
    """What a scan is given: all tokens of some documents, one document after the other, and some of the heads.

    Attributes:
        tensors: [tokens, heads of this rank, ...]; of those that several heads share, [tokens, those read, ...].
        heads: which of the model's these are.
        lengths: tokens of every document, or of its piece.
        states: that documents begin with; None: of zeros.
        whole: those that are not in pieces: nobody asks for the state after them.
    """

    tensors: Tensors
    heads: slice
    lengths: tuple[int, ...]
    states: tuple[torch.Tensor | None, ...]
    whole: WholeDocuments


Scan = Callable[[PackedDocuments], tuple[torch.Tensor, Sequence[torch.Tensor | None]]]
"""Returns the output [tokens, heads of this rank, ...] in the dtype of the first tensor, and the state after every
document that is in pieces."""


class StateScan(NamedTuple):
    """How a scan passes states between ranks: sizes of a state, and the scan of runs of tokens from zeros."""

    shape: StateShape
    scan_runs: ScanRuns


def scan_documents(
    scan: Scan,
    tensors: Sequence[torch.Tensor],
    context: Context,
    *,
    layer: int | None,
    name: str,
    by_states: StateScan | None = None,
) -> torch.Tensor:
    """Scan the documents that this rank's tokens belong to, wherever their other tokens lie; with autograd.

    All ranks of a group call it, forward and backward, also those without tokens. In a group with more ranks than heads
    some ranks scan a head whose output another rank gives.

    Args:
        scan: computes some heads of whole documents.
        tensors: [tokens, heads, ...], rows as in `context.spans`; dtypes may differ. After the first one a tensor may
            have fewer heads, each of which as many heads of the first read: head h reads h // (heads // its own).
        context: of the round, from `bind`.
        layer: number of the layer in the model; needed where a document is in pieces.
        name: of the scan among those of the layer.
        by_states: for groups that pass states; None: there are heads in their place.

    Returns:
        [tokens, heads, ...] as `scan` returns it.
    """

    def scan_group(number: int, *own: torch.Tensor) -> torch.Tensor:
        bound = context.groups[number]
        if by_states is not None and bound.group.states and bound.group.degree > 1:
            passing = context.cached(("states", number), lambda: StatePassing.of(context, bound))
            return _pass_states(scan, by_states, own, passing, context, number)
        exchange = _exchange_of(context, number, tuple(each.shape[1] for each in own))
        whole = context.cached(("scanned", number), lambda: _whole_documents(exchange.spans, context))
        return _scan_group(scan, own, exchange, whole, context, layer, name)

    return run_by_group(scan_group, tuple(tensors), context, name)


def run_by_group(run: Callable[..., torch.Tensor], tensors: Tensors, context: Context, name: str) -> torch.Tensor:
    """Call run(number of a group, its rows of the tensors ...) for every group of this rank; return all rows."""
    if context.tp_group is not None:
        raise SeqloomError(f"{name} in a TP group: nobody has said how its weights are sharded; plan with tensor = 1")
    redistribute = context.attention_redistribute
    if redistribute is not None:
        tensors = _redistribute(redistribute, tensors)
    outs = []
    for number, bound in enumerate(context.groups):
        check_pieces(context, bound.group, AttentionOptions())
        own = tensors if len(context.groups) == 1 else tuple(take(each, bound.rows) for each in tensors)
        outs.append(run(number, *own))
    out = outs[0] if len(outs) == 1 else _joined(outs, context.groups, tensors[0])
    return out if redistribute is None else _redistribute(redistribute.reversed(), (out,))[0]


def _whole_documents(spans: Sequence[Span], context: Context) -> WholeDocuments:
    in_pieces = [span.document in context.pieces for span in spans]
    return WholeDocuments.of([span.tokens for span in spans], in_pieces, context.device)


def _scan_group(
    scan: Scan,
    tensors: Tensors,
    exchange: HeadExchange,
    whole: WholeDocuments,
    context: Context,
    layer: int | None,
    name: str,
) -> torch.Tensor:
    """Return the output [own rows, heads, ...] of a group's rows."""
    alone = len(exchange.ranks) == 1
    inside = tensors if alone else RowFunction.apply(exchange.to_heads, exchange.to_tokens, *tensors)
    kept, pieces = context.kv_cache, [document_piece(span, context, layer, name) for span in exchange.spans]
    states = [None if not isinstance(kept, KVCache) else kept.scan_states.take(each, inside[0]) for each in pieces]
    lengths = tuple(span.tokens for span in exchange.spans)
    out, after = scan(PackedDocuments(inside, exchange.own_heads, lengths, tuple(states), whole))
    if isinstance(kept, KVCache):
        for piece, state in zip(pieces, after, strict=True):
            if piece is not None and state is not None:
                out = kept.scan_states.leave(piece, out, state, backward=kept.backward)
    if alone:
        return out
    outside = exchange.of_output()
    return RowFunction.apply(outside.to_tokens, outside.to_heads, out[:, : outside.own_count])[0]


def _pass_states(
    scan: Scan, by_states: StateScan, tensors: Tensors, passing: StatePassing, context: Context, number: int
) -> torch.Tensor:
    """Return the output [own rows, heads, ...] of a group's rows, whose ranks pass states."""
    heads, lengths = slice(0, tensors[0].shape[1]), passing.lengths
    outs, parts = [tensors[0]] * len(lengths), [each.split(lengths) for each in tensors]
    whole, shared = ([n for n, each in enumerate(passing.whole) if each == kind] for kind in (True, False))
    if whole:
        own = tuple(lengths[n] for n in whole)
        packed = context.cached(
            ("states", number, "whole"), lambda: WholeDocuments.of(own, [False] * len(own), context.device)
        )
        given = tuple(torch.cat([each[n] for n in whole]) for each in parts)
        out, _ = scan(PackedDocuments(given, heads, own, (None,) * len(own), packed))
        for n, each in zip(whole, out.split(own), strict=True):
            outs[n] = each
    unused = [] if outs else [*tensors[1:]]  # on a rank without tokens they get gradients like everywhere
    if sum(passing.counts):  # all ranks know
        own = tuple(lengths[n] for n in shared)
        given = tuple(torch.cat([each[n] for n in shared]) for each in parts) if shared else ()
        found = by_states.scan_runs(given, own) if shared else None
        exchanged = passing.exchange(found, by_states.shape, tensors[0])
        if found is not None:
            for n, each in zip(shared, passing.correct(found, own, exchanged, by_states.shape), strict=True):
                outs[n] = each
        unused.append(exchanged)  # a rank that reads no state takes part in the backward of others
    out = torch.cat(outs) if outs else tensors[0]
    for each in unused:
        out = WithBackward.apply(out, each)
    return out


def _joined(outs: Sequence[torch.Tensor], groups: Sequence[BoundGroup], like: torch.Tensor) -> torch.Tensor:
    """Put the rows of all groups in their places of the local buffer."""
    if not outs:
        return like
    places = torch.arange(len(like), device=like.device)
    order = torch.cat([take(places, bound.rows) for bound in groups])
    return torch.cat(list(outs)).index_select(0, inverse_permutation(order))


def _redistribute(redistribute: TokenRedistribute, tensors: Tensors) -> Tensors:
    """Move tensors of any dtypes between token layouts, in one message.

    One node of the graph moves them all: a rank in no group uses the first alone, and takes part in every exchange.
    """

    def move(exchange: RowExchange, *given: torch.Tensor) -> Tensors:
        (rows,) = exchange(_joined_bytes(given))
        return _split_bytes(rows, [(tuple(each.shape[1:]), each.dtype) for each in given])

    return RowFunction.apply(partial(move, redistribute.to_target), partial(move, redistribute.to_source), *tensors)


# -- the exchange of tokens for heads ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class HeadExchange:
    """One rank's part of the all-to-all among all ranks of a group: own tokens of all heads, all tokens of own heads.

    Attributes:
        ranks: of the group.
        index: of this rank among them.
        collective: whether they have a communicator.
        counts: rows of every rank.
        spans: of the group, sorted.
        order: int64[rows of the group] that sorts the rows of all ranks, one rank after the other, into those of
            `spans`; None: they are sorted already.
        inverse_order: the inverse of `order`.
        shares: for every tensor, the heads that each rank reads; the first tensor has all heads.
        given: for every rank, the heads whose output it gives.
    """

    transport: Transport
    ranks: tuple[int, ...]
    index: int
    collective: bool
    counts: tuple[int, ...]
    spans: tuple[Span, ...]
    order: torch.Tensor | None
    inverse_order: torch.Tensor | None
    shares: tuple[Ranges, ...]
    given: Ranges

    @property
    def own_heads(self) -> slice:
        """Heads of this rank."""
        return slice(*self.shares[0][self.index])

    @property
    def own_count(self) -> int:
        """Heads of the first tensor that this rank has."""
        low, high = self.shares[0][self.index]
        return high - low

    def of_output(self) -> HeadExchange:
        """Return the exchange of a scan's output, to which every head is given once."""
        fields = (self.transport, self.ranks, self.index, self.collective, self.counts, self.spans)
        return HeadExchange(*fields, self.order, self.inverse_order, (self.given,), self.given)

    def to_heads(self, *tensors: torch.Tensor) -> Tensors:
        """Exchange tensors [own rows, heads, ...] for [all rows, own heads, ...]."""
        parts = [
            _joined_bytes([x[:, slice(*share[rank])] for x, share in zip(tensors, self.shares, strict=True)])
            for rank in range(len(self.ranks))
        ]
        width = parts[self.index].shape[1]
        received = parts[0].new_empty((sum(self.counts), width))
        sent = torch.cat([part.reshape(-1) for part in parts])
        self._all_to_all(received.view(-1), sent, [count * width for count in self.counts], [p.numel() for p in parts])
        if self.order is not None:
            received = received.index_select(0, self.order)
        shapes = [(share[self.index], x) for x, share in zip(tensors, self.shares, strict=True)]
        return _split_bytes(received, [((high - low, *x.shape[2:]), x.dtype) for (low, high), x in shapes])

    def to_tokens(self, *tensors: torch.Tensor) -> Tensors:
        """Exchange tensors [all rows, own heads, ...] for [own rows, heads, ...], adding up those of one head."""
        packed = _joined_bytes(tensors)
        if self.inverse_order is not None:
            packed = packed.index_select(0, self.inverse_order)
        kinds = [
            [((high - low, *x.shape[2:]), x.dtype) for x, (low, high) in zip(tensors, own, strict=True)]
            for own in zip(*self.shares, strict=True)
        ]
        rows, widths = self.counts[self.index], [sum(_row_bytes(*kind) for kind in own) for own in kinds]
        received = packed.new_empty(rows * sum(widths))
        sizes = [rows * width for width in widths], [count * packed.shape[1] for count in self.counts]
        self._all_to_all(received, packed.view(-1), *sizes)
        chunks = [chunk.view(rows, width) for chunk, width in zip(received.split(sizes[0]), widths, strict=True)]
        parts = [_split_bytes(chunk, own) for chunk, own in zip(chunks, kinds, strict=True)]
        return tuple(_summed(each, share) for each, share in zip(zip(*parts, strict=True), self.shares, strict=True))

    def _all_to_all(
        self, output: torch.Tensor, sent: torch.Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int]
    ) -> None:
        if sum(self.counts):  # all ranks know when there are no tokens
            all_to_all(self.transport, output, sent, output_sizes, input_sizes, self.ranks, collective=self.collective)


def _exchange_of(context: Context, number: int, heads: tuple[int, ...]) -> HeadExchange:
    """Return the exchange of a group for tensors with so many heads each; the context keeps it."""
    return context.cached(("scan", number, heads), lambda: _build_exchange(context, context.groups[number], heads))


def _build_exchange(context: Context, bound: BoundGroup, heads: tuple[int, ...]) -> HeadExchange:
    group, layout = bound.group, bound.group.token_layout()
    held = [layout.spans(rank) for rank in group.ranks]
    spans = tuple(sorted(group.spans))
    order = sort_order([span for own in held for span in own], spans, context.device)
    given = tuple(even_ranges(heads[0], group.degree))
    # A rank without heads reads one that another has too: its scan has a dtype and a graph like all others.
    read = tuple((low, high) if low < high else (heads[0] - 1, heads[0]) for low, high in given)
    shares = []
    for count in heads:
        shared = heads[0] // count
        shares.append(tuple((low // shared, -(-high // shared)) for low, high in read))
    counts = tuple(sum(span.tokens for span in own) for own in held)
    place, collective = group.ranks.index(context.rank), group.ring == 1  # a Ulysses block has a communicator
    fields = (context.transport, group.ranks, place, collective, counts, spans)
    return HeadExchange(*fields, *order, tuple(shares), given)


def _joined_bytes(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return tensors [rows, ...] of any dtypes side by side, uint8[rows, bytes of a row]."""
    return torch.cat([each.flatten(1).contiguous().view(torch.uint8) for each in tensors], dim=1)


def _split_bytes(rows: torch.Tensor, kinds: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> Tensors:
    """Return the tensors [rows, *shape] that `_joined_bytes` has joined, in memory of their own."""
    parts = rows.split([_row_bytes(*kind) for kind in kinds], dim=1)
    return tuple(
        part.clone(memory_format=torch.contiguous_format).flatten().view(dtype).view(len(rows), *shape)
        for part, (shape, dtype) in zip(parts, kinds, strict=True)
    )


def _row_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _summed(parts: Sequence[torch.Tensor], share: Ranges) -> torch.Tensor:
    """Join [rows, heads of a rank, ...] of all ranks to [rows, heads, ...], adding up in rank order."""
    if all(first[1] == second[0] for first, second in pairwise(share)):
        return torch.cat(list(parts), dim=1)
    first = parts[0]
    total = first.new_zeros((len(first), share[-1][1], *first.shape[2:]), dtype=sum_dtype(first.dtype))
    for part, (low, high) in zip(parts, share, strict=True):
        total[:, low:high] += part
    return total.to(first.dtype)
