"""The transport of real jobs: torch.distributed, with NCCL or gloo.

Blocks run on the communicators of a family, `exchange` on the world, messages on a communicator for every way (NCCL)
or on the world with a tag for every lane (gloo, where ways do not wait for each other by themselves). gloo moves CUDA
tensors in collectives but not in send and receive, so there they pass through pinned host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from seqloom.comm.groups import Communicators
from seqloom.comm.lanes import Lane, Message, Way, check_peer
from seqloom.comm.transport import Handle, Parcel
from seqloom.errors import SeqloomError

ASIDE = 1 + len(Lane)
"""The label of parcels on the second world communicator, see `_tag`."""


class Distributed:
    """One process of a torch.distributed job as a transport."""

    def __init__(self, communicators: Communicators, *, aside: bool = False) -> None:
        """Speak over these communicators. With NCCL the process must have set its CUDA device.

        Args:
            communicators: of the job.
            aside: whether `exchange` is on the second world communicator.
        """
        if communicators.world is None:
            raise SeqloomError(
                f"rank {communicators.rank} is outside the family of {communicators.family.ranks} ranks; "
                "make a larger family, or no transport here"
            )
        self._communicators = communicators
        self._aside = aside
        self._stages = not communicators.has_nccl
        self._ready: set[Way] = set()

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

    @property
    def aside(self) -> Distributed:
        """See `Transport.aside`."""
        return Distributed(self._communicators, aside=True)

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
        world = self._communicators.aside if self._aside else self._communicators.world
        tag = ASIDE if self._aside else 0
        # Receives first: gloo tells a peer that it may send on the connection that carries this rank's own data to
        # it, so behind a send two ranks that exchange would take turns.
        batch = [dist.P2POp(dist.irecv, tensor, peer, world, tag) for peer, tensor in incoming]
        batch += [dist.P2POp(dist.isend, tensor, peer, world, tag) for peer, tensor in outgoing]
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

    def connect(self, ways: Iterable[Way]) -> None:
        """See `Transport.connect`. With NCCL a way's communicator is made by its first message, which is sent here.

        Both ends wait for each other then. All ranks take their ways in one order, so none waits in a circle.
        """
        new = sorted(set(ways) - self._ready)
        self._ready.update(new)
        if self._stages:
            return
        token = torch.zeros(1, device="cuda")
        for way in sorted(new, key=lambda way: (way.peers, way)):
            if way.sender == self.rank:
                self.send(token, way.receiver, way.lane).wait()
            else:
                self.receive(token, way.sender, way.lane).wait()

    def send(self, tensor: torch.Tensor, peer: int, lane: Lane) -> Message:
        """See `Transport.send`."""
        check_peer(self.rank, self.ranks, peer, lane)
        group = self._communicators.group_on(lane, upward=self.rank < peer)
        given = _to_host([Parcel(peer, tensor)])[0].tensor if self._stages else tensor.detach()
        work = dist.isend(given, peer, group=group, tag=_tag(lane))
        assert work is not None  # it is where this process is not in the group
        return _Message(work, given)

    def receive(self, tensor: torch.Tensor, peer: int, lane: Lane) -> Message:
        """See `Transport.receive`."""
        check_peer(self.rank, self.ranks, peer, lane)
        group = self._communicators.group_on(lane, upward=peer < self.rank)
        room = _host_like(tensor) if self._stages else tensor.detach()
        work = dist.irecv(room, peer, group=group, tag=_tag(lane))
        assert work is not None
        return _Message(work, room, tensor if room.device != tensor.device else None)

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


@dataclass(slots=True)
class _Message:
    """A started message: what carries it, its tensor while it travels, and where that goes from host memory."""

    work: dist.Work | None
    tensor: torch.Tensor | None
    target: torch.Tensor | None = None

    def wait(self) -> None:
        """See `Message.wait`."""
        if self.work is None:
            return
        self.work.wait()
        if self.target is not None and self.tensor is not None:
            self.target.detach().copy_(self.tensor, non_blocking=True)
        self.work = self.tensor = self.target = None

    def done(self) -> bool:
        """See `Message.done`; gloo cannot tell."""
        return self.work is None or self.work.is_completed()


def _tag(lane: Lane) -> int:
    """Return the label of a lane's messages: gloo keeps those of different labels apart, parcels have 0."""
    return 1 + list(Lane).index(lane)


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
