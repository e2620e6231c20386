"""A parameter in shards: a master that is cut along its first axis, and a whole copy to compute with.

Shards of many parameters travel together, in flat buckets. A rank's share of a parameter is as long as that of the
first rank; what a last rank lacks is padding:

    parameter a, 5 rows     | a0 a1 | a2 a3 | a4 -- |
    parameter b, 3 rows     | b0    | b1    | b2    |
                              rank 0  rank 1  rank 2
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from seqloom.attention.lse import sum_dtype
from seqloom.compat import dtensor_like, inherit_timeout
from seqloom.dist import Transport
from seqloom.dist.resharding import Box
from seqloom.errors import SeqloomError
from seqloom.models.adapter import ModelAdapter
from seqloom.params.fsdp import check_job
from seqloom.params.interface import BUCKET, local, squared_norm
from seqloom.params.placement import exchange
from seqloom.plan.parameter_layout import EMBEDDING, HEAD, Weight


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
            self.master.grad = dtensor_like(cast("DTensor", self.master), found)
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


# ---- merged: runtime.copies
# What layers compute with where parameters have a free compute layout: a copy of each, as the plan of the step has
# it.
#
# The copies take the places of the module's parameters once. From plan to plan only their memory changes: whole on
# ranks
# of a stage that needs them, a slice where a team cuts them, nothing elsewhere. So no module is wrapped or made
# anew.


def weights_of(adapter: ModelAdapter) -> tuple[Weight, ...]:
    """Return the parameters of a network as layouts see them, in the order of the module.

    A parameter of which it is not known what needs it is needed everywhere: where only the layers of a model are known,
    all that is in none of them.
    """
    places: list[tuple[int | str, nn.Module]] = list(enumerate(adapter.layers))
    if adapter.embedding is not None and adapter.norm is not None:
        places += [(EMBEDDING, adapter.embedding), (HEAD, adapter.norm), (HEAD, adapter.head)]
    homes: dict[int, dict[int | str, None]] = {}
    for home, module in places:
        for parameter in module.parameters():
            homes.setdefault(id(parameter), {})[home] = None
    everywhere = dict.fromkeys((EMBEDDING, *range(len(adapter.layers)), HEAD))
    found = []
    for name, parameter in adapter.module.named_parameters():
        if not parameter.ndim:
            raise SeqloomError(f"parameter {name} has no axis, and rows are what ranks share; make it a vector of one")
        home = tuple(homes.get(id(parameter), everywhere))
        found.append(Weight(name, len(parameter), prod(parameter.shape[1:]), home, adapter.tp_axes.get(name)))
    return tuple(found)


class ComputeCopies:
    """One parameter for every weight, by number.

    Attributes:
        dtype: that layers compute in.
    """

    def __init__(self, module: nn.Module, compute: torch.dtype | None, shapes: Sequence[torch.Size]) -> None:
        """Put copies in the places of a module's parameters.

        Args:
            module: whose parameters give up their values.
            compute: dtype of the copies; None: that of the parameters. Gradients add up in float32 or wider.
            shapes: of the whole parameters.
        """
        self._shapes = shapes
        self._foreign: set[int] = set()  # copies whose memory is the masters' own, or comes and goes
        self.all: list[nn.Parameter] = []
        places = {}
        for parameter in module.parameters():
            dtype = compute or parameter.dtype
            copy = nn.Parameter(parameter.new_empty(0, dtype=dtype), requires_grad=parameter.requires_grad)
            if copy.requires_grad and dtype != sum_dtype(dtype):
                copy.grad_dtype = sum_dtype(dtype)
            places[id(parameter)] = copy
            self.all.append(copy)
        exchange(module, places)
        self.dtype = self.all[0].dtype

    def arrange(
        self, boxes: Mapping[int, Box], borrowed: Mapping[int, torch.Tensor], hollow: Collection[int] = ()
    ) -> dict[int, torch.Tensor]:
        """Give every copy the shape of its box, none to those without; return the memory to be filled.

        Args:
            boxes: what this rank computes with, by number.
            borrowed: tensors that already are what this rank computes with; those are not copied.
            hollow: copies that shall have no memory until they are given some.
        """
        room = {}
        for number, copy in enumerate(self.all):
            shape = self._shape(number, boxes.get(number))
            if number in borrowed:
                copy.data = borrowed[number].view(shape)
                continue
            if copy.shape != shape or number in self._foreign:
                copy.data = copy.new_empty(shape)
            if number in hollow:
                self.free(number)
            elif number in boxes:
                room[number] = copy.detach()
        self._foreign = {*borrowed, *hollow}
        return room

    def new(self, box: Box) -> torch.Tensor:
        """Return a tensor for some of a weight's rows, [rows, columns], beside the copies."""
        return self.all[0].new_empty((box.rows, box.columns)).detach()

    def give_memory(self, number: int) -> torch.Tensor:
        """Give a copy memory, and return that: a tensor of its own, so that autograd does not see it written."""
        copy, storage = self.all[number], self.all[number].untyped_storage()
        storage.resize_(copy.numel() * copy.element_size())
        return copy.new_empty(0).set_(storage, 0, copy.shape, copy.stride())

    def free(self, number: int) -> None:
        """Take a copy's memory; shape and graph stay."""
        self.all[number].untyped_storage().resize_(0)

    def take_gradients(self, numbers: Iterable[int]) -> dict[int, torch.Tensor]:
        """Return gradients of copies, and forget them; one that nobody has made is not there."""
        found = {}
        for number in numbers:
            gradient, self.all[number].grad = self.all[number].grad, None
            if gradient is not None:
                found[number] = gradient.contiguous()
        return found

    def held(self) -> Iterator[torch.Tensor]:
        """Yield the copies that have memory."""
        yield from (copy for copy in self.all if copy.untyped_storage().nbytes())

    def clear(self) -> None:
        """Drop all gradients."""
        for copy in self.all:
            copy.grad = None

    def _shape(self, number: int, box: Box | None) -> torch.Size:
        whole = self._shapes[number]
        if box is None:
            return torch.Size((0,))
        if box.columns == prod(whole[1:]):
            return torch.Size((box.rows, *whole[1:]))
        return torch.Size((box.rows, box.columns))


# ---- merged: runtime.masters
# What the optimiser updates where parameters have a free compute layout: an even share of the rows of every
# parameter.
#
#     weight of 10 rows on 4 ranks    rank 0: rows 0-2   rank 1: rows 3-5   rank 2: rows 6-8   rank 3: row 9
#
# These are the shards of a DTensor over all ranks, so a checkpoint of them is like that of any other layout. In a
# process
# without torch.distributed, where ranks are threads, they are plain tensors.


SHARD = "shard"


class OptimizerShards:
    """This rank's rows of all parameters, by their number in the module.

    Attributes:
        names: canonical ones; tied parameters have one.
        shapes: of whole parameters.
        parameters: this rank's rows; some have none. Gradients are put there.
        rows: the same memory as plain tensors, by number; optimisers and checkpoints write it in place.
    """

    def __init__(self, adapter: ModelAdapter, transport: Transport, device: torch.device) -> None:
        """Cut the parameters of a network, which keeps none of its values.

        Args:
            network: the same values on all ranks.
            transport: where torch.distributed runs, all ranks of the job.
            device: of the parameters.
        """
        self._transport, self._device = transport, device
        self._mesh = _mesh(transport, device) if dist.is_initialized() else None
        named = dict(adapter.module.named_parameters())
        self.names = tuple(named)
        self.shapes = tuple(each.shape for each in named.values())
        self.parameters: list[nn.Parameter] = []
        for name, parameter in named.items():
            adapter.materialize([(name, parameter)])
            values = parameter.detach().contiguous()
            own = self._share(values)
            own = own if transport.ranks == 1 else own.clone()
            master = own if self._mesh is None else distributed(own, values, self._mesh)
            self.parameters.append(nn.Parameter(master, requires_grad=parameter.requires_grad))
            parameter.data = values.new_empty(0)  # the whole and its shares are never all there at once
        self.rows = {number: local(each.detach()) for number, each in enumerate(self.parameters)}

    def trained(self) -> dict[str, nn.Parameter]:
        """Return those that want a gradient, by name."""
        return {name: each for name, each in zip(self.names, self.parameters, strict=True) if each.requires_grad}

    def put_gradients(self, sums: Mapping[int, torch.Tensor]) -> None:
        """Make sums the gradients of this rank's rows; without a sum a gradient is zero."""
        for number, master in enumerate(self.parameters):
            if not master.requires_grad:
                continue
            own = self.rows[number]
            found = sums.get(number)
            found = torch.zeros_like(own) if found is None else found.view(own.shape).to(own.dtype)
            master.grad = found if self._mesh is None else distributed(found, master, self._mesh)

    def squared_norm(self) -> torch.Tensor:
        """Return the sum of squares of the whole model's gradient, a scalar in float64, the same on all ranks."""
        squares = squared_norm(self.trained().values()).to(self._device)
        self._transport.all_reduce(squares, tuple(range(self._transport.ranks)))
        return squares

    def values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the whole value of every parameter; all ranks iterate."""
        for number, own in self.rows.items():
            yield self.names[number], self._whole(own, self.shapes[number])

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the whole gradient of every trained parameter; all ranks iterate."""
        for number, master in enumerate(self.parameters):
            if master.grad is not None:
                yield self.names[number], self._whole(local(master.grad), self.shapes[number])

    def _share(self, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows: torch's chunks, of which the last may be short or empty."""
        rows = -(-len(values) // self._transport.ranks)
        begin = min(self._transport.rank * rows, len(values))
        return values[begin : begin + rows]

    def _whole(self, own: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        ranks = self._transport.ranks
        rows = -(-shape[0] // ranks)
        mine = own.new_zeros((rows, *shape[1:]))
        mine[: len(own)] = own
        every = own.new_empty((ranks * rows, *shape[1:]))
        self._transport.all_gather(every.view(-1), mine.view(-1), tuple(range(ranks)))
        return every[: shape[0]]


def _mesh(transport: Transport, device: torch.device) -> DeviceMesh:
    """Make the row of all ranks. All processes of the job take part."""
    check_job(transport)
    mesh = DeviceMesh(device.type, torch.arange(transport.ranks), mesh_dim_names=(SHARD,))
    inherit_timeout(mesh.get_group(SHARD))
    return mesh
