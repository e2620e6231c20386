"""Time and memory of any piece of a plan: compute, communication, memory; profiles as data files; fitting."""

from seqloom.cost.made_for import MadeFor
from seqloom.cost.model import CostModel
from seqloom.cost.profile import Profile
from seqloom.cost.shapes import CostBreakdown, CostTables, GroupShape, MemoryPolicy

__all__ = [
    "CostBreakdown",
    "CostModel",
    "CostTables",
    "GroupShape",
    "MadeFor",
    "MemoryPolicy",
    "Profile",
]
