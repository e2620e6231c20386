"""A world of one rank, and the context of documents that lie on it whole: the engine on a single device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from seqloom.dist.token_layout import Context, bind
from seqloom.dist.transport import P2PDirection, Message, P2PChannel, check_peer
from seqloom.dist.transport import Handle, P2PTensor
from seqloom.errors import SeqloomError
from seqloom.plan import Checkpoint, Group, StageMicroBatch; from seqloom.layout import Span


class SingleRankTransport:
    """The transport of a world with one rank: what it sends, it receives."""

    rank = 0
    ranks = 1
    waits_in_stream = False

    @property
    def background(self) -> SingleRankTransport:
        """Itself: nothing waits."""
        return self

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        block: Sequence[int],
    ) -> None:
        """Copy `input` to `output`."""
        _only_self(block)
        output.copy_(input)

    def exchange(self, sends: Sequence[P2PTensor], receives: Sequence[P2PTensor]) -> Handle:
        """Copy what is sent into what is received, in the order listed."""
        _only_self([parcel.peer for parcel in (*sends, *receives)])
        for sent, received in zip(sends, receives, strict=True):
            received.tensor.copy_(sent.tensor)
        return _Done()

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, block: Sequence[int]) -> None:
        """Copy `input` to `output`."""
        _only_self(block)
        output.copy_(input)

    def all_reduce(self, tensor: torch.Tensor, block: Sequence[int]) -> None:
        """Leave the tensor as it is."""
        _only_self(block)

    def connect(self, ways: Iterable[P2PChannel]) -> None:
        """Refuse any way: there is nobody else."""
        for way in ways:
            check_peer(self.rank, self.ranks, max(way.peers), way.lane)

    def send(self, tensor: torch.Tensor, peer: int, lane: P2PDirection) -> Message:
        """Refuse: there is nobody else."""
        check_peer(self.rank, self.ranks, peer, lane)
        return _Done()

    def receive(self, tensor: torch.Tensor, peer: int, lane: P2PDirection) -> Message:
        """Refuse: there is nobody else."""
        return self.send(tensor, peer, lane)


class _Done:
    def wait(self) -> None:
        """Return at once."""

    def done(self) -> bool:
        """Say yes."""
        return True


def bind_single_rank(lengths: Sequence[int], *, device: torch.device | str = "cpu") -> Context:
    """Return the context of documents 0, 1, .. of these lengths, packed one after the other on one device."""
    wrong = [length for length in lengths if length < 0]
    if wrong:
        raise SeqloomError(f"a document of {wrong[0]} tokens: lengths are 0 or more")
    spans = tuple(Span(number, 0, int(length)) for number, length in enumerate(lengths) if length)
    groups = (Group((0,), 1, 1, spans),) if spans else ()
    return bind(StageMicroBatch(groups, Checkpoint.NONE), SingleRankTransport(), device=device)


def _only_self(ranks: Sequence[int]) -> None:
    others = [rank for rank in ranks if rank != 0]
    if others:
        raise SeqloomError(f"rank {others[0]} in a world of one rank; use a transport that reaches it")
