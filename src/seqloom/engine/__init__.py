"""Runs a plan on one rank: forward, backward, messages between stages, gradient reduction.

    adapter = ModelAdapter.of(model)
    recompute_layers(adapter.layers)
    parameters = FSDPParameters(adapter, transport, plan.sharding, node_size=plan.limits.node_size)
    result = run_step(bind_plan(plan, transport, device=device), parameters, rows, valid)

`rank_actions` says what this rank does, `executor` does it, `stage_p2p` moves hidden states between stages.
"""

from seqloom.engine.executor import StepResult, evaluate, rank_losses, run_step
from seqloom.engine.rank_actions import RankMicroBatch, RankPlan, bind_plan

__all__ = ["RankMicroBatch", "RankPlan", "StepResult", "bind_plan", "evaluate", "rank_losses", "run_step"]
