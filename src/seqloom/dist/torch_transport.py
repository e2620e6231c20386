"""The transport of real jobs: torch.distributed, with NCCL or gloo.

`Communicators` creates every process group before step 1, in one order on all ranks: one for each block of the group
family, and with NCCL a world for every channel of `exchange`. `TorchTransport` runs the verbs on them. gloo keeps
channels apart by tags on one world. It moves CUDA tensors in collectives but not in send and receive, so these go
through pinned host memory.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist

from seqloom.compat import inherit_timeout
from seqloom.dist.transport import Channel, Exchange, P2PTensor, check_payload, gather_by_exchange
from seqloom.errors import SeqloomError
from seqloom.plan import GroupFamily

Copy = tuple[torch.Tensor, torch.Tensor]
_created: weakref.WeakSet[Communicators] = weakref.WeakSet()


class Communicators:
    """All process groups of a job.

    Attributes:
        family: the blocks that have a communicator.
        channels: the group of all ranks of the family, by channel; None in a process outside it. With NCCL a channel
            has one of its own, and those that were not asked for have none.
        groups: {block of more than one rank: its process group, None where this rank is not a member}, by size and
            then by start.
        rank: this process.
        has_nccl: whether CUDA tensors travel by NCCL.
    """

    def __init__(self, family: GroupFamily, channels: Iterable[Channel] = Channel) -> None:
        """Create a process group for every block, in the family's order, and for every channel.

        Every process of the job calls this, whichever blocks it is in: torch creates a group with the help of all.
        Blocks of one rank need no group, so a rank ends up in at most `family.budget` of them.

        Args:
            family: the blocks. If it has fewer ranks than the job, the first ones are its world.
            channels: that will be used, beside that of the layers.
        """
        if not dist.is_initialized():
            raise SeqloomError("torch.distributed is not initialised; call torch.distributed.init_process_group first")
        size, everyone = dist.get_world_size(), range(family.ranks)
        if family.ranks > size:
            raise SeqloomError(f"a family of {family.ranks} ranks in a job of {size}; make it for at most {size} ranks")
        self.family, self.rank, self.has_nccl = family, dist.get_rank(), "nccl" in dist.get_backend_config()
        make = partial(new_group, backend="nccl" if self.has_nccl else None)
        world = make(everyone) if family.ranks < size else dist.group.WORLD
        self.groups = {tuple(block): make(block) for block in family.communicators()}
        self.channels: dict[Channel, dist.ProcessGroup | None] = {Channel.LAYERS: world}
        for channel in sorted(set(channels) - {Channel.LAYERS}):
            self.channels[channel] = make(everyone) if self.has_nccl else world
        _created.add(self)

    @property
    def world(self) -> dist.ProcessGroup | None:
        """The group of all ranks of the family; None in a process outside it."""
        return self.channels.get(Channel.LAYERS)

    @property
    def count(self) -> int:
        """Communicators that this process is a member of."""
        return len({id(each) for each in (*self.groups.values(), *self.channels.values()) if each is not None})

    @property
    def note(self) -> str | None:
        """How many communicators of NCCL this process has, which all exist from the start; None with gloo."""
        if not self.has_nccl:
            return None
        count, worlds = self.count, len(self.channels)
        return f"{count} NCCL communicators on rank {self.rank}: {worlds} of all ranks, {count - worlds} of blocks"

    def group_of(self, block: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return the process group of a block; None for a block of one rank, which needs none."""
        group = self.groups.get(block)
        if group is None:
            check_block(block, self.rank, self.family.ranks, self.family)
            if len(block) > 1:
                raise SeqloomError(f"block {block}: these communicators are closed; create new ones")
        return group

    def warm_up(self) -> None:
        """Run one small verb on every communicator of this rank, so that the first step finds open connections."""
        if self.world is None:
            return
        token = torch.ones(1, device="cuda" if self.has_nccl else "cpu")
        following, previous = ((self.rank + step) % self.family.ranks for step in (1, -1))
        for world in dict.fromkeys(self.channels.values()):
            dist.all_reduce(token, group=world)  # the first verb of a world must involve all its ranks
            if self.family.ranks > 1:
                ring = [
                    dist.P2POp(dist.isend, token, following, world),
                    dist.P2POp(dist.irecv, torch.empty_like(token), previous, world),
                ]
                for work in dist.batch_isend_irecv(ring):
                    work.wait()
        for group in self.groups.values():
            if group is not None:
                dist.all_reduce(token, group=group)

    def close(self) -> None:
        """Destroy the groups that were created here; torch's own world stays."""
        for group in {*self.groups.values(), *self.channels.values()} - {None, dist.group.WORLD}:
            dist.destroy_process_group(group)
        self.drop_references()

    def drop_references(self) -> None:
        """Forget all groups, so that those end which torch has destroyed."""
        self.groups, self.channels = {}, {}


@atexit.register
def _drop_all_references() -> None:
    """Let groups that the job has destroyed end before the interpreter does.

    A thread of theirs that outlives it and then frees a tensor aborts the process.
    """
    for each in list(_created):
        each.drop_references()


def new_group(ranks: Sequence[int], backend: str | None) -> dist.ProcessGroup | None:
    """Create a process group with the timeout of the world; None where this process is not a member.

    All processes of the job call it. One that makes a group of itself alone does so alone: otherwise a job of n ranks
    would meet n times for n such groups.
    """
    alone = len(ranks) == 1
    if alone and ranks[0] != dist.get_rank():
        return None
    group = dist.new_group(list(ranks), backend=backend, use_local_synchronization=alone)
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

    def __init__(self, communicators: Communicators, channel: Channel = Channel.LAYERS) -> None:
        """Use these communicators, and for `exchange` that of a channel. With NCCL the process has set its device."""
        if communicators.world is None:
            raise SeqloomError(
                f"rank {communicators.rank} is outside the family of {communicators.family.ranks} ranks; "
                "make a larger family, or no transport here"
            )
        self._communicators, self._channel = communicators, channel
        self._stages_on_host = not communicators.has_nccl

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

    def on(self, channel: Channel) -> TorchTransport:
        """Return this transport on another channel."""
        if channel not in self._communicators.channels:
            raise SeqloomError(f"no communicator for {channel.name}; name it when the Communicators are created")
        return TorchTransport(self._communicators, channel)

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

    def exchange(self, sends: Sequence[P2PTensor], receives: Sequence[P2PTensor]) -> Exchange:
        """Call batch_isend_irecv, without empty tensors; copy what this rank sends to itself."""
        copied = self._copy_own(sends, receives)
        outgoing = [each for each in sends if each.peer != self.rank and each.tensor.numel()]
        incoming = [each for each in receives if each.peer != self.rank and each.tensor.numel()]
        copies: list[Copy] = []
        if self._stages_on_host:
            outgoing = _to_host(outgoing)
            staged = [each._replace(tensor=_host_like(each.tensor)) for each in incoming]
            copies = [(target.tensor, host.tensor) for target, host in zip(incoming, staged, strict=True)]
            incoming = staged
        world, tag = self._communicators.channels[self._channel], int(self._channel)
        # Receives first: gloo grants a peer its send on the connection that carries this rank's data to it, so behind
        # a send two ranks that exchange would take turns.
        batch = [dist.P2POp(dist.irecv, tensor, peer, world, tag) for peer, tensor in incoming]
        batch += [dist.P2POp(dist.isend, tensor, peer, world, tag) for peer, tensor in outgoing]
        sent = [each.tensor for each in (*sends, *outgoing)]
        return _Transfer(dist.batch_isend_irecv(batch) if batch else [], sent, copies, copied)

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, block: Sequence[int], sizes: Sequence[int] | None = None
    ) -> None:
        """Call all_gather_into_tensor, or all_gather of unequal inputs.

        gloo has no such verb, and NCCL none for empty inputs: there ranks send theirs to all others.
        """
        group = self._communicators.group_of(tuple(block))
        if group is None:
            output.copy_(input)
        elif sizes is None or len(set(sizes)) == 1:
            flat_collective("all_gather")(output, input, group=group)
        elif self._communicators.has_nccl and min(sizes):
            dist.all_gather(list(output.view(-1).split(list(sizes))), input.view(-1), group=group)
        else:
            gather_by_exchange(self, output, input, sizes, block)

    def all_reduce(self, tensor: torch.Tensor, block: Sequence[int]) -> None:
        """Call all_reduce."""
        group = self._communicators.group_of(tuple(block))
        if group is not None:
            dist.all_reduce(tensor, group=group)

    def broadcast(self, payload: bytes | None, *, root: int = 0) -> bytes:
        """Call broadcast for the size and then the bytes; by gloo where the job has it: that waits for no GPU."""
        check_payload(self.rank, payload, root)
        world = self._communicators.world
        device = "cpu" if "gloo" in dist.get_backend_config(world) else "cuda"
        size = torch.tensor([len(payload or b"")], device=device)
        dist.broadcast(size, root, group=world)
        content = torch.empty(int(size), dtype=torch.uint8, device=device)
        if payload:
            content.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        if len(content):
            dist.broadcast(content, root, group=world)
        return bytes(content.cpu().numpy())

    def _copy_own(self, sends: Sequence[P2PTensor], receives: Sequence[P2PTensor]) -> torch.cuda.Event | None:
        """Copy what this rank sends to itself; return when that is done, None if it is."""
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
        if not any(each.is_cuda for each in taken):
            return None
        copied = torch.cuda.Event()
        copied.record()
        return copied


@dataclass(slots=True)
class _Transfer:
    """A started exchange.

    Attributes:
        works: torch's handles.
        sent: buffers, alive while they travel.
        copies: (target, host buffer) of what is received; on another device, the buffer is copied at the end.
        copied: when this rank has what it sent to itself, in the order of the stream that started the exchange; None:
            at once. Another stream may wait for the exchange, and no handle of torch's covers these copies.
    """

    works: Sequence[dist.Work | None]
    sent: Sequence[torch.Tensor]
    copies: Sequence[Copy]
    copied: torch.cuda.Event | None

    def wait(self) -> None:
        """See `Handle.wait`."""
        for work in self.works:
            assert work is not None  # it is where this process is not in the group
            work.wait()
        if self.copied is not None:
            self.copied.wait()
        for target, buffer in self.copies:
            if buffer.device != target.device:
                target.detach().copy_(buffer, non_blocking=True)
        self.works = self.sent = self.copies = ()

    def done(self) -> bool:
        """See `Exchange.done`; gloo cannot tell."""
        copied = self.copied is None or self.copied.query()
        return copied and all(work is not None and work.is_completed() for work in self.works)


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
