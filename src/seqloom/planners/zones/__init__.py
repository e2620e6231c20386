"""Planner ``zones``: long documents over nodes, medium ones inside a node, short ones whole, on the same ranks at once.

Groups of a round may share ranks: a rank holds a slice of a very long document, a slice of a medium one and whole short
ones. What a document may be cut into is decided by its price, never by its length alone.
"""

from seqloom.planners.zones.planner import plan_zones

__all__ = [
    "plan_zones",
]
