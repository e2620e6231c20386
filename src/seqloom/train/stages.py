"""Who plans a run, and on which stages: one pipeline for all of its steps, none, or others in every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from seqloom.cost import CostModel
from seqloom.errors import SeqloomError
from seqloom.plan import Sharding, Stage
from seqloom.planners.choice import Choice
from seqloom.planners.pipelines.line import check_stages, line_of
from seqloom.planners.pipelines.orders import FOLDED, require_order
from seqloom.planners.registry import makes_stages
from seqloom.planners.strategies import Strategy
from seqloom.simulate import predicted_ns
from seqloom.train.config import Config

SAMPLE = 4
"""Batches by whose predicted times the number of stages is chosen."""


@dataclass(frozen=True, slots=True)
class Planners:
    """What a run plans with.

    Attributes:
        stages: of all its plans; a single one: no pipeline; none: every plan has its own.
        planner: of every step.
        stand_in: of a step whose plan is late or could not be made.
        strategies: that the planner chooses from; none: it chooses from no list.
    """

    stages: tuple[Stage, ...]
    planner: Choice
    stand_in: Choice
    strategies: tuple[Strategy, ...] = ()

    @property
    def cut(self) -> bool:
        """Whether plans may cut the model into stages."""
        return len(self.stages) != 1

    @property
    def tensor_degrees(self) -> tuple[int, ...]:
        """Tensor degrees of the strategies."""
        return tuple(sorted({pipe.scheme.tensor for each in self.strategies for pipe in each.pipelines}))

    def alternatives(self, lengths: np.ndarray) -> list[Choice]:
        """Return one planner for every strategy that holds documents of these lengths, tokens; and that of the run.

        A planner that makes nothing but such plans has no plan beside them.
        """
        able = [each for each in self.strategies if each.longest >= lengths.max()]
        every = [replace(self.planner, name="strategies", options={"strategies": (each,)}) for each in able]
        return every if every and makes_stages(self.planner.name) else [*every, self.planner]

    @classmethod
    def of(cls, config: Config, cost: CostModel, stages: int, strategies: Sequence[Strategy] = ()) -> Planners:
        """Return the planners of a run with so many stages, or with these strategies.

        Raises:
            SeqloomError: the model or the ranks do not allow this number.
        """
        if stages > 1:
            return cls._of_line(config, cost, stages)
        options = {"strategies": tuple(strategies)} if strategies else {}
        planner = Choice(config.plan.planner, options, config.run.seed)
        if cost.sharding == Sharding.FREE:
            return cls((), planner, _plain(planner, cost), tuple(strategies))
        everything = Stage(tuple(range(cost.ranks)), (0, cost.model.layers))
        return cls((everything,), planner, Choice("static"))

    @classmethod
    def _of_line(cls, config: Config, cost: CostModel, stages: int) -> Planners:
        """One pipeline over all ranks."""
        chunks, order = config.pipeline.chunks, config.pipeline.schedule
        check_stages(cost, stages, chunks)
        require_order(order, stages, chunks)
        _check_nodes(cost, stages)
        folded = order in FOLDED
        placed = line_of(cost, stages, chunks, folded=folded).stages
        plain = order if folded else "1f1b" if chunks == 1 else "interleaved"
        line = {"stages": stages, "chunks": chunks}
        planner, stand_in = (Choice("pipeline", {**line, "schedule": each}) for each in (order, plain))
        return cls(() if cost.sharding == Sharding.FREE else placed, planner, stand_in)


def _plain(planner: Choice, cost: CostModel) -> Choice:
    """Return who stands in where plans may have any stages: static, unless only several stages hold the documents."""
    static = Choice("static")
    try:
        static.plan([cost.max_length or 1], cost)
    except SeqloomError:
        return planner
    return static


def _check_nodes(cost: CostModel, stages: int) -> None:
    """Refuse hybrid sharding of ranks that are neither a part of a node nor a number of whole ones."""
    width, node = cost.ranks // stages, cost.node_size
    if cost.sharding == Sharding.HYBRID and width % node and node % width:
        raise SeqloomError(
            f"plan.sharding = 'hybrid' with stages of {width} ranks in nodes of {node}: every stage needs equally many "
            "ranks in every node that it touches; use 'full' or 'none', or stages that fill nodes or divide them"
        )


def number_of_stages(config: Config, cost: CostModel, batches: Sequence[np.ndarray]) -> int:
    """Return the config's number of stages; where it says auto, the one with the shortest predicted steps.

    Args:
        config: of the run.
        cost: prices its plans.
        batches: lengths of its first batches, int64[n] each.
    """
    wanted = config.pipeline.stages
    if isinstance(wanted, int):
        return wanted
    most = cost.model.layers // config.pipeline.chunks
    divisors = [count for count in range(1, min(cost.ranks, most) + 1) if cost.ranks % count == 0]
    times: dict[int, int] = {}
    refused: SeqloomError | None = None
    for count in divisors:
        try:
            planner = Planners.of(config, cost, count).planner
            times[count] = sum(predicted_ns(planner.plan(batch, cost), cost) for batch in batches[:SAMPLE])
        except SeqloomError as error:
            refused = refused or error
    if not times:
        raise refused or SeqloomError("no documents to choose the number of stages by; give it in pipeline.stages")
    return min(times, key=lambda count: (times[count], count))
