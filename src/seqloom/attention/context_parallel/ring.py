"""Ring attention: keys and values go round, every ring index computes its tiles with each of them in turn.

In step s index i works on the keys of index j = (i - s) mod ring. What the next step needs is under way meanwhile.
Backward sends keys and values round again, and their gradients one step behind them, in float32: they are sums
that grow with every step, and after the last one they go home.

    exchange    0     1          2          ...   r - 1     r
    keys of     s=1   s=2        s=3        ...
    gradients         after s=0  after s=1  ...   s=r-2     s=r-1, home

In a routed ring all messages are as long as the longest, with rows at their end that nobody reads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from seqloom.attention.context_parallel.overlap import ContextParallelAttention, Meanwhile, Waits
from seqloom.attention.context_parallel.routed import RoutedExchanges, gradients_of, keys_of
from seqloom.attention.kernels.interface import Gradients, Saved
from seqloom.attention.lse import Joins, Sum, Total, sum_dtype
from seqloom.attention.tiles import PreparedTile, add_key_gradients, backward_tiles, forward_tiles
from seqloom.dist.routed import RoutedTransfer
from seqloom.dist.transport import Handle, P2PTensor, Transport, exchange_nonempty


@dataclass(frozen=True, slots=True, eq=False)
class Ring(ContextParallelAttention):
    """One rank's part of a ring.

    Attributes:
        transport: this rank's.
        ranks: of the ring, by ring index.
        index: of this rank.
        counts: rows of every ring index.
        steps: the tiles of every step.
        joins: how partial results are joined.
        roads: how exchanges cross nodes; None: from rank to rank.
    """

    transport: Transport
    ranks: tuple[int, ...]
    index: int
    counts: tuple[int, ...]
    steps: tuple[tuple[PreparedTile, ...], ...]
    joins: Joins
    roads: RoutedExchanges | None = None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meanwhile: Meanwhile
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse) over the keys of all ring indices. `out` has the dtype of q."""
        total = Total(q, self.joins)
        kv = self._joined(k, v)
        for step, tiles in enumerate(self.steps):
            coming = self._room(kv, step + 1, kv.dtype) if step + 1 < len(self.steps) else None
            passage = None if self.roads is None or coming is None else self.roads.ahead[step]
            handle = self._pass_on(passage, (None if coming is None else kv, coming))
            forward_tiles(tiles, total, q, kv)
            meanwhile(step)
            handle.wait()
            kv = kv if coming is None else coming
        return total.result()

    def backward(self, dout: torch.Tensor, saved: Saved, meanwhile: Meanwhile) -> Gradients:
        """Return (dq, dk, dv) of the own rows: dq in the dtype of q, dk and dv in `sum_dtype`."""
        q, wide = saved.q, sum_dtype(saved.q.dtype)
        kv = self._joined(saved.k, saved.v)
        dq, dkv = Sum(q, self.joins), None
        for step, tiles in enumerate(self.steps):
            coming = self._room(kv, step + 1, kv.dtype) if step + 1 < len(self.steps) else None
            arriving = self._room(kv, step, wide) if step else None
            passage = None if self.roads is None else self.roads.back[step]
            handle = self._pass_on(passage, (None if coming is None else kv, coming), (dkv, arriving))
            found = backward_tiles(tiles, dout, saved, kv, dq)
            meanwhile(step)
            handle.wait()
            dkv = add_key_gradients(arriving, self._rows(step), found, self.joins)
            dkv = self._room(kv, step, wide) if dkv is None else dkv  # there is no such key
            kv = kv if coming is None else coming
        home = self._room(kv, 0, wide)
        passage = None if self.roads is None else self.roads.back[-1]
        handle = self._pass_on(passage, (None, None), (dkv, home))
        meanwhile(len(self.steps))
        handle.wait()
        dk, dv = home[: self._count(0)].tensor_split(2, dim=1)
        return dq.result(), dk, dv

    def waits(self, row: int, wide_row: int) -> Waits:
        """See `Shared.waits`."""
        ring = len(self.steps)
        keys = [row * self._count(step) for step in range(1, ring)]
        gradients = [wide_row * self._count(step) for step in range(1, ring)]
        both = [sum(pair) for pair in zip([*keys, 0], [0, *gradients], strict=True)]
        return Waits(tuple(keys), (*both, wide_row * self._count(0)))

    def _count(self, step: int) -> int:
        """Rows of the index whose keys are here in a step."""
        return self.counts[(self.index - step) % len(self.counts)]

    def _rows(self, step: int) -> int:
        """Rows of a message that belongs to the keys of a step."""
        return self._count(step) if self.roads is None else max(self.counts)

    def _joined(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return the own keys and values as a message [rows, 2 * kv heads, dim]."""
        if len(k) == self._rows(0):
            return torch.cat((k, v), dim=1)
        kv = k.new_zeros((self._rows(0), 2 * k.shape[1], k.shape[2]))
        torch.cat((k, v), dim=1, out=kv[: len(k)])
        return kv

    def _room(self, like: torch.Tensor, step: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an empty buffer for what belongs to the keys of a step."""
        return like.new_empty((self._rows(step), *like.shape[1:]), dtype=dtype)

    def _pass_on(
        self, passage: RoutedTransfer | None, *moves: tuple[torch.Tensor | None, torch.Tensor | None]
    ) -> Handle:
        """Send the first of every pair to the next index, receive the second from the one before; None: nothing.

        Args:
            passage: of a routed exchange.
            moves: of keys and values, then of their gradients.
        """
        here, after, before = (self.ranks[(self.index + k) % len(self.ranks)] for k in (0, 1, -1))
        if self.roads is not None and passage is not None:
            named = list(zip((keys_of, gradients_of), moves, strict=False))
            sent = {item(here): tensor for item, (tensor, _) in named if tensor is not None}
            wanted = {item(before): room for item, (_, room) in named if room is not None}
            return self.roads.start(passage, sent, wanted)
        sends = [P2PTensor(after, tensor) for tensor, _ in moves if tensor is not None]
        receives = [P2PTensor(before, room) for _, room in moves if room is not None]
        return exchange_nonempty(self.transport, sends, receives)
