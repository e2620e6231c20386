"""Who holds what, and who sends what to whom: layouts, moves between them, routes, and token balancing."""

from seqloom.layout.balance import balanced_token_counts, rebalance_layout
from seqloom.layout.layout import Layout, Span
from seqloom.layout.move import Move, move_between
from seqloom.layout.route import Route, route_move

__all__ = [
    "Layout",
    "Move",
    "Route",
    "Span",
    "balanced_token_counts",
    "move_between",
    "rebalance_layout",
    "route_move",
]
