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
from functools import partial
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
        load: int64[count + 1], to which the tokens of this rank add how often each expert was chosen; the last is for
            numbers that no expert has. None: they are not counted.
        arrived: called with the pairs of a row and an expert that this rank computes, of all ranks of the EP group.
            None: they are not counted.
    """

    count: int
    own: range
    ep_group: EPGroup | None = None
    load: torch.Tensor | None = None
    arrived: Callable[[int], None] | None = None

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


class ExpertLoad:
    """How many tokens of a step every expert of every layer gets; counted in forwards, however often layers run again.

    Attributes:
        layers: of the model that have experts.
        experts: of such a layer, at most.
    """

    def __init__(self, layers: int, experts: int) -> None:
        """Count nothing until `start`."""
        self.layers, self.experts = layers, experts
        self._counts: torch.Tensor | None = None
        self._seen: set[tuple[int, int]] = set()
        self._pairs: dict[tuple[int, int], int] = {}
        self._ep_group: EPGroup | None = None

    def start(self, device: torch.device) -> None:
        """Count from now on, for a new step."""
        self._counts = torch.zeros((self.layers, self.experts + 1), dtype=torch.int64, device=device)
        self._seen.clear()
        self._pairs.clear()

    def stop(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what was counted since `start`, to be added up over ranks, and count no more.

        Returns:
            int64[layers, experts]: tokens of this rank that chose an expert; int64[layers, 2]: of this rank's EP group,
            on its first rank, pairs at the busiest rank of every call times the ranks, and pairs at all of them.
        """
        assert self._counts is not None
        counts, self._counts = self._counts[:, :-1], None
        return counts.contiguous(), self._busiest(counts.device)

    def _busiest(self, device: torch.device) -> torch.Tensor:
        """Ranks of an EP group tell each other, once in a step, what each had to compute in every call of a layer."""
        found, group = torch.zeros((self.layers, 2), dtype=torch.int64, device=device), self._ep_group
        if group is None or not self._pairs:
            return found
        own = torch.tensor([*self._pairs.values()], device=device)
        every = group.gather(own)
        if group.index == 0:
            sums = torch.stack((len(group.ranks) * every.amax(dim=0), every.sum(dim=0)), dim=1)
            found.index_add_(0, torch.tensor([layer for layer, _ in self._pairs], device=device), sums)
        return found

    def arrivals_of_call(self, layer: int, context: Context) -> Callable[[int], None] | None:
        """Return what counts the pairs that arrive in a call of a layer; all ranks of an EP group make the same calls.

        A recomputed layer has the same pairs again.
        """
        if self._counts is None or context.ep_group is None:
            return None
        self._ep_group = context.ep_group
        return partial(self._pairs.__setitem__, (layer, id(context.work)))

    def of_call(self, layer: int, count: int, context: Context) -> torch.Tensor | None:
        """Return where a call of a layer counts, int64[count + 1]; None: nowhere.

        A layer that is recomputed is called with the same microbatch again, the ranks of a TP group all have its
        tokens, and a rank without tokens may compute a row that is nobody's.
        """
        moved, key = context.mlp_redistribute, (layer, id(context.work))
        tokens = context.tokens if moved is None else sum(moved.to_target.receives)
        first = context.tp_group is None or context.tp_group.index == 0
        if self._counts is None or key in self._seen or not (first and tokens):
            return None
        self._seen.add(key)
        return self._counts[layer, : count + 1]


def divide_experts(layers: Iterable[nn.Module], experts_of: Callable[[nn.Module], int | None]) -> ExpertLoad | None:
    """Tell the experts in layers, call by call, which of them are this rank's: `expert_range` of their module.

    Returns what counts their tokens; None: no layer has experts.

    Args:
        layers: each is called with the context.
        experts_of: how many experts a module has; None: it is no module of experts.
    """
    layers = list(layers)
    found = [[(each, count) for each in layer.modules() if (count := experts_of(each))] for layer in layers]
    counts = [count for modules in found for _, count in modules]
    if not counts:
        return None
    load, numbers = ExpertLoad(len(counts), max(counts)), iter(range(len(counts)))
    for layer, modules in zip(layers, found, strict=True):
        if modules:
            numbered = tuple((next(numbers), *each) for each in modules)
            LayerWrapper.of(layer).scopes[EXPERTS] = ExpertScope(numbered, load)
    return load


@torch.no_grad()
def balance_experts(biases: Iterable[torch.Tensor | None], tokens: torch.Tensor, rate: float) -> None:
    """Move the correction bias of every expert up where it got fewer tokens than the mean, down where more (DeepSeek).

    Args:
        biases: [experts] by layer, which routers add to scores to choose experts; None: the layer has none.
        tokens: int64[layers, experts] of the whole step.
        rate: of a step.
    """
    for bias, own in zip(biases, tokens.double(), strict=True):
        if bias is not None:
            own = own[: len(bias)]
            bias += rate * (own.mean() - own).sign().to(bias)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertScope:
    """The modules of experts in a layer: number among those of the model, module, experts."""

    modules: tuple[tuple[int, nn.Module, int], ...]
    load: ExpertLoad

    @contextmanager
    def __call__(self, context: Context) -> Iterator[None]:
        """Set what a call with a context computes."""
        for number, module, count in self.modules:
            load, arrived = self.load.of_call(number, count, context), self.load.arrivals_of_call(number, context)
            own = ExpertRange.of(count, context)._replace(load=load, arrived=arrived)
            module.expert_range = own  # pyrefly: ignore[bad-argument-type]
        try:
            yield
        finally:
            for _, module, _ in self.modules:
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
    group, load = experts.ep_group, experts.load
    if load is not None:
        numbers = chosen.reshape(-1).clamp(max=experts.count)
        load.scatter_add_(0, numbers, torch.ones_like(numbers))
    if group is None:
        pairs = chosen.numel() if len(experts.own) == experts.count else None
        return _own_pairs(x, chosen, weights, experts.own, compute, pairs)
    route = group.route(chosen, experts.count)
    if experts.arrived is not None:
        experts.arrived(route.pairs)
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
