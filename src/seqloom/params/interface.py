"""Parameters behind one small interface: a layer's are at hand when it runs, gradients add up over ranks.

`Replicated` is the plainest way to keep it: every rank has all parameters, and one sum over all ranks ends a step.
It works on every transport. `Sharded` and `StageSharded` keep shards in fixed places, `FreeLayout` moves them by plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, cast

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.distributed.tensor import DTensor

from seqloom.attention.lse import sum_dtype
from seqloom.dist import Context, Transport
from seqloom.errors import SeqloomError
from seqloom.models.adapter import ModelAdapter, ModelWithLoss
from seqloom.models.loss import CHUNK, HeadGradients
from seqloom.models.split_backward import WeightGradients
from seqloom.plan import LayerRange, Plan, Sharding

BUCKET = 1 << 26
"""Elements that are summed over ranks in one call."""


class Parameters(Protocol):
    """What the rest of the system sees of parameters. All ranks call the same methods in the same order.

    A layer's parameters are acquired when it is called, in forward, backward and recomputation, and released after.
    """

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        """Ranks that have shards of the same parameters, this one among them: they run the same rounds."""
        ...

    @property
    def weight_gradients(self) -> WeightGradients:
        """Where gradients of weights wait between the two halves of a split backward: those of the network."""
        ...

    def empty_hidden_states(self, tokens: int) -> torch.Tensor:
        """Return memory for hidden states, [tokens, hidden]: on the device, in the dtype that layers compute in."""
        ...

    def prefetch(self, plan: Plan) -> None:
        """Bring parameters where a plan computes with them, or refuse it; all ranks call it before the plan runs."""
        ...

    def wait_prefetch(self) -> None:
        """Wait for what `arrange` has started and no layer has asked for; `finish` does it too."""
        ...

    def unshard(self, part: LayerRange) -> None:
        """Gather the parameters of a part, for all its rounds: UNSHARD. A plan may leave this to `run`."""
        ...

    def forward(
        self, part: LayerRange, given: torch.Tensor, labels: torch.Tensor | None, context: Context
    ) -> torch.Tensor:
        """Run a part of the model forward.

        Args:
            part: the whole model, or the layers of a stage.
            given: token ids int64[tokens] for a part that begins, else hidden states [tokens, hidden].
            labels: int64[tokens] for a part that ends, else None.
            context: of the round, on this part's stage.

        Returns:
            The sum of this rank's token losses, a scalar, for a part that ends, else hidden states [tokens, hidden].
        """
        ...

    def backward(self, output: torch.Tensor | GradientEdge, gradient: torch.Tensor | None, *, reduce: bool) -> None:
        """Run what `run` has run backward; the gradients are added to what is there, and if asked reduced.

        Args:
            output: what `run` returned, or its place in the graph (which does not hold its memory).
            gradient: of the step's loss by `output`; None: 1.
            reduce: whether gradients are reduced to the shards with this backward; not if `reduce` is called later.
        """
        ...

    def reduce(self, part: LayerRange) -> None:
        """Reduce the gradients of a part to the shards, after all its backwards: REDUCE of a step."""
        ...

    def reshard(self, part: LayerRange) -> None:
        """Drop what `acquire` has gathered: RESHARD."""
        ...

    def finish_gradients(self) -> None:
        """End a step's gradients: sum over replicas. From then on they are those of the whole step."""
        ...

    def gradient_norm(self) -> torch.Tensor:
        """Return the norm of the whole model's gradient, every parameter once; a scalar, the same on all ranks."""
        ...

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every trained parameter's canonical name and whole gradient, one at a time; all ranks iterate."""
        ...

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter's canonical name and whole value, one at a time; all ranks iterate. Tied ones once."""
        ...

    def master_weights(self) -> dict[str, nn.Parameter]:
        """Return what the optimiser updates on this rank, by canonical name; tied parameters once."""
        ...

    def compute_weights(self) -> Iterator[torch.Tensor]:
        """Yield what layers compute with on this rank, as it is in memory now: masters, or copies of them."""
        ...

    def zero_grad(self) -> None:
        """Drop all gradients."""
        ...


class ReplicatedParameters:
    """Every rank has all parameters; gradients are summed over all ranks once per step, through the transport."""

    def __init__(self, adapter: ModelAdapter, transport: Transport, *, chunk: int = CHUNK) -> None:
        """Take a network that has the same values on all ranks.

        Args:
            network: computes and accumulates gradients in the dtype of its parameters.
            transport: this rank's. Its family has the block of all ranks.
            chunk: as in `summed_loss`.
        """
        adapter.materialize()
        self._adapter, self._transport = adapter, transport
        self._head = HeadGradients()
        self._loss = ModelWithLoss(adapter, chunk, self._head)

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        """This rank alone."""
        return (self._transport.rank,)

    @property
    def weight_gradients(self) -> WeightGradients:
        """See `Parameters.weight_gradients`."""
        return self._adapter.weight_gradients

    def empty_hidden_states(self, tokens: int) -> torch.Tensor:
        """See `Parameters.empty_hidden_states`."""
        head = cast("torch.Tensor", self._adapter.head.weight)
        return head.new_empty(tokens, head.shape[1])

    def prefetch(self, plan: Plan) -> None:
        """See `Parameters.prefetch`; everything is here, and whole."""
        check_whole(plan)

    def wait_prefetch(self) -> None:
        """See `Parameters.wait_prefetch`; nothing is under way."""

    def unshard(self, part: LayerRange) -> None:
        """See `Parameters.unshard`; everything is here."""

    def forward(
        self, part: LayerRange, given: torch.Tensor, labels: torch.Tensor | None, context: Context
    ) -> torch.Tensor:
        """See `Parameters.forward`."""
        return self._loss(given, labels, context, part)

    def backward(self, output: torch.Tensor | GradientEdge, gradient: torch.Tensor | None, *, reduce: bool) -> None:
        """See `Parameters.backward`. A shard group of one rank has nothing to reduce."""
        torch.autograd.backward(output, gradient)

    def reduce(self, part: LayerRange) -> None:
        """See `Parameters.reduce`; a shard group of one rank has nothing to reduce."""

    def reshard(self, part: LayerRange) -> None:
        """See `Parameters.reshard`; nothing was gathered."""

    def finish_gradients(self) -> None:
        """See `Parameters.finish_gradients`."""
        everyone = tuple(range(self._transport.ranks))
        if len(everyone) == 1:  # the sum is what is there already
            complete_gradients(self.master_weights().values())
        else:
            sum_gradients(self.master_weights().values(), lambda flat: self._transport.all_reduce(flat, everyone))

    def gradient_norm(self) -> torch.Tensor:
        """See `Parameters.gradient_norm`."""
        return squared_norm(self.master_weights().values()).sqrt()

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Parameters.full_gradients`."""
        for name, parameter in self.master_weights().items():
            assert parameter.grad is not None
            yield name, parameter.grad

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Parameters.full_parameters`."""
        for name, parameter in self._adapter.module.named_parameters():
            yield name, parameter.detach()

    def master_weights(self) -> dict[str, nn.Parameter]:
        """See `Parameters.master_weights`."""
        return trained(self._adapter.module)

    def compute_weights(self) -> Iterator[torch.Tensor]:
        """See `Parameters.compute_weights`."""
        yield from self._adapter.module.parameters()

    def zero_grad(self) -> None:
        """See `Parameters.zero_grad`."""
        self._head.clear()
        self._adapter.module.zero_grad(set_to_none=True)


def check_whole(plan: Plan) -> None:
    """Refuse a plan that cuts weights over the ranks of a team."""
    tensor = max((stage.tensor for line in plan.pipelines for stage in line.stages), default=1)
    if tensor > 1:
        raise SeqloomError(
            f"a plan with tensor degree {tensor} for parameters that every rank of a stage computes with whole; plan "
            "with tensor degree 1, or use FreeLayout"
        )


def check_fixed(plan: Plan) -> None:
    """Refuse a plan for parameters whose places do not change from step to step."""
    if plan.sharding == Sharding.FREE:
        raise SeqloomError(
            "a plan with free sharding, whose stages may be others in every step, for parameters that stay where they "
            "were placed; use FreeLayout, or plan with the sharding of the parameters"
        )
    check_whole(plan)


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that want a gradient, by name; tied ones once."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def squared_norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
    """Return the sum of squares of what this rank holds of the gradients, a scalar in float64.

    A tensor's own sum is in float32 (float64 for float64).
    """
    held = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    norms = [torch.linalg.vector_norm(each, dtype=sum_dtype(each.dtype)) for each in held]
    return torch.stack(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64)


def sum_gradients(parameters: Iterable[nn.Parameter], all_reduce: Callable[[torch.Tensor], None]) -> None:
    """Replace the gradients by their sums over ranks, in float32 or wider; one that is missing counts as zero.

    Args:
        parameters: the same on all ranks, in the same order.
        all_reduce: replaces a flat tensor by its sum.
    """
    parameters = list(parameters)
    complete_gradients(parameters)
    for bucket in _buckets(parameters):
        dtype = sum_dtype(bucket[0].dtype)
        flat = torch.cat([gradient.reshape(-1).to(dtype) for gradient in bucket])
        all_reduce(flat)
        for gradient, total in zip(bucket, flat.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(total.view(gradient.shape))


def complete_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Give a gradient of zero to parameters that have none: a step did not touch them."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def scale_gradients(parameters: Parameters, factor: float | torch.Tensor) -> None:
    """Multiply all gradients; clipping is a factor of min(1, limit / norm)."""
    if isinstance(factor, float) and factor == 1.0:
        return
    for parameter in parameters.master_weights().values():
        if parameter.grad is not None:
            local(parameter.grad).mul_(factor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor: its shard of a distributed one, else the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterator[list[torch.Tensor]]:
    """Yield local gradients of one dtype, together at most `BUCKET` elements or a single one."""
    bucket: list[torch.Tensor] = []
    for parameter in parameters:
        assert parameter.grad is not None
        gradient = local(parameter.grad)
        size = sum(each.numel() for each in bucket)
        if bucket and (gradient.dtype != bucket[0].dtype or size + gradient.numel() > BUCKET):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket
