"""What `gpu_experts.py` times: products and layers of experts, and dense ones of the same FLOPs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from seqloom.describe import ModelSpec
from seqloom.dist import bind_single_rank
from seqloom.models.experts import grouped_linear
from seqloom.models.transformer import FeedForward, MixtureOfExperts, RMSNorm

Side = Callable[[], Any]


def drawn_ends(spec: ModelSpec, tokens: int, skew: float, seed: int) -> torch.Tensor:
    """Cumulative rows of the experts, int32[experts]; a token has different experts, some experts are more popular."""
    generator = torch.Generator().manual_seed(seed)
    popularity = skew * torch.randn(spec.experts, generator=generator)
    gumbel = -torch.rand(tokens, spec.experts, generator=generator).clamp_min(1e-12).log().neg().log()
    chosen = (popularity + gumbel).topk(spec.active_experts).indices
    return torch.bincount(chosen.reshape(-1), minlength=spec.experts).cumsum(0, dtype=torch.int32)


def busiest(ends: torch.Tensor) -> float:
    """Rows of the busiest expert over the mean."""
    counts = ends.diff(prepend=ends.new_zeros(1)).double()
    return float(counts.max() / counts.mean())


def products(spec: ModelSpec, tokens: int, skew: float, device: torch.device, seed: int) -> tuple[dict[str, Side], Any]:
    """The grouped products and the two dense ones, with how unequal the experts' rows are."""

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(0.05).requires_grad_()

    ends, width, hidden = drawn_ends(spec, tokens, skew, seed), spec.expert_ffn, spec.hidden
    pairs, wide, on_device = int(ends[-1]), spec.active_experts * width, ends.to(device)
    shapes = {
        "grouped": (pairs, width, lambda x, weight: grouped_linear(x, weight, on_device), (spec.experts,)),
        "dense, the same rows": (pairs, width, linear, ()),
        "dense, a row per token": (tokens, wide, linear, ()),
    }

    def side(rows: int, width: int, product: Any, experts: tuple[int, ...]) -> Side:
        inputs = (drawn(rows, hidden), drawn(rows, width))
        weights = (drawn(*experts, 2 * width, hidden), drawn(*experts, hidden, width))
        gradients = (drawn(rows, 2 * width).detach(), drawn(rows, hidden).detach())

        def run() -> None:
            outputs = [product(x, weight) for x, weight in zip(inputs, weights, strict=True)]
            torch.autograd.grad(outputs, (*inputs, *weights), gradients)

        return run

    return {name: side(*each) for name, each in shapes.items()}, busiest(ends)


class Stack(nn.Module):
    """Layers of experts or of feed-forwards, each added to its input, each on normalised input."""

    def __init__(self, layers: list[nn.Module], hidden: int, **factory: Any) -> None:
        super().__init__()
        self.norms = nn.ModuleList(RMSNorm(hidden, 1e-6, **factory) for _ in layers)
        self.layers = nn.ModuleList(layers)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else nn.init.ones_(parameter)

    def forward(self, x: torch.Tensor, context: Any) -> torch.Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x), context)
        return x


def layers(spec: ModelSpec, tokens: int, device: torch.device, count: int) -> dict[str, Side]:
    """A stack of layers with experts, and one of feed-forwards of their FLOPs."""
    wide, context = spec.active_experts * spec.expert_ffn, bind_single_rank([tokens])
    factory: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    x = torch.randn(tokens, spec.hidden, requires_grad=True, **factory)
    made: dict[str, list[nn.Module]] = {
        "experts": [MixtureOfExperts(spec, **factory) for _ in range(count)],
        "dense": [FeedForward(spec.hidden, wide, **factory) for _ in range(count)],
    }
    stacks = {name: Stack(each, spec.hidden, **factory) for name, each in made.items()}

    def run(stack: Stack) -> None:
        torch.autograd.grad(stack(x, context).sum(), (x, *stack.parameters()))

    return {name: lambda stack=stack: run(stack) for name, stack in stacks.items()}
