"""Runs a plan: binding, loss, parameters, checkpointing, the executor.

network = Network.of(model)
recompute_layers(network.layers)
parameters = Sharded(network, transport, plan.sharding, node_size=plan.limits.node_size)
result = run_step(bind_plan(plan, transport, device=device), parameters, rows, valid)
"""

from seqloom.engine.executor import StepResult, evaluate, run_step
from seqloom.engine.microbatch import Kept, Offload
from seqloom.engine.rank_plan import BoundPlan, BoundRound, bind_plan
from seqloom.engine.stage_p2p import Arrival, Handovers, Mail, Progress, Share, ways_of

__all__ = [
    "Arrival",
    "BoundPlan",
    "BoundRound",
    "Handovers",
    "Kept",
    "Mail",
    "Offload",
    "Progress",
    "Share",
    "StepResult",
    "bind_plan",
    "evaluate",
    "run_step",
    "ways_of",
]
