"""Transports for tests: one that counts calls and bytes of every verb, and one that only knows its rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from seqloom.dist.transport import Channel, Exchange, P2PTensor, Transport


@dataclass(frozen=True, slots=True)
class Traffic:
    """Calls of one verb, and bytes that left this rank for another in them."""

    calls: int = 0
    bytes: int = 0


class RankOnly:
    """A transport that can do nothing: binding a round must not need more."""

    def __init__(self, rank: int, ranks: int = 4) -> None:
        self.rank, self.ranks = rank, ranks


class CountingTransport:
    """Wraps a transport, does what it does, and counts.

    Every call counts, also one that moves nothing. Bytes of an all-gather are those of the plain algorithm (the
    input to every other rank), of an all-reduce those of a ring: 2 (p - 1) / p of the tensor, rounded up.
    """

    def __init__(self, transport: Transport) -> None:
        """Start at zero."""
        self._transport = transport
        self._traffic: dict[str, Traffic] = {}
        self._sent_to: Counter[int] = Counter()

    @property
    def rank(self) -> int:
        """This rank."""
        return self._transport.rank

    @property
    def ranks(self) -> int:
        """Size of the world."""
        return self._transport.ranks

    @property
    def waits_in_stream(self) -> bool:
        """See `Transport.waits_in_stream`."""
        return self._transport.waits_in_stream

    def on(self, channel: Channel) -> CountingTransport:
        """See `Transport.on`; what travels there is counted here too."""
        other = CountingTransport(self._transport.on(channel))
        other._traffic, other._sent_to = self._traffic, self._sent_to
        return other

    def traffic(self, verb: str) -> Traffic:
        """Return what was counted for one verb since the start or the last `reset`."""
        return self._traffic.get(verb, Traffic())

    def bytes_to(self, peer: int) -> int:
        """Return the bytes that left for one rank in exchanges, since the start or the last `reset`."""
        return self._sent_to[peer]

    def reset(self) -> None:
        """Start again at zero."""
        self._traffic.clear()
        self._sent_to.clear()

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        block: Sequence[int],
    ) -> None:
        """See `Transport.all_to_all`."""
        self._transport.all_to_all(output, input, output_sizes, input_sizes, block)
        own = input_sizes[list(block).index(self.rank)]
        self._count("all_to_all", (sum(input_sizes) - own) * input.element_size())

    def exchange(self, sends: Sequence[P2PTensor], receives: Sequence[P2PTensor]) -> Exchange:
        """See `Transport.exchange`."""
        handle = self._transport.exchange(sends, receives)
        for peer, tensor in sends:
            self._sent_to[peer] += tensor.nbytes
        self._count("exchange", sum(tensor.nbytes for peer, tensor in sends if peer != self.rank))
        return handle

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, block: Sequence[int], sizes: Sequence[int] | None = None
    ) -> None:
        """See `Transport.all_gather`."""
        self._transport.all_gather(output, input, block, sizes)
        self._count("all_gather", (len(block) - 1) * input.nbytes)

    def all_reduce(self, tensor: torch.Tensor, block: Sequence[int]) -> None:
        """See `Transport.all_reduce`."""
        self._transport.all_reduce(tensor, block)
        self._count("all_reduce", -(-2 * (len(block) - 1) * tensor.nbytes // len(block)))

    def broadcast(self, payload: bytes | None, *, root: int = 0) -> bytes:
        """See `Transport.broadcast`; not counted."""
        return self._transport.broadcast(payload, root=root)

    def _count(self, verb: str, size: int) -> None:
        before = self.traffic(verb)
        self._traffic[verb] = Traffic(before.calls + 1, before.bytes + size)
