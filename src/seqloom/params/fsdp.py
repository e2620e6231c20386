"""Parameters of a single stage, sharded with torch's FSDP2: over all ranks (full), over a node (hybrid), or not (none).

The ranks form a mesh with one row per replica of the parameters and one column per shard:

    hybrid, nodes of 4      0 1 2 3     backward sums gradients along a row, every round or in the last one;
                            4 5 6 7     `finish_gradients` sums them down the columns, once per step

Rows may run different rounds, or none. The loss is scaled already, so sums are not divided by the number of ranks.

Experts that an EP group divides are cut by expert first. What a rank has of them is sharded over the ranks of its row
with the same experts, and gradients of an expert are those of all tokens that were sent to it:

    hybrid, nodes of 4,     0 1 2 3     0 and 2 share the first half of the experts, 1 and 3 the second;
    expert degree 2         4 5 6 7     so do 4 and 6, 5 and 7

Weights of layers that a TP group divides are cut in the same way (`params.tp_slices`): with tensor degree 2 ranks 0 and
2 share the first half of every matrix, and of embedding and head, if the degree divides the vocabulary. What is whole
on all ranks of a TP group, such as norms, has its gradients summed there once per step.

Where the optimiser is offloaded, FSDP2 shards copies in the dtype that layers compute in. It would round gradients to
that dtype too, so hooks of its reductions take the sums before (`WideGradients`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard

from seqloom.compat import dtensor_like
from seqloom.dist import Context, Transport
from seqloom.dist.torch_transport import new_group
from seqloom.errors import SeqloomError
from seqloom.models.adapter import ModelAdapter
from seqloom.models.loss import CHUNK
from seqloom.models.split_backward import WeightGradients
from seqloom.params.host_masters import host_copy, host_master
from seqloom.params.interface import (
    Parameters,
    ParameterShard,
    all_reduce_gradients,
    check_expert_degree,
    check_job,
    check_tensor_degree,
    device_of,
    full_tensor,
    local_tensor,
    reduce_dtype,
    row_shard,
    shard_rows,
    squared_norm,
    trained_parameters,
)
from seqloom.params.placement import replace_parameters
from seqloom.params.tp_slices import slice_parameters, tp_slices
from seqloom.plan import LayerRange, Plan, Sharding

REPLICA, SHARD, EXPERT, TENSOR = "replica", "shard", "expert", "tensor"
LOSS = "seqloom_loss"
"""Method of a model that FSDP2 takes for a forward, where the model itself is called too."""


class FSDPParameters(Parameters):
    """A model sharded by FSDP2. Every rank of the job makes one, with the same values.

    Master weights are the given parameters, in their dtype (float32 for training), sharded along their first axis.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        transport: Transport,
        sharding: Sharding,
        *,
        node_size: int | None = None,
        param_dtype: torch.dtype | None = None,
        keep_gathered: bool = False,
        offload_optimiser: bool = False,
        expert: int = 1,
        tensor: int = 1,
        chunk: int = CHUNK,
        others_call: bool = False,
    ) -> None:
        """Shard the model in place. If layers shall recompute, `recompute_layers` comes first.

        Args:
            adapter: of the model, on the device where it will run; or with `deferred` values, read layer by layer.
            transport: over torch.distributed; all its ranks.
            node_size: ranks of a node; hybrid needs it.
            param_dtype: dtype of parameters and activations in the model; None: that of the master weights. Gradients
                are summed in float32 or wider.
            keep_gathered: keep layers gathered from forward to backward: more memory, one gather less.
            offload_optimiser: keep master weights in host memory.
            expert: neighbours that divide the experts of every layer among them.
            tensor: neighbours that divide the weights of every layer among them.
            others_call: whether the model is also called by itself, as in another library's evaluation.
        """
        adapter.check_expert_degree(expert)
        parameters = list(adapter.module.parameters())
        device, dtype = device_of(adapter, parameters), param_dtype or cast("torch.Tensor", adapter.head.weight).dtype
        super().__init__(adapter, dtype, device, chunk, None)
        self._expert, width = expert, _shard_width(transport, Sharding(sharding), node_size)
        ranks = torch.arange(transport.ranks)
        self._mesh = new_mesh(device, ranks.view(-1, width), (REPLICA, SHARD))
        self._ep_mesh = self._mesh
        if expert > 1:
            wide = max(width, expert)
            self._ep_mesh = new_mesh(device, ranks.view(-1, wide // expert, expert), (REPLICA, SHARD, EXPERT))
        self._tensor, self._tp_mesh = tensor, self._mesh
        if tensor > 1:
            wide = max(width, tensor)
            blocks = ranks.view(-1, wide // tensor, tensor).transpose(1, 2).contiguous()
            self._tp_mesh = new_mesh(device, blocks, (REPLICA, TENSOR, SHARD))
        self._slices = tp_slices(adapter, adapter.layers, transport.rank % tensor, tensor)
        shapes = {name: each.shape for name, each in adapter.module.named_parameters() if name in self._slices}
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype(parameters))
        del parameters  # they would keep the unsharded tensors alive
        options = {"mp_policy": policy, "reshard_after_forward": not keep_gathered}
        self._experts = frozenset(adapter.expert_parameters) if expert > 1 else frozenset[str]()
        names = {id(each): name for name, each in adapter.module.named_parameters()}
        modules = {module for module, _ in adapter.experts} if expert > 1 else set[nn.Module]()
        host, of_layers = dict[str, torch.Tensor](), set[str]()
        for layers in _by_shared_parameters(adapter.layers):
            for module in (each for layer in layers for each in layer.modules() if each in modules):
                host |= self._divide_experts(module, names, param_dtype, offload=offload_optimiser)
                fully_shard(module, **options, mesh=self._ep_mesh[SHARD], shard_placement_fn=self._shard_axis)
            wanted = {id(each): each for layer in layers for each in layer.parameters() if id(each) in names}
            named = [(names[each], parameter) for each, parameter in wanted.items()]
            sliced = slice_parameters(adapter, self._slices, dict(named))
            for layer in layers:
                replace_parameters(layer, sliced)
            named = [(name, sliced.get(id(parameter), parameter)) for name, parameter in named]
            adapter.materialize([(name, parameter) for name, parameter in named if parameter.is_meta])
            if offload_optimiser:
                host |= self._to_host(named, param_dtype, self._tp_mesh[SHARD])
            of_layers |= {name for name, _ in named}
            fully_shard(layers, **options, mesh=self._tp_mesh[SHARD])
        # parameters outside the layers: embedding, norm, head
        tables = self._slices.keys() - of_layers
        named = [(name, each) for name, each in adapter.module.named_parameters() if name in tables]
        replace_parameters(adapter.module, slice_parameters(adapter, self._slices, dict(named)))
        del named
        adapter.materialize()
        root_mesh = self._tp_mesh if tables else self._mesh
        if offload_optimiser:
            others = [(name, each) for name, each in adapter.module.named_parameters() if name not in host]
            host |= self._to_host(others, param_dtype, root_mesh[SHARD])
        whole = adapter.module if others_call else self._loss
        self._root, self._run = fully_shard(whole, mesh=root_mesh[SHARD], mp_policy=policy), self._loss
        if others_call:
            setattr(whole, LOSS, self._loss.forward)
            register_fsdp_forward_method(whole, LOSS)
            self._run = getattr(whole, LOSS)
            whole.register_forward_hook(lambda *_: self._reshard_unless_backward(), always_call=True)
        self._sharded = [module for module in self._loss.modules() if isinstance(module, FSDPModule)]
        for module in self._sharded:
            _sum_all_gradients(module)
        self._shards = trained_parameters(adapter.module)  # while nothing is gathered
        self._parameters = dict(adapter.module.named_parameters())
        of_tp_mesh = self._parameters.keys() if tables else of_layers
        self._replicated = frozenset(of_tp_mesh - self._slices.keys() if tensor > 1 else ())
        # slices as shards of the whole weights, in the memory of those that FSDP2 has
        for name, own in self._slices.items():
            shard = self._parameters[name]
            whole = own.whole(local_tensor(shard.detach()), shapes[name], self._tp_mesh[TENSOR, SHARD])
            self._parameters[name] = nn.Parameter(whole, requires_grad=shard.requires_grad)
            self._parameters[name].grad_dtype = None
        self._host_masters = {name: host_master(values, self._parameters[name]) for name, values in host.items()}
        wide = offload_optimiser and param_dtype is not None
        self._wide_gradients = WideGradients(self._sharded, self._shards, policy.reduce_dtype) if wide else None
        self._weight_gradients = WeightGradients()

    def _divide_experts(
        self, module: nn.Module, names: Mapping[int, str], dtype: torch.dtype | None, *, offload: bool
    ) -> dict[str, torch.Tensor]:
        """Replace the parameters of a module of experts by those of this rank's experts.

        Returns, where the optimiser is offloaded, this rank's shard of each in host memory; what is left has the dtype
        of layers then.
        """
        ep_mesh, shards, host = self._ep_mesh[EXPERT], self._ep_mesh[SHARD], {}
        for name, parameter in list(module.named_parameters(recurse=False)):
            canonical = names[id(parameter)]
            if canonical not in self._experts:
                continue
            own = len(parameter) // self._expert
            rows = slice(ep_mesh.get_local_rank() * own, (ep_mesh.get_local_rank() + 1) * own)
            values = self._adapter.read_rows(canonical, parameter, rows)
            if offload:
                axis = _expert_shard_axis(values.shape, shards.size())
                part = shard_rows(values.shape[axis], shards.get_local_rank(), shards.size())
                host[canonical] = host_copy(values.narrow(axis, part.start, part.stop - part.start))
                values = values if dtype is None else values.to(dtype)
            divided = row_shard(values, parameter.shape, ep_mesh)
            setattr(module, name, nn.Parameter(divided, requires_grad=parameter.requires_grad))
        return host

    def _shard_axis(self, parameter: nn.Parameter) -> Shard:
        """Return how FSDP2 shards a parameter of a module of experts."""
        return Shard(_expert_shard_axis(local_tensor(parameter).shape, self._ep_mesh[SHARD].size()))

    def _to_host(
        self, named: Iterable[tuple[str, nn.Parameter]], dtype: torch.dtype | None, mesh: DeviceMesh
    ) -> dict[str, torch.Tensor]:
        """Copy this rank's rows of parameters to the host, and convert what is left to the dtype of layers."""
        rows = {}
        for name, parameter in named:
            values = parameter.detach()
            rows[name] = host_copy(values[shard_rows(len(values), mesh.get_local_rank(), mesh.size())])
            parameter.data = values if dtype is None else values.to(dtype)
        return rows

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        """See `Parameters.shard_ranks`. Ranks that divide experts run the same rounds in any case."""
        axes = (SHARD,) if self._expert == 1 else (SHARD, EXPERT)
        return tuple(sorted(self._ep_mesh[axes].mesh.flatten().tolist()))

    def prefetch(self, plan: Plan) -> None:
        """Refuse a plan that divides experts or weights in another way."""
        super().prefetch(plan)
        check_expert_degree(plan, self._expert)
        check_tensor_degree(plan, self._tensor)

    @property
    def weight_gradients(self) -> WeightGradients:
        """Always empty: FSDP2 reduces a layer's gradients in its backward, so no weight gradient may come later."""
        return self._weight_gradients

    def forward(
        self, layers: LayerRange, inputs: torch.Tensor, labels: torch.Tensor | None, context: Context
    ) -> torch.Tensor:
        """See `Parameters.forward`; FSDP2 gathers layer by layer."""
        if not (layers.has_embedding and layers.has_head):
            raise SeqloomError(
                f"layers {layers.first} to {layers.stop - 1} of {layers.model_layers} asked of parameters that FSDP2 "
                "shards over all ranks: they run the whole model; plan with one stage, or use PipelineFSDP"
            )
        loss = self._run(inputs, labels, context)
        self._reshard_unless_backward()
        return loss

    def _reshard_unless_backward(self) -> None:
        """Free what a forward has gathered, where no backward will do it."""
        if not torch.is_grad_enabled():
            for module in self._sharded:
                module.reshard()

    def backward(self, output: torch.Tensor | GradientEdge, gradient: torch.Tensor | None, *, reduce: bool) -> None:
        """See `Parameters.backward`. Without `reduce`, unsharded gradients add up on this rank."""
        self._root.set_requires_gradient_sync(reduce)
        super().backward(output, gradient, reduce=reduce)

    def finish_gradients(self) -> None:
        """See `Parameters.finish_gradients`."""
        if self._wide_gradients is not None:
            self._wide_gradients.set()
        for each in self._kinds:
            for axis in each.summed:
                if each.shards and each.mesh[axis].size() > 1:
                    group = each.mesh[axis].get_group()
                    all_reduce_gradients(each.shards, lambda flat, group=group: dist.all_reduce(flat, group=group))
        for name in self._slices.keys() & self._shards.keys():
            gradient, whole = self._shards[name].grad, self._parameters[name]
            if gradient is not None:
                whole.grad = dtensor_like(cast("DTensor", whole), local_tensor(gradient))

    def gradient_norm(self) -> torch.Tensor:
        """See `Parameters.gradient_norm`. The shards of a row are the model; all rows have the same."""
        kinds = self._kinds
        squares = torch.stack([squared_norm(each.shards, self._device) for each in kinds])
        for number, each in enumerate(kinds):
            for axis in each.cut:
                dist.all_reduce(squares[number : number + 1], group=each.mesh[axis].get_group())
        return squares.sum().sqrt()

    @property
    def _kinds(self) -> list[ShardKind]:
        """The trained shards by the ranks that have them."""
        chosen = {
            "experts": ShardKind(self._ep_mesh, (REPLICA,), (SHARD, EXPERT), []),
            "slices": ShardKind(self._tp_mesh, (REPLICA,), (SHARD, TENSOR), []),
            "replicated": ShardKind(self._tp_mesh, (TENSOR, REPLICA), (SHARD,), []),
            "others": ShardKind(self._mesh, (REPLICA,), (SHARD,), []),
        }
        for name, shard in self._shards.items():
            chosen[self._kind_of(name)].shards.append(shard)
        return [each for each in chosen.values() if each.shards]

    def _kind_of(self, name: str) -> str:
        if name in self._experts:
            return "experts"
        if name in self._slices:
            return "slices"
        return "replicated" if name in self._replicated else "others"

    def shards(self) -> Iterator[tuple[str, ParameterShard]]:
        """See `Parameters.shards`; the first replica has them."""
        for name, parameter in self._parameters.items():
            kind = self._kind_of(name)
            mesh = {"experts": self._ep_mesh, "others": self._mesh}.get(kind, self._tp_mesh)
            sends = mesh[REPLICA].get_local_rank() == 0
            if kind == "replicated":
                sends = sends and mesh[TENSOR].get_local_rank() == 0
            yield name, ParameterShard.of(self._master(name, parameter), sends=sends)

    def _master(self, name: str, parameter: nn.Parameter) -> torch.Tensor:
        """Return the master of a parameter, as a DTensor whose shard is on the device."""
        master = self._host_masters.get(name)
        rows = local_tensor(parameter if master is None else master).detach().to(self._device)
        return dtensor_like(cast("DTensor", parameter), rows)

    def master_weights(self) -> dict[str, nn.Parameter]:
        """See `Parameters.master_weights`; all of them are DTensors."""
        return {name: self._host_masters.get(name, shard) for name, shard in self.device_shards().items()}

    def device_shards(self) -> dict[str, nn.Parameter]:
        """See `Parameters.device_shards`."""
        return {name: self._parameters[name] for name in self._shards}

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Parameters.full_parameters`."""
        for name, parameter in self._parameters.items():
            yield name, full_tensor(self._master(name, parameter))

    def zero_grad(self) -> None:
        """See `Parameters.zero_grad`."""
        super().zero_grad()
        for name in self._slices.keys() & self._shards.keys():
            self._shards[name].grad = None
        if self._wide_gradients is not None:
            self._wide_gradients.clear()

    def compute_weights(self) -> Iterator[torch.Tensor]:
        """Yield the shards; torch allocates and frees the gathered parameters."""
        yield from map(local_tensor, self._shards.values())


class ShardKind(NamedTuple):
    """Shards that ranks have alike: gradients are summed over some axes of their mesh, values are cut along others."""

    mesh: DeviceMesh
    summed: tuple[str, ...]
    cut: tuple[str, ...]
    shards: list[nn.Parameter]


class WideGradients:
    """Gradients of FSDP2's shards in the dtype in which it sums them, although the shards are narrower.

    A reduction first hands the sums of a layer to one hook, flat, then every parameter with its rounded gradient to
    another: its place in the flat tensor is that of its gradient.
    """

    def __init__(
        self, modules: Iterable[FSDPModule], shards: Mapping[str, nn.Parameter], dtype: torch.dtype | None
    ) -> None:
        self._shards, self._dtype, self._sums = shards, dtype, dict[str, torch.Tensor]()
        self._flat: torch.Tensor | None = None
        for module in modules:
            module.set_all_reduce_hook(self._take_flat)
        for name, shard in shards.items():
            shard.grad_dtype = None  # any: first FSDP2's, then the sums
            shard.register_post_accumulate_grad_hook(partial(self._take_shard, name))

    def set(self) -> None:
        """Give the shards their gradients; zero where no round had one."""
        for name, shard in self._shards.items():
            rows = local_tensor(shard)
            total = self._sums.get(name)
            total = torch.zeros_like(rows, dtype=self._dtype) if total is None else total
            shard.grad = dtensor_like(cast("DTensor", shard), total)
        self._sums.clear()

    def clear(self) -> None:
        """Drop what an unfinished step has left."""
        self._sums.clear()

    def _take_flat(self, sums: torch.Tensor) -> None:
        self._flat = sums

    def _take_shard(self, name: str, shard: torch.Tensor) -> None:
        rounded, flat = local_tensor(cast("torch.Tensor", shard.grad)), self._flat
        assert flat is not None
        rows = flat.as_strided(rounded.size(), rounded.stride(), rounded.storage_offset())
        shard.grad = None
        before = self._sums.get(name)
        self._sums[name] = rows if before is None else before.add_(rows)


def _shard_width(transport: Transport, sharding: Sharding, node_size: int | None) -> int:
    """Return the ranks that share shards of the parameters."""
    check_job(transport)
    if sharding == Sharding.FREE:
        raise SeqloomError(
            "free sharding asked of FSDP2, whose shards stay on the same ranks; use ReshardingParameters"
        )
    world = transport.ranks
    width = {Sharding.FULL: world, Sharding.HYBRID: node_size, Sharding.NONE: 1}[sharding]
    if width is None or width < 1 or world % width:
        raise SeqloomError(
            f"hybrid sharding of {world} ranks in nodes of {node_size}: give the node_size that the plans have, a "
            "divisor of the ranks"
        )
    return width


def new_mesh(device: torch.device, ranks: torch.Tensor, axes: tuple[str, ...]) -> DeviceMesh:
    """Create a mesh whose process groups have the timeout of the world; all processes of the job call it.

    Torch's own constructor names a group after its ranks and the number of groups that this process is in. Where ranks
    are in different numbers of groups, their names differ, and gloo waits for ever.
    """
    groups = []
    for axis, size in enumerate(ranks.shape):
        rows = ranks.movedim(axis, -1).reshape(-1, size).tolist()
        groups += [group for row in rows if (group := new_group(row, backend_of(device))) is not None]
    ranks = ranks.flatten().view(ranks.shape)  # in row-major strides, also of axes of size 1: torch 2.11 reads them
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=axes)


def backend_of(device: torch.device) -> str:
    """Return the backend that moves the tensors of a device."""
    return dist.get_backend_config().partition(f"{device.type}:")[2].partition(",")[0] or dist.get_backend()


def _by_shared_parameters(layers: Iterable[nn.Module]) -> list[list[nn.Module]]:
    """Return layers in lists, those that share a parameter in one: FSDP2 gathers such layers together."""
    lists: dict[nn.Parameter, list[nn.Module]] = {}
    for layer in layers:
        own = next((lists[each] for each in layer.parameters() if each in lists), [])
        own.append(layer)
        lists |= dict.fromkeys(layer.parameters(), own)
    return list({id(each): each for each in lists.values()}.values())


def _expert_shard_axis(shape: torch.Size, ranks: int) -> int:
    """Return the axis along which a parameter [experts, ..] is sharded: by expert, or inside of each to be even."""
    return 0 if shape[0] % ranks == 0 or shape[1] % ranks else 1


def _sum_all_gradients(module: FSDPModule) -> None:
    """Make reductions plain sums over all parameters, also those that a rank without tokens never uses."""
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    if hasattr(module, "set_reduce_scatter_unused_params"):  # torch before 2.13: every rank must use every parameter
        module.set_reduce_scatter_unused_params(True)
