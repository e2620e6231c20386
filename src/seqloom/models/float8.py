"""Linear layers in float8, off by default: two of the three matrix products of a layer run at up to twice the rate.

    y  = x W^T      float8, with a scale for every row of x, which is a token, and for every row of W
    dx = dy W       float8, with a scale for every row of dy, which is a token, and for every column of W
    dW = dy^T x     in the dtype of the layers

No scale spans tokens, so what a token gets does not depend on which others its rank holds, and the plan does not change
the result. The scales of a float8 dW would have to span the tokens of a rank; therefore dW is left as it is. Scales are
powers of two: scaling by them rounds nothing. The format is e4m3, of which three bits are the mantissa, also for
gradients, whose range the scale of their row follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear

from seqloom.compat import scaled_product
from seqloom.errors import SeqloomError

FORMAT = torch.float8_e4m3fn
LARGEST = torch.finfo(FORMAT).max
LEAST = 2.0**-96
"""What the largest value of a row counts as at least: a row of zeros has a scale too."""
EXPONENT = 0x7F80_0000
"""The bits of a float32 that are its exponent: alone they are the power of two at or below it."""
MULTIPLE = 16
"""What the width of a float8 product has to be a multiple of."""
NARROWEST = 256
"""Layers that are narrower on either side, such as routers, stay as they are: scaling would take longer than it
saves."""


class LinearProducts(NamedTuple):
    """How a linear layer multiplies.

    Attributes:
        linear: linear(x, weight, bias) -> y, seen by autograd; x is [..., in], weight is [out, in].
        output: the same below autograd.
        input_gradient: input_gradient(dy, weight) -> dx, dy is [rows, out].
    """

    linear: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
    output: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
    input_gradient: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def use_float8(layers: Iterable[nn.Module], *, narrowest: int = NARROWEST) -> int:
    """Have the linear layers inside `layers` multiply in float8; return how many do. Classes and parameters stay.

    Every plain nn.Linear in them whose widths are multiples of 16 gets another `forward`, on the instance.

    Raises:
        SeqloomError: there is none.
    """
    found = [module for layer in layers for module in layer.modules() if type(module) is nn.Linear]
    chosen = [module for module in found if _fits(module, narrowest)]
    if not chosen:
        widths = sorted({(module.in_features, module.out_features) for module in found})
        raise SeqloomError(
            f"model.float8 = true, and none of the {len(found)} linear layers has widths that are multiples of "
            f"{MULTIPLE} and at least {narrowest}: they are {widths[:4]}; set model.float8 to false"
        )
    for module in chosen:
        module.float8 = True  # pyrefly: ignore[bad-argument-type]
        module.forward = MethodType(_float8_forward, module)
    return len(chosen)


def keep_dtype(layer: nn.Module) -> None:
    """Leave a linear layer as it is when others are made to multiply in float8."""
    layer.keeps_dtype = True  # pyrefly: ignore[bad-argument-type]


def linear_products(layer: nn.Module) -> LinearProducts:
    """Return how a linear layer multiplies."""
    return FLOAT8 if getattr(layer, "float8", False) else PLAIN


def check_float8(device: torch.device) -> None:
    """Refuse a GPU that has no float8 products with a scale for every row."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        major, minor = torch.cuda.get_device_capability(device)
        raise SeqloomError(
            f"model.float8 = true on {torch.cuda.get_device_name(device)}, compute capability {major}.{minor}: float8 "
            "products with a scale for every row need 9.0 (Hopper) or more; set model.float8 to false"
        )


def _fits(module: nn.Linear, narrowest: int) -> bool:
    widths = module.in_features, module.out_features
    fits = min(widths) >= narrowest and not any(width % MULTIPLE for width in widths)
    return fits and not getattr(module, "keeps_dtype", False)


def _float8_forward(layer: Any, input: torch.Tensor) -> torch.Tensor:
    return float8_linear(input, layer.weight, layer.bias)


class Quantised(NamedTuple):
    """A matrix in float8; `values * scale` is about what it was made of. `scale` is float32, a row or a column."""

    values: torch.Tensor
    scale: torch.Tensor


def quantise(matrix: torch.Tensor, axis: int) -> Quantised:
    """Scale every row (`axis` 1) or column (0) of a matrix by a power of two into the range of float8, and round it."""
    top = matrix.abs().amax(axis, keepdim=True).float().clamp(min=LEAST)
    factor = (LARGEST / top).view(torch.int32).bitwise_and(EXPONENT).view(torch.float32)
    return Quantised((matrix * factor).to(FORMAT), factor.reciprocal())


def float8_output(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x W^T + b; x is [..., in]."""
    rows = x.reshape(-1, x.shape[-1])
    values, scale = quantise(weight, 1)
    out = _product(quantise(rows, 1), Quantised(values.t(), scale.t()), x.dtype).view(*x.shape[:-1], len(weight))
    return out if bias is None else out + bias


def float8_input_gradient(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return dy W; dy is [rows, out]."""
    values, scale = quantise(weight, 0)
    return _product(quantise(dy, 1), Quantised(values.t().contiguous().t(), scale), dy.dtype)


def _product(left: Quantised, right: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """Return left [rows, n] times right [n, columns], whose columns are contiguous."""
    rows, columns = left.values.shape[0], right.values.shape[1]
    if rows == 0:
        return torch.zeros((0, columns), dtype=dtype, device=left.values.device)
    if left.values.is_cuda:
        return scaled_product(*left, *right, dtype)
    wide = torch.promote_types(dtype, torch.float32)  # the same numbers, multiplied as they are
    a, b = (matrix.values.to(wide) * matrix.scale.to(wide) for matrix in (left, right))
    return (a @ b).to(dtype)


class _Float8Linear(torch.autograd.Function):
    """x W^T."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return float8_output(x, weight, None)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        x, weight = ctx.saved_tensors
        dy = grad_outputs[0].reshape(-1, grad_outputs[0].shape[-1])
        dx = float8_input_gradient(dy, weight).view(x.shape) if ctx.needs_input_grad[0] else None
        dweight = dy.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        return dx, dweight


@cache
def allow_in_graphs() -> None:
    """Have torch.compile take the products into its graphs as they are: it traces them, but not their autograd node."""
    torch.compiler.allow_in_graph(_Float8Linear)  # loads the compiler; only when it is needed


def float8_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x W^T + b; x is [..., in]."""
    out = _Float8Linear.apply(x, weight)
    return out if bias is None else out + bias


PLAIN = LinearProducts(linear, linear, torch.matmul)
FLOAT8 = LinearProducts(float8_linear, float8_output, float8_input_gradient)
