"""The transport of real jobs: torch.distributed, with NCCL or gloo.

Blocks run on the communicators of a family, `exchange` on the world. gloo moves CUDA tensors in collectives but
not in send and receive, so there they pass through pinned host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from seqloom.comm.groups import Communicators
from seqloom.comm.transport import Handle, Parcel
from seqloom.errors import SeqloomError


class Distributed:
    """One process of a torch.distributed job as a transport."""

    def __init__(self, communicators: Communicators) -> None:
        """Speak over these communicators. With NCCL the process must have set its CUDA device."""
        if communicators.world is None:
            raise SeqloomError(
                f"rank {communicators.rank} is outside the family of {communicators.family.ranks} ranks; "
                "make a larger family, or no transport here"
            )
        self._communicators = communicators
        self._stages = not communicators.has_nccl

    @property
    def rank(self) -> int:
        """This rank."""
        return self._communicators.rank

    @property
    def ranks(self) -> int:
        """Size of the world."""
        return self._communicators.family.ranks

    @property
    def waits_in_stream(self) -> bool:
        """With NCCL."""
        return not self._stages

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        block: Sequence[int],
    ) -> None:
        """See `Transport.all_to_all`."""
        group = self._communicators.group_of(tuple(block))
        if group is None:
            output.copy_(input)
        else:
            dist.all_to_all_single(output, input, list(output_sizes), list(input_sizes), group=group)

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Handle:
        """See `Transport.exchange`. Parcels without elements do not travel."""
        self._keep_own(sends, receives)
        outgoing = [parcel for parcel in sends if parcel.peer != self.rank and parcel.tensor.numel()]
        incoming = [parcel for parcel in receives if parcel.peer != self.rank and parcel.tensor.numel()]
        arrivals: list[tuple[torch.Tensor, torch.Tensor]] = []
        if self._stages:
            outgoing = _to_host(outgoing)
            staged = [parcel._replace(tensor=_host_like(parcel.tensor)) for parcel in incoming]
            pairs = zip(incoming, staged, strict=True)
            arrivals = [(there.tensor, here.tensor) for there, here in pairs if there.tensor is not here.tensor]
            incoming = staged
        world = self._communicators.world
        # Receives first: gloo tells a peer that it may send on the connection that carries this rank's own data to
        # it, so behind a send two ranks that exchange would take turns.
        batch = [dist.P2POp(dist.irecv, tensor, peer, world) for peer, tensor in incoming]
        batch += [dist.P2POp(dist.isend, tensor, peer, world) for peer, tensor in outgoing]
        return _Transfer(dist.batch_isend_irecv(batch) if batch else [], arrivals)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, block: Sequence[int]) -> None:
        """See `Transport.all_gather`."""
        group = self._communicators.group_of(tuple(block))
        if group is None:
            output.copy_(input)
        else:
            _all_gather_flat()(output, input, group=group)

    def all_reduce(self, tensor: torch.Tensor, block: Sequence[int]) -> None:
        """See `Transport.all_reduce`."""
        group = self._communicators.group_of(tuple(block))
        if group is not None:
            dist.all_reduce(tensor, group=group)

    def _keep_own(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> None:
        """Copy what this rank sends to itself."""
        given = [tensor for peer, tensor in sends if peer == self.rank]
        taken = [tensor for peer, tensor in receives if peer == self.rank]
        sizes = [[(tensor.numel(), tensor.dtype) for tensor in tensors] for tensors in (given, taken)]
        if sizes[0] != sizes[1]:
            raise SeqloomError(
                f"rank {self.rank} sends itself {sizes[0]} and receives {sizes[1]} from itself; "
                "both must be the same in one exchange"
            )
        for source, target in zip(given, taken, strict=True):
            target.detach().view(-1).copy_(source.detach().view(-1))


@dataclass(frozen=True, slots=True)
class _Transfer:
    """Started sends and receives, and what must be copied from host memory after them."""

    works: Sequence[dist.Work]
    arrivals: Sequence[tuple[torch.Tensor, torch.Tensor]]

    def wait(self) -> None:
        """See `Handle.wait`."""
        for work in self.works:
            work.wait()
        for target, host in self.arrivals:
            target.detach().copy_(host, non_blocking=True)


def _to_host(parcels: Sequence[Parcel]) -> list[Parcel]:
    """Return the parcels with CUDA tensors copied to the host, all of them in one wait for the GPU."""
    staged = []
    for peer, tensor in parcels:
        host = _host_like(tensor)
        if host is not tensor:
            host.copy_(tensor.detach(), non_blocking=True)
        staged.append(Parcel(peer, host))
    if any(tensor.is_cuda for _, tensor in parcels):
        torch.cuda.current_stream().synchronize()
    return staged


def _host_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a pinned tensor of the same shape for a CUDA tensor, and a CPU tensor itself."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def _all_gather_flat() -> Callable[..., object]:
    """The all-gather into one tensor, whose name differs between torch versions."""
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
