"""Planner ``adaptive``: one degree per batch, the fastest that holds it. The same packing as ``static``."""

from __future__ import annotations

import numpy as np

from seqloom.cost import CostModel
from seqloom.plan import Plan
from seqloom.planners.problem import fitting_problems, to_plan
from seqloom.planners.static import holding_degrees, homogeneous_answers


def plan_adaptive(lengths: np.ndarray, cost: CostModel) -> Plan:
    """Plan a batch with groups of one degree: every degree that holds the batch's longest is tried.

    Args:
        lengths: int64[n] tokens.
        cost: prices the batch.
    """
    problems = fitting_problems(lengths, cost)
    answers = homogeneous_answers(problems, holding_degrees(problems, cost, 1))
    best = min(answers, key=lambda answer: answer.ns)
    return to_plan(best.problem, best.rounds, "adaptive")
