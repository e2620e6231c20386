"""Expert parallelism: the ranks of an EP group divide the experts of every layer, and send each other tokens.

With 8 experts over 4 ranks, rank 1 has experts 2 and 3. A rank sends a token to every rank with some of the experts
that the router has chosen for it, once to each; it gets back the weighted sum of what these experts return:

    x [tokens, hidden]  -- to_experts ->  [rows, hidden] from all ranks  -- experts ->  [rows, hidden]
                        <- to_tokens  --                                    weighted

No token is dropped and nothing is padded: ranks tell each other how many rows they send, and the host waits for these
counts, once per layer and forward. `to_tokens` is the transpose of `to_experts`, so each is the backward of the other.
Both start in one autograd node and end in another, and their backward does the same in reverse: what is computed
between the two nodes hides the transfer, forward and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from seqloom.dist.transport import Exchange, P2PTensor, Transport

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class EPGroup:
    """The ranks that divide the experts among them, as one of them sees it.

    Attributes:
        ranks: neighbours; the k-th of e ranks has the k-th of e equal ranges of experts.
        index: of this rank among them.
    """

    ranks: tuple[int, ...]
    index: int
    transport: Transport

    def route(self, chosen: torch.Tensor, count: int) -> ExpertRoute:
        """Work out which tokens go where, and how many arrive. All ranks of the group call it; the host waits.

        Args:
            chosen: int64[tokens, top_k], the experts of every token; numbers that no expert has are left out.
            count: experts of the layer.
        """
        ranks, tokens = len(self.ranks), len(chosen)
        owner = chosen.div(count // ranks, rounding_mode="floor").clamp(max=ranks)  # the last: no expert
        wanted = owner.new_zeros((tokens, ranks + 1), dtype=torch.bool).scatter_(1, owner, True)[:, :ranks].t()
        pairs = owner.new_zeros(ranks + 1).scatter_add_(0, owner.reshape(-1), torch.ones_like(owner).reshape(-1))
        counts = torch.stack((wanted.sum(1), pairs[:ranks]), dim=1)  # int64[ranks, 2]
        sent, arriving = torch.stack((counts, self._exchange_counts(counts))).tolist()
        sends, receives = (tuple(rows for rows, _ in each) for each in (sent, arriving))
        # Those wanted first, receiver by receiver: their number is known, so that no kernel has to find it out.
        rows = torch.argsort(~wanted.reshape(-1), stable=True)[: sum(sends)].remainder(max(tokens, 1))
        return ExpertRoute(self, rows, tokens, sends, receives, sum(pairs for _, pairs in arriving))

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return what every rank of the group has, [ranks, ...]; all of them call it with tensors of one shape."""
        received = own.new_empty((len(self.ranks), *own.shape))
        sends = [P2PTensor(peer, own) for peer in self.ranks]
        receives = [P2PTensor(peer, part) for peer, part in zip(self.ranks, received.unbind(), strict=True)]
        self.transport.exchange(sends, receives).wait()
        return received

    def _exchange_counts(self, counts: torch.Tensor) -> torch.Tensor:
        """Return what every rank of the group sends this one: rows, and (row, expert) pairs; int64[ranks, 2]."""
        received = torch.empty_like(counts)
        sends, receives = (
            [P2PTensor(peer, part) for peer, part in zip(self.ranks, tensor.unbind(), strict=True)]
            for tensor in (counts, received)
        )
        self.transport.exchange(sends, receives).wait()
        return received


class ExpertRoute(NamedTuple):
    """Which rows of a rank go to which ranks of its EP group, in one layer.

    Attributes:
        rows: int64[rows sent], one receiver after the other.
        tokens: of this rank.
        sends, receives: rows for and from every rank of the group, this one included.
        pairs: of an arriving row and an expert of this rank.
    """

    group: EPGroup
    rows: torch.Tensor
    tokens: int
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    pairs: int

    def to_experts(self, *tensors: torch.Tensor) -> Transfer:
        """Start to send rows of tensors [tokens, ...] to the ranks with their experts; `Transfer.wait` has them."""
        return Transfer(self, to_experts=True).start(*tensors)

    def to_tokens(self, rows: torch.Tensor) -> Transfer:
        """Start to send rows [rows, ...] back; `Transfer.wait` has the sum of the rows of every token."""
        return Transfer(self, to_experts=False).start(rows)


@dataclass(slots=True, eq=False)
class Transfer:
    """Rows on their way, with autograd.

    The nodes `_Start` and `_Wait` run in the opposite order backwards: there `_Wait` starts to send gradients back, and
    `_Start` waits for them. An empty tensor joins the two: what travels is kept here.
    """

    route: ExpertRoute
    to_experts: bool
    _link: torch.Tensor | None = None
    _differentiable: tuple[bool, ...] = ()
    _in_flight: tuple[Exchange, Tensors, Tensors] | None = None

    def start(self, *tensors: torch.Tensor) -> Transfer:
        """Start to send."""
        self._link = _Start.apply(self, *tensors)
        return self

    def wait(self) -> Tensors:
        """Return what has arrived."""
        link, self._link = self._link, None
        return _Wait.apply(self, link)

    def begin(self, tensors: Sequence[torch.Tensor], *, to_experts: bool) -> None:
        """Start an exchange."""
        route = self.route
        outgoing, incoming = (route.sends, route.receives) if to_experts else (route.receives, route.sends)
        sent = tuple(each.index_select(0, route.rows) if to_experts else each.contiguous() for each in tensors)
        received = tuple(each.new_empty((sum(incoming), *each.shape[1:])) for each in sent)
        sends, receives = (
            [
                P2PTensor(peer, chunk)
                for each in buffers
                for peer, chunk in zip(route.group.ranks, each.split(list(counts)), strict=True)
            ]
            for buffers, counts in ((sent, outgoing), (received, incoming))
        )
        self._in_flight = route.group.transport.exchange(sends, receives), sent, received

    def end(self, *, to_experts: bool) -> Tensors:
        """Wait for the exchange; at the tokens' end add up the rows of every token, in float32 or wider."""
        assert self._in_flight is not None
        (exchange, _, received), self._in_flight = self._in_flight, None
        exchange.wait()
        return received if to_experts else tuple(map(self._sum_rows, received))

    def _sum_rows(self, received: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(received.dtype, torch.float32)
        total = received.new_zeros((self.route.tokens, *received.shape[1:]), dtype=wide)
        return total.index_add_(0, self.route.rows, received.to(wide)).to(received.dtype)

    def begin_backward(self, gradients: Sequence[torch.Tensor]) -> None:
        """Start to send the gradients of what arrived to where it came from, of tensors that need one."""
        wanted = [each for each, needed in zip(gradients, self._differentiable, strict=True) if needed]
        self.begin(wanted, to_experts=not self.to_experts)

    def end_backward(self) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of what was sent; None of tensors that need none."""
        arrived = iter(self.end(to_experts=not self.to_experts))
        return tuple(next(arrived) if needed else None for needed in self._differentiable)


class _Start(torch.autograd.Function):
    """Starts to send; backward waits for gradients."""

    @staticmethod
    def forward(ctx: Any, transfer: Transfer, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.transfer, transfer._differentiable = transfer, ctx.needs_input_grad[1:]
        transfer.begin(tensors, to_experts=transfer.to_experts)
        return tensors[0].new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        return None, *ctx.transfer.end_backward()


class _Wait(torch.autograd.Function):
    """Waits for what was sent; backward starts to send gradients."""

    @staticmethod
    def forward(ctx: Any, transfer: Transfer, link: torch.Tensor) -> Any:
        ctx.transfer = transfer
        arrived = transfer.end(to_experts=transfer.to_experts)
        ctx.mark_non_differentiable(*(each for each in arrived if not each.is_floating_point()))
        return arrived

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        ctx.transfer.begin_backward(gradients)
        return None, gradients[0].new_zeros(0)
