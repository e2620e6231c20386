"""Runs a plan: binding, loss, parameters, checkpointing, the executor.

network = Network.of(model)
recompute_layers(network.layers)
parameters = Sharded(network, transport, plan.sharding, node_size=plan.limits.node_size)
result = run_step(bind_plan(plan, transport, device=device), parameters, rows, valid)
"""

from __future__ import annotations

from seqloom.runtime.bind import BoundPlan, BoundRound, bind_plan
from seqloom.runtime.checkpoint import recompute_layers
from seqloom.runtime.compiled import compile_layers
from seqloom.runtime.executor import StepResult, evaluate, run_step
from seqloom.runtime.free_layout import FreeLayout
from seqloom.runtime.fsdp import Sharded
from seqloom.runtime.loss import summed_loss
from seqloom.runtime.network import Network
from seqloom.runtime.parameters import Parameters, Replicated, scale_gradients
from seqloom.runtime.placement import Placement
from seqloom.runtime.split_backward import split_weights
from seqloom.runtime.stage_sharded import StageSharded

__all__ = [
    "BoundPlan",
    "BoundRound",
    "FreeLayout",
    "Network",
    "Parameters",
    "Placement",
    "Replicated",
    "Sharded",
    "StageSharded",
    "StepResult",
    "bind_plan",
    "compile_layers",
    "evaluate",
    "recompute_layers",
    "run_step",
    "scale_gradients",
    "split_weights",
    "summed_loss",
]
