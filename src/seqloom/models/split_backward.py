"""Split backward (zero bubble): gradients of inputs now (I), gradients of linear layers' weights later (W).

    weight_gradients = defer_weight_gradients(adapter.layers)
    with weight_gradients.deferred(unit):    # I: the stage before waits for it
        output.backward(gradient)
    weight_gradients.run(unit)               # W: whenever there is time, before gradients are reduced

Only the matrices and biases of linear layers can wait: their gradients are a product of the layer's input and of its
output gradient, which are kept until W. Norms, the token embedding and the head inside the loss get theirs in I.
Outside of `deferred` everything happens at once, as in plain torch, bit by bit.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterable
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from seqloom.errors import SeqloomError
from seqloom.models.float8 import linear_products


class WeightGradients:
    """Inputs and output gradients of linear layers, for every unit whose I has run and whose W has not.

    Attributes:
        enabled: whether a forward has to prepare for `deferred`; without, layers run as plain torch has them, which is
            a little faster. Set before the forwards of a step.
    """

    def __init__(self) -> None:
        self.enabled = True
        self._waiting: dict[Hashable, list[_LinearCall]] = {}
        self._open: list[_LinearCall] | None = None

    @contextmanager
    def deferred(self, key: Hashable) -> Generator[None]:
        """Defer the weight gradients of every backward in this block; `run(key)` computes them."""
        if self._open is not None or key in self._waiting:
            raise SeqloomError(
                f"the input gradients of {key} begin while those of {list(self._waiting)} wait for their weights; "
                "every unit runs I once, one after the other, and W before its I comes again"
            )
        self._open = self._waiting[key] = []
        try:
            yield
        finally:
            self._open = None

    def run(self, key: Hashable) -> None:
        """Add the gradients that `deferred(key)` put off to those of the weights, and free what they needed."""
        if key not in self._waiting:
            raise SeqloomError(f"no weight gradients of {key} wait; W comes once, after the I of the same unit")
        calls = self._waiting.pop(key)
        calls.reverse()
        while calls:  # in the order of the backward; each is freed before the next
            calls.pop().add_gradients()

    def clear(self) -> None:
        """Drop what waits, as after a failed step."""
        self._waiting.clear()

    def defer(self, call: _LinearCall) -> bool:
        """Keep a call for W; False: its gradients are wanted now."""
        if self._open is None:
            return False
        self._open.append(call)
        return True


def defer_weight_gradients(layers: Iterable[nn.Module]) -> WeightGradients:
    """Make the linear layers inside `layers` able to defer their weight gradients. Classes and parameters stay.

    Every plain nn.Linear in them gets another `forward`, on the instance; subclasses do not. A layer that torch.compile
    runs computes both halves in I, and W finds nothing to do: its backward is one graph.
    """
    weight_gradients = WeightGradients()
    for layer in layers:
        for module in layer.modules():
            if "weight_gradients" in module.__dict__:
                raise SeqloomError("a linear layer's backward is split already; call defer_weight_gradients once")
            if type(module) is nn.Linear:
                module.weight_gradients = weight_gradients  # pyrefly: ignore[bad-argument-type]
                module.forward = MethodType(_split_forward, module)
    return weight_gradients


def _split_forward(layer: Any, input: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_compiling() or not layer.weight_gradients.enabled or not torch.is_grad_enabled():
        return linear_products(layer).linear(input, layer.weight, layer.bias)
    return _SplitLinear.apply(input, layer.weight, layer.bias, layer)


class _SplitLinear(torch.autograd.Function):
    """x W^T + b."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: nn.Module
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.layer = layer
        return linear_products(layer).output(input, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        grad_output, (input, weight) = grad_outputs[0], ctx.saved_tensors  # under checkpointing this recomputes `input`
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        rows = grad_output.reshape(-1, grad_output.shape[-1])
        grad_input = linear_products(ctx.layer).input_gradient(rows, weight).view(input.shape) if needs_input else None
        # The parameters themselves: under checkpointing the saved weight is a copy of them that has no gradient.
        layer = ctx.layer
        call = _LinearCall(
            layer.weight if needs_weight else None,
            layer.bias if needs_bias else None,
            input.reshape(-1, input.shape[-1]),
            rows,
        )
        if not (needs_weight or needs_bias) or layer.weight_gradients.defer(call):
            return grad_input, None, None, None
        return grad_input, *call.gradients(), None


class _LinearCall(NamedTuple):
    """Factors of the weight gradients of one call of a linear layer.

    Attributes:
        weight, bias: the parameters; None where no gradient is wanted.
        input: [rows, in].
        grad_output: [rows, out].
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    input: torch.Tensor
    grad_output: torch.Tensor

    def gradients(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of weight and bias, by the products that autograd would use."""
        weight = None if self.weight is None else self.grad_output.t() @ self.input
        return weight, None if self.bias is None else self.grad_output.sum(0)

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add the gradients to those of the parameters, in the dtype that these have or will have."""
        for parameter, gradient in zip((self.weight, self.bias), self.gradients(), strict=True):
            if parameter is None or gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient.to(parameter.grad_dtype)
            else:
                parameter.grad += gradient
