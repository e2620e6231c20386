"""Parameters of a single stage, sharded with torch's FSDP2: over all ranks (full), over a node (hybrid), or not (none).

The ranks form a mesh with one row per replica of the parameters and one column per shard:

    hybrid, nodes of 4      0 1 2 3     backward sums gradients along a row, every round or in the last one;
                            4 5 6 7     `finish_gradients` sums them down the columns, once per step

Rows may run different rounds, or none. The loss is scaled already, so sums are not divided by the number of ranks.

Experts that an EP group divides are cut by expert first. What a rank has of them is sharded over the ranks of its row
with the same experts, and gradients of an expert are those of all tokens that were sent to it:

    hybrid, nodes of 4,     0 1 2 3     0 and 2 share the first half of the experts, 1 and 3 the second;
    expert degree 2         4 5 6 7     so do 4 and 6, 5 and 7
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from seqloom.dist import Context, Transport
from seqloom.dist.torch_transport import new_group
from seqloom.errors import SeqloomError
from seqloom.models.adapter import ModelAdapter
from seqloom.models.loss import CHUNK
from seqloom.models.split_backward import WeightGradients
from seqloom.params.interface import (
    Parameters,
    ParameterShard,
    all_reduce_gradients,
    check_expert_degree,
    check_job,
    device_of,
    local_tensor,
    reduce_dtype,
    row_shard,
    squared_norm,
    trained_parameters,
)
from seqloom.plan import LayerRange, Plan, Sharding

REPLICA, SHARD, EXPERT = "replica", "shard", "expert"


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
        chunk: int = CHUNK,
        expert: int = 1,
    ) -> None:
        """Shard the model in place. If layers shall recompute, `recompute_layers` comes first.

        Args:
            adapter: of the model, on the device where it will run; or with `deferred` values, read layer by layer.
            transport: over torch.distributed; all its ranks.
            node_size: ranks of a node; hybrid needs it.
            param_dtype: dtype of parameters and activations in the model; None: that of the master weights. Gradients
                are summed in float32 or wider.
            keep_gathered: keep layers gathered from forward to backward: more memory, one gather less.
            expert: neighbours that divide the experts of every layer among them.
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
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype(parameters))
        del parameters  # they would keep the unsharded tensors alive
        options = {"mp_policy": policy, "reshard_after_forward": not keep_gathered}
        self._experts = frozenset(adapter.expert_parameters) if expert > 1 else frozenset[str]()
        names = {id(each): name for name, each in adapter.module.named_parameters()}
        modules = {module for module, _ in adapter.experts} if expert > 1 else set[nn.Module]()
        for layer in adapter.layers:
            for module in filter(modules.__contains__, layer.modules()):
                self._divide_experts(module, names)
                fully_shard(module, **options, mesh=self._ep_mesh[SHARD], shard_placement_fn=self._shard_axis)
            adapter.materialize([(names[id(each)], each) for each in layer.parameters() if each.is_meta])
            fully_shard(layer, **options, mesh=self._mesh[SHARD])
        adapter.materialize()
        # parameters outside the layers: embedding, norm, head
        self._root = fully_shard(self._loss, mesh=self._mesh[SHARD], mp_policy=policy)
        self._sharded = [module for module in self._loss.modules() if isinstance(module, FSDPModule)]
        for module in self._sharded:
            _sum_all_gradients(module)
        self._masters = trained_parameters(adapter.module)  # the shards, while nothing is gathered
        self._weight_gradients = WeightGradients()

    def _divide_experts(self, module: nn.Module, names: Mapping[int, str]) -> None:
        """Replace the parameters of a module of experts by those of this rank's experts."""
        ep_mesh = self._ep_mesh[EXPERT]
        for name, parameter in list(module.named_parameters(recurse=False)):
            canonical = names[id(parameter)]
            if canonical in self._experts:
                own = len(parameter) // self._expert
                rows = slice(ep_mesh.get_local_rank() * own, (ep_mesh.get_local_rank() + 1) * own)
                values = row_shard(self._adapter.read_rows(canonical, parameter, rows), parameter.shape, ep_mesh)
                setattr(module, name, nn.Parameter(values, requires_grad=parameter.requires_grad))

    def _shard_axis(self, parameter: nn.Parameter) -> Shard:
        """Shard by expert where these divide evenly over the ranks, else inside of each."""
        ranks, (own, width) = self._ep_mesh[SHARD].size(), local_tensor(parameter).shape[:2]
        return Shard(0 if own % ranks == 0 or width % ranks else 1)

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        """See `Parameters.shard_ranks`. Ranks that divide experts run the same rounds in any case."""
        axes = (SHARD,) if self._expert == 1 else (SHARD, EXPERT)
        return tuple(sorted(self._ep_mesh[axes].mesh.flatten().tolist()))

    def prefetch(self, plan: Plan) -> None:
        """Refuse a plan that divides experts in another way."""
        super().prefetch(plan)
        check_expert_degree(plan, self._expert)

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
        loss = self._loss(inputs, labels, context)
        if not torch.is_grad_enabled():  # no backward will free what forward has gathered
            for module in self._sharded:
                module.reshard()
        return loss

    def backward(self, output: torch.Tensor | GradientEdge, gradient: torch.Tensor | None, *, reduce: bool) -> None:
        """See `Parameters.backward`. Without `reduce`, unsharded gradients add up on this rank."""
        self._root.set_requires_gradient_sync(reduce)
        super().backward(output, gradient, reduce=reduce)

    def finish_gradients(self) -> None:
        """See `Parameters.finish_gradients`."""
        experts = [each for name, each in self._masters.items() if name in self._experts]
        others = [each for name, each in self._masters.items() if name not in self._experts]
        for mesh, masters in ((self._mesh, others), (self._ep_mesh, experts)):
            if masters and mesh[REPLICA].size() > 1:
                group = mesh[REPLICA].get_group()
                all_reduce_gradients(masters, lambda flat, group=group: dist.all_reduce(flat, group=group))

    def gradient_norm(self) -> torch.Tensor:
        """See `Parameters.gradient_norm`. The shards of a row are the model; all rows have the same."""
        squares = torch.stack(
            [
                squared_norm(each for name, each in self._masters.items() if (name in self._experts) == of_experts)
                for of_experts in (False, True)
            ]
        ).to(self._device)
        dist.all_reduce(squares[:1], group=self._mesh[SHARD].get_group())
        for axis in (SHARD, EXPERT) if self._experts else ():
            dist.all_reduce(squares[1:], group=self._ep_mesh[axis].get_group())
        return squares.sum().sqrt()

    def shards(self) -> Iterator[tuple[str, ParameterShard]]:
        """See `Parameters.shards`; the first replica has them."""
        for name, parameter in self._adapter.module.named_parameters():
            mesh = self._ep_mesh if name in self._experts else self._mesh
            yield name, ParameterShard.of(parameter, sends=mesh[REPLICA].get_local_rank() == 0)

    def master_weights(self) -> dict[str, nn.Parameter]:
        """See `Parameters.master_weights`; all of them are DTensors."""
        return dict(self._masters)

    def compute_weights(self) -> Iterator[torch.Tensor]:
        """Yield the shards; torch allocates and frees the gathered parameters."""
        yield from map(local_tensor, self._masters.values())


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
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=axes)


def backend_of(device: torch.device) -> str:
    """Return the backend that moves the tensors of a device."""
    return dist.get_backend_config().partition(f"{device.type}:")[2].partition(",")[0] or dist.get_backend()


def _sum_all_gradients(module: FSDPModule) -> None:
    """Make reductions plain sums over all parameters, also those that a rank without tokens never uses."""
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    if hasattr(module, "set_reduce_scatter_unused_params"):  # torch before 2.13: every rank must use every parameter
        module.set_reduce_scatter_unused_params(True)
