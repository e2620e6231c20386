"""A stage of a pipeline: its parameters, and what it costs once per step.

A stage's parameters are gathered once, before its first round, and its gradients are summed and scattered once, after
its last. So its rounds carry no such traffic, and the step's end has it all, beside the optimiser on this rank's part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from seqloom.cost.analytic import DEFAULT_CONTEXT, AnalyticEngine
from seqloom.cost.memory import GRADIENT_BYTES, PARAMETER_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from seqloom.cost.model import CostModel
    from seqloom.plan import Part


def stage_parameters(cost: CostModel, share: Part) -> int:
    """Parameters of a stage: its layers, with the embedding on the first stage, and norm and head on the last.

    A tied table is on both. All stages together have the model's parameters, a tied table counted twice.
    """
    model = cost.model
    context = cost.max_length or DEFAULT_CONTEXT
    table = model.head_parameters
    outside = model.parameters(context) - sum(map(model.layer_parameters, range(model.layers)))
    beside = outside - table * (1 if model.tied else 2)  # final norm, and learned positions
    positions = context * model.hidden if model.learned_positions else 0
    own = sum(map(model.layer_parameters, range(share.first, share.stop)))
    own += table + positions if share.begins else 0
    if share.ends:
        own += beside - positions + (0 if share.begins and model.tied else table)
    return own


def stage_end_ns(cost: CostModel, shares: Sequence[Part], ranks: int, island: int) -> tuple[int, int]:
    """(ns, of that communication) once per step on a host of `ranks` ranks that runs these stages.

    Parameters are gathered over islands of `island` ranks, gradients scattered over them and summed over the host's
    islands, and the optimiser runs on a rank's part. Published constants have none of this.
    """
    engine = cost.engine
    if not isinstance(engine, AnalyticEngine):
        return 0, 0
    parameters = sum(stage_parameters(cost, share) for share in shares)
    layers = sum(share.stop - share.first for share in shares)
    links = engine.links
    moved = links.collective(PARAMETER_BYTES * parameters, island, layers)
    moved += links.collective(GRADIENT_BYTES * parameters, island, layers)
    moved += links.replica_sum(GRADIENT_BYTES * parameters, island, layers, ranks)
    rest = engine.compute.optimiser(parameters / island) + engine.profile.step_us * 1e3
    return int(np.rint(moved + rest)), int(np.rint(moved))
