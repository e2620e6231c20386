"""The communicators of a family of blocks: one process group for each, made once, in one order, before step 1."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from seqloom.comm.lanes import Lane
from seqloom.compat import inherit_timeout
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
        lanes: Mapping[tuple[Lane, bool], dist.ProcessGroup | None],
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
            ways = [(lane, upward) for lane in Lane for upward in (True, False)]
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

    def group_on(self, lane: Lane, *, upward: bool) -> dist.ProcessGroup | None:
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
