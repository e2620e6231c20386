"""Planner `zones` on one core: time from lengths to plan on fresh batches, and step times beside flex, auto, the bound.

Llama 3 8B on H200 nodes of 8, full sharding, documents of at most 128K tokens. Validating and hashing a plan is timed
apart: every planner's plan is validated and hashed once.

    python benchmarks/bench_zones.py --out benchmarks/results/zones.json
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
from common import Check, options, progress, show, show_checks
from record import commit, write

from seqloom.api import cost_model, lower_bound
from seqloom.cost import CostModel
from seqloom.describe import sample
from seqloom.plan import Plan
from seqloom.planners import make_plan
from seqloom.planners.zones import plan_zones

SOURCES = ("wikipedia", "github", "prolong", "commoncrawl")
SIZES = {"8x8xH200": (1_000, 21, 10.0), "128x8xH200": (10_000, 5, 100.0)}
"""Cluster to sequences of a step, steps, and the most ms of the median."""
COMPARED = ("static", "flex", "zones", "auto")
LONGEST = 131_072


def batches(source: str, size: int, count: int, seed: int) -> list[np.ndarray]:
    """Fresh steps of a source; the first one warms up."""
    return list(sample(source, size * (count + 1), seed=seed, max_length=LONGEST).reshape(count + 1, size))


def ms(call: Callable[[], object]) -> float:
    """Milliseconds that a call takes."""
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e3


def plan_times(cost: CostModel, steps: list[np.ndarray]) -> dict[str, float]:
    """Medians in ms: lengths to plan, and validation with hash."""
    plans: list[Plan] = []
    planned = [ms(lambda step=step: plans.append(plan_zones(step, cost))) for step in steps][1:]
    checked = [ms(lambda plan=plan: (plan.validate(), plan.hash)) for plan in plans][1:]
    return {"plan_ms": statistics.median(planned), "worst_ms": max(planned), "check_ms": statistics.median(checked)}


def gaps(cost: CostModel, steps: list[np.ndarray], seed: int) -> dict[str, float]:
    """How far the plans of each planner are above the bound, mean over steps."""
    above: dict[str, list[float]] = {name: [] for name in COMPARED}
    for step in steps:
        bound = lower_bound(step, cost)
        for name in COMPARED:
            above[name].append(cost.plan_ns(make_plan(name, step, cost, seed=seed)) / bound - 1)
    return {name: statistics.mean(values) for name, values in above.items()}


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__)
    arguments = parser.parse_args(argv)
    commit()  # what runs from here on, whatever is committed in the meantime
    figures, checks, shown = {}, [], []
    for cluster, (size, count, most) in SIZES.items():
        cost = cost_model(cluster, "llama3-8b", max_length=LONGEST)
        for source in SOURCES[:1] if arguments.quick else SOURCES:
            progress(f"{cluster} {source}")
            steps = batches(source, 32 if arguments.quick else size, 1 if arguments.quick else count, arguments.seed)
            row = plan_times(cost, steps)
            if cost.ranks == 64:
                row |= {f"{name} above the bound": gap for name, gap in gaps(cost, steps[1:4], arguments.seed).items()}
            figures[f"{cluster} {source}"] = row
            shown.append((f"{cluster} {source}", *(f"{value:,.4g}" for value in row.values())))
            if not arguments.quick:
                checks.append(Check(f"{cluster} {source}, median ms to plan {size:,} sequences", row["plan_ms"], most))
    columns = ("cluster, lengths", "plan ms", "worst", "validate + hash ms", *(f"{name} - bound" for name in COMPARED))
    show("zones", columns, [(*row, *[""] * (len(columns) - len(row))) for row in shown])
    show_checks(checks)
    write(arguments.out, __file__, arguments, figures, checks)


if __name__ == "__main__":
    main()
