"""`Parameters`, as the engine and the optimiser see them, and the plainest implementation, `ReplicatedParameters`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from seqloom.attention.merge import sum_dtype
from seqloom.compat import shard_offset
from seqloom.dist import Context, Transport
from seqloom.errors import SeqloomError
from seqloom.models.adapter import ModelAdapter, ModelWithLoss
from seqloom.models.experts import ExpertLoad
from seqloom.models.loss import CHUNK, HeadGradients
from seqloom.models.router_loss import RouterLoss
from seqloom.models.split_backward import WeightGradients
from seqloom.params.placement import replace_parameters
from seqloom.params.tp_slices import TPSlice, tp_slices
from seqloom.plan import LayerRange, Plan, Sharding

T = TypeVar("T")
BUCKET = 1 << 26
"""Elements that travel in one collective."""


class Parameters(ABC):
    """The parameters of a model and their gradients. All ranks call the same methods in the same order.

    A layer's parameters are unsharded while it runs forward, backward or recomputes.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        dtype: torch.dtype,
        device: torch.device,
        chunk: int,
        head_gradients: HeadGradients | None,
    ) -> None:
        """Store what all implementations need.

        Args:
            chunk, head_gradients: as in `summed_loss`.
        """
        self._adapter, self._dtype, self._device, self._head_gradients = adapter, dtype, device, head_gradients
        self._hidden_size = cast("torch.Tensor", adapter.head.weight).shape[1]
        self._loss = ModelWithLoss(adapter, chunk, head_gradients)

    @property
    @abstractmethod
    def shard_ranks(self) -> tuple[int, ...]:
        """Ranks with shards of the same parameters, this one among them: they run the same rounds."""

    @property
    def weight_gradients(self) -> WeightGradients:
        """Weight gradients that wait between the two halves of a split backward."""
        return self._adapter.weight_gradients

    @property
    def router_loss(self) -> RouterLoss | None:
        """The loss of the model's routers, if it has one."""
        return self._adapter.router_loss

    @property
    def expert_load(self) -> ExpertLoad | None:
        """Counts the tokens of the model's experts, if it has some."""
        return self._adapter.expert_load

    def empty_hidden_states(self, tokens: int) -> torch.Tensor:
        """Allocate hidden states, [tokens, hidden], in the dtype that layers compute in."""
        return torch.empty((tokens, self._hidden_size), dtype=self._dtype, device=self._device)

    def prefetch(self, plan: Plan) -> None:
        """Start to bring parameters where a plan computes with them, or refuse the plan; called before it runs."""
        check_fixed_layout(plan)

    def wait_prefetch(self) -> None:  # noqa: B027 - nothing to do, unless a subclass says so
        """Wait for what `prefetch` has started and no layer has needed; `finish_gradients` does it too."""

    def unshard(self, layers: LayerRange) -> None:  # noqa: B027
        """Gather the parameters of a stage: UNSHARD. A plan may leave this to `forward`."""

    def forward(
        self, layers: LayerRange, inputs: torch.Tensor, labels: torch.Tensor | None, context: Context
    ) -> torch.Tensor:
        """Run a stage forward.

        Args:
            inputs: token ids int64[tokens] for a stage with the embedding, else hidden states [tokens, hidden].
            labels: int64[tokens] for a stage with the head, else None.
            context: of the round, on this stage.

        Returns:
            With the head the sum of this rank's token losses, a scalar; else hidden states [tokens, hidden].
        """
        return self._loss(inputs, labels, context, layers)

    def backward(self, output: torch.Tensor | GradientEdge, gradient: torch.Tensor | None, *, reduce: bool) -> None:
        """Run backward and add to the gradients.

        Args:
            output: of `forward`, or its edge in the graph, which does not keep its memory.
            gradient: of the step's loss with respect to `output`; None: 1.
            reduce: whether this backward reduces gradients to the shards; not where `reduce` is called later.
        """
        torch.autograd.backward((cast("torch.Tensor", output),), (gradient,))

    def reduce(self, layers: LayerRange) -> None:  # noqa: B027
        """Reduce the gradients of a stage to the shards, after its last backward of the step: REDUCE."""

    def reshard(self, layers: LayerRange) -> None:  # noqa: B027
        """Free what `unshard` has gathered: RESHARD."""

    @abstractmethod
    def finish_gradients(self) -> None:
        """Sum over replicas. From then on gradients are those of the whole step."""

    @abstractmethod
    def gradient_norm(self) -> torch.Tensor:
        """Return the norm of the whole model's gradient, every parameter once: a scalar, the same on all ranks."""

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield canonical name and unsharded gradient of every trained parameter, one at a time; all ranks iterate."""
        for name, parameter in self.device_shards().items():
            assert parameter.grad is not None
            yield name, full_tensor(parameter.grad)

    @abstractmethod
    def shards(self) -> Iterator[tuple[str, ParameterShard]]:
        """Yield canonical name and this rank's part of every parameter's value, tied ones once."""

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield canonical name and unsharded value of every parameter, tied ones once; all ranks iterate."""
        for name, parameter in self._adapter.module.named_parameters():
            yield name, full_tensor(parameter.detach())

    def master_weights(self) -> dict[str, nn.Parameter]:
        """Return what the optimiser updates on this rank, by canonical name; tied parameters once."""
        return trained_parameters(self._adapter.module)

    def device_shards(self) -> dict[str, nn.Parameter]:
        """Return what the device has of the master weights, with the step's gradients.

        Those are the master weights, or copies of them where these are in host memory: see `params.host_masters`.
        """
        return self.master_weights()

    def compute_weights(self) -> Iterator[torch.Tensor]:
        """Yield what layers compute with on this rank, as it is in memory now: master weights, or copies of them."""
        yield from self._adapter.module.parameters()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        if self._head_gradients is not None:
            self._head_gradients.clear()
        for parameter in self.device_shards().values():
            parameter.grad = None


class ParameterShard(NamedTuple):
    """A rank's part of a parameter's value. The parts with values, of all ranks together, are the parameter.

    Attributes:
        shape, dtype: of the whole parameter.
        offset: where the part begins, axis by axis.
        values: None: this rank has no part, or another one has the same.
    """

    shape: torch.Size
    dtype: torch.dtype
    offset: tuple[int, ...]
    values: torch.Tensor | None

    @classmethod
    def of(cls, value: torch.Tensor, *, sends: bool) -> ParameterShard:
        """Return this rank's part of a DTensor, or all of another tensor; without values unless the rank `sends`."""
        local = local_tensor(value.detach())
        if not sends or not local.numel():
            return cls(value.shape, value.dtype, (), None)
        offset = shard_offset(value) if isinstance(value, DTensor) else (0,) * value.ndim
        return cls(value.shape, value.dtype, tuple(offset), local)


class ReplicatedParameters(Parameters):
    """All parameters on every rank, of any transport; one sum of the gradients over all ranks per step.

    Where a plan has a tensor degree, layers compute with slices of them, in the same memory.
    """

    def __init__(self, adapter: ModelAdapter, transport: Transport, *, chunk: int = CHUNK) -> None:
        """Take a model that has the same values on all ranks.

        Args:
            adapter: of the model, which computes and accumulates gradients in the dtype of its parameters.
            transport: this rank's. Its family has the block of all ranks.
        """
        adapter.materialize()
        head = cast("torch.Tensor", adapter.head.weight)
        super().__init__(adapter, head.dtype, head.device, chunk, HeadGradients())
        self._transport = transport
        self._whole = dict(adapter.module.named_parameters())
        self._slices: dict[str, TPSlice] = {}

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        """This rank."""
        return (self._transport.rank,)

    def prefetch(self, plan: Plan) -> None:
        """Give layers the slices of their weights that this rank computes with."""
        rank, slices = self._transport.rank, dict[str, TPSlice]()
        for pipeline in plan.pipelines:
            for stage in pipeline.stages:
                if rank in stage.ranks:
                    place, layers = stage.ranks.index(rank) % stage.tensor, self._adapter.layers[slice(*stage.layers)]
                    tables = plan.sharding != Sharding.FREE
                    slices |= tp_slices(self._adapter, layers, place, stage.tensor, tables=tables)
        if slices != self._slices:
            now = dict(self._adapter.module.named_parameters())
            new = {name: self._whole[name] for name in self._slices}
            for name, own in slices.items():
                whole = self._whole[name]
                new[name] = nn.Parameter(own.of(whole.detach()), requires_grad=whole.requires_grad)
            replace_parameters(self._adapter.module, {id(now[name]): each for name, each in new.items()})
            self._slices = slices

    def finish_gradients(self) -> None:
        """See `Parameters.finish_gradients`."""
        computed = dict(self._adapter.module.named_parameters()) if self._slices else {}
        for name, own in self._slices.items():
            whole, gradient = self._whole[name], computed[name].grad
            if gradient is not None:
                whole.grad = torch.zeros_like(whole)
                own.of(whole.grad).copy_(gradient)
        everyone, masters = tuple(range(self._transport.ranks)), self.master_weights().values()
        if len(everyone) == 1:
            fill_missing_gradients(masters)
        else:
            all_reduce_gradients(masters, lambda flat: self._transport.all_reduce(flat, everyone))

    def gradient_norm(self) -> torch.Tensor:
        """See `Parameters.gradient_norm`."""
        return squared_norm(self.master_weights().values()).sqrt()

    def shards(self) -> Iterator[tuple[str, ParameterShard]]:
        """See `Parameters.shards`; rank 0 has them."""
        for name, parameter in self._whole.items():
            yield name, ParameterShard.of(parameter, sends=self._transport.rank == 0)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Parameters.full_parameters`."""
        yield from ((name, each.detach()) for name, each in self._whole.items())

    def master_weights(self) -> dict[str, nn.Parameter]:
        """See `Parameters.master_weights`."""
        return {name: each for name, each in self._whole.items() if each.requires_grad}

    def zero_grad(self) -> None:
        """See `Parameters.zero_grad`."""
        super().zero_grad()
        for parameter in self._adapter.module.parameters():
            parameter.grad = None


def check_tensor_degree(plan: Plan, degree: int) -> None:
    """Refuse a plan that divides weights over other ranks than those that have them."""
    found = {stage.tensor for pipeline in plan.pipelines for stage in pipeline.stages}
    if found != {degree}:
        raise SeqloomError(
            f"a plan with tensor degree {', '.join(map(str, sorted(found)))} for parameters whose weights are divided "
            f"over {degree} rank{'s' * (degree > 1)}; plan with tensor = {degree}, or use ReshardingParameters"
        )


def check_expert_degree(plan: Plan, degree: int) -> None:
    """Refuse a plan that divides experts over other ranks than those that have them."""
    found = {stage.expert for pipeline in plan.pipelines for stage in pipeline.stages}
    if found != {degree}:
        raise SeqloomError(
            f"a plan with expert degree {', '.join(map(str, sorted(found)))} for parameters whose experts are divided "
            f"over {degree} ranks; plan with expert = {degree}"
        )


def check_fixed_layout(plan: Plan) -> None:
    """Refuse a plan for parameters whose layout does not change from step to step."""
    if plan.sharding == Sharding.FREE:
        raise SeqloomError(
            "a plan with free sharding, whose stages may be others in every step, for parameters that stay where they "
            "were placed; use ReshardingParameters, or plan with the sharding of the parameters"
        )


def check_job(transport: Transport) -> None:
    """Refuse a transport that is not all of a torch.distributed job."""
    world = transport.ranks
    if not dist.is_initialized() or dist.get_world_size() != world:
        job = f"a job of {dist.get_world_size()}" if dist.is_initialized() else "no torch.distributed job"
        raise SeqloomError(
            f"sharded parameters on {world} ranks in {job}: they need all ranks of a torch.distributed job; start it "
            "with torchrun, or use ReplicatedParameters"
        )


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
    """Return the dtype that gradients are summed in; refuse parameters of several."""
    dtypes = {sum_dtype(parameter.dtype) for parameter in parameters}
    if len(dtypes) != 1:
        raise SeqloomError(
            f"parameters in {sorted(map(str, dtypes))}: gradients are added up in one dtype; convert the model to one"
        )
    return dtypes.pop()


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, by name; tied ones once."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def accumulate_wide(copy: nn.Parameter) -> nn.Parameter:
    """Let the gradient of a trained parameter add up in float32 or wider."""
    if copy.requires_grad and copy.dtype != sum_dtype(copy.dtype):
        copy.grad_dtype = sum_dtype(copy.dtype)
    return copy


def squared_norm(parameters: Iterable[nn.Parameter], device: torch.device | None = None) -> torch.Tensor:
    """Return the sum of squares of this rank's shards of the gradients, a scalar in float64 on `device`.

    The sum of one tensor is in float32 (float64 for float64). Without `device` it stays where the gradients are, and
    on the CPU where there are none.
    """
    gradients = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
    norms = [torch.linalg.vector_norm(each, dtype=sum_dtype(each.dtype)) for each in gradients]
    total = torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)
    return total if device is None else total.to(device)


def all_reduce_gradients(parameters: Iterable[nn.Parameter], all_reduce: Callable[[torch.Tensor], None]) -> None:
    """Replace the gradients by their sums over ranks, in float32 or wider; a missing one counts as zero.

    Args:
        parameters: the same on all ranks, in the same order.
        all_reduce: replaces a flat tensor by its sum.
    """
    parameters = list(parameters)
    fill_missing_gradients(parameters)
    gradients = [local_tensor(cast("torch.Tensor", parameter.grad)) for parameter in parameters]
    for bucket in buckets(gradients, lambda gradient: gradient):
        dtype = sum_dtype(bucket[0].dtype)
        flat = torch.cat([gradient.reshape(-1).to(dtype) for gradient in bucket])
        all_reduce(flat)
        for gradient, total in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(total.view(gradient.shape))


def fill_missing_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Set a gradient of zero for parameters that a step has not used."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)


def scale_gradients(parameters: Parameters, factor: float | torch.Tensor) -> None:
    """Multiply all gradients; clipping is a factor of min(1, limit / norm)."""
    if isinstance(factor, float) and factor == 1.0:
        return
    for parameter in parameters.device_shards().values():
        if parameter.grad is not None:
            local_tensor(parameter.grad).mul_(factor)


def row_shard(shard: torch.Tensor, shape: torch.Size, mesh: DeviceMesh) -> DTensor:
    """Return the contiguous DTensor of a shape of which this rank has a shard; the axes of a mesh cut rows in turn."""
    strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return DTensor.from_local(shard, mesh, [Shard(0)] * mesh.ndim, run_check=False, shape=shape, stride=strides)


def shard_rows(length: int, rank: int, ranks: int) -> slice:
    """Return a rank's rows: torch's chunks, of which the last may be short or empty."""
    rows = -(-length // ranks)
    return slice(min(rank * rows, length), min((rank + 1) * rows, length))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor unsharded, any other tensor as it is; what was cut last is gathered first, without a warning."""
    if not isinstance(tensor, DTensor):
        return tensor
    # FSDP2 cuts rows along the first axis of a mesh after those along the others: these shards are strided.
    plain = [type(placement) is Shard for placement in tensor.placements]
    for axis in sorted(range(len(plain)), key=lambda axis: (plain[axis], -axis)):
        placements = list(tensor.placements)
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor.to_local()


def buckets(items: Iterable[T], tensor: Callable[[T], torch.Tensor], most: int = BUCKET) -> Iterator[list[T]]:
    """Yield consecutive items whose tensors have one dtype and together at most `most` elements, or a single item."""
    bucket: list[T] = []
    size = 0
    for item in items:
        current = tensor(item)
        if bucket and (size + current.numel() > most or current.dtype != tensor(bucket[0]).dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(item)
        size += current.numel()
    if bucket:
        yield bucket
