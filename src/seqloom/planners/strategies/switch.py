"""What it costs to bring parameters where a strategy computes, and gradients back, whatever the documents are.

Most of it hides behind the step's own work, which depends on the plan. What never hides is known beforehand: embedding
and first layer, there and back. Strategies are chosen with that; full plans are compared with all of it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from seqloom.cost import CostModel
from seqloom.cost.relaying import relay_times
from seqloom.plan import Action, ActionKind, Pipeline
from seqloom.planners.pipelines.line import line_of
from seqloom.planners.strategies.values import Pipe, Strategy


def switch_ns(strategy: Strategy, cost: CostModel) -> int:
    """ns of a step under free sharding that moving parameters and gradients adds at least."""
    relay = relay_times(cost, [_outline(pipe, cost) for pipe in strategy.pipelines])
    return int(np.rint(relay.first + relay.last))


def _outline(pipe: Pipe, cost: CostModel) -> Pipeline:
    """The stages of a pipeline, without anything to do but to say whether they are gathered for every pass."""
    line = line_of(cost.on_ranks(len(pipe.ranks), pipe.scheme.tensor), pipe.scheme.stages)
    stages = (replace(stage, ranks=tuple(pipe.ranks[rank] for rank in stage.ranks)) for stage in line.stages)
    gathers = tuple((Action(stage, ActionKind.UNSHARD, 0),) for stage in range(pipe.scheme.stages))
    return Pipeline(tuple(stages), (), gathers if pipe.scheme.gathered else ())
