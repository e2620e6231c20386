"""Bytes from one rank to all others: small values such as plans, in as many hops as the world has binary digits."""

from __future__ import annotations

import numpy as np
import torch

from seqloom.comm.transport import Parcel, Transport
from seqloom.errors import SeqloomError


def broadcast_bytes(
    transport: Transport, payload: bytes | None, *, root: int = 0, device: torch.device | str = "cpu"
) -> bytes:
    """Return the root's bytes on every rank; all ranks of the world call it.

    Args:
        transport: this rank's.
        payload: what the root sends; None on the others.
        root: the rank that has it.
        device: where the transport's tensors live.
    """
    if (payload is None) == (transport.rank == root):
        given = "nothing" if payload is None else f"{len(payload)} bytes"
        raise SeqloomError(f"rank {transport.rank} gave {given} to a broadcast from rank {root}; only the root gives")
    size = torch.tensor([0 if payload is None else len(payload)], dtype=torch.int64, device=device)
    _hand_down(transport, size, root)
    if payload is None:
        content = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    else:
        content = torch.from_numpy(np.frombuffer(payload, dtype=np.uint8).copy()).to(device)
    if len(content):
        _hand_down(transport, content, root)
    return bytes(content.cpu().numpy())


def _hand_down(transport: Transport, tensor: torch.Tensor, root: int) -> None:
    """Fill `tensor` on all ranks with the root's: in hop k the first 2^k ranks each serve one more."""
    place = (transport.rank - root) % transport.ranks
    reach = 1
    while reach < transport.ranks:
        if place < reach:
            child = place + reach
            if child < transport.ranks:
                transport.exchange([Parcel((child + root) % transport.ranks, tensor)], []).wait()
        elif place < 2 * reach:
            transport.exchange([], [Parcel((place - reach + root) % transport.ranks, tensor)]).wait()
        reach *= 2
