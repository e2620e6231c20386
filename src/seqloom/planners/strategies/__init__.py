"""Planner ``strategies``: pipelines of different shape side by side, another list of them at every step.

    before a run    lengths of the data  ->  propose_strategies(...)  ->  a short list of Strategy
    every step      lengths of the batch ->  plan_strategies(lengths, cost, strategies=...)  ->  Plan
"""

from __future__ import annotations

from seqloom.planners.strategies.price import SchemeCost, SchemeCosts
from seqloom.planners.strategies.values import Pipe, Scheme, Strategy, strategies_from_json, strategies_to_json

__all__ = [
    "Pipe",
    "Scheme",
    "SchemeCost",
    "SchemeCosts",
    "Strategy",
    "strategies_from_json",
    "strategies_to_json",
]
