"""Parameters sharded with torch's FSDP2: over all ranks (full), over a node (hybrid), or not at all (none).

Ranks stand in a table, one row per replica of the parameters, one column per shard:

    hybrid, nodes of 4      0 1 2 3     gradients are summed along a row inside backward, every round or in the last,
                            4 5 6 7     and down a column once, at the end of the step

Rows may run different rounds, or none. Sums are sums: the loss is scaled already, so nothing is divided.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from seqloom.attention.lse import sum_dtype
from seqloom.compat import inherit_timeout
from seqloom.dist import Context, Transport
from seqloom.errors import SeqloomError
from seqloom.models.adapter import ModelAdapter, ModelWithLoss
from seqloom.models.loss import CHUNK
from seqloom.models.split_backward import WeightGradients
from seqloom.params.interface import check_fixed, local, squared_norm, sum_gradients, trained
from seqloom.plan import LayerRange, Plan, Sharding

REPLICA, SHARD = "replica", "shard"


class FSDPParameters:
    """A network whose parameters FSDP2 keeps. Every rank of the job makes one, with the same values.

    Masters are the parameters that were given, in their dtype (float32 for training), cut along their first axis.
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
    ) -> None:
        """Shard the network in place. If layers shall recompute, `recompute_layers` comes first.

        Args:
            network: the model, on the device where it will run; or with `values`, of which there is a layer at a time.
            transport: over torch.distributed; all its ranks.
            sharding: over which ranks.
            node_size: ranks of a node; hybrid needs it.
            param_dtype: dtype of parameters and activations in the model; None: that of the masters. Gradients are
                added up and reduced in float32 or wider.
            keep_gathered: keep layers gathered from forward to backward: more memory, one gather less.
            chunk: as in `summed_loss`.
        """
        parameters = list(adapter.module.parameters())
        device = device_of(adapter, parameters)
        self._mesh = _mesh(transport, Sharding(sharding), node_size, device)
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype(parameters))
        del parameters  # they would keep what is whole
        options = {"mesh": self._mesh[SHARD], "mp_policy": policy}
        names = {id(each): name for name, each in adapter.module.named_parameters()}
        for layer in adapter.layers:
            adapter.materialize([(names[id(each)], each) for each in layer.parameters() if each.is_meta])
            fully_shard(layer, **options, reshard_after_forward=not keep_gathered)
        self._adapter, self._compute, self._weights = adapter, param_dtype, WeightGradients()
        self._loss = ModelWithLoss(adapter, chunk)
        adapter.materialize()
        self._root = fully_shard(self._loss, **options)  # what is in no layer: the table of tokens, norm, head
        self._parts = [part for part in self._loss.modules() if isinstance(part, FSDPModule)]
        for part in self._parts:
            _sum_only(part)
        self._masters = trained(adapter.module)  # while nothing is gathered, these are the shards

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        """See `Parameters.shard_ranks`."""
        return tuple(self._mesh[SHARD].mesh.flatten().tolist())

    @property
    def weight_gradients(self) -> WeightGradients:
        """See `Parameters.weight_gradients`. Nothing waits there: FSDP2 reduces a layer's gradients in its backward."""
        return self._weights

    def empty_hidden_states(self, tokens: int) -> torch.Tensor:
        """See `Parameters.empty_hidden_states`."""
        head = cast("torch.Tensor", self._adapter.head.weight)
        return torch.empty(tokens, head.shape[1], dtype=self._compute or head.dtype, device=head.device)

    def prefetch(self, plan: Plan) -> None:
        """See `Parameters.prefetch`; parameters stay where they are."""
        check_fixed(plan)

    def wait_prefetch(self) -> None:
        """See `Parameters.wait_prefetch`; nothing is under way."""

    def unshard(self, part: LayerRange) -> None:
        """See `Parameters.unshard`; FSDP2 gathers layer by layer, when `run` comes to them."""

    def forward(
        self, part: LayerRange, given: torch.Tensor, labels: torch.Tensor | None, context: Context
    ) -> torch.Tensor:
        """See `Parameters.forward`; the part is the whole model."""
        if not (part.has_embedding and part.has_head):
            raise SeqloomError(
                f"layers {part.first} to {part.stop - 1} of {part.model_layers} asked of parameters that FSDP2 shards "
                "over all ranks: they run the whole model; plan with one stage, or keep the stages' parameters apart"
            )
        loss = self._loss(given, labels, context)
        if not torch.is_grad_enabled():  # no backward will release what forward has gathered
            for sharded in self._parts:
                sharded.reshard()
        return loss

    def backward(self, output: torch.Tensor | GradientEdge, gradient: torch.Tensor | None, *, reduce: bool) -> None:
        """See `Parameters.backward`. Without `reduce`, whole gradients stay on this rank and add up."""
        self._root.set_requires_gradient_sync(reduce)
        torch.autograd.backward(output, gradient)

    def reduce(self, part: LayerRange) -> None:
        """See `Parameters.reduce`; the last backward did it."""

    def reshard(self, part: LayerRange) -> None:
        """See `Parameters.reshard`; layers are released one by one."""

    def finish_gradients(self) -> None:
        """See `Parameters.finish_gradients`."""
        column = self._mesh[REPLICA]
        if column.size() > 1:
            group = column.get_group()
            sum_gradients(self._masters.values(), lambda flat: dist.all_reduce(flat, group=group))

    def gradient_norm(self) -> torch.Tensor:
        """See `Parameters.gradient_norm`. Shards of a row make up the model; the other rows have the same."""
        squares = squared_norm(self._masters.values()).to(self._mesh.device_type)
        dist.all_reduce(squares, group=self._mesh[SHARD].get_group())
        return squares.sqrt()

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Parameters.full_gradients`; each is gathered when its turn comes."""
        for name, parameter in self._masters.items():
            assert parameter.grad is not None
            yield name, parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Parameters.full_parameters`; each is gathered when its turn comes."""
        for name, parameter in self._adapter.module.named_parameters():
            held = parameter.detach()
            yield name, held.full_tensor() if isinstance(held, DTensor) else held

    def master_weights(self) -> dict[str, nn.Parameter]:
        """See `Parameters.master_weights`; all of them are distributed tensors."""
        return dict(self._masters)

    def compute_weights(self) -> Iterator[torch.Tensor]:
        """See `Parameters.compute_weights`; the gathered ones come and go inside torch."""
        yield from map(local, self._masters.values())

    def zero_grad(self) -> None:
        """See `Parameters.zero_grad`."""
        for parameter in self._masters.values():
            parameter.grad = None


def _mesh(transport: Transport, sharding: Sharding, node_size: int | None, device: torch.device) -> DeviceMesh:
    """Make the table of ranks. All processes of the job take part."""
    check_job(transport)
    if sharding == Sharding.FREE:
        raise SeqloomError("free sharding asked of FSDP2, whose shards stay on the same ranks; use FreeLayout")
    world = transport.ranks
    width = {Sharding.FULL: world, Sharding.HYBRID: node_size, Sharding.NONE: 1}[sharding]
    if width is None or width < 1 or world % width:
        raise SeqloomError(
            f"hybrid sharding of {world} ranks in nodes of {node_size}: give the node_size that the plans have, a "
            "divisor of the ranks"
        )
    table = torch.arange(world).view(-1, width)
    mesh = DeviceMesh(device.type, table, mesh_dim_names=(REPLICA, SHARD))
    for axis in (REPLICA, SHARD):
        inherit_timeout(mesh.get_group(axis))
    return mesh


def check_job(transport: Transport) -> None:
    """Refuse a transport that is not all of a torch.distributed job."""
    world = transport.ranks
    if not dist.is_initialized() or dist.get_world_size() != world:
        job = f"a job of {dist.get_world_size()}" if dist.is_initialized() else "no torch.distributed job"
        raise SeqloomError(
            f"sharded parameters on {world} ranks in {job}: they need all ranks of a torch.distributed job; start it "
            "with torchrun, or use Replicated"
        )


def _sum_only(part: FSDPModule) -> None:
    """Make reductions plain sums over all parameters, also those that a rank without tokens never touched."""
    part.set_gradient_divide_factor(1.0)
    part.set_force_sum_reduction_for_comms(True)
    if hasattr(part, "set_reduce_scatter_unused_params"):  # torch before 2.13: every rank must touch every parameter
        part.set_reduce_scatter_unused_params(True)


def device_of(adapter: ModelAdapter, parameters: Sequence[nn.Parameter]) -> torch.device:
    """Return the device where these parameters are or will be; refuse several, and parameters without values."""
    if adapter.deferred is not None:
        return adapter.deferred.device
    devices = {parameter.device for parameter in parameters}
    if len(devices) != 1 or next(iter(devices)).type == "meta":
        raise SeqloomError(
            f"parameters on {sorted(map(str, devices))}: they must all be on one device, with their values; load the "
            "model there before it is sharded"
        )
    return devices.pop()


def reduce_dtype(parameters: Sequence[nn.Parameter]) -> torch.dtype:
    """Return the dtype that their gradients are added up in; refuse parameters of several."""
    dtypes = {sum_dtype(parameter.dtype) for parameter in parameters}
    if len(dtypes) != 1:
        raise SeqloomError(
            f"parameters in {sorted(map(str, dtypes))}: gradients are added up in one dtype; convert the model to one"
        )
    return dtypes.pop()
