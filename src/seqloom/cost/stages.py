"""A stage of a pipeline: its parameters, and what it costs once per step.

A stage's parameters are gathered once, before its first round, and its gradients are summed and scattered once, after
its last. So its rounds carry no such traffic, and the step's end has it all, beside the optimiser on this rank's part.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from seqloom.cost.analytic import DEFAULT_CONTEXT, AnalyticEngine
from seqloom.cost.memory import GRADIENT_BYTES, PARAMETER_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from seqloom.cost.model import CostModel
    from seqloom.describe import ModelSpec
    from seqloom.plan import Part


def stage_parameters(cost: CostModel, share: Part, tensor: int | None = None) -> int:
    """Parameters of a rank of a stage: its layers, the embedding on the first stage, norm and head on the last.

    A tied table is on both. All stages together have the model's parameters, a tied table counted twice. Tensor ranks
    have their part of the layers' matrices, by the cost model's tensor degree if none is given.
    """
    degree = cost.tensor if tensor is None else tensor
    model = cost.model
    context = cost.max_length or DEFAULT_CONTEXT
    table = model.head_parameters
    outside = model.parameters(context) - _layers(model, 0, model.layers, 1)
    beside = outside - table * (1 if model.tied else 2)  # final norm, and learned positions
    positions = context * model.hidden if model.learned_positions else 0
    own = _layers(model, share.first, share.stop, degree)
    own += table + positions if share.begins else 0
    if share.ends:
        own += beside - positions + (0 if share.begins and model.tied else table)
    return own


@lru_cache(maxsize=1024)
def _layers(model: ModelSpec, first: int, stop: int, tensor: int) -> int:
    """Parameters of a rank of some layers."""
    return sum(model.layer_parameters(layer, tensor) for layer in range(first, stop))


def stage_end_ns(cost: CostModel, shares: Sequence[Part], ranks: int, island: int) -> tuple[int, int]:
    """(ns, of that communication) once per step on a host of `ranks` ranks that runs these stages.

    Parameters are gathered over islands of `island` ranks, gradients scattered over them and summed over the host's
    islands, and the optimiser runs on a rank's part. Tensor ranks share with their like in other teams. Under free
    sharding the optimiser runs on an even part of the whole model; what moves depends on all stages of a plan, see
    `relaying`. Published constants have none of this.
    """
    engine = cost.engine
    if not isinstance(engine, AnalyticEngine):
        return 0, 0
    rest = engine.profile.step_us * 1e3
    if engine.memory.owners:
        rest += engine.compute.optimiser(engine.memory.parameters / engine.memory.owners)
        return int(np.rint(rest)), 0
    ranks, island = max(1, ranks // cost.tensor), max(1, island // cost.tensor)
    parameters = sum(stage_parameters(cost, share) for share in shares)
    layers = sum(share.stop - share.first for share in shares)
    links = engine.links
    moved = links.collective(PARAMETER_BYTES * parameters, island, layers)
    moved += links.collective(GRADIENT_BYTES * parameters, island, layers)
    moved += links.replica_sum(GRADIENT_BYTES * parameters, island, layers, ranks)
    rest += engine.compute.optimiser(parameters / island)
    return int(np.rint(moved + rest)), int(np.rint(moved))
