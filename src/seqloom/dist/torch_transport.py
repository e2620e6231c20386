"""The communicators of a family of blocks: one process group for each, made once, in one order, before step 1."""

from __future__ import annotations

import atexit
import numpy as np
import torch
import torch.distributed as dist
import weakref
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from seqloom.compat import inherit_timeout
from seqloom.dist.transport import Handle
from seqloom.dist.transport import P2PDirection
from seqloom.dist.transport import Message
from seqloom.dist.transport import P2PTensor
from seqloom.dist.transport import Transport
from seqloom.dist.transport import P2PChannel
from seqloom.dist.transport import check_peer
from seqloom.errors import SeqloomError
from seqloom.plan import GroupFamily


@dataclass(frozen=True, slots=True)
class Communicator:
    """A block of the family. `group` is None where this rank is not a member."""

    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)


class Communicators:
    """All communicators of a job: the world for `exchange`, and the blocks of a family for the other verbs.

    Attributes:
        world: the group of all ranks of the family; None in a process outside it.
        aside: another one of the same ranks with NCCL, else the same: gloo keeps messages apart by their tags.
        rank: this process.
        has_nccl: CUDA tensors travel by NCCL.
    """

    def __init__(
        self,
        family: GroupFamily,
        world: dist.ProcessGroup | None,
        communicators: Sequence[Communicator],
        lanes: Mapping[tuple[P2PDirection, bool], dist.ProcessGroup | None],
        aside: dist.ProcessGroup | None,
    ) -> None:
        """Keep what `create` has made."""
        self.family = family
        self.world = world
        self.aside = aside
        self.rank = dist.get_rank()
        self.has_nccl = "nccl" in dist.get_backend_config()
        self._list = tuple(communicators)
        self._groups = {communicator.ranks: communicator.group for communicator in communicators}
        self._lanes = dict(lanes)
        _alive.add(self)

    @classmethod
    def create(cls, family: GroupFamily) -> Communicators:
        """Make a process group for every block, in the family's order.

        Every process of the job calls this, whatever blocks it is in: torch makes a group with the help of all.
        Blocks of one rank need no group, so a rank ends up in at most `family.budget` of them.

        Args:
            family: the blocks. If it has fewer ranks than the job, the first ones are its world.
        """
        if not dist.is_initialized():
            raise SeqloomError("torch.distributed is not initialised; call torch.distributed.init_process_group first")
        size = dist.get_world_size()
        if family.ranks > size:
            raise SeqloomError(f"a family of {family.ranks} ranks in a job of {size}; make it for at most {size} ranks")
        world = _make_group(range(family.ranks)) if family.ranks < size else dist.group.WORLD
        made = [Communicator(tuple(block), _make_group(block)) for block in family.communicators()]
        lanes, aside = {}, world
        if "nccl" in dist.get_backend_config():
            # Groups, not yet communicators: NCCL makes one for every pair of ranks that has a first message there. It
            # runs what a pair does in a group one after the other, so each direction of a lane has its own.
            ways = [(lane, upward) for lane in P2PDirection for upward in (True, False)]
            lanes = {way: _make_group(range(family.ranks)) for way in ways}
            aside = _make_group(range(family.ranks))
        return cls(family, world, made, lanes, aside)

    def list(self) -> tuple[Communicator, ...]:
        """Return the blocks of the family that have a communicator, by size and then by start."""
        return self._list

    def group_of(self, block: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return the process group of a block; None for a block of one rank, which needs none."""
        group = self._groups.get(block)
        if group is None:
            check_block(block, self.rank, self.family.ranks, self.family)
            if len(block) > 1:
                raise SeqloomError(f"block {block}: these communicators are closed; create new ones")
        return group

    def group_on(self, lane: P2PDirection, *, upward: bool) -> dist.ProcessGroup | None:
        """Return the process group of messages on a lane, to a higher rank or a lower one."""
        return self._lanes.get((lane, upward), self.world)

    def warm_up(self) -> None:
        """Run one small verb on every communicator of this rank, so that the first step finds connections made."""
        if self.world is None:
            return
        device = "cuda" if self.has_nccl else "cpu"
        token = torch.ones(1, device=device)
        for world in dict.fromkeys((self.world, self.aside)):
            dist.all_reduce(token, group=world)  # a world's first verb must be one that all its ranks take part in
        after, before = (self.rank + 1) % self.family.ranks, (self.rank - 1) % self.family.ranks
        if self.family.ranks > 1:
            ring = [
                dist.P2POp(dist.isend, token, after, self.world),
                dist.P2POp(dist.irecv, torch.empty_like(token), before, self.world),
            ]
            for work in dist.batch_isend_irecv(ring):
                work.wait()
        for communicator in self._list:
            if communicator.group is not None:
                dist.all_reduce(token, group=communicator.group)

    def close(self) -> None:
        """Destroy the groups that were made here; torch's own world stays."""
        made = [*(communicator.group for communicator in self._list), *self._lanes.values()]
        made += {self.world, self.aside} - {dist.group.WORLD}
        for group in made:
            if group is not None:
                dist.destroy_process_group(group)
        self.let_go()

    def let_go(self) -> None:
        """Forget all groups, so that those end that torch has forgotten too."""
        self.world = self.aside = None
        self._list, self._groups, self._lanes = (), {}, {}


_alive: weakref.WeakSet[Communicators] = weakref.WeakSet()


@atexit.register
def _let_go_of_all() -> None:
    """Let groups that the job has destroyed end before Python does.

    A thread of theirs that is still there while the interpreter shuts down, and wants to give a tensor back, aborts the
    process.
    """
    for each in list(_alive):
        each.let_go()


def _make_group(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """Make a process group; return None where this process is not a member."""
    group = dist.new_group(list(ranks))
    if not isinstance(group, dist.ProcessGroup):
        return None
    inherit_timeout(group)
    return group


def check_block(block: tuple[int, ...], rank: int, ranks: int, family: GroupFamily | None) -> None:
    """Refuse a block without `rank`, one that is not ascending, and one outside the family.

    Args:
        block: ranks of a communicator.
        rank: the one that calls it.
        ranks: size of the world.
        family: the legal blocks; None: all.
    """
    ascending = all(low < high for low, high in pairwise(block))
    if rank not in block or not ascending or block[0] < 0 or block[-1] >= ranks:
        raise SeqloomError(
            f"block {block} called by rank {rank} of {ranks}: a block is an ascending run of ranks, the caller in it"
        )
    size = len(block)
    if family is not None and (block[-1] - block[0] != size - 1 or not family.contains(block[0], size)):
        raise SeqloomError(
            f"block {block} is not in the family of {family.ranks} ranks with sizes {family.sizes}; "
            f"the nearest is {tuple(family.nearest(block[0], size))}"
        )


# ---- merged: comm.distributed
# The transport of real jobs: torch.distributed, with NCCL or gloo.
#
# Blocks run on the communicators of a family, `exchange` on the world, messages on a communicator for every way
# (NCCL)
# or on the world with a tag for every lane (gloo, where ways do not wait for each other by themselves). gloo moves
# CUDA
# tensors in collectives but not in send and receive, so there they pass through pinned host memory.


ASIDE = 1 + len(P2PDirection)
"""The label of parcels on the second world communicator, see `_tag`."""


class TorchTransport:
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
        self._ready: set[P2PChannel] = set()

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
    def background(self) -> TorchTransport:
        """See `Transport.background`."""
        return TorchTransport(self._communicators, aside=True)

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

    def exchange(self, sends: Sequence[P2PTensor], receives: Sequence[P2PTensor]) -> Handle:
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

    def connect(self, ways: Iterable[P2PChannel]) -> None:
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

    def send(self, tensor: torch.Tensor, peer: int, lane: P2PDirection) -> Message:
        """See `Transport.send`."""
        check_peer(self.rank, self.ranks, peer, lane)
        group = self._communicators.group_on(lane, upward=self.rank < peer)
        given = _to_host([P2PTensor(peer, tensor)])[0].tensor if self._stages else tensor.detach()
        work = dist.isend(given, peer, group=group, tag=_tag(lane))
        assert work is not None  # it is where this process is not in the group
        return _Message(work, given)

    def receive(self, tensor: torch.Tensor, peer: int, lane: P2PDirection) -> Message:
        """See `Transport.receive`."""
        check_peer(self.rank, self.ranks, peer, lane)
        group = self._communicators.group_on(lane, upward=peer < self.rank)
        room = _host_like(tensor) if self._stages else tensor.detach()
        work = dist.irecv(room, peer, group=group, tag=_tag(lane))
        assert work is not None
        return _Message(work, room, tensor if room.device != tensor.device else None)

    def _keep_own(self, sends: Sequence[P2PTensor], receives: Sequence[P2PTensor]) -> None:
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


def _tag(lane: P2PDirection) -> int:
    """Return the label of a lane's messages: gloo keeps those of different labels apart, parcels have 0."""
    return 1 + list(P2PDirection).index(lane)


def _to_host(parcels: Sequence[P2PTensor]) -> list[P2PTensor]:
    """Return the parcels with CUDA tensors copied to the host, all of them in one wait for the GPU."""
    staged = []
    for peer, tensor in parcels:
        host = _host_like(tensor)
        if host is not tensor:
            host.copy_(tensor.detach(), non_blocking=True)
        staged.append(P2PTensor(peer, host))
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


# ---- merged: comm.broadcast
# Bytes from one rank to all others: small values such as plans, in as many hops as the world has binary digits.


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
                transport.exchange([P2PTensor((child + root) % transport.ranks, tensor)], []).wait()
        elif place < 2 * reach:
            transport.exchange([], [P2PTensor((place - reach + root) % transport.ranks, tensor)]).wait()
        reach *= 2
