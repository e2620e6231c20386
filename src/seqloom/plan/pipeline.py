"""A pipeline: stages, the rounds that flow through them, and the table of actions that says in what order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from seqloom.plan.action import Action, ActionKind
from seqloom.plan.limits import Reduce
from seqloom.plan.round import Round
from seqloom.plan.stage import Part, Stage


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages, rounds in their total order, and one row of actions per host.

    Two stages have the same ranks or none in common. A host is a tuple of ranks that one or more stages have;
    hosts are numbered in the order in which the stages name them. Its row holds the actions of all its stages
    in the order in which its ranks run them. With ranks a and b:

        stages 0-1 on  a b        host 0 runs stage 0, host 1 runs stage 1
        stages 0-3 on  a b a b    interleaved: host 0 runs stages 0 and 2, host 1 runs 1 and 3
        stages 0-3 on  a b b a    V: host 0 runs stages 0 and 3, host 1 runs 1 and 2

    What a stage makes reaches the next one by SEND and RECV, or without any when both are on one host.
    """

    stages: tuple[Stage, ...]
    rounds: tuple[Round, ...]
    actions: tuple[tuple[Action, ...], ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of all hosts, host by host."""
        return tuple(rank for host in self.hosts for rank in host)

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every host."""
        return tuple(dict.fromkeys(stage.ranks for stage in self.stages))

    @property
    def parts(self) -> tuple[Part, ...]:
        """What every stage has of the model."""
        return tuple(Part(*stage.layers, self.stages[-1].layers[1]) for stage in self.stages)

    def host_of(self, stage: int) -> int:
        """Return the host, and so the row of `actions`, that runs a stage."""
        return self.hosts.index(self.stages[stage].ranks)

    def stages_of(self, host: int) -> tuple[int, ...]:
        """Return the stages that a host runs."""
        ranks = self.hosts[host]
        return tuple(s for s, stage in enumerate(self.stages) if stage.ranks == ranks)

    @classmethod
    def single(
        cls,
        ranks: Sequence[int],
        layers: int | tuple[int, int],
        rounds: Sequence[Round],
        reduce: Reduce,
        tensor: int = 1,
    ) -> Pipeline:
        """Build the pipeline of one stage with the trivial table.

        Args:
            ranks: ranks of the only stage.
            layers: the model's number of layers, or their range.
            rounds: rounds of one `Work` each.
            reduce: when gradients are reduced.
            tensor: tensor-parallel degree of the stage.
        """
        extent = (0, layers) if isinstance(layers, int) else layers
        stage = Stage(tuple(ranks), extent, tensor)
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
