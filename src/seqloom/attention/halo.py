"""Halos of short causal convolutions: the few tokens before a rank's own, wherever they lie.

A convolution of width k + 1 lets a token see the k before it in its document. So a rank fetches the k rows before every
run of tokens that it holds, from the ranks of the group that hold them, and convolves its own tokens, all channels:

    rank 0    . . . A0 A1 A2      . stands for rows before the first token of a document, zeros
    rank 1    A0 A1 A2 A3 A4 A5   k = 3

Of a document in pieces, the rows before a piece are a state (`context_parallel/scan_states.py`). The first rank of the
group keeps it: it gathers the last rows of every piece, and gives them out beside its own rows when the next one comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from seqloom.attention.context_parallel.kv_cache import KVCache
from seqloom.attention.context_parallel.scan_states import DocumentPiece, document_piece
from seqloom.attention.merge import sum_dtype
from seqloom.attention.scan import run_by_group
from seqloom.dist.rank_tokens import BoundGroup, Context
from seqloom.dist.rows import expand_runs, on_device, span_columns
from seqloom.dist.tensor_parallel import RowFunction
from seqloom.dist.transport import Transport, all_to_all
from seqloom.layout import Span

Runs = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Documents, first positions and numbers of tokens, int64[runs] each."""


def convolve_documents(
    convolve: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    before: int,
    context: Context,
    *,
    layer: int | None,
    name: str,
) -> torch.Tensor:
    """Convolve this rank's tokens, each with those before it in its document, wherever they lie; with autograd.

    All ranks of a group call it, forward and backward, also those without tokens.

    Args:
        convolve: [rows, channels] -> the same shape; a row depends on itself and the `before` rows in front of it.
        x: [tokens, channels], rows as in `context.spans`.
        before: rows that a row sees before itself.
        context: of the round, from `bind`.
        layer: number of the layer in the model; needed where a document is in pieces.
        name: of the convolution among the scans of the layer.
    """

    def convolve_group(number: int, own: torch.Tensor) -> torch.Tensor:
        bound = context.groups[number]
        exchange = context.cached(("halo", number, before), lambda: HaloExchange.of(context, bound, before))
        pieces = [document_piece(span, context, layer, name) for span in sorted(bound.group.spans)]
        halo = _fetch(own, exchange, before, context, pieces)
        out = convolve(torch.cat([own, halo]).index_select(0, exchange.order))
        return out.index_select(0, exchange.kept)

    return run_by_group(convolve_group, (x,), context, name)


def _fetch(
    own: torch.Tensor,
    exchange: HaloExchange,
    before: int,
    context: Context,
    pieces: Sequence[DocumentPiece | None],
) -> torch.Tensor:
    """Return the halo of a group's rows, [runs * before, channels]; its first rank takes and leaves the states."""
    kept = context.kv_cache
    if exchange.index or not context.pieces or not isinstance(kept, KVCache):
        return RowFunction.apply(exchange.gather, exchange.scatter, own)
    states = [state for piece in pieces if (state := kept.scan_states.take(piece, own)) is not None]
    fetched = RowFunction.apply(exchange.gather, exchange.scatter, torch.cat([own, *states]))
    halo, ends = fetched[: exchange.halo_rows], iter(fetched[exchange.halo_rows :].split(before))
    for piece in pieces:
        state = halo if piece is None or piece.last else next(ends)
        halo = kept.scan_states.leave(piece, halo, state, backward=kept.backward)
    return halo


@dataclass(frozen=True, slots=True, eq=False)
class HaloExchange:
    """One rank's part of fetching rows in a group.

    The first rank of a group also fetches, after its halo, the last rows of every span that another piece follows, and
    has, after its own rows, the states of spans that begin inside their documents.

    Attributes:
        ranks: of the group.
        index: of this rank among them.
        sends, receives: rows for and from every rank.
        sent: int64[rows], those that are sent, one receiver after the other; a row may go to several.
        places: int64[rows], where received rows belong among those fetched.
        fetched: rows that this rank asks for; those before the first token of a document are nobody's, and zero.
        given: rows that this rank has.
        halo_rows: of those fetched.
        order: int64[rows], own rows and halo -> the rows of each run after its halo.
        kept: int64[own rows], where these are then.
    """

    transport: Transport
    ranks: tuple[int, ...]
    index: int
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    sent: torch.Tensor
    places: torch.Tensor
    fetched: int
    given: int
    halo_rows: int
    order: torch.Tensor
    kept: torch.Tensor

    @classmethod
    def of(cls, context: Context, bound: BoundGroup, before: int) -> HaloExchange:
        """Do the index work of a group: every rank knows what all of them ask for."""
        group, layout, spans = bound.group, bound.group.token_layout(), sorted(bound.group.spans)
        held = [_runs(layout.spans(rank)) for rank in group.ranks]
        begun = [span for span in spans if span.start > 0]
        ended = [Span(span.document, span.stop, span.stop) for span in spans if _goes_on(span, context)]
        given, asked = [_positions(runs) for runs in held], [_positions(_before(runs, before)) for runs in held]
        for rows, more in ((given, begun), (asked, ended)):
            rows[0] = np.concatenate([rows[0], _positions(_before(_runs(more), before))], axis=1)
        index = group.ranks.index(context.rank)
        owners, rows = _find(given, asked)
        wanted = np.flatnonzero(owners[index] >= 0)
        wanted = wanted[np.argsort(owners[index][wanted], kind="stable")]
        mine = [rows[peer][owners[peer] == index] for peer in range(group.degree)]
        receives = np.bincount(owners[index][wanted], minlength=group.degree)
        order, kept = _padded(held[index][2], before)
        indices = [on_device(each, context.device) for each in (np.concatenate(mine), wanted, order, kept)]
        return cls(
            context.transport,
            group.ranks,
            index,
            sends=tuple(map(len, mine)),
            receives=tuple(receives.tolist()),
            sent=indices[0],
            places=indices[1],
            fetched=asked[index].shape[1],
            given=given[index].shape[1],
            halo_rows=before * len(held[index][0]),
            order=indices[2],
            kept=indices[3],
        )

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows that this rank asks for, [fetched, channels], from those that it has, [given, channels]."""
        received = self._all_to_all(rows.index_select(0, self.sent), self.sends, self.receives)
        return rows.new_zeros((self.fetched, rows.shape[1])).index_copy_(0, self.places, received)

    def scatter(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of rows that this rank has, from that of rows that were asked for: the transpose."""
        received = self._all_to_all(gradient.index_select(0, self.places), self.receives, self.sends)
        wide = sum_dtype(gradient.dtype)
        total = gradient.new_zeros((self.given, gradient.shape[1]), dtype=wide)
        return total.index_add_(0, self.sent, received.to(wide)).to(gradient.dtype)

    def _all_to_all(self, sent: torch.Tensor, sends: Sequence[int], receives: Sequence[int]) -> torch.Tensor:
        width = sent.shape[1]
        received = sent.new_empty((sum(receives), width))
        sizes = [count * width for count in receives], [count * width for count in sends]
        all_to_all(self.transport, received.view(-1), sent.view(-1), *sizes, self.ranks, collective=False)
        return received


def _goes_on(span: Span, context: Context) -> bool:
    """Whether a later round has the next piece of a document."""
    return span.document in context.pieces and context.pieces[span.document][-1] != span


def _runs(spans: Sequence[Span]) -> Runs:
    documents, starts, stops = span_columns(spans)
    return documents, starts, stops - starts


def _before(runs: Runs, before: int) -> Runs:
    """Return the rows before each run."""
    documents, starts, lengths = runs
    return documents, starts - before, np.full_like(lengths, before)


def _positions(runs: Runs) -> np.ndarray:
    """Return document and position of every row of runs, int64[2, rows]; positions below 0 are nobody's."""
    documents, starts, lengths = runs
    return np.stack([np.repeat(documents, lengths), expand_runs(starts, lengths)])


def _find(given: list[np.ndarray], asked: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return for every rank who has what it asks for, -1: nobody, and in which row there; int64[rows asked] each."""
    counts = np.array([each.shape[1] for each in given])
    documents, positions = np.concatenate(given, axis=1)
    width = 1 + int(positions.max(initial=0))
    real = np.flatnonzero(positions >= 0)
    keys = documents[real] * width + positions[real]
    by_key = real[np.argsort(keys)]
    keys = np.sort(keys)
    owner, row = np.repeat(np.arange(len(given)), counts), expand_runs(np.zeros_like(counts), counts)
    owners, rows = [], []
    for document, position in asked:
        exists = position >= 0
        at = by_key[np.searchsorted(keys, (document * width + position)[exists])] if exists.any() else by_key[:0]
        who, where = (np.full(len(position), -1, dtype=np.int64) for _ in range(2))
        who[exists], where[exists] = owner[at], row[at]
        owners.append(who)
        rows.append(where)
    return owners, rows


def _padded(lengths: np.ndarray, before: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the order that puts the halo of every run in front of its rows, and where the rows are then.

    Before come the rows of all runs, then their halos.
    """
    firsts, halos = np.cumsum(lengths) - lengths, int(lengths.sum()) + before * np.arange(len(lengths))
    starts = np.stack([halos, firsts], axis=1).ravel()
    sizes = np.stack([np.full_like(lengths, before), lengths], axis=1).ravel()
    kept = np.cumsum(lengths + before) - lengths
    return expand_runs(starts, sizes), expand_runs(kept, lengths)
