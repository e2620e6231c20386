"""The head of llama3-8b on the last stage of a pipeline or on all of them, simulated on 64 H100: how level stages are.

Documents of one length, 512K tokens a step, in 4 and 8 stages; our planner with the schedule `auto`. Work is what the
ranks of a stage compute and the exchanges that they wait for, without the end of the step, in which the copies of a
head sum their gradients. The parts of the head are dealt out by tokens.

    python benchmarks/bench_pipeline_head.py --out benchmarks/results/pipeline_head.json
"""

from __future__ import annotations

import numpy as np
from common import Check, K, options, progress, show, show_checks
from record import commit, write

from seqloom import cost_model
from seqloom.cost import CostModel
from seqloom.plan import Plan
from seqloom.planners.bounds import plan_bound
from seqloom.planners.pipeline import plan_pipeline
from seqloom.simulate import simulate

CLUSTER, MODEL = "8x8xH100", "llama3-8b"
TOKENS = 512 * K
SETTINGS = tuple((stages, length) for stages in (4, 8) for length in (8 * K, 64 * K))


def figures(plan: Plan, cost: CostModel) -> dict[str, float]:
    """How level the stages are, times and memory of one plan."""
    found, bound = simulate(plan, cost), plan_bound(plan, cost)
    work = found.busy_ns + found.comm_ns - found.end_ns
    by_stage = [work[list(ranks)].mean() for ranks in plan.pipelines[0].ranks_by_pp_rank]
    assert bound is not None
    return {
        "busiest over mean": float(max(by_stage) / np.mean(by_stage)),
        "step, ms": found.step_ns / 1e6,
        "end of the step, ms": found.end_ns / 1e6,
        "bound, ms": bound / 1e6,
        "peak memory, GiB": float(found.peak_memory.max()) / 2**30,
    }


def main(argv: list[str] | None = None) -> None:
    arguments = options(__doc__, lengths=False).parse_args(argv)
    commit()  # what runs from here on, whatever is committed in the meantime
    table: dict[str, dict[str, float]] = {}
    for stages, length in SETTINGS[2:3] if arguments.quick else SETTINGS:
        cost = cost_model(CLUSTER, MODEL, stages=stages)
        lengths = np.full((TOKENS // 4 if arguments.quick else TOKENS) // length, length)
        schedule = "1f1b" if arguments.quick else "auto"
        for head in ("last", "all"):
            name = f"{stages} stages, {length // K}K, head on {'the last' if head == 'last' else head}"
            progress(name)
            table[name] = figures(plan_pipeline(lengths, cost, stages=stages, schedule=schedule, head=head), cost)
    checks = [
        Check(f"{name}: busiest stage over the mean", row["busiest over mean"], 1.04)
        for name, row in table.items()
        if name.endswith("all")
    ]
    columns = ("plan", *next(iter(table.values())))
    show("head", columns, [(name, *(f"{value:,.4g}" for value in row.values())) for name, row in table.items()])
    show_checks(checks)
    drawn = "documents of one length; see the script"
    write(arguments.out, __file__, arguments, table, checks, gpu=False, lengths=drawn)


if __name__ == "__main__":
    main()
