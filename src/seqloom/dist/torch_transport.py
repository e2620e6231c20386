"""The transport of real jobs: torch.distributed, with NCCL or gloo.

`Communicators` creates every process group before step 1, in one order on all ranks: one for each block of the group
family, two worlds for `exchange`, and with NCCL one for every kind of point-to-point channel. `TorchTransport` runs the
verbs on them. gloo keeps channels and worlds apart by tags on one world. It moves CUDA tensors in collectives but not
in send and receive, so these go through pinned host memory.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from seqloom.compat import inherit_timeout
from seqloom.dist.transport import Handle, Message, P2PChannel, P2PDirection, P2PTensor, check_peer
from seqloom.errors import SeqloomError
from seqloom.plan import GroupFamily

TAGS = {P2PDirection.FORWARD: 1, P2PDirection.BACKWARD: 2}
"""gloo's tags of messages; tensors of `exchange` have 0."""
BACKGROUND_TAG = 3
"""gloo's tag of tensors on the background world."""
Copy = tuple[torch.Tensor, torch.Tensor]
_created: weakref.WeakSet[Communicators] = weakref.WeakSet()


class Communicators:
    """All process groups of a job.

    Attributes:
        family: the blocks that have a communicator.
        world: the group of all ranks of the family; None in a process outside it.
        background: with NCCL a second group of the same ranks, else `world`.
        groups: {block of more than one rank: its process group, None where this rank is not a member}, by size and
            then by start.
        rank: this process.
        has_nccl: whether CUDA tensors travel by NCCL.
    """

    def __init__(self, family: GroupFamily) -> None:
        """Create a process group for every block, in the family's order.

        Every process of the job calls this, whichever blocks it is in: torch creates a group with the help of all.
        Blocks of one rank need no group, so a rank ends up in at most `family.budget` of them.

        Args:
            family: the blocks. If it has fewer ranks than the job, the first ones are its world.
        """
        if not dist.is_initialized():
            raise SeqloomError("torch.distributed is not initialised; call torch.distributed.init_process_group first")
        size, everyone = dist.get_world_size(), range(family.ranks)
        if family.ranks > size:
            raise SeqloomError(f"a family of {family.ranks} ranks in a job of {size}; make it for at most {size} ranks")
        self.family, self.rank, self.has_nccl = family, dist.get_rank(), "nccl" in dist.get_backend_config()
        self.world = _new_group(everyone) if family.ranks < size else dist.group.WORLD
        self.groups = {tuple(block): _new_group(block) for block in family.communicators()}
        self._p2p_groups: dict[tuple[P2PDirection, bool], dist.ProcessGroup | None] = {}
        self.background = self.world
        if self.has_nccl:
            # Groups, not yet communicators: NCCL creates one for every pair of ranks at their first message. It runs
            # the messages of a pair in a group one after the other, so each direction upward and downward has its own.
            keys = [(direction, upward) for direction in P2PDirection for upward in (True, False)]
            self._p2p_groups = {key: _new_group(everyone) for key in keys}
            self.background = _new_group(everyone)
        _created.add(self)

    def group_of(self, block: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return the process group of a block; None for a block of one rank, which needs none."""
        group = self.groups.get(block)
        if group is None:
            check_block(block, self.rank, self.family.ranks, self.family)
            if len(block) > 1:
                raise SeqloomError(f"block {block}: these communicators are closed; create new ones")
        return group

    def p2p_group(self, direction: P2PDirection, *, upward: bool) -> dist.ProcessGroup | None:
        """Return the process group of messages in a direction, to a higher rank or a lower one."""
        return self._p2p_groups.get((direction, upward), self.world)

    def warm_up(self) -> None:
        """Run one small verb on every communicator of this rank, so that the first step finds open connections."""
        if self.world is None:
            return
        token = torch.ones(1, device="cuda" if self.has_nccl else "cpu")
        for world in dict.fromkeys((self.world, self.background)):
            dist.all_reduce(token, group=world)  # the first verb of a world must involve all its ranks
        if self.family.ranks > 1:
            following, previous = ((self.rank + step) % self.family.ranks for step in (1, -1))
            ring = [
                dist.P2POp(dist.isend, token, following, self.world),
                dist.P2POp(dist.irecv, torch.empty_like(token), previous, self.world),
            ]
            for work in dist.batch_isend_irecv(ring):
                work.wait()
        for group in self.groups.values():
            if group is not None:
                dist.all_reduce(token, group=group)

    def close(self) -> None:
        """Destroy the groups that were created here; torch's own world stays."""
        created = [*self.groups.values(), *self._p2p_groups.values()]
        created += {self.world, self.background} - {dist.group.WORLD}
        for group in created:
            if group is not None:
                dist.destroy_process_group(group)
        self.drop_references()

    def drop_references(self) -> None:
        """Forget all groups, so that those end which torch has destroyed."""
        self.world = self.background = None
        self.groups, self._p2p_groups = {}, {}


@atexit.register
def _drop_all_references() -> None:
    """Let groups that the job has destroyed end before the interpreter does.

    A thread of theirs that outlives it and then frees a tensor aborts the process.
    """
    for each in list(_created):
        each.drop_references()


def _new_group(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """Create a process group; return None where this process is not a member."""
    group = dist.new_group(list(ranks))
    if not isinstance(group, dist.ProcessGroup):
        return None
    inherit_timeout(group)
    return group


def check_block(block: tuple[int, ...], rank: int, ranks: int, family: GroupFamily | None) -> None:
    """Refuse a block without `rank`, one that is not ascending, and one outside the family.

    Args:
        family: the legal blocks; None: all.
    """
    ascending = all(low < high for low, high in pairwise(block))
    if rank not in block or not ascending or block[0] < 0 or block[-1] >= ranks:
        raise SeqloomError(
            f"block {block} called by rank {rank} of {ranks}: a block is an ascending run of ranks, the "
            "caller in it; use a transport that reaches all of them"
        )
    size = len(block)
    if family is not None and (block[-1] - block[0] != size - 1 or not family.contains(block[0], size)):
        raise SeqloomError(
            f"block {block} is not in the family of {family.ranks} ranks with sizes {family.sizes}; "
            f"the nearest is {tuple(family.nearest(block[0], size))}"
        )


class TorchTransport:
    """One process of a torch.distributed job as a `Transport`, whose methods it has."""

    def __init__(self, communicators: Communicators, *, background: bool = False) -> None:
        """Use these communicators. With NCCL the process must have set its CUDA device.

        Args:
            background: whether `exchange` is on the second world communicator.
        """
        if communicators.world is None:
            raise SeqloomError(
                f"rank {communicators.rank} is outside the family of {communicators.family.ranks} ranks; "
                "make a larger family, or no transport here"
            )
        self._communicators, self._background = communicators, background
        self._stages_on_host = not communicators.has_nccl
        self._connected: set[P2PChannel] = set()

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
        """True with NCCL."""
        return not self._stages_on_host

    @property
    def background(self) -> TorchTransport:
        """This transport on the second world communicator."""
        return TorchTransport(self._communicators, background=True)

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        block: Sequence[int],
    ) -> None:
        """Call all_to_all_single."""
        group = self._communicators.group_of(tuple(block))
        if group is None:
            output.copy_(input)
        else:
            dist.all_to_all_single(output, input, list(output_sizes), list(input_sizes), group=group)

    def exchange(self, sends: Sequence[P2PTensor], receives: Sequence[P2PTensor]) -> Handle:
        """Call batch_isend_irecv, without empty tensors; copy what this rank sends to itself."""
        self._copy_own(sends, receives)
        outgoing = [each for each in sends if each.peer != self.rank and each.tensor.numel()]
        incoming = [each for each in receives if each.peer != self.rank and each.tensor.numel()]
        copies: list[Copy] = []
        if self._stages_on_host:
            outgoing = _to_host(outgoing)
            staged = [each._replace(tensor=_host_like(each.tensor)) for each in incoming]
            copies = [(target.tensor, host.tensor) for target, host in zip(incoming, staged, strict=True)]
            incoming = staged
        world = self._communicators.background if self._background else self._communicators.world
        tag = BACKGROUND_TAG if self._background else 0
        # Receives first: gloo grants a peer its send on the connection that carries this rank's data to it, so behind
        # a send two ranks that exchange would take turns.
        batch = [dist.P2POp(dist.irecv, tensor, peer, world, tag) for peer, tensor in incoming]
        batch += [dist.P2POp(dist.isend, tensor, peer, world, tag) for peer, tensor in outgoing]
        return _Transfer(dist.batch_isend_irecv(batch) if batch else [], [], copies)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, block: Sequence[int]) -> None:
        """Call all_gather_into_tensor."""
        group = self._communicators.group_of(tuple(block))
        if group is None:
            output.copy_(input)
        else:
            flat_collective("all_gather")(output, input, group=group)

    def all_reduce(self, tensor: torch.Tensor, block: Sequence[int]) -> None:
        """Call all_reduce."""
        group = self._communicators.group_of(tuple(block))
        if group is not None:
            dist.all_reduce(tensor, group=group)

    def connect(self, channels: Iterable[P2PChannel]) -> None:
        """Send a first message on every new channel: with NCCL it creates the channel's communicator.

        Both ends wait for each other. All ranks take their channels in one order, so no cycle of waits can arise.
        """
        new = set(channels) - self._connected
        self._connected.update(new)
        if self._stages_on_host:
            return
        token = torch.zeros(1, device="cuda")
        for channel in sorted(new, key=lambda channel: (channel.peers, channel)):
            if channel.sender == self.rank:
                self.send(token, channel.receiver, channel.direction).wait()
            else:
                self.receive(token, channel.sender, channel.direction).wait()

    def send(self, tensor: torch.Tensor, peer: int, direction: P2PDirection) -> Message:
        """Call isend."""
        check_peer(self.rank, self.ranks, peer, direction)
        group = self._communicators.p2p_group(direction, upward=self.rank < peer)
        given = _to_host([P2PTensor(peer, tensor)])[0].tensor if self._stages_on_host else tensor.detach()
        return _Transfer([dist.isend(given, peer, group=group, tag=TAGS[direction])], [given], [])

    def receive(self, tensor: torch.Tensor, peer: int, direction: P2PDirection) -> Message:
        """Call irecv."""
        check_peer(self.rank, self.ranks, peer, direction)
        group = self._communicators.p2p_group(direction, upward=peer < self.rank)
        buffer = _host_like(tensor) if self._stages_on_host else tensor.detach()
        return _Transfer([dist.irecv(buffer, peer, group=group, tag=TAGS[direction])], [], [(tensor, buffer)])

    def _copy_own(self, sends: Sequence[P2PTensor], receives: Sequence[P2PTensor]) -> None:
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


@dataclass(slots=True)
class _Transfer:
    """A started exchange or message.

    Attributes:
        works: torch's handles.
        sent: buffers, alive while they travel.
        copies: (target, host buffer) of what is received; on another device, the buffer is copied at the end.
    """

    works: Sequence[dist.Work | None]
    sent: Sequence[torch.Tensor]
    copies: Sequence[Copy]

    def wait(self) -> None:
        """See `Handle.wait`."""
        for work in self.works:
            assert work is not None  # it is where this process is not in the group
            work.wait()
        for target, buffer in self.copies:
            if buffer.device != target.device:
                target.detach().copy_(buffer, non_blocking=True)
        self.works = self.sent = self.copies = ()

    def done(self) -> bool:
        """See `Message.done`; gloo cannot tell."""
        return all(work is not None and work.is_completed() for work in self.works)


def _to_host(tensors: Sequence[P2PTensor]) -> list[P2PTensor]:
    """Return the tensors with those on the GPU copied to the host, all of them in one wait for the GPU."""
    staged = []
    for peer, tensor in tensors:
        host = _host_like(tensor)
        if host is not tensor:
            host.copy_(tensor.detach(), non_blocking=True)
        staged.append(P2PTensor(peer, host))
    if any(tensor.is_cuda for _, tensor in tensors):
        torch.cuda.current_stream().synchronize()
    return staged


def _host_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a pinned tensor of the same shape for a CUDA tensor, and a CPU tensor itself."""
    if not tensor.is_cuda:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)


def flat_collective(verb: str) -> Callable[..., object]:
    """Return torch's "all_gather" or "reduce_scatter" of flat tensors, whose name differs between versions."""
    old = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}[verb]
    return getattr(dist, f"{verb}_single", None) or getattr(dist, old)
