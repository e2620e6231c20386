"""The plan: what every other part of Seqloom reads."""

from seqloom.plan.action import Action, ActionKind
from seqloom.plan.limits import GroupFamily, Limits, Reduce, Sharding
from seqloom.plan.parameter_layout import Weight, compute_layout, optimiser_layout
from seqloom.plan.pipeline import LayerRange, Pipeline, Stage
from seqloom.plan.plan import Plan
from seqloom.plan.round import Checkpoint, Group, Method, Remap, Round, StageMicroBatch, sort_groups
from seqloom.plan.rules import RULES

__all__ = [
    "RULES",
    "Action",
    "ActionKind",
    "Checkpoint",
    "Group",
    "GroupFamily",
    "LayerRange",
    "Limits",
    "Method",
    "Pipeline",
    "Plan",
    "Reduce",
    "Remap",
    "Round",
    "Sharding",
    "Stage",
    "StageMicroBatch",
    "Weight",
    "compute_layout",
    "optimiser_layout",
    "sort_groups",
]
