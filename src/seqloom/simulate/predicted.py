"""One predicted step time for any plan: what planners compare, and what training records beside the measured time."""

from __future__ import annotations

from seqloom.cost import CostModel
from seqloom.plan import Plan
from seqloom.simulate.price import end_ns, price
from seqloom.simulate.translate import translate


def predicted_ns(plan: Plan, cost: CostModel) -> int:
    """Step time of a plan in ns: `Simulation.step_ns`, by the closed form where there is one.

    Plans of one stage have a closed form; plans with more stages are run on paper.
    """
    if all(len(pipeline.stages) == 1 for pipeline in plan.pipelines):
        return cost.plan_ns(plan)
    windows = price(plan, cost)
    program = translate(plan, cost, windows)
    _, stops = program.engine.run(program.name)
    return int(stops.max(initial=0)) + end_ns(plan, cost, windows)[0]
