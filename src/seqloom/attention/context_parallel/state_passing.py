"""States of scans passed between ranks: every rank scans its own tokens of all heads, from zeros, and corrects after.

A scan is linear in the state S that a run of tokens begins with. So a rank that holds a run finds, without knowing S,

    out    the outputs from zeros                   output of a token = out + reads S
    reads  what a token reads of S
    after  the state after the run, from zeros      state after the run = transition S + after
    transition

Ranks exchange `after` and `transition` of all runs of documents that several of them share. Each then joins those
before its own runs, in order, and adds what its tokens read. A document of any length takes the same messages:

    rank 0   run 0 | run 3      run 0 begins with zeros
    rank 1   run 1 | run 2      run 2 with  transition 1 (after 0) + after 1,   and so on

Nothing else differs from one process; gradients of states go back along the transpose of the exchange, and are summed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch

from seqloom.attention.merge import sum_dtype
from seqloom.dist.rank_tokens import BoundGroup, Context
from seqloom.dist.tensor_parallel import RowFunction
from seqloom.dist.transport import Transport, all_to_all
from seqloom.layout import Span

Tensors = tuple[torch.Tensor, ...]


class StateShape(NamedTuple):
    """Sizes of the state of a scan: [heads, keys, values]; its transition is [heads, keys, keys], or a number per head.

    Attributes:
        matrix: whether it is a matrix.
    """

    heads: int
    keys: int
    values: int
    matrix: bool

    @property
    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of a state, and of a transition."""
        transition = (self.heads, self.keys, self.keys) if self.matrix else (self.heads, 1, 1)
        return (self.heads, self.keys, self.values), transition

    @property
    def message(self) -> int:
        """Values of both."""
        return sum(map(prod, self.shapes))


class ScannedRuns(NamedTuple):
    """What runs of tokens give from zeros, see above; lists have one entry for each run.

    Attributes:
        out: [tokens, heads, values].
        reads: [tokens, heads, keys]; or [tokens, fewer, keys] where as many heads each read alike, but for a factor.
        after: [heads, keys, values] each.
        transitions: as `StateShape` says.
        factors: [tokens, heads], of what heads read; None: 1.
    """

    out: torch.Tensor
    reads: torch.Tensor
    after: Sequence[torch.Tensor]
    transitions: Sequence[torch.Tensor]
    factors: torch.Tensor | None = None

    def of_runs(self, lengths: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Yield out, reads and factors of every run."""
        factors = [None] * len(lengths) if self.factors is None else self.factors.split(lengths)
        return zip(self.out.split(lengths), self.reads.split(lengths), factors, strict=True)


ScanRuns = Callable[[Tensors, tuple[int, ...]], ScannedRuns]
"""Scans runs of tokens of these lengths, one after the other in tensors [tokens, heads, ...], all heads."""


@dataclass(frozen=True, slots=True, eq=False)
class StatePassing:
    """One rank's part in passing states among the ranks of a group.

    Attributes:
        ranks: of the group.
        index: of this rank among them.
        collective: whether they have a communicator.
        lengths: tokens of this rank's runs, in the order of its rows.
        whole: which of these are whole documents, and need no states.
        counts: shared runs of every rank; their states lie one rank after the other.
        before: for every shared run of this rank, the shared runs before it in its document, in order.
    """

    transport: Transport
    ranks: tuple[int, ...]
    index: int
    collective: bool
    lengths: tuple[int, ...]
    whole: tuple[bool, ...]
    counts: tuple[int, ...]
    before: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, context: Context, bound: BoundGroup) -> StatePassing:
        """Do the index work of a group, all of whose documents are whole ones."""
        group, layout = bound.group, bound.group.token_layout()
        tokens = {span.document: span.tokens for span in group.spans}
        held = [joined_runs(layout.spans(rank)) for rank in group.ranks]
        shared = [[run for run in runs if run.tokens < tokens[run.document]] for runs in held]
        numbered = {run: number for number, run in enumerate(run for runs in shared for run in runs)}
        index, so_far = group.ranks.index(context.rank), defaultdict[int, list[int]](list)
        before: dict[Span, tuple[int, ...]] = {}
        own = {*shared[index]}
        for run in sorted(numbered):
            if run in own:
                before[run] = tuple(so_far[run.document])
            so_far[run.document].append(numbered[run])
        return cls(
            context.transport,
            group.ranks,
            index,
            group.ring == 1,  # a Ulysses block has a communicator
            lengths=tuple(run.tokens for run in held[index]),
            whole=tuple(run.tokens == tokens[run.document] for run in held[index]),
            counts=tuple(map(len, shared)),
            before=tuple(before[run] for run in shared[index]),
        )

    def exchange(self, found: ScannedRuns | None, shape: StateShape, like: torch.Tensor) -> torch.Tensor:
        """Return states and transitions of all shared runs, [runs, values of a message]; None: no own run is shared.

        All ranks call it, forward and backward, unless no run is shared at all. `like` is an input of the scan.
        """
        wide = sum_dtype(like.dtype)
        message = like.flatten()[:0].to(wide).reshape(0, shape.message)
        if found is not None:
            pairs = zip(found.after, found.transitions, strict=True)
            message = torch.stack([torch.cat([each.flatten() for each in pair]) for pair in pairs]).to(wide)
        return RowFunction.apply(self.gather, self.scatter, message)

    def correct(
        self, found: ScannedRuns, lengths: Sequence[int], exchanged: torch.Tensor, shape: StateShape
    ) -> list[torch.Tensor]:
        """Return the outputs [tokens, heads, values] of this rank's shared runs, which have these lengths."""
        sizes, outs = [prod(each) for each in shape.shapes], []
        states = [
            tuple(part.view(own) for part, own in zip(row.split(sizes), shape.shapes, strict=True))
            for row in exchanged.unbind(0)
        ]
        state, joined = None, ()
        for (out, reads, factors), before in zip(found.of_runs(lengths), self.before, strict=True):
            if before[: len(joined)] != joined:  # of another document than the run before
                state, joined = None, ()
            for after, transition in (states[number] for number in before[len(joined) :]):
                moved = 0 if state is None else transition @ state if shape.matrix else transition * state
                state = after + moved
            joined = before
            outs.append(out if state is None else out + _read(state, reads, factors).to(out.dtype))
        return outs

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Return the rows [shared runs, width] of all ranks from one's own."""
        received = own.new_empty((sum(self.counts), own.shape[1]))
        sizes = [count * own.shape[1] for count in self.counts], [own.numel()] * len(self.ranks)
        self._all_to_all(received, own.repeat(len(self.ranks), 1), *sizes)
        return received

    def scatter(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of one's own rows, summed over ranks, from those of all rows: the transpose."""
        own, width = self.counts[self.index], gradient.shape[1]
        received = gradient.new_empty((len(self.ranks) * own, width))
        sizes = [own * width] * len(self.ranks), [count * width for count in self.counts]
        self._all_to_all(received, gradient.contiguous(), *sizes)
        return received.view(len(self.ranks), own, width).sum(0)

    def _all_to_all(self, output: torch.Tensor, sent: torch.Tensor, into: list[int], out_of: list[int]) -> None:
        flat = output.view(-1), sent.view(-1)
        all_to_all(self.transport, *flat, into, out_of, self.ranks, collective=self.collective)


def _read(state: torch.Tensor, reads: torch.Tensor, factors: torch.Tensor | None) -> torch.Tensor:
    """Return what tokens read of a state [heads, keys, values], [tokens, heads, values]."""
    heads, keys, values = state.shape
    groups = reads.shape[1]
    shared = state.to(reads.dtype).view(groups, -1, keys, values).transpose(1, 2).flatten(2)  # heads that read alike
    found = (reads.transpose(0, 1) @ shared).transpose(0, 1).reshape(len(reads), heads, values)
    return found if factors is None else found * factors[..., None]


def joined_runs(spans: Sequence[Span]) -> list[Span]:
    """Join spans that touch."""
    found: list[Span] = []
    for span in sorted(spans):
        if found and (found[-1].document, found[-1].stop) == (span.document, span.start):
            found[-1] = Span(span.document, found[-1].start, span.stop)
        else:
            found.append(span)
    return found


class WithBackward(torch.autograd.Function):
    """Returns the first tensor, and has the backward of both run, with zeros for the second."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, other: torch.Tensor) -> torch.Tensor:  # noqa: D102
        ctx.shape, ctx.dtype = other.shape, other.dtype
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]  # noqa: D102
        return gradient, gradient.new_zeros(ctx.shape, dtype=ctx.dtype)
