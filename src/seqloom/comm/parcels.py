"""Exchanges in which empty parcels are left out: both sides know the sizes, so neither waits for nothing.

An all-to-all is one where its ranks have no communicator of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from seqloom.comm.transport import Handle, Parcel, Transport


def exchange_filled(transport: Transport, sends: Iterable[Parcel], receives: Iterable[Parcel]) -> Handle:
    """Start an exchange of the parcels that hold something; without any, nothing is called."""
    outgoing = [parcel for parcel in sends if parcel.tensor.numel()]
    incoming = [parcel for parcel in receives if parcel.tensor.numel()]
    return transport.exchange(outgoing, incoming) if outgoing or incoming else _Done()


def all_to_all(
    transport: Transport,
    output: torch.Tensor,
    input: torch.Tensor,
    output_sizes: Sequence[int],
    input_sizes: Sequence[int],
    ranks: Sequence[int],
    *,
    collective: bool,
) -> None:
    """Do `Transport.all_to_all` among any ranks, all of which call it.

    Args:
        transport: this rank's.
        output, input, output_sizes, input_sizes: see `Transport.all_to_all`.
        ranks: different ones, in an order on which all agree; this one among them.
        collective: they have a communicator. Otherwise they send and receive on the world's.
    """
    if collective:
        transport.all_to_all(output, input, output_sizes, input_sizes, ranks)
        return
    sent, received = input.split(list(input_sizes)), output.split(list(output_sizes))
    own = list(ranks).index(transport.rank)
    received[own].copy_(sent[own])
    outgoing, incoming = (
        [Parcel(peer, part) for peer, part in zip(ranks, parts, strict=True) if peer != transport.rank]
        for parts in (sent, received)
    )
    exchange_filled(transport, outgoing, incoming).wait()


class _Done:
    """The handle of an exchange of nothing."""

    __slots__ = ()

    def wait(self) -> None:
        """Return at once."""
