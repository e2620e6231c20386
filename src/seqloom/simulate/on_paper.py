"""A plan run on paper: its windows, its tasks, and when each of them starts and stops.

Ranks that share memory and clock, as processes of one CPU do, are faster while others wait. A profile prices work as if
all were busy and has a constant `alone` for the other end. Pipelines have ranks that wait, so they are run twice: with
all prices as they are, which tells the share of time in which ranks work; and with prices for that share.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel
from seqloom.plan import Plan
from seqloom.simulate.price import price
from seqloom.simulate.translate import Program, translate
from seqloom.simulate.twins import Place
from seqloom.simulate.window import WHOLE, Window


class OnPaper(NamedTuple):
    """Tasks are numbered as in the program's engine; ns."""

    windows: dict[Place, Window]
    program: Program
    starts: np.ndarray
    stops: np.ndarray


def run_on_paper(plan: Plan, cost: CostModel) -> OnPaper:
    """Price a plan and run its actions."""
    windows = price(plan, cost)
    found = _run(plan, cost, windows)
    if cost.engine.alone == 1.0 or all(len(pipeline.stages) == 1 for pipeline in plan.pipelines):
        return found
    busy = sum(int(window.total.sum()) for window in windows.values())
    waiting = 1.0 - busy / max(busy, cost.ranks * int(found.stops.max(initial=0)), 1)
    share = round(WHOLE * (1.0 - (1.0 - cost.engine.alone) * waiting))
    return _run(plan, cost, {place: window.scaled(share) for place, window in windows.items()})


def _run(plan: Plan, cost: CostModel, windows: dict[Place, Window]) -> OnPaper:
    program = translate(plan, cost, windows)
    return OnPaper(windows, program, *program.engine.run(program.name))
