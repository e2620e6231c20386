"""Long-tail batches through a pipeline of 8 stages, simulated: the planner beside 1F1B, fixed chunks and Seq1F1B.

256 documents a step, log-normal (median 2K, 99th percentile 56K, at most 128K tokens; every other seed has one of 128K
and one of 90K). One layer of h = 4096 a stage, whose products and attention run at one rate; a unit takes as long as if
it had 512 tokens more in its linear layers; messages take no time. Time is over the work without that. Memory is the
most tokens that a stage holds, from F to B or W, over the longest document. The planner gets a budget in bytes: of so
many tokens with their keys and values, and of the longest document's gradients of these; 1 % less and so on, should it
hold more tokens by using less of the rest. The bound holds for any plan on these stages.

    python benchmarks/bench_pipeline_tail.py --out benchmarks/results/pipeline_tail.json
"""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import numpy as np
from common import Check, K, options, progress, show, show_checks
from record import commit, write
from tail_prices import HOSTS, PLENTY_GIB, budget, ideal_ns, lengths_of, priced

from seqloom.cost import CostModel
from seqloom.cost.memory import pipeline_limits
from seqloom.plan import ActionKind, Plan
from seqloom.planners.bounds import plan_bound
from seqloom.planners.pipeline import plan_pipeline
from seqloom.planners.pipeline.stage_layout import StageLayout
from seqloom.planners.published.chunkflow import chunk_plan
from seqloom.simulate import simulate

SEEDS = 24
TARGETS = {2.0: 1.05, 1.6: 1.07}
OURS = (1.25, 1.6, 2.0)  # times the longest document


class Figures(NamedTuple):
    """One plan of one batch."""

    time: float
    memory: float
    units: float
    bound: float
    planning_ms: float


def figures(plan: Plan, cost: CostModel, planning_s: float) -> Figures:
    """Over the ideal, which is the work of one stage without overhead, and over the longest document."""
    lengths = np.array(plan.documents)
    ideal = ideal_ns(lengths)
    found, bound = simulate(plan, cost), plan_bound(plan, cost)
    assert bound is not None
    rounds, end = plan.pipelines[0].rounds, found.end_ns
    taken = [(each - end) / ideal for each in (found.step_ns, bound)]
    return Figures(taken[0], held_tokens(plan) / lengths.max(), len(rounds), taken[1], 1e3 * planning_s)


def held_tokens(plan: Plan) -> int:
    """The most tokens that a stage holds at once."""
    tokens = [sum(group.tokens for group in each.by_stage[0].groups) for each in plan.pipelines[0].rounds]
    signs = {ActionKind.F: 1, ActionKind.B: -1, ActionKind.W: -1}
    rows = [[signs[a.kind] * tokens[a.round or 0] for a in row if a.kind in signs] for row in plan.pipelines[0].actions]
    return max(int(np.cumsum(row).max()) for row in rows)


def plans(lengths: np.ndarray, quick: bool) -> dict[str, Figures]:
    """All plans of a batch; rivals have all the memory that they want."""
    plenty, longest = priced(PLENTY_GIB), int(lengths.max())
    layout = StageLayout.of(plenty, HOSTS)
    limits = pipeline_limits(plenty, layout.ranges_by_pp_rank, layout.shard_group_size(plenty))
    made: dict[str, Any] = {"1F1B, packs up to the longest": {"schedule": "1f1b", "pieces": 1}}
    made |= {
        f"Seq1F1B, {k} equal-time pieces": {"schedule": "seq1f1b", "pieces": k} for k in ((24,) if quick else (16, 24))
    }
    rivals = {name: plan_pipeline(lengths, plenty, stages=HOSTS, **given) for name, given in made.items()}
    for size in (4 * K, 8 * K):
        rivals[f"fixed chunks of {size // K}K"] = chunk_plan(lengths, plenty, layout, limits, size)
    found = {name: figures(plan, plenty, 0.0) for name, plan in rivals.items()}
    for memory in OURS[-1:] if quick else OURS:
        for percent in range(100, 90, -1):
            cost = priced(budget(memory, longest) * percent / 100)
            begin = time.process_time()
            plan = plan_pipeline(lengths, cost, stages=HOSTS)
            found[f"ours, memory {memory}"] = figures(plan, cost, time.process_time() - begin)
            if held_tokens(plan) <= memory * longest:
                break
    return found


def checked(runs: list[dict[str, Figures]], table: dict[str, dict[str, float]]) -> list[Check]:
    """The targets."""
    checks = []
    for memory in OURS:
        mine, rivals = f"ours, memory {memory}", [name for name in table if not name.startswith("ours")]
        if memory in TARGETS:
            checks.append(Check(f"{mine}: time / ideal, mean", table[mine]["time"], TARGETS[memory]))
            checks.append(Check(f"{mine}: tokens held / longest, worst", table[mine]["most memory"], memory))
        nearest = max(run[mine].time / min(run[name].time for name in rivals) for run in runs)
        checks.append(Check(f"{mine}: over the fastest rival of the seed, worst", nearest, 0.999))
    return checks


def main(argv: list[str] | None = None) -> None:
    arguments = options(__doc__, lengths=False).parse_args(argv)
    commit()  # what runs from here on, whatever is committed in the meantime
    runs = []
    for seed in range(arguments.seed, arguments.seed + (1 if arguments.quick else SEEDS)):
        progress(f"seed {seed}")
        runs.append(plans(lengths_of(seed)[: 32 if arguments.quick else None], arguments.quick))
    table = {name: summary([run[name] for run in runs]) for name in runs[0]}
    checks = [] if arguments.quick else checked(runs, table)
    columns = ("plan", "time / ideal", "worst", "memory", "most", "units", "bound", "planning, CPU ms", "most")
    show("long tail", columns, [(name, *(f"{value:,.4g}" for value in row.values())) for name, row in table.items()])
    show_checks(checks)
    drawn = "log-normal, median 2K, 99th percentile 56K, at most 128K; see the script"
    write(arguments.out, __file__, arguments, table, checks, gpu=False, lengths=drawn)


def summary(rows: list[Figures]) -> dict[str, float]:
    """Means over seeds, and the worst where it matters."""
    mean, most = (Figures(*map(take, zip(*rows, strict=True))) for take in (statistics.mean, max))
    found = {"time": mean.time, "worst time": most.time, "memory": mean.memory, "most memory": most.memory}
    found |= {"units": mean.units, "bound": mean.bound}
    return found | {"planning_ms": mean.planning_ms, "most planning_ms": most.planning_ms}


if __name__ == "__main__":
    main()
