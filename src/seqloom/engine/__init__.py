"""Runs a plan: binding, loss, parameters, checkpointing, the executor.

network = Network.of(model)
recompute_layers(network.layers)
parameters = Sharded(network, transport, plan.sharding, node_size=plan.limits.node_size)
result = run_step(bind_plan(plan, transport, device=device), parameters, rows, valid)
"""

from seqloom.engine.executor import StepResult, evaluate, run_step
from seqloom.engine.microbatch import MicrobatchState, Offload
from seqloom.engine.rank_plan import RankMicroBatch, RankPlan, bind_plan
from seqloom.engine.stage_p2p import Arrival, Progress, RowSlice, StageBoundary, StageP2P, ways_of

__all__ = [
    "Arrival",
    "MicrobatchState",
    "Offload",
    "Progress",
    "RankMicroBatch",
    "RankPlan",
    "RowSlice",
    "StageBoundary",
    "StageP2P",
    "StepResult",
    "bind_plan",
    "evaluate",
    "run_step",
    "ways_of",
]
