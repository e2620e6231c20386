"""What `cpu_strategies` finds: every batch predicted and measured, the exposed switch, and the gain of switching."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common import Check, show, show_checks

from seqloom.cost import CostModel
from seqloom.plan import Plan
from seqloom.plan.plan import plan_shape
from seqloom.planners.hydraulis import Strategy
from seqloom.simulate import predicted_ns

Plans = list[dict[Strategy, Plan]]
"""For every batch its plan under every strategy that holds it."""
Passes = dict[str, list[float]]
"""Seconds of every batch in every pass."""


def row(
    number: int, plans: Plans, taken: list[Strategy], fixed: Strategy, timed: Sequence[Passes], cost: CostModel
) -> dict[str, Any]:
    """One batch: what ran, predicted and measured."""
    ms = {name: 1e3 * min(turn[name][number] for turn in timed) for name in timed[0]}
    plan, kept = plans[number][taken[number]], plans[number][fixed]
    return {
        "shape": plan_shape(plan),
        "fixed shape": plan_shape(kept),
        "switched": taken[number] != taken[number - 1],
        "predicted": predicted_ns(plan, cost) / 1e6,
        "predicted fixed": predicted_ns(kept, cost) / 1e6,
        **ms,
    }


def judged(rows: list[dict[str, Any]]) -> list[Check]:
    """The targets: the share of a switch in the steps that had one, and the gain over the fixed strategy."""
    total = {name: sum(each[name] for each in rows) for name in ("switching", "fixed")}
    switched = [each for each in rows if each["switched"]]
    own = sum(each["own"] for each in switched)
    share = sum(each["switching"] for each in switched) / own - 1 if own else 0.0
    return [
        Check("exposed switch, % of step time", 100 * share, 3),
        Check("switching / best fixed strategy, speed", total["fixed"] / total["switching"], 1.0, at_least=True),
        Check("strategies taken", len({each["shape"] for each in rows}), 3, at_least=True),
    ]


def shown(rows: list[dict[str, Any]]) -> None:
    """Print the table and the targets."""
    cells = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in each.values()] for each in rows]
    show("steps, ms", [*rows[0]], cells)
    show_checks(judged(rows))
