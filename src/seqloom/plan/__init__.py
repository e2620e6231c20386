"""The plan: what every other part of Seqloom reads."""

from __future__ import annotations

from seqloom.plan.action import Action, ActionKind
from seqloom.plan.balance import level_targets, rebalanced
from seqloom.plan.error import PlanError
from seqloom.plan.family import GroupFamily
from seqloom.plan.group import Group, Method, in_order
from seqloom.plan.layout import Layout, Span
from seqloom.plan.limits import Limits, Reduce, Sharding
from seqloom.plan.move import Move, move_between
from seqloom.plan.pipeline import Pipeline
from seqloom.plan.plan import Plan
from seqloom.plan.round import Checkpoint, Remap, Round, Work
from seqloom.plan.route import Route, staged
from seqloom.plan.stage import Part, Stage
from seqloom.plan.validate import RULES
from seqloom.plan.weights import Weight, compute_layout, optimiser_layout, step_layout

__all__ = [
    "RULES",
    "Action",
    "ActionKind",
    "Checkpoint",
    "Group",
    "GroupFamily",
    "Layout",
    "Limits",
    "Method",
    "Move",
    "Part",
    "Pipeline",
    "Plan",
    "PlanError",
    "Reduce",
    "Remap",
    "Round",
    "Route",
    "Sharding",
    "Span",
    "Stage",
    "Weight",
    "Work",
    "compute_layout",
    "in_order",
    "level_targets",
    "move_between",
    "optimiser_layout",
    "rebalanced",
    "staged",
    "step_layout",
]
