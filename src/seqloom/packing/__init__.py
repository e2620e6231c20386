"""Hierarchical balance packing (HBP): a data set becomes packs and steps before training; how even steps are."""

from seqloom.packing.hbp import Balance, Packing, choose_levels, hbp, plain_packing, plans_balance
from seqloom.packing.levels import PackingLevel, cheapest_level

__all__ = [
    "Balance",
    "Packing",
    "PackingLevel",
    "cheapest_level",
    "choose_levels",
    "hbp",
    "plain_packing",
    "plans_balance",
]
