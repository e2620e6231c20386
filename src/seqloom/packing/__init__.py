"""Hierarchical balance packing: a fixed data set becomes packs and steps before training; and how even steps are."""

from seqloom.packing.hbp import choose_levels, hbp, plain_packing
from seqloom.packing.levels import Level, profiled
from seqloom.packing.packing import Balance, Packing, plans_balance

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
