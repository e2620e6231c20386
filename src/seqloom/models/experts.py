"""Mixtures of experts on packed tokens: routed rows are sorted by expert, multiplied in groups, and summed by token.

    x [tokens, hidden], chosen and weights [tokens, top_k]
        -> to the ranks with the experts, where these are divided over an EP group     `dist.expert_parallel`
        -> rows in the order of experts, [pairs, hidden], a pair for every row and expert
        -> the experts, one product for all of them (`grouped_linear`)
        -> times weights, summed by row, back to the ranks of the tokens and summed there

Every pair of a token and an expert is computed, however unequal the experts' loads are. The weights in hand may be all
experts of the layer or those of this rank. In a TP group every rank has the tokens of all, and computes the pairs of
its experts: the sum over the group completes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn.functional import grouped_mm

from seqloom.dist import Context
from seqloom.dist.expert_parallel import EPGroup
from seqloom.dist.rows import inverse_permutation
from seqloom.errors import SeqloomError
from seqloom.models.layer_wrapper import EXPERTS, LayerWrapper

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""compute(rows [pairs, hidden], expert of each int64[pairs], ends int32[experts here]) -> [pairs, hidden].

Rows are sorted by expert; experts are counted from the first one in hand."""
ALIGNED_BYTES = 16
"""Rows and columns that torch's grouped product takes are a multiple of it."""


class ExpertRange(NamedTuple):
    """The experts that a rank computes.

    Attributes:
        count: experts of the layer.
        own: those of this rank.
        ep_group: with which it exchanges tokens; None: it has the tokens of all its experts.
    """

    count: int
    own: range
    ep_group: EPGroup | None = None

    @classmethod
    def of(cls, count: int, context: Context) -> ExpertRange:
        """Return what a rank computes of `count` experts; refuse a number that its EP or TP group cannot divide."""
        group, ep_group = context.ep_group or context.tp_group, context.ep_group
        ranks, index = (1, 0) if group is None else (len(group.ranks), group.index)
        if count % ranks:
            name = "tensor" if ep_group is None else "expert"
            raise SeqloomError(
                f"{count} experts over {ranks} ranks: every rank has equally many; use a {name} degree that divides "
                f"{count}"
            )
        own = count // ranks
        return cls(count, range(index * own, (index + 1) * own), ep_group)

    def in_hand(self, weight: torch.Tensor) -> torch.Tensor:
        """Return this rank's experts of a weight [experts, ...], of which it may have all or only its own."""
        weight = weight.to_local() if isinstance(weight, DTensor) else weight
        if len(weight) == len(self.own):
            return weight
        if len(weight) != self.count:
            raise SeqloomError(
                f"a weight of {len(weight)} experts where a rank computes {len(self.own)} of {self.count}; keep all of "
                "them, or the rank's own"
            )
        return weight[self.own.start : self.own.stop]


def divide_experts(layers: Iterable[nn.Module], experts_of: Callable[[nn.Module], int | None]) -> None:
    """Tell the experts in layers, call by call, which of them are this rank's: `expert_range` of their module.

    Doing it again changes nothing.

    Args:
        layers: each is called with the context.
        experts_of: how many experts a module has; None: it is no module of experts.
    """
    for layer in layers:
        found = tuple((each, count) for each in layer.modules() if (count := experts_of(each)) is not None)
        if found:
            LayerWrapper.of(layer).scopes[EXPERTS] = ExpertScope(found).entered


@dataclass(frozen=True, slots=True, eq=False)
class ExpertScope:
    """The modules of experts in a layer, with how many each has."""

    modules: tuple[tuple[nn.Module, int], ...]

    @contextmanager
    def entered(self, context: Context) -> Iterator[None]:
        """Set what a call with a context computes."""
        for module, count in self.modules:
            module.expert_range = ExpertRange.of(count, context)  # pyrefly: ignore[bad-argument-type]
        try:
            yield
        finally:
            for module, _ in self.modules:
                module.expert_range = None  # pyrefly: ignore[bad-argument-type]


@torch.compiler.disable
def run_experts(
    x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, experts: ExpertRange, compute: Compute
) -> torch.Tensor:
    """Return for every token the weighted sum of what its experts return, [tokens, hidden]; all of an EP group call it.

    Args:
        x: [tokens, hidden].
        chosen: int64[tokens, top_k], experts of every token; numbers that no expert has add nothing.
        weights: [tokens, top_k].
        experts: which of them this rank computes. Without an EP group, pairs of other experts are left out.
    """
    group = experts.ep_group
    if group is None:
        pairs = chosen.numel() if len(experts.own) == experts.count else None
        return _own_pairs(x, chosen, weights, experts.own, compute, pairs)
    route = group.route(chosen, experts.count)
    rows, of_rows, by = route.to_experts(x, weights, chosen.to(torch.int32)).wait()
    summed = _own_pairs(rows, by, of_rows, experts.own, compute, route.pairs)
    return route.to_tokens(summed).wait()[0]


def _own_pairs(
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    own: range,
    compute: Compute,
    pairs: int | None,
) -> torch.Tensor:
    """Return the weighted sums over the experts of a range; `pairs` is how many pairs there are, None: not known."""
    expert, experts = chosen.reshape(-1).long() - own.start, len(own)
    expert = torch.where((expert >= 0) & (expert < experts), expert, experts)  # the last: of no expert here
    counts = expert.new_zeros(experts + 1).scatter_add_(0, expert, torch.ones_like(expert))
    ends = counts[:experts].cumsum(0, dtype=torch.int32)
    if pairs is None:
        pairs = int(ends[-1])
    order = torch.argsort(expert, stable=True)[:pairs]
    row = order.div(max(chosen.shape[1], 1), rounding_mode="floor")
    results = compute(x.index_select(0, row), expert.index_select(0, order), ends)
    wide = torch.promote_types(x.dtype, torch.float32)
    weighted = results.to(wide) * weights.reshape(-1).index_select(0, order).to(wide)[:, None]
    if pairs == chosen.numel():  # every place is taken: in the order of tokens there is nothing to add to
        return weighted.index_select(0, inverse_permutation(order)).view(*chosen.shape, x.shape[1]).sum(1).to(x.dtype)
    return torch.zeros_like(x, dtype=wide).index_add(0, row, weighted).to(x.dtype)


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return rows times the transposed matrix of their expert, [pairs, out].

    Args:
        x: [pairs, in], sorted by expert.
        weight: [experts, out, in], in any memory order.
        ends: int32[experts], one behind the last row of each; the last one is the number of rows.
    """
    matrices = weight.transpose(1, 2)
    widths = (width * weight.element_size() for width in weight.shape[1:])
    if x.dtype != torch.float64 and not any(width % ALIGNED_BYTES for width in widths):
        return grouped_mm(x, matrices, offs=ends)
    return _GroupedProduct.apply(x, matrices, tuple(ends.tolist()))


class _GroupedProduct(torch.autograd.Function):
    """A product per expert, for dtypes and widths that torch's grouped product does not take."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, matrices: torch.Tensor, ends: tuple[int, ...]) -> torch.Tensor:
        ctx.save_for_backward(x, matrices)
        ctx.runs = tuple(zip((0, *ends), ends, strict=False))
        out = x.new_empty((len(x), matrices.shape[2]))
        for matrix, (start, stop) in zip(matrices, ctx.runs, strict=True):
            torch.mm(x[start:stop], matrix, out=out[start:stop])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        (gradient,), (x, matrices) = grad_outputs, ctx.saved_tensors
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        dmatrices = torch.empty_like(matrices) if ctx.needs_input_grad[1] else None
        for expert, (start, stop) in enumerate(ctx.runs):
            if dx is not None:
                torch.mm(gradient[start:stop], matrices[expert].t(), out=dx[start:stop])
            if dmatrices is not None:
                torch.mm(x[start:stop].t(), gradient[start:stop], out=dmatrices[expert])
        return dx, dmatrices, None
