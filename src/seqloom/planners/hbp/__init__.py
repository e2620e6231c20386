"""Hierarchical balance packing: a fixed data set becomes packs and steps before training; and how even steps are."""

from __future__ import annotations

from seqloom.planners.hbp.balance import Balance, plans_balance
from seqloom.planners.hbp.levels import Level, profiled
from seqloom.planners.hbp.packing import Packing
from seqloom.planners.hbp.planner import choose_levels, hbp, plain_packing

__all__ = [
    "Balance",
    "Level",
    "Packing",
    "choose_levels",
    "hbp",
    "plain_packing",
    "plans_balance",
    "profiled",
]
