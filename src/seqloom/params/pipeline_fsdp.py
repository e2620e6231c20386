"""Parameters of a pipeline: every rank holds shards of its own stages' parameters.

The ranks form a mesh, pp ranks x replicas x shards. Four stages on 16 ranks, hybrid sharding in nodes of 2:

    pp rank 0   0  1    pp rank 1   4  5    pp rank 2   8  9    pp rank 3   12 13    ranks of a row share shards,
                2  3                6  7               10 11                14 15    the rows are replicas

Once per step the ranks of a stage gather its parameters, unsharded gradients add up over all microbatches, then
`reduce` sums them along a row, both beside the layers of other stages, and `finish_gradients` over the rows. A tied
embedding is on the first and on the last stage: its gradients are summed over both, so both keep the same values.
Experts that an EP group divides are cut by expert first, and weights that a TP group divides into slices, as
`params.fsdp` says; the final norm is whole.

torch's FSDP2 does not serve here: it reduces gradients in the hooks of a backward, but weight gradients of a split
backward (W) come after the last one, when only private methods of FSDP2 could start the reduction.

Parameters travel in flat buckets. Every rank's part of a parameter has the length of rank 0's, if need be with padding:

    parameter a, 5 rows     | a0 a1 | a2 a3 | a4 -- |
    parameter b, 3 rows     | b0    | b1    | b2    |
                              rank 0  rank 1  rank 2
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import product
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from seqloom.attention.merge import sum_dtype
from seqloom.compat import dtensor_like
from seqloom.dist import Context, Transport
from seqloom.dist.streams import stream_of
from seqloom.dist.torch_transport import flat_collective, new_group
from seqloom.errors import SeqloomError
from seqloom.models.adapter import ModelAdapter
from seqloom.models.loss import CHUNK, HeadGradients
from seqloom.params.fsdp import EXPERT, REPLICA, SHARD, TENSOR, backend_of, new_mesh
from seqloom.params.host_masters import device_shard, host_copy, host_master
from seqloom.params.interface import (
    Parameters,
    ParameterShard,
    accumulate_wide,
    all_reduce_gradients,
    buckets,
    check_expert_degree,
    check_job,
    check_tensor_degree,
    device_of,
    fill_missing_gradients,
    full_tensor,
    local_tensor,
    reduce_dtype,
    row_shard,
    shard_rows,
    squared_norm,
    trained_parameters,
)
from seqloom.params.placement import (
    Placement,
    drop_other_stages,
    parameters_of,
    parameters_of_stages,
    replace_parameters,
)
from seqloom.params.tp_slices import TPSlice, tp_slices
from seqloom.plan import LayerRange, Plan
from seqloom.plan.parameter_layout import ROWS

PP_RANK = "pp_rank"


class Kind(StrEnum):
    """By which ranks a parameter is sharded."""

    WHOLE = "whole"  # all of a shard group
    DIVIDED = "divided"  # those with the same experts, or the same slice of a weight
    REPLICATED = "replicated"  # those with the same slices, of a parameter that no TP group divides


class PipelineFSDP(Parameters):
    """The parameters of this rank's stages. Every rank of the job makes one; what several ranks hold is the same there.

    Master weights are the given parameters, in their dtype (float32 for training), sharded along their first axis.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        transport: Transport,
        placement: Placement,
        *,
        param_dtype: torch.dtype | None = None,
        offload_optimiser: bool = False,
        chunk: int = CHUNK,
    ) -> None:
        """Shard the model in place: parameters of other ranks' stages go to "meta".

        Args:
            adapter: of the model, on the device where it will run, or with `deferred` values, read one at a time;
                parameters that this rank does not hold may be on "meta".
            transport: over torch.distributed; all its ranks.
            param_dtype: dtype of parameters and activations in the model; None: that of the master weights. Gradients
                are summed in float32 or wider.
            offload_optimiser: keep master weights in host memory.
        """
        check_job(transport)
        ranks = placement.mesh(transport.ranks)
        self._pp_rank = placement.pp_rank_of(transport.rank)
        self._stages = placement.layer_ranges(self._pp_rank)
        by_pp_rank = [parameters_of_stages(adapter, placement.layer_ranges(index)) for index in range(len(ranks))]
        held = by_pp_rank[self._pp_rank]
        parameters = list(held.values())
        device = device_of(adapter, parameters)
        reduce_dtype(parameters)
        super().__init__(adapter, param_dtype or parameters[0].dtype, device, chunk, HeadGradients())
        del parameters
        self._mesh = new_mesh(device, ranks, (PP_RANK, REPLICA, SHARD))
        self._expert, self._tensor, self._divided_mesh = placement.expert, placement.tensor, self._mesh
        adapter.check_expert_degree(self._expert)
        self._part = TENSOR if self._tensor > 1 else EXPERT  # axis of the mesh of divided parameters
        if self._expert * self._tensor > 1:
            axes = (PP_RANK, REPLICA, self._part, SHARD)
            self._divided_mesh = new_mesh(device, placement.divided_mesh(transport.ranks), axes)
        cuts = self._cuts(adapter)
        self._holders = {
            name: [index for index, names in enumerate(by_pp_rank) if name in names]
            for name, _ in adapter.module.named_parameters()
        }
        self._tied_groups = _tied_groups(self._holders, ranks, device)
        drop_other_stages(adapter, self._stages)
        self._sharded: dict[str, ShardedParameter] = {}
        for name, parameter in held.items():
            kind, cut = cuts.get(name, (Kind.WHOLE, None))
            mesh = self._mesh if kind == Kind.WHOLE else self._divided_mesh
            mesh = mesh[self._part, SHARD] if kind == Kind.DIVIDED else mesh[SHARD]
            read = partial(adapter.read_rows, name, parameter)
            place = ShardPlace(kind, cut, mesh)
            self._sharded[name] = ShardedParameter.of(
                parameter, read, place, param_dtype, offload_master=offload_optimiser
            )
            parameter.data = parameter.data.new_empty(0)  # so that unsharded values exist one parameter at a time
        replace_parameters(adapter.module, {id(held[name]): each.copy for name, each in self._sharded.items()})
        self._by_stage = {
            layers: [self._sharded[name] for name in parameters_of(adapter, layers)] for layers in self._stages
        }
        self._unsharded: set[LayerRange] = set()
        self._gathered: dict[LayerRange, torch.Event] = {}  # when the gather of a stage is done, before its first use
        self._unreduced: set[LayerRange] = set()  # have run since the last reduction

    def _cuts(self, adapter: ModelAdapter) -> dict[str, tuple[Kind, TPSlice | None]]:
        """Return how parameters are sharded that not all ranks of a shard group share, by name."""
        if self._expert > 1:
            return {name: (Kind.DIVIDED, None) for name in adapter.expert_parameters}
        if self._tensor == 1:
            return {}
        index = self._divided_mesh.get_local_rank(TENSOR)
        slices = tp_slices(adapter, adapter.layers, index, self._tensor)
        names = {id(parameter): name for name, parameter in adapter.module.named_parameters()}
        every = (names[id(each)] for layer in adapter.layers for each in layer.parameters())
        cuts: dict[str, tuple[Kind, TPSlice | None]] = {name: (Kind.REPLICATED, None) for name in every}
        cuts.update((name, (Kind.DIVIDED, own)) for name, own in slices.items())
        return cuts

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        """See `Parameters.shard_ranks`. Ranks that divide experts run the same rounds in any case."""
        mesh = self._mesh[SHARD] if self._expert == 1 else self._divided_mesh[EXPERT, SHARD]
        return tuple(sorted(mesh.mesh.flatten().tolist()))

    def prefetch(self, plan: Plan) -> None:
        """Refuse a plan that divides experts or weights in another way."""
        super().prefetch(plan)
        check_expert_degree(plan, self._expert)
        check_tensor_degree(plan, self._tensor)

    def unshard(self, layers: LayerRange) -> None:
        """See `Parameters.unshard`."""
        self._check(layers)
        if layers in self._unsharded:
            return
        allocated = self._in_use()
        self._unsharded.add(layers)
        wanted = [each for each in self._by_stage[layers] if id(each) not in allocated and not each.is_master]
        for each in wanted:
            each.allocate()
        with self._on_own_stream() as stream:
            for bucket in self._buckets(wanted):
                _all_gather(bucket)
            if stream is not None:
                self._gathered[layers] = stream.record_event()

    def forward(
        self, layers: LayerRange, inputs: torch.Tensor, labels: torch.Tensor | None, context: Context
    ) -> torch.Tensor:
        """See `Parameters.forward`."""
        self.unshard(layers)
        self._wait_gathered(layers)
        if torch.is_grad_enabled():
            self._unreduced.add(layers)
        return super().forward(layers, inputs, labels, context)

    def reduce(self, layers: LayerRange) -> None:
        """See `Parameters.reduce`. Adds to what was reduced before: a plan may reduce a stage several times."""
        self._check(layers)
        self._unreduced.discard(layers)
        for bucket in self._buckets(each for each in self._by_stage[layers] if each.copy.requires_grad):
            if bucket[0].ranks == 1:
                for each in bucket:
                    each.add_gradient(each.pop_gradient())
                continue
            packed = _pack_gradients(bucket)
            with self._on_own_stream() as stream:
                _reduce_scatter(bucket, packed)
                if stream is not None:
                    packed.record_stream(stream)

    def reshard(self, layers: LayerRange) -> None:
        """See `Parameters.reshard`."""
        self._check(layers)
        self._wait_gathered(layers)
        self._unsharded.discard(layers)
        needed = self._in_use()
        for each in self._by_stage[layers]:
            if id(each) not in needed:
                each.free()

    def finish_gradients(self) -> None:
        """See `Parameters.finish_gradients`. A tied parameter gets its gradient from all stages that hold it."""
        for layers in self._stages:
            if layers in self._unreduced:  # the plan has no REDUCE for it
                self.reduce(layers)
        stream = stream_of(self._device, "parameters")
        if stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(stream)
        shards = self.device_shards()
        for kind in Kind:
            own = [each for name, each in shards.items() if self._sharded[name].kind == kind]
            mesh = self._mesh if kind == Kind.WHOLE else self._divided_mesh
            for axis in (TENSOR, REPLICA) if kind == Kind.REPLICATED else (REPLICA,):
                if own and mesh[axis].size() > 1:
                    group = mesh.get_group(axis)
                    all_reduce_gradients(own, lambda flat, group=group: dist.all_reduce(flat, group=group))
        fill_missing_gradients(shards.values())
        for holders, group in self._tied_groups.items():
            tied = [each for name, each in shards.items() if tuple(self._holders[name]) == holders]
            all_reduce_gradients(tied, lambda flat, group=group: dist.all_reduce(flat, group=group))

    def gradient_norm(self) -> torch.Tensor:
        """See `Parameters.gradient_norm`. A parameter of several pp ranks is counted on the first."""
        shards = self.device_shards()
        counted = {name: each for name, each in shards.items() if self._holders[name][0] == self._pp_rank}
        parts = [[each for name, each in counted.items() if self._sharded[name].kind == kind] for kind in Kind]
        squares = torch.stack([squared_norm(each, self._device) for each in parts])  # whole, divided, replicated
        dist.all_reduce(squares[:1], group=self._mesh.get_group(SHARD))
        if self._divided_mesh is not self._mesh:
            dist.all_reduce(squares[1:], group=self._divided_mesh.get_group(SHARD))
            dist.all_reduce(squares[1:2], group=self._divided_mesh.get_group(self._part))
        dist.all_reduce(squares, group=self._mesh.get_group(PP_RANK))
        return squares.sum().sqrt()

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Parameters.full_gradients`; the first pp rank that holds a parameter broadcasts it."""
        for name, parameter in trained_parameters(self._adapter.module).items():
            held = self._sharded.get(name)
            shape = parameter.shape if held is None else held.sharded.shape
            yield name, self._broadcast(name, shape, None if held is None else held.sharded.grad)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Parameters.full_parameters`; the first pp rank that holds a parameter broadcasts it."""
        for name, parameter in self._adapter.module.named_parameters():
            held = self._sharded.get(name)
            shape = parameter.shape if held is None else held.sharded.shape
            yield name, self._broadcast(name, shape, None if held is None else held.master_values(self._device))

    def shards(self) -> Iterator[tuple[str, ParameterShard]]:
        """See `Parameters.shards`; the first replica of the first pp rank that holds a parameter has them."""
        dtype = next(iter(self._sharded.values())).master.dtype
        for name, parameter in self._adapter.module.named_parameters():
            held = self._sharded.get(name)
            if held is None or self._holders[name][0] != self._pp_rank:
                shape = parameter.shape if held is None else held.sharded.shape
                yield name, ParameterShard(shape, dtype, (), None)
                continue
            mesh = self._mesh if held.kind == Kind.WHOLE else self._divided_mesh
            sends = mesh[REPLICA].get_local_rank() == 0
            if held.kind == Kind.REPLICATED:
                sends = sends and mesh[TENSOR].get_local_rank() == 0
            yield name, ParameterShard.of(held.master_values(self._device), sends=sends)

    def master_weights(self) -> dict[str, nn.Parameter]:
        """See `Parameters.master_weights`; all of them are DTensors, of this rank's stages."""
        return {name: each.master for name, each in self._sharded.items() if each.master.requires_grad}

    def device_shards(self) -> dict[str, nn.Parameter]:
        """See `Parameters.device_shards`."""
        return {name: each.sharded for name, each in self._sharded.items() if each.sharded.requires_grad}

    def compute_weights(self) -> Iterator[torch.Tensor]:
        """See `Parameters.compute_weights`."""
        yield from (each.copy for each in self._sharded.values())

    def zero_grad(self) -> None:
        """See `Parameters.zero_grad`. Frees the copies too: the optimiser may have changed the master weights."""
        super().zero_grad()
        self._unreduced.clear()
        for each in self._sharded.values():
            each.copy.grad = None
        for layers in tuple(self._unsharded):
            self.reshard(layers)

    def _broadcast(self, name: str, shape: torch.Size, held: torch.Tensor | None) -> torch.Tensor:
        """Return a parameter's unsharded tensor on all ranks, from the first pp rank that holds it."""
        source = self._holders[name][0]
        if source == self._pp_rank:
            full = full_tensor(cast("DTensor", held)).contiguous()
        else:
            dtype = next(iter(self._sharded.values())).master.dtype
            full = torch.empty(shape, dtype=dtype, device=self._device)
        column = self._mesh[PP_RANK]
        if column.size() > 1:
            dist.broadcast(full, int(column.mesh[source]), group=column.get_group())
        return full

    def _wait_gathered(self, layers: LayerRange) -> None:
        """Have the layers' stream wait for the gather of a stage, once."""
        event = self._gathered.pop(layers, None)
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    @contextmanager
    def _on_own_stream(self) -> Iterator[torch.cuda.Stream | None]:
        """Run collectives beside the layers, on a GPU: behind what the layers' stream was given so far.

        Memory that is allocated inside is used again only behind that, too.
        """
        stream = stream_of(self._device, "parameters")
        if stream is None:
            yield None
            return
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield stream

    def _buckets(self, parameters: Iterable[ShardedParameter]) -> Iterator[list[ShardedParameter]]:
        """Yield parameters that travel together, those that other ranks have shards of apart."""
        every = list(parameters)
        for kinds in ((Kind.WHOLE,), (Kind.DIVIDED, Kind.REPLICATED)):
            yield from buckets([each for each in every if each.kind in kinds], lambda each: each.copy)

    def _in_use(self) -> set[int]:
        """Ids of the parameters of unsharded stages."""
        return {id(each) for layers in self._unsharded for each in self._by_stage[layers]}

    def _check(self, layers: LayerRange) -> None:
        if layers not in self._by_stage:
            mine = ", ".join(f"{each.first} to {each.stop - 1}" for each in self._stages)
            raise SeqloomError(
                f"layers {layers.first} to {layers.stop - 1} of {layers.model_layers} asked of a rank that holds the "
                f"stages with layers {mine}; plan with the stages that the parameters were placed for"
            )


def _tied_groups(
    holders: dict[str, list[int]], ranks: torch.Tensor, device: torch.device
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Create process groups of ranks with the same rows of a parameter of several pp ranks; return those of this rank.

    All processes of the job call it and create the groups in one order.
    """
    found: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for pp_ranks in sorted({tuple(each) for each in holders.values() if len(each) > 1}):
        for replica, shard in product(*map(range, ranks.shape[1:])):
            group = new_group([int(ranks[pp_rank, replica, shard]) for pp_rank in pp_ranks], backend_of(device))
            if group is not None:
                found[pp_ranks] = group
    return found


class ShardPlace(NamedTuple):
    """How a parameter is sharded: over the last axis of a mesh; another one before that divides it."""

    kind: Kind
    cut: TPSlice | None  # of a weight that a TP group divides
    mesh: DeviceMesh


@dataclass(frozen=True, slots=True, eq=False)
class ShardedParameter:
    """A parameter as one rank has it.

    Attributes:
        master: what the optimiser updates: a DTensor, of which this rank has some rows.
        sharded: what the device has of it, with its gradient: the master, or its rows in the dtype of layers where the
            master is in host memory.
        copy: the unsharded parameter, in the dtype that layers compute in; without memory while its stage is sharded.
            Its gradient adds up in float32 or wider.
        shard: this rank's rows on the device: asking a DTensor for them takes longer than a small layer.
        group: the ranks that have shards of the copy.
        kind: which ranks those are; a divided copy is that of some experts, or a slice of a weight.
    """

    master: nn.Parameter
    sharded: nn.Parameter
    copy: nn.Parameter
    shard: torch.Tensor
    group: dist.ProcessGroup
    kind: Kind

    @classmethod
    def of(
        cls,
        parameter: nn.Parameter,
        read: Callable[[slice], torch.Tensor],
        place: ShardPlace,
        dtype: torch.dtype | None,
        *,
        offload_master: bool = False,
    ) -> ShardedParameter:
        """Shard a parameter.

        Args:
            read: returns rows of its values.
            dtype: of the copy; None: that of the parameter.
            offload_master: keep the master in host memory.
        """
        kind, cut, mesh = place
        length, start, trained = len(parameter), 0, parameter.requires_grad
        by_columns = cut is not None and cut.axis != ROWS
        if kind == Kind.DIVIDED and not by_columns:
            length //= mesh.size(0)
            start = mesh.get_local_rank(0) * length
        ranks, index = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
        rows = shard_rows(length, index, ranks)
        shard = read(slice(start + rows.start, start + rows.stop))
        shard = cut.of(shard).contiguous() if cut is not None and by_columns else shard
        master_dtype, dtype = shard.dtype, dtype or shard.dtype
        host = host_copy(shard) if offload_master else None
        shard = shard if host is None else shard.to(dtype)
        shape = parameter.shape
        sharded = row_shard(shard, shape, mesh) if cut is None else cut.whole(shard, shape, mesh)
        sharded = device_shard(sharded, requires_grad=trained, master_dtype=master_dtype)
        master = sharded if host is None else host_master(host, sharded)
        if ranks == 1 and dtype == shard.dtype:
            full = shard  # the same memory: an update by the optimiser needs no copy
        else:
            full = shard.new_empty((length, *shard.shape[1:]), dtype=dtype)
            full.untyped_storage().resize_(0)
        copy = accumulate_wide(nn.Parameter(full, requires_grad=trained))
        return cls(master, sharded, copy, shard, mesh.get_group(mesh.ndim - 1), kind)

    @property
    def ranks(self) -> int:
        """That have shards of the copy."""
        return self.group.size()

    def master_values(self, device: torch.device) -> torch.Tensor:
        """Return the master's rows on the device, as a DTensor."""
        return dtensor_like(cast("DTensor", self.sharded), local_tensor(self.master).detach().to(device))

    @property
    def padded_size(self) -> int:
        """Elements of a rank's rows, padding included."""
        return -(-len(self.copy) // self.ranks) * (self.copy.numel() // len(self.copy))

    @property
    def is_master(self) -> bool:
        """Whether the copy shares the master's memory."""
        return self.copy.data_ptr() == self.shard.data_ptr() != 0

    def allocate(self) -> None:
        """Allocate the copy's memory."""
        self.copy.untyped_storage().resize_(self.copy.numel() * self.copy.element_size())

    def free(self) -> None:
        """Free the copy's memory."""
        if not self.is_master:
            self.copy.untyped_storage().resize_(0)

    def pop_gradient(self) -> torch.Tensor | None:
        """Return the copy's gradient, unsharded and flat, and drop it."""
        gradient, self.copy.grad = self.copy.grad, None
        return None if gradient is None else gradient.reshape(-1)

    @torch.no_grad()
    def add_gradient(self, flat: torch.Tensor | None) -> None:
        """Add the first elements of a flat tensor, without its padding, to the master's gradient; None: zero."""
        if flat is None:
            return
        shard = self.shard
        gradient = flat[: shard.numel()].view(shard.shape).to(self.sharded.grad_dtype)
        if self.sharded.grad is None:
            self.sharded.grad = dtensor_like(cast("DTensor", self.sharded), gradient)
        else:
            local_tensor(self.sharded.grad).add_(gradient)


@torch.no_grad()
def _all_gather(bucket: Sequence[ShardedParameter]) -> None:
    """Fill the allocated copies from the shards of all ranks."""
    ranks = bucket[0].ranks
    if ranks == 1:
        for each in bucket:
            each.copy.copy_(each.shard)
        return
    sizes = [each.padded_size for each in bucket]
    packed = bucket[0].copy.new_empty(sum(sizes))
    for each, part in zip(bucket, packed.split(sizes), strict=True):
        part[: each.shard.numel()].copy_(each.shard.reshape(-1))
    gathered = packed.new_empty(ranks * len(packed))
    flat_collective("all_gather")(gathered, packed, group=bucket[0].group)
    for each, parts in zip(bucket, gathered.view(ranks, -1).split(sizes, 1), strict=True):
        for full, shards in _without_padding(each.copy.detach().view(-1), parts):
            full.copy_(shards)


@torch.no_grad()
def _pack_gradients(bucket: Sequence[ShardedParameter]) -> torch.Tensor:
    """Take the gradients of the copies: [ranks, padded sizes]; a missing one counts as zero."""
    sizes, ranks = [each.padded_size for each in bucket], bucket[0].ranks
    packed = bucket[0].copy.new_zeros((ranks, sum(sizes)), dtype=sum_dtype(bucket[0].copy.dtype))
    for each, parts in zip(bucket, packed.split(sizes, 1), strict=True):
        gradient = each.pop_gradient()
        if gradient is not None:
            for full, shards in _without_padding(gradient, parts):
                shards.copy_(full)
    return packed


@torch.no_grad()
def _reduce_scatter(bucket: Sequence[ShardedParameter], packed: torch.Tensor) -> None:
    """Add the sum of all ranks' packed gradients to those of the masters."""
    sizes, summed = [each.padded_size for each in bucket], packed.new_empty(packed.shape[1])
    flat_collective("reduce_scatter")(summed, packed.view(-1), group=bucket[0].group)
    for each, part in zip(bucket, summed.split(sizes), strict=True):
        each.add_gradient(part)


def _without_padding(full: torch.Tensor, parts: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the corresponding elements of a flat tensor and of its parts [ranks, padded size]: full parts, the rest."""
    size = parts.shape[1]
    count = len(full) // size
    yield full[: count * size].view(count, size), parts[:count]
    if count * size < len(full):
        yield full[count * size :], parts[count, : len(full) - count * size]
