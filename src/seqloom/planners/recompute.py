"""Choose what a round recomputes: the fastest checkpointing whose memory holds the round's tokens.

Plans of one stage over all ranks choose here. Pipelines choose for every micro-batch on every stage, see
`planners.pipeline.recompute_offload`. The plan carries the choice; `models.layer_wrapper` carries it out.
"""

from __future__ import annotations

from seqloom.cost import CostModel
from seqloom.plan import Checkpoint, Reduce

CHECKPOINTS = (Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL, Checkpoint.PROFILE)
"""From the fastest, which keeps the most activations, to the slowest."""


def checkpoint_capacities(cost: CostModel, reduce: Reduce) -> dict[Checkpoint, int]:
    """Tokens a rank holds in a round, under each checkpoint that goes with this way to reduce gradients."""
    return {policy.checkpoint: cost.capacity(policy) for policy in cost.policies if policy.reduce == reduce}


def fastest_checkpoint(capacities: dict[Checkpoint, int], tokens: int) -> Checkpoint | None:
    """The fastest checkpoint that holds so many tokens on a rank; None: none does."""
    return next((checkpoint for checkpoint in CHECKPOINTS if capacities.get(checkpoint, -1) >= tokens), None)
