"""Split backward: gradients of inputs now (I), gradients of linear layers' weights later (W).

    weights = defer_weight_gradients(network.layers)
    with weights.deferred(unit):        # I: what the stage before waits for
        output.backward(gradient)
    weights.run(unit)                   # W: whenever there is time, before gradients are reduced

Only the matrices and biases of linear layers can wait: their gradients are a product of what the layer saw and of what
came back, which are kept until W. Norms, the table of tokens and the head inside the loss get theirs in I. Outside of
`deferred` everything happens at once, as in plain torch, bit by bit.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from seqloom.errors import SeqloomError


class WeightGradients:
    """What weights' gradients will be made of, for every unit whose I has run and whose W has not.

    Attributes:
        enabled: whether a forward has to prepare for `deferred`; without, layers run as plain torch has them, which is
            a little faster. Set before the forwards of a step.
    """

    def __init__(self) -> None:
        """Start with nothing."""
        self.enabled = True
        self._waiting: dict[Hashable, list[_Product]] = {}
        self._open: list[_Product] | None = None

    @contextmanager
    def deferred(self, key: Hashable) -> Generator[None]:
        """Put off the weights' gradients of every backward in this block; `run(key)` finds them."""
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
            raise SeqloomError(f"no weights' gradients of {key} wait; W comes once, after the I of the same unit")
        for product in _taken(self._waiting.pop(key)):
            product.add()

    def clear(self) -> None:
        """Forget what waits: a step was given up."""
        self._waiting.clear()

    @property
    def waiting(self) -> tuple[Hashable, ...]:
        """Units whose W has not run."""
        return tuple(self._waiting)

    @property
    def bytes(self) -> int:
        """Memory of what waits. An input that several layers share counts once."""
        products = [product for waiting in self._waiting.values() for product in waiting]
        storages = [each.untyped_storage() for product in products for each in (product.given, product.gradient)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def keep(self, product: _Product) -> bool:
        """Take what a layer's gradients are made of; False: they are wanted now."""
        if self._open is None:
            return False
        self._open.append(product)
        return True


def defer_weight_gradients(layers: Iterable[nn.Module]) -> WeightGradients:
    """Make the linear layers inside `layers` able to put off their weights' gradients. Names and parameters stay.

    A layer that torch.compile runs computes both halves in I, and W finds nothing to do: its backward is one graph.

    Args:
        layers: any modules; every plain nn.Linear in them is changed, subclasses of others are left as they are.
    """
    weights = WeightGradients()
    for layer in layers:
        for module in layer.modules():
            if isinstance(module, _Split):
                raise SeqloomError(
                    "a linear layer's backward is split already; call defer_weight_gradients once for a layer"
                )
            if type(module) is nn.Linear:
                module.__class__ = _Split
                module.weight_gradients = weights  # pyrefly: ignore[bad-argument-type]
    return weights


class _Split(nn.Linear):
    """A linear layer whose weights' gradients may wait."""

    weight_gradients: WeightGradients

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """See nn.Linear."""
        plain = not self.weight_gradients.enabled or not torch.is_grad_enabled()
        if plain or torch.compiler.is_compiling():
            return super().forward(input)
        return _Linear.apply(input, self.weight, self.bias, self)


class _Linear(torch.autograd.Function):
    """x W^T + b."""

    @staticmethod
    def forward(
        ctx: Any, given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: _Split
    ) -> torch.Tensor:
        ctx.save_for_backward(given, weight)
        ctx.layer = layer
        return linear(given, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        gradient, (given, weight) = grad_outputs[0], ctx.saved_tensors  # under checkpointing this recomputes `given`
        wants_given, wants_weight, wants_bias, _ = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        back = (rows @ weight).view(given.shape) if wants_given else None
        # The parameters themselves: under checkpointing the saved weight is a copy of them that has no gradient.
        layer = ctx.layer
        product = _Product(
            layer.weight if wants_weight else None,
            layer.bias if wants_bias else None,
            given.reshape(-1, given.shape[-1]),
            rows,
        )
        if not (wants_weight or wants_bias) or layer.weight_gradients.keep(product):
            return back, None, None, None
        return back, *product.gradients(), None


class _Product(NamedTuple):
    """What the gradients of one call of a linear layer are made of.

    Attributes:
        weight, bias: the parameters; None where no gradient is wanted.
        given: [rows, in], what the layer was given.
        gradient: [rows, out], of what it returned.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    given: torch.Tensor
    gradient: torch.Tensor

    def gradients(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of weight and bias, by the products that autograd would use."""
        weight = None if self.weight is None else self.gradient.t() @ self.given
        return weight, None if self.bias is None else self.gradient.sum(0)

    @torch.no_grad()
    def add(self) -> None:
        """Add the gradients to those of the parameters, in the dtype that these have or will have."""
        for parameter, gradient in zip((self.weight, self.bias), self.gradients(), strict=True):
            if parameter is None or gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient.to(parameter.grad_dtype)
            else:
                parameter.grad += gradient


def _taken(products: list[_Product]) -> Iterator[_Product]:
    """Yield products, first the ones of the layers that ran backward first, and let go of each."""
    products.reverse()
    while products:
        yield products.pop()
