"""A pipeline: stages, the rounds that flow through them, and the table of actions that says in what order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from seqloom.plan.action import Action, ActionKind
from seqloom.plan.limits import Reduce
from seqloom.plan.round import Round
from seqloom.plan.stage import Stage


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages on disjoint ranks, rounds in their total order, and one row of actions per stage."""

    stages: tuple[Stage, ...]
    rounds: tuple[Round, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of all stages, stage by stage."""
        return tuple(rank for stage in self.stages for rank in stage.ranks)

    @classmethod
    def single(
        cls, ranks: Sequence[int], layers: int | tuple[int, int], rounds: Sequence[Round], reduce: Reduce
    ) -> Pipeline:
        """Build the pipeline of one stage with the trivial table.

        Args:
            ranks: ranks of the only stage.
            layers: the model's number of layers, or their range.
            rounds: rounds of one `Work` each.
            reduce: when gradients are reduced.
        """
        extent = (0, layers) if isinstance(layers, int) else layers
        stage = Stage(tuple(ranks), extent)
        return cls((stage,), tuple(rounds), (tuple(_trivial_row(rounds, reduce)),))


def _trivial_row(rounds: Sequence[Round], reduce: Reduce) -> Iterator[Action]:
    """Yield forward and backward round by round.

    Rounds that hold pieces of one document stay open together: the backward of a piece needs the key and
    value gradients of all later pieces, so these rounds run forward in order and backward in reverse.
    """
    for run in _open_together(rounds):
        for number in run:
            yield Action(0, ActionKind.F, number)
        for number in reversed(run):
            yield Action(0, ActionKind.B, number)
            if reduce == Reduce.ROUND:
                yield Action(0, ActionKind.REDUCE, number)
    if reduce == Reduce.STEP:
        yield Action(0, ActionKind.REDUCE)


def _open_together(rounds: Sequence[Round]) -> Iterator[range]:
    """Split the rounds into the shortest runs such that no document has pieces in two of them."""
    last: dict[int, int] = {}
    for number, current in enumerate(rounds):
        for span in current.work[0].spans():
            last[span.document] = number
    start, reach = 0, 0
    for number, current in enumerate(rounds):
        reach = max([reach, *(last[span.document] for span in current.work[0].spans())])
        if number >= reach:
            yield range(start, number + 1)
            start = reach = number + 1
