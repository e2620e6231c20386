"""A parameter in shards: a master that is cut along its first axis, and a whole copy to compute with.

Shards of many parameters travel together, in flat buckets. A rank's share of a parameter is as long as that of the
first rank; what a last rank lacks is padding:

    parameter a, 5 rows     | a0 a1 | a2 a3 | a4 -- |
    parameter b, 3 rows     | b0    | b1    | b2    |
                              rank 0  rank 1  rank 2
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from seqloom.attention.merge import sum_dtype
from seqloom.compat import laid_out_like
from seqloom.runtime.parameters import BUCKET, local


@dataclass(frozen=True, slots=True, eq=False)
class ShardedParameter:
    """A parameter as one rank has it.

    Attributes:
        master: what the optimiser updates: a DTensor, this rank's rows of the parameter.
        copy: the whole parameter, in the dtype that layers compute in; without memory while it is not needed.
            Its gradient adds up in float32 or wider.
        shard: this rank's rows, the master's own memory: asking a DTensor for them takes longer than small layers do.
        width: ranks that have shards.
    """

    master: nn.Parameter
    copy: nn.Parameter
    shard: torch.Tensor
    width: int

    @classmethod
    def of(cls, parameter: nn.Parameter, mesh: DeviceMesh, compute: torch.dtype | None) -> ShardedParameter:
        """Cut a parameter that is the same on all ranks of a mesh with one axis."""
        values, width = parameter.detach().contiguous(), mesh.size()
        rows = -(-len(values) // width)
        begin = min(mesh.get_local_rank() * rows, len(values))
        own = values if width == 1 else values[begin : begin + rows].clone()
        master = nn.Parameter(distributed(own, values, mesh), requires_grad=parameter.requires_grad)
        dtype = compute or values.dtype
        if width == 1 and dtype == values.dtype:
            whole = own  # the same memory: what the optimiser writes is there at once
        else:
            whole = torch.empty_like(values, dtype=dtype)
            whole.untyped_storage().resize_(0)
        copy = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        if copy.requires_grad and dtype != sum_dtype(dtype):
            copy.grad_dtype = sum_dtype(dtype)
        return cls(master, copy, own, width)

    @property
    def share(self) -> int:
        """Elements of a rank's rows, padding included."""
        return -(-len(self.copy) // self.width) * (self.copy.numel() // len(self.copy))

    @property
    def is_master(self) -> bool:
        """Whether the copy is the master's own memory, always there."""
        return self.copy.data_ptr() == self.shard.data_ptr() != 0

    def give_memory(self) -> None:
        """Make room for the copy."""
        storage = self.copy.untyped_storage()
        storage.resize_(self.copy.numel() * self.copy.element_size())

    def free(self) -> None:
        """Give the copy's memory back."""
        if not self.is_master:
            self.copy.untyped_storage().resize_(0)

    def take_gradient(self) -> torch.Tensor | None:
        """Return the copy's gradient, whole and flat, and forget it."""
        found, self.copy.grad = self.copy.grad, None
        return None if found is None else found.reshape(-1)

    def add_gradient(self, own: torch.Tensor) -> None:
        """Add to the master's gradient: the first elements of `own`, flat; the rest is padding."""
        shard = self.shard
        found = own[: shard.numel()].view(shard.shape).to(shard.dtype)
        if self.master.grad is None:
            self.master.grad = laid_out_like(cast("DTensor", self.master), found)
        else:
            local(self.master.grad).add_(found)


def buckets(kept: Iterable[ShardedParameter], most: int = BUCKET) -> Iterator[list[ShardedParameter]]:
    """Yield parameters in turn, together at most `most` elements or a single one."""
    bucket: list[ShardedParameter] = []
    size = 0
    for each in kept:
        own = each.copy.numel()
        if bucket and size + own > most:
            yield bucket
            bucket, size = [], 0
        bucket.append(each)
        size += own
    if bucket:
        yield bucket


@torch.no_grad()
def gather(bucket: Sequence[ShardedParameter], group: dist.ProcessGroup) -> None:
    """Fill the copies from the shards of all ranks; they have their memory already."""
    if bucket[0].width == 1:
        for kept in bucket:
            kept.copy.copy_(kept.shard)
        return
    sizes = [kept.share for kept in bucket]
    mine = bucket[0].copy.new_empty(sum(sizes))
    for kept, room in zip(bucket, mine.split(sizes), strict=True):
        own = kept.shard.reshape(-1)
        room[: len(own)].copy_(own)
    every = mine.new_empty(bucket[0].width * len(mine))
    _flat("all_gather")(every, mine, group=group)
    for kept, found in zip(bucket, every.view(bucket[0].width, -1).split(sizes, 1), strict=True):
        for piece, shares in _aligned(kept.copy.detach().view(-1), found):
            piece.copy_(shares)


@torch.no_grad()
def scatter(bucket: Sequence[ShardedParameter], group: dist.ProcessGroup) -> None:
    """Add the sum of all ranks' gradients to the masters', each rank its rows. One that is missing counts as zero."""
    if bucket[0].width == 1:
        for kept in bucket:
            found = kept.take_gradient()
            if found is not None:
                kept.add_gradient(found)
        return
    sizes = [kept.share for kept in bucket]
    dtype = sum_dtype(bucket[0].copy.dtype)
    rows = bucket[0].copy.new_zeros((bucket[0].width, sum(sizes)), dtype=dtype)
    for kept, room in zip(bucket, rows.split(sizes, 1), strict=True):
        gradient = kept.take_gradient()
        if gradient is not None:
            for piece, shares in _aligned(gradient, room):
                shares.copy_(piece)
    mine = rows.new_empty(sum(sizes))
    _flat("reduce_scatter")(mine, rows.view(-1), group=group)
    for kept, own in zip(bucket, mine.split(sizes), strict=True):
        kept.add_gradient(own)


def _aligned(whole: torch.Tensor, shares: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield what belongs together of a flat tensor and its shares [width, share]: full shares, then the last one."""
    share = shares.shape[1]
    full = len(whole) // share
    yield whole[: full * share].view(full, share), shares[:full]
    if full * share < len(whole):
        yield whole[full * share :], shares[full, : len(whole) - full * share]


def distributed(own: torch.Tensor, whole: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """Return the tensor like `whole` of which this rank of a mesh with one axis has the rows `own`."""
    return DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())


def _flat(verb: str) -> Callable[..., object]:
    """A collective on one flat tensor, whose name differs between torch versions."""
    old = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}[verb]
    return getattr(dist, f"{verb}_single", None) or getattr(dist, old)
