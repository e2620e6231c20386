"""What stages lose by waiting for each other at the end of a step: llama3-8b in 8 stages on 64 H200, simulated.

The gradient norm is that of all stages, so an optimiser's step begins when the last backward of the last stage is done.
Zero bubble's post-validation lets every stage step, and begin the next batch, as soon as it is done itself. At best a
step then takes as long as the longest stage from its own first action to the end of its own optimiser's step: nothing
is rolled back, no norm is checked afterwards, and the next step has the same slant.

    python benchmarks/bench_step_end.py --out benchmarks/results/step_end.json
"""

from __future__ import annotations

import numpy as np
from common import K, options, progress, show
from record import commit, write

from seqloom import cost_model
from seqloom.cost import CostModel
from seqloom.describe import sample
from seqloom.plan import Plan
from seqloom.planners.pipeline import plan_pipeline
from seqloom.simulate import simulate
from seqloom.simulate.events import EventKind

CLUSTER, MODEL, STAGES = "8x8xH200", "llama3-8b", 8
LONGEST = 192 * K
BATCHES = {
    "512 of Wikipedia": lambda seed: sample("wikipedia", 512, seed=seed, max_length=LONGEST),
    "512 of CommonCrawl": lambda seed: sample("commoncrawl", 512, seed=seed, max_length=LONGEST),
    "64 of 8K": lambda seed: np.full(64, 8 * K),
    "8 of 64K": lambda seed: np.full(8, 64 * K),
}


def figures(plan: Plan, cost: CostModel) -> dict[str, float]:
    """Time of a step as it is run, and the least that it could take if no stage waited at its end."""
    found, pipeline, longest = simulate(plan, cost), plan.pipelines[0], 0
    events = found.events.where(~found.events.is_message & (found.events.kind != EventKind.STEP))
    for pp_rank, ranks in enumerate(pipeline.ranks_by_pp_rank):
        own = events.where(np.isin(events.rank, ranks))
        layers = [pipeline.layer_ranges[stage] for stage in pipeline.stages_of(pp_rank)]
        narrowest = min(map(len, plan.shard_groups_of(pipeline, pp_rank)))
        end, _ = cost.stage_overhead_ns(layers, len(ranks), narrowest)
        longest = max(longest, int(own.stop.max() - own.start.min()) + end)
    return {
        "step, ms": found.step_ns / 1e6,
        "without waiting, ms": longest / 1e6,
        "lost, %": 100 * (1 - longest / found.step_ns),
    }


def main(argv: list[str] | None = None) -> None:
    arguments = options(__doc__, lengths=False).parse_args(argv)
    commit()  # what runs from here on, whatever is committed in the meantime
    cost, table = cost_model(CLUSTER, MODEL, stages=STAGES, max_length=LONGEST), {}
    for name in list(BATCHES)[2:3] if arguments.quick else BATCHES:
        lengths = BATCHES[name](arguments.seed)
        for head in ("last", "all"):
            for schedule in ("1f1b",) if arguments.quick else ("auto", "1f1b"):
                key = f"{name}, head on {'the last' if head == 'last' else head}, {schedule}"
                progress(key)
                table[key] = figures(plan_pipeline(lengths, cost, stages=STAGES, schedule=schedule, head=head), cost)
    columns = ("plan", *next(iter(table.values())))
    show(
        "end of a step", columns, [(name, *(f"{value:,.4g}" for value in row.values())) for name, row in table.items()]
    )
    drawn = "published length distributions and documents of one length; see the script"
    write(arguments.out, __file__, arguments, table, [], gpu=False, lengths=drawn)


if __name__ == "__main__":
    main()
