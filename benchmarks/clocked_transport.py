"""A transport whose messages carry the clocks of ranks, see `rank_clocks.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rank_clocks import RankClock

from seqloom.dist import Channel, P2PTensor, Transport
from seqloom.dist.transport import Exchange


class ClockedTransport:
    """A transport whose messages carry clocks."""

    def __init__(self, inner: Transport, clock: RankClock) -> None:
        """Wrap a transport; all of its channels share the clock."""
        self._inner, self.clock = inner, clock

    @property
    def rank(self) -> int:
        """This rank."""
        return self._inner.rank

    @property
    def ranks(self) -> int:
        """Size of the world."""
        return self._inner.ranks

    @property
    def waits_in_stream(self) -> bool:
        """As the transport inside."""
        return self._inner.waits_in_stream

    def on(self, channel: Channel) -> ClockedTransport:
        """Return the same ranks with `exchange` on another channel."""
        return ClockedTransport(self._inner.on(channel), self.clock)

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        block: Sequence[int],
    ) -> None:
        """See `Transport.all_to_all`."""
        self.clock.stop()
        self._inner.all_to_all(output, input, output_sizes, input_sizes, block)
        index = list(block).index(self.rank)
        moved = max(sum(sizes) - sizes[index] for sizes in (input_sizes, output_sizes)) * input.element_size()
        self._meet(moved, block)

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, block: Sequence[int], sizes: Sequence[int] | None = None
    ) -> None:
        """See `Transport.all_gather`."""
        self.clock.stop()
        self._inner.all_gather(output, input, block, sizes)
        self._meet(output.nbytes - input.nbytes, block)

    def all_reduce(self, tensor: torch.Tensor, block: Sequence[int]) -> None:
        """See `Transport.all_reduce`."""
        self.clock.stop()
        self._inner.all_reduce(tensor, block)
        self._meet(tensor.nbytes * (len(block) - 1) // len(block), block, times=2)

    def broadcast(self, payload: bytes | None, *, root: int = 0) -> bytes:
        """See `Transport.broadcast`."""
        self.clock.stop()
        content = self._inner.broadcast(payload, root=root)
        self._meet(len(content), range(self.ranks))
        return content

    def exchange(self, sends: Sequence[P2PTensor], receives: Sequence[P2PTensor]) -> Exchange:
        """See `Transport.exchange`; before the first tensor for a peer goes its departure."""
        clock = self.clock
        clock.stop()
        going, coming = (self._bytes_by_peer(each) for each in (sends, receives))
        departures = [
            P2PTensor(peer, torch.tensor(clock.depart(size), dtype=torch.float64)) for peer, size in going.items()
        ]
        arrivals = [P2PTensor(peer, torch.zeros((), dtype=torch.float64)) for peer in coming]
        started = self._inner.exchange([*departures, *sends], [*arrivals, *receives])
        clock.go()
        return _ClockedExchange(clock, started, arrivals, list(coming.values()))

    def _bytes_by_peer(self, tensors: Sequence[P2PTensor]) -> dict[int, int]:
        found: dict[int, int] = {}
        for peer, tensor in tensors:
            if peer != self.rank and tensor.numel():
                found[peer] = found.get(peer, 0) + tensor.nbytes
        return found

    def _meet(self, size: int, block: Sequence[int], times: int = 1) -> None:
        """Set the clock to the end of a collective in which a rank moves so many bytes."""
        if len(block) > 1:
            clock, mine = self.clock, torch.tensor([self.clock.now, float(size)], dtype=torch.float64)
            every = torch.empty(2 * len(block), dtype=torch.float64)
            self._inner.all_gather(every, mine, block)
            began, moved = every.view(-1, 2).amax(dim=0).tolist()
            clock.now = began + times * (clock.link.latency_s + moved / clock.link.bytes_per_s)
        self.clock.go()


@dataclass(slots=True)
class _ClockedExchange:
    clock: RankClock
    inner: Exchange
    departures: list[P2PTensor]
    sizes: list[int]
    _over: bool = False

    def wait(self) -> None:
        """See `Handle.wait`."""
        if self._over:
            return
        self.clock.stop()
        self.inner.wait()
        self.clock.arrive([(float(each.tensor), size) for each, size in zip(self.departures, self.sizes, strict=True)])
        self.clock.go()
        self._over = True

    def done(self) -> bool:
        """See `Exchange.done`: known after `wait`."""
        return self._over
