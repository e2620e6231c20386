"""Attention over documents in pieces, round after round, checked against one process that sees whole documents.

of_ranks = run_ranks(case.world, lambda transport: attend_pieces(transport, case, given))
worst(assemble(parts[layer] for parts in of_ranks), case.truth(given[layer]))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, starmap
from typing import Any

import numpy as np
import torch

from seqloom.attention.context_parallel import KVCache
from seqloom.attention.kernels import Kernel
from seqloom.dist.rank_tokens import Context, bind
from seqloom.dist.transport import Transport
from seqloom.layout import Span
from seqloom.models.layer_wrapper import run_checkpointed
from seqloom.plan import Checkpoint, Group, StageMicroBatch
from support.attention_cases import AXES, Case, Inputs, RankResult, attend_in_teams, of_teams
from support.oracle import Truth

Order = tuple[tuple[str, int], ...]
"""F or B, and the round."""


@dataclass(frozen=True, slots=True)
class PiecesCase:
    """Documents in pieces, and in what order their rounds run.

    Attributes:
        whole: lengths, heads and mask; its groups are not used.
        rounds: the groups of every round.
        order: forwards ascend; a piece goes backward after all later pieces of its document.
        checkpoint: of every round.
        layers: with inputs and a state of their own.
    """

    whole: Case
    rounds: tuple[tuple[Group, ...], ...]
    order: Order
    checkpoint: Checkpoint = Checkpoint.NONE
    layers: int = 1

    @classmethod
    def on_one_group(
        cls, whole: Case, rounds: Sequence[Sequence[Span]], ulysses: int = 1, ring: int = 1, **options: Any
    ) -> PiecesCase:
        """Give all spans to one group of all ranks, all rounds forward and then backward."""
        ranks = tuple(range(ulysses * ring))
        groups = tuple((Group(ranks, ulysses, ring, tuple(spans)),) for spans in rounds)
        numbers = range(len(rounds))
        order = (*(("F", n) for n in numbers), *(("B", n) for n in reversed(numbers)))
        return cls(whole, groups, order, **options)

    def in_tp_groups(self, tensor: int) -> PiecesCase:
        """See `Case.in_tp_groups`."""
        rounds = tuple(tuple(of_teams(group, tensor) for group in groups) for groups in self.rounds)
        return replace(self, whole=self.whole.in_tp_groups(tensor), rounds=rounds)

    @property
    def world(self) -> int:
        """Ranks."""
        return self.whole.world

    @property
    def pieces(self) -> dict[int, tuple[Span, ...]]:
        """All pieces of every document that has several."""
        found: dict[int, list[Span]] = {}
        for span in chain.from_iterable(group.spans for groups in self.rounds for group in groups):
            found.setdefault(span.document, []).append(span)
        return {document: tuple(sorted(spans)) for document, spans in found.items() if len(spans) > 1}

    def inputs(self, dtype: torch.dtype, device: str = "cpu") -> list[Inputs]:
        """Draw what every layer is given."""
        return [self.whole.inputs(dtype, seed=layer, device=device) for layer in range(self.layers)]

    def truth(self, inputs: Inputs, layer: int = 0) -> Truth:
        """What one process computes of whole documents, in float64."""
        return self.whole.truth(inputs, layer=layer)

    def bind(self, transport: Transport, kv_cache: KVCache, device: torch.device | str = "cpu") -> list[Context]:
        """Bind all rounds to one KV cache."""
        options: dict[str, Any] = {"device": device, "pieces": self.pieces, "kv_cache": kv_cache}
        options |= {"node_size": self.whole.node_size, "tensor": self.whole.tensor}
        options |= {"dropout_seed": self.whole.dropout_seed, "prefixes": dict(enumerate(self.whole.prefixes))}
        return [bind(StageMicroBatch(groups, self.checkpoint), transport, **options) for groups in self.rounds]

    def rows(self, context: Context) -> torch.Tensor:
        """Where the tokens of a rank and round are in the pack, int64[tokens]."""
        first = torch.tensor(np.cumsum(self.whole.lengths) - self.whole.lengths, device=context.device)
        return first[context.documents] + context.positions


@dataclass(frozen=True, slots=True, eq=False)
class _Unit:
    """A round of one layer between its forward and its backward: where its tokens are, what went in and came out."""

    rows: torch.Tensor
    given: tuple[torch.Tensor, ...]
    out: torch.Tensor
    lse: torch.Tensor


def attend_pieces(
    transport: Transport,
    case: PiecesCase,
    inputs: Sequence[Inputs],
    kernels: Kernel | None = None,
    device: str | None = None,
) -> list[RankResult]:
    """Run one rank's share of all rounds and layers; return that of every layer. Nothing may be left in the cache."""
    if device is not None:
        inputs = [Inputs(*(x.to(device) for x in each)) for each in inputs]
    kv_cache, numbers = KVCache(), range(len(inputs))
    contexts = case.bind(transport, kv_cache, inputs[0].q.device)
    forward = partial(_forward, case, kernels)
    units: dict[tuple[int, int], _Unit] = {}
    parts: list[list[RankResult]] = [[] for _ in inputs]
    for kind, number in case.order:
        if kind == "F":
            keeps = case.checkpoint != Checkpoint.STAGE
            units |= {(number, n): forward(contexts[number], inputs[n], n, keeps) for n in numbers}
            continue
        if case.checkpoint == Checkpoint.STAGE:  # what was run without a graph runs again, all layers first
            units |= {(number, n): forward(contexts[number], inputs[n], n, True) for n in numbers}
        for n in reversed(numbers):
            parts[n].append(_backward(units.pop((number, n)), inputs[n]))
    kv_cache.check_empty()
    return [_joined(own) for own in parts]


def evaluate_pieces(transport: Transport, case: PiecesCase, inputs: Sequence[Inputs]) -> list[RankResult]:
    """The same without a backward: gradients are zero."""
    kv_cache, found = KVCache(backward=False), [[] for _ in inputs]
    with torch.no_grad():
        for context in case.bind(transport, kv_cache, inputs[0].q.device):
            for n, given in enumerate(inputs):
                unit = _forward(case, None, context, given, n, False)
                zeros = (x.new_zeros(x.shape) for x in unit.given[:3])
                found[n].append(RankResult(unit.rows, Truth(unit.out, unit.lse, *zeros)))
    kv_cache.check_empty()
    return [_joined(own) for own in found]


def _forward(
    case: PiecesCase, kernels: Kernel | None, context: Context, inputs: Inputs, layer: int, keeps: bool
) -> _Unit:
    rows, whole = case.rows(context), case.whole
    q, k, v = given = tuple(x[rows].requires_grad_() for x in inputs[:3])
    sinks = whole.sink_leaf(q)
    given += () if sinks is None else (sinks,)
    mask = {**whole.options, "sinks": sinks, "kernels": kernels, "layer": layer, "dropout": whole.dropout}

    def body(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        return attend_in_teams(q * 1, k * 1, v * 1, context, case.whole.tensor, **mask)

    with torch.set_grad_enabled(keeps):
        out, lse = run_checkpointed(body, (q, k, v, context), {}, layer)
    return _Unit(rows, given, out, lse)


def _backward(unit: _Unit, inputs: Inputs) -> RankResult:
    gradients = [x.detach().cpu() for x in torch.autograd.grad(unit.out, unit.given, inputs.dout[unit.rows])]
    found = Truth(unit.out.detach().cpu(), unit.lse.detach().cpu(), *gradients[:3])
    return RankResult(unit.rows.cpu(), found, *gradients[3:])


def _joined(parts: Sequence[RankResult]) -> RankResult:
    """The rounds of a rank as one part."""
    fields = zip(*(part.found for part in parts), strict=True)
    found = Truth(*starmap(torch.cat, zip(fields, AXES, strict=True)))
    dsinks = [part.dsinks for part in parts if part.dsinks is not None]
    return RankResult(torch.cat([part.rows for part in parts]), found, sum(dsinks) if dsinks else None)
