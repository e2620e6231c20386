"""TODO."""

from seqloom.layout.balance import level_targets, rebalanced
from seqloom.layout.layout import Layout, Span
from seqloom.layout.move import Move, move_between
from seqloom.layout.route import Route, staged

__all__ = [
    "Layout",
    "Move",
    "Route",
    "Span",
    "level_targets",
    "move_between",
    "rebalanced",
    "staged",
]
