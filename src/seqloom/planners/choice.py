"""A planner with its options, as a value: what a run was set to plan with, here or in another process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from seqloom.cost import CostModel
from seqloom.plan import Plan
from seqloom.planners.registry import make_plan


@dataclass(frozen=True, slots=True)
class Choice:
    """Who plans, and how.

    Attributes:
        name: of the planner, see `make_plan`.
        options: of that planner.
        seed: of its pseudo-random choices.
    """

    name: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __str__(self) -> str:
        """Name and options, for example ``pipeline:4,1,1f1b``; of a list its length, or the only one on it."""
        return ":".join([self.name, *filter(None, [",".join(map(_spelled, self.options.values()))])])

    def plan(self, lengths: Sequence[int] | np.ndarray, cost: CostModel) -> Plan:
        """Plan one batch, int64[n] tokens; the plan is validated."""
        return make_plan(self.name, np.asarray(lengths, dtype=np.int64), cost, seed=self.seed, **self.options)


def _spelled(value: Any) -> str:
    """Spell the value of an option."""
    if not isinstance(value, tuple):
        return str(value)
    return str(value[0]) if len(value) == 1 else f"{len(value)} candidates"
