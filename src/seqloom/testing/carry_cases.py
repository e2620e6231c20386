"""Attention over documents in pieces, round after round, checked against one process that sees whole documents.

of_ranks = run_ranks(case.world, lambda transport: attend_pieces(transport, case, given))
worst(assemble(parts[layer] for parts in of_ranks), case.truth(given[layer]))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import starmap

import numpy as np
import torch

from seqloom.attention import Carry, attention, attention_with_lse
from seqloom.attention.kernels import Kernel
from seqloom.comm.context import Context, bind
from seqloom.comm.transport import Transport
from seqloom.plan import Checkpoint, Group, Span, Work
from seqloom.runtime.checkpoint import run_layer
from seqloom.testing.attention_cases import Case, Inputs, Part
from seqloom.testing.attention_oracle import Truth


@dataclass(frozen=True, slots=True)
class PiecesCase:
    """Documents in pieces and in what order the rounds run.

    Attributes:
        whole: lengths, heads and mask; its groups are not used.
        rounds: the groups of every round, in forward order.
        back: the rounds in the order of their backward; a piece comes after all later pieces of its document.
        checkpoint: of every round.
        keep_exchanged: see `run_layer`.
    """

    whole: Case
    rounds: tuple[tuple[Group, ...], ...]
    back: tuple[int, ...]
    checkpoint: Checkpoint = Checkpoint.NONE
    keep_exchanged: bool = False
    layers: int = field(default=1)

    @property
    def world(self) -> int:
        """Ranks."""
        return self.whole.world

    @property
    def pieces(self) -> dict[int, tuple[Span, ...]]:
        """All pieces of every document that has several."""
        found: dict[int, list[Span]] = {}
        for groups in self.rounds:
            for span in (span for group in groups for span in group.spans):
                found.setdefault(span.document, []).append(span)
        return {document: tuple(sorted(spans)) for document, spans in found.items() if len(spans) > 1}

    def inputs(self, dtype: torch.dtype, device: str = "cpu") -> list[Inputs]:
        """Draw what every layer is given."""
        return [self.whole.inputs(dtype, seed=layer, device=device) for layer in range(self.layers)]

    def truth(self, inputs: Inputs) -> Truth:
        """What one process computes of whole documents, in float64."""
        return self.whole.truth(inputs)


@dataclass(slots=True, eq=False)
class _Unit:
    """A round of one layer between its forward and its backward: where its tokens are, what went in, what came out."""

    rows: torch.Tensor
    given: tuple[torch.Tensor, ...]
    out: torch.Tensor
    lse: torch.Tensor


def attend_pieces(
    transport: Transport, case: PiecesCase, inputs: Sequence[Inputs], kernels: Kernel | None = None
) -> list[Part]:
    """Run one rank's share of all rounds and layers, forward and then backward; nothing may be left in the carry."""
    carry = Carry()
    contexts = bound_rounds(transport, case, carry, inputs[0].q.device)
    units = [[_forward(case, context, given, n, kernels) for n, given in enumerate(inputs)] for context in contexts]
    parts: list[list[Part]] = [[] for _ in inputs]
    for number in case.back:
        for layer in reversed(range(len(inputs))):
            unit = units[number][layer]
            if case.checkpoint == Checkpoint.STAGE:  # what was run without a graph runs again
                unit = _forward(case, contexts[number], inputs[layer], layer, kernels, again=True)
            gradients = torch.autograd.grad(unit.out, unit.given, inputs[layer].dout[unit.rows])
            found = Truth(*(x.detach().cpu() for x in (unit.out, unit.lse, *gradients)))
            parts[layer].append(Part(unit.rows.cpu(), found))
    carry.check_empty()
    return [_joined(own) for own in parts]


def bound_rounds(
    transport: Transport, case: PiecesCase, carry: Carry, device: torch.device | str = "cpu"
) -> list[Context]:
    """Bind all rounds to one carry."""
    works = [Work(groups, case.checkpoint) for groups in case.rounds]
    options = {"device": device, "node_size": case.whole.node_size, "pieces": case.pieces, "carry": carry}
    return [bind(work, transport, **options) for work in works]


def rows_of(case: PiecesCase, context: Context) -> torch.Tensor:
    """Where the tokens of a rank and round are in the pack, int64[tokens]."""
    first = torch.tensor(np.cumsum(case.whole.lengths) - case.whole.lengths, device=context.device)
    return first[context.documents] + context.positions


def _forward(
    case: PiecesCase, context: Context, inputs: Inputs, layer: int, kernels: Kernel | None, *, again: bool = False
) -> _Unit:
    rows = rows_of(case, context)
    q, k, v = given = tuple(x[rows].requires_grad_() for x in inputs[:3])
    mask = {"window": case.whole.window, "scale": case.whole.scale, "kernels": kernels, "layer": layer}
    if case.checkpoint in (Checkpoint.FULL, Checkpoint.SELECTIVE):

        def body(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context) -> torch.Tensor:
            return attention(q * 1, k * 1, v * 1, context, **mask)

        out = run_layer(body, (*given, context), {}, keep_exchanged=case.keep_exchanged)
        return _Unit(rows, given, out, out.new_zeros((out.shape[1], len(out))))
    with torch.set_grad_enabled(case.checkpoint != Checkpoint.STAGE or again):
        return _Unit(rows, given, *attention_with_lse(q, k, v, context, **mask))


def _joined(parts: Sequence[Part]) -> Part:
    """The rounds of a rank as one part."""
    rows = torch.cat([part.rows for part in parts])
    fields = zip(*(part.found for part in parts), strict=True)
    axes = (0, 1, 0, 0, 0)
    return Part(rows, Truth(*starmap(torch.cat, zip(fields, axes, strict=True))))
