"""One predicted step time for any plan: what planners compare, and what training records beside the measured time."""

from __future__ import annotations

from seqloom.cost import CostModel
from seqloom.plan import Plan
from seqloom.simulate.on_paper import run_on_paper
from seqloom.simulate.price import end_ns


def predicted_ns(plan: Plan, cost: CostModel) -> int:
    """Step time of a plan in ns: `Simulation.step_ns`, by the closed form where there is one.

    Plans of one stage have a closed form; plans with more stages are run on paper.
    """
    if all(len(pipeline.stages) == 1 for pipeline in plan.pipelines):
        return cost.plan_ns(plan)
    found = run_on_paper(plan, cost)
    return int(found.stops.max(initial=0)) + end_ns(plan, cost, found.windows)[0]
