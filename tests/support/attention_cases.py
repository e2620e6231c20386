"""Attention over a pack of documents on any groups, checked against one process: the harness of all attention tests.

found = assemble(run_ranks(case.world, lambda transport: attend(transport, case, tensors)))
worst(found, case.truth(tensors))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from seqloom.attention import attention_with_lse
from seqloom.attention.kernels import AttentionShape, Kernel, PreparedAttention
from seqloom.attention.kernels.dispatch import default_dispatcher
from seqloom.attention.kernels.interface import Gradients, Saved
from seqloom.attention.masks import Segments
from seqloom.dist import Context, all_gather_rows, attention_context, bind, reduce_scatter_rows
from seqloom.dist.transport import Transport
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group, GroupFamily, Method, StageMicroBatch
from support.dropout import expected_weights
from support.oracle import Truth, attention_truth, difference

DROPOUT_SEED = 2**40 + 77
AXES = (0, 1, 0, 0, 0)
"""Along which axis of out, lse, dq, dk and dv the tokens lie."""


class Inputs(NamedTuple):
    """q, dout [tokens, heads, dim] and k, v [tokens, kv_heads, dim], documents one after the other."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor


@dataclass(frozen=True, slots=True)
class Case:
    """One attention problem and how it is spread.

    Attributes:
        lengths: of documents 0, 1, ...
        heads, kv_heads, dim: of the model.
        world: ranks, in groups or not.
        groups: who works on which documents.
        causal, window, scale, softcap, attention_chunk: see `attention`.
        sinks: of every head; none: there are none.
        node_size, tensor: see `bind`.
        dropout: of attention weights.
        prefixes: of every document, how many of its first tokens see each other; none: 0.
    """

    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    dim: int
    world: int
    groups: tuple[Group, ...]
    causal: bool = True
    window: int | None = None
    scale: float | None = None
    node_size: int | None = None
    tensor: int = 1
    softcap: float | None = None
    sinks: tuple[float, ...] = ()
    attention_chunk: int | None = None
    dropout: float = 0.0
    prefixes: tuple[int, ...] = ()

    @classmethod
    def one_group(
        cls,
        lengths: Iterable[int],
        heads: int,
        kv_heads: int,
        dim: int,
        ulysses: int = 1,
        ring: int = 1,
        *,
        method: Method | str = Method.RING,
        **options: Any,
    ) -> Case:
        """All documents in one group of ranks 0, 1, ..."""
        lengths = tuple(lengths)
        world = ulysses * ring
        spans = tuple(Span(k, 0, n) for k, n in enumerate(lengths))
        group = Group(tuple(range(world)), ulysses, ring, spans, Method(method))
        return cls(lengths, heads, kv_heads, dim, world, (group,), **options)

    def in_tp_groups(self, tensor: int) -> Case:
        """Put a tp_group in the place of every rank, and for every head so many."""
        groups, world = tuple(of_teams(group, tensor) for group in self.groups), self.world * tensor
        heads, kv_heads = self.heads * tensor, self.kv_heads * tensor
        return replace(self, heads=heads, kv_heads=kv_heads, world=world, groups=groups, tensor=tensor)

    @property
    def work(self) -> StageMicroBatch:
        """What is bound."""
        return StageMicroBatch(self.groups, Checkpoint.NONE)

    def inputs(self, dtype: torch.dtype, seed: int = 0, device: torch.device | str = "cpu") -> Inputs:
        """Draw unit-normal tensors; the same numbers, rounded, in every dtype."""
        generator = torch.Generator().manual_seed(seed)
        tokens = sum(self.lengths)
        found = (
            torch.randn(tokens, heads, self.dim, generator=generator, dtype=torch.float64).to(device, dtype)
            for heads in (self.heads, self.kv_heads, self.kv_heads, self.heads)
        )
        return Inputs(*found)

    def truth(self, inputs: Inputs, sinks: torch.Tensor | None = None, layer: int = 0) -> Truth:
        """What one process computes in float64; a leaf with sinks gets its gradient. Layers drop different weights."""
        q, k, v, dout = (x.cpu() for x in inputs)
        sinks = self.sink_leaf(q) if sinks is None else sinks
        options = {"causal": self.causal, **self.options, "sinks": sinks, "keep": self.keep_masks(layer)}
        options["prefixes"] = self.prefixes
        return attention_truth(q, k, v, dout, self.lengths, **options)

    def keep_masks(self, layer: int = 0) -> list[torch.Tensor] | None:
        """What the attention weights of every document are multiplied with in a layer; None: nothing is dropped."""
        if not self.dropout:
            return None
        drop = (layer, self.heads, self.dropout)
        places = [(document, np.arange(length), np.arange(length)) for document, length in enumerate(self.lengths)]
        return [torch.from_numpy(expected_weights(DROPOUT_SEED, *place, *drop)) for place in places]

    @property
    def dropout_seed(self) -> int | None:
        """What is bound for dropout."""
        return DROPOUT_SEED if self.dropout else None

    @property
    def options(self) -> dict[str, Any]:
        """What `attention` is called with beside `causal` and sinks."""
        return {name: getattr(self, name) for name in ("window", "scale", "softcap", "attention_chunk")}

    def sink_leaf(self, like: torch.Tensor) -> torch.Tensor | None:
        """The sinks as a parameter beside a tensor; None: there are none."""
        if not self.sinks:
            return None
        return torch.tensor(self.sinks, dtype=like.dtype, device=like.device, requires_grad=True)


def of_teams(group: Group, tensor: int) -> Group:
    """Put a tp_group of neighbours in the place of every rank of a group."""
    ranks = tuple(rank * tensor + k for rank in group.ranks for k in range(tensor))
    return replace(group, ranks=ranks, ulysses=group.ulysses * tensor)


def attend_in_teams(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context, tensor: int, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `attention_with_lse` of all heads, every member of a tp_group computing its own: what a layer does.

    Its projections are the plainest there are: cut heads out going in, and fill up with zeros coming out.
    """
    if context.tp_group is None:
        return attention_with_lse(q, k, v, context, **options)
    index = context.tp_group.index
    q, k, v = (all_gather_rows(x, context).chunk(tensor, dim=1)[index] for x in (q, k, v))
    out, lse = attention_with_lse(q, k, v, attention_context(context), **options)
    out, lse = (
        reduce_scatter_rows(
            torch.cat([x if k == index else torch.zeros_like(x) for k in range(tensor)], dim=1), context
        )
        for x in (out, lse.T)
    )
    return out, lse.T


class RankResult(NamedTuple):
    """One rank's results and where its tokens are in the pack, int64[tokens]; its part of the sinks' gradient."""

    rows: torch.Tensor
    found: Truth
    dsinks: torch.Tensor | None = None


def rows_of_pack(case: Case, context: Context) -> torch.Tensor:
    """Where a rank's tokens are in the pack, int64[tokens]."""
    first = torch.tensor(np.cumsum(case.lengths) - case.lengths, device=context.device)
    return first[context.documents] + context.positions


def attend(
    transport: Transport, case: Case, inputs: Inputs, kernels: Kernel | None = None, device: str | None = None
) -> RankResult:
    """Run one rank's share, forward and backward, on the inputs' device or another."""
    if device is not None:
        inputs = Inputs(*(x.to(device) for x in inputs))
    family = GroupFamily.cached(case.world, case.world)
    places = {"node_size": case.node_size, "tensor": case.tensor, "dropout_seed": case.dropout_seed}
    places |= {"prefixes": dict(enumerate(case.prefixes))}
    context = bind(case.work, transport, device=inputs.q.device, family=family, **places)
    rows = rows_of_pack(case, context)
    q, k, v = (x[rows].requires_grad_() for x in inputs[:3])
    sinks = case.sink_leaf(q)
    options = {"causal": case.causal, **case.options, "sinks": sinks, "kernels": kernels}
    options |= {"dropout": case.dropout, "layer": 0}
    out, lse = attend_in_teams(q, k, v, context, case.tensor, **options)
    leaves = (q, k, v) if sinks is None else (q, k, v, sinks)
    gradients = [x.detach().cpu() for x in torch.autograd.grad(out, leaves, inputs.dout[rows])]
    found = Truth(out.detach().cpu(), lse.detach().cpu(), *gradients[:3])
    return RankResult(rows.cpu(), found, *gradients[3:])


def assemble(parts: Iterable[RankResult]) -> Truth:
    """Put the results of all ranks into the order of the pack; every token must be there once."""
    parts = list(parts)
    rows = torch.cat([part.rows for part in parts])
    sort = torch.argsort(rows)
    if not torch.equal(rows[sort], torch.arange(len(rows))):
        raise AssertionError(f"tokens of the pack that are on no rank or on several: rows {rows.tolist()}")
    fields = zip(*(part.found for part in parts), strict=True)  # of all ranks: outputs, then log-sum-exps, ...
    return Truth(*(torch.cat(pieces, axis).index_select(axis, sort) for axis, pieces in zip(AXES, fields, strict=True)))


def worst(found: Truth, truth: Truth) -> float:
    """Return the largest relative difference of output, log-sum-exp and gradients."""
    return max(difference(*pair) for pair in zip(found, truth, strict=True))


class CountingKernel:
    """The kernels of the CPU, which count their calls."""

    def __init__(self) -> None:
        self.inner, self.calls = default_dispatcher(torch.device("cpu")), Counter()
        self.capabilities = self.inner.capabilities

    def prepare(self, segments: Segments, shape: AttentionShape) -> PreparedAttention:
        prepared, calls = self.inner.prepare(segments, shape), self.calls

        class Counted:
            def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                calls["forward"] += 1
                return prepared.forward(*tensors)

            def backward(self, dout: torch.Tensor, saved: Saved) -> Gradients:
                calls["backward"] += 1
                return prepared.backward(dout, saved)

        return Counted()
