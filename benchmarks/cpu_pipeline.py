"""Real pipelines on CPU processes of one core each: plans side by side, measured beside predicted.

Fixed before measuring: Wikipedia lengths cut at 4K, 2 sequences a rank and step, one of them 4K, the model below. The
machine is measured first (`profiling.calibration`): plans of one stage, and what a handover takes. Then every batch
is run on 4 and on 8 stages: whole documents packed (1F1B), chunks of equal tokens, Seq1F1B with 4 pieces, and what the
planner chooses. All sides of a batch run once to warm up, then in turns, and the fastest step of each counts. A step is
bind, forward, backward, reduction, clipping and AdamW; its time is that of the slowest rank.

    python benchmarks/cpu_pipeline.py --ranks 8 --lengths wikipedia_lengths.npz --out results/cpu_pipeline_8.json
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from cpu_ranks import Say, rank_options, start
from pipeline_report import Report

from seqloom.cost import CostModel
from seqloom.cost.memory import pipeline_limits
from seqloom.describe import Cluster, ModelSpec, lengths_from
from seqloom.dist import TorchTransport
from seqloom.plan import Plan
from seqloom.planners.pipeline import plan_pipeline
from seqloom.planners.pipeline.stage_layout import StageLayout
from seqloom.planners.published.chunkflow import chunk_plan
from seqloom.profiling.calibration import Calibrator, StepTimer
from seqloom.simulate import simulate

LONGEST, PER_RANK, STEPS, STAGES, REPEATS = 4_096, 2, 3, (4, 8), 3
SIZES = {"layers": 8, "hidden": 128, "ffn": 384, "vocabulary": 512, "heads": 4, "kv_heads": 4, "head_dim": 32}
QUICK = {"longest": 512, "steps": 1}


def drawn(arguments: argparse.Namespace, longest: int, steps: int) -> list[np.ndarray]:
    """The batches, each with one document of the longest length."""
    size = PER_RANK * arguments.ranks
    lengths = lengths_from(arguments.lengths, seed=arguments.seed, count=(steps + 1) * size, max_length=10**9)
    batches = np.minimum(lengths[size : (steps + 1) * size], longest).reshape(-1, size)
    batches[:, 0] = longest
    return list(batches)


def plans_of(lengths: np.ndarray, cost: CostModel, stages: int) -> dict[str, Plan]:
    """Every side's plan of a batch."""
    layout = StageLayout.of(cost, stages)
    limits = pipeline_limits(cost, layout.ranges_by_pp_rank, layout.shard_group_size(cost))
    longest = int(lengths.max())
    sides = {"1f1b": {"schedule": "1f1b"}, "seq1f1b": {"schedule": "seq1f1b", "pieces": 4}, "auto": {}}
    plans = {name: plan_pipeline(lengths, cost, stages=stages, **given) for name, given in sides.items()}
    return plans | {"chunks": chunk_plan(lengths, cost, layout, limits, longest // 8)}


def busy(timer: StepTimer) -> list[float]:
    """Seconds that every rank spent in forwards and backwards of the last step."""
    assert timer.last_result is not None
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, timer.last_result.forward_s + timer.last_result.backward_s)
    return every


def run(transport: TorchTransport, arguments: argparse.Namespace, say: Say) -> None:
    """Measure the machine, then every batch on every number of stages."""
    ranks, quick = transport.ranks, arguments.quick
    longest, steps = (QUICK["longest"], QUICK["steps"]) if quick else (LONGEST, arguments.steps)
    where = (Cluster.parse(f"1x{ranks}xCPU"), ModelSpec("small", gated=True, tied=False, **SIZES))
    limits: dict[str, Any] = {"sharding": "none", "max_length": longest, "capacity": longest}
    calibrator = Calibrator(CostModel(*where, "cpu", **limits), transport, torch.device("cpu"), torch.float32)
    found = calibrator.calibrate(longest, say, widest=ranks // min(STAGES), stages=min(ranks, max(STAGES)))
    cost = CostModel(*where, found.profile, **(limits | {"capacity": None}))
    say(f"calibrated, {max(map(abs, found.errors)):.0%} off at most")
    report = Report(found, {"ranks": ranks, "model": SIZES, "longest": longest, "sequences": PER_RANK * ranks})

    def save() -> None:
        if transport.rank == 0:
            report.write(__file__, arguments)

    for stages in (count for count in STAGES if ranks % count == 0 and count <= ranks):
        timer = StepTimer(cost, transport, torch.device("cpu"), torch.float32, StageLayout.of(cost, stages).stages)
        for number, batch in enumerate(drawn(arguments, longest, steps)):
            plans = plans_of(batch, cost, stages)
            turns = [
                {name: (timer.seconds(plan), busy(timer)) for name, plan in plans.items()} for _ in range(1 + REPEATS)
            ]
            timed = {name: min(turn[name] for turn in turns[1:]) for name in plans}  # the first turn warms up
            row = {name: report.entry(plans[name], simulate(plans[name], cost), *timed[name]) for name in plans}
            say(f"{stages} stages, batch {number}, ms, in brackets predicted: {report.line(row)}")
            report.rows.setdefault(stages, []).append(row)
            save()
    if transport.rank == 0:
        report.show()


def main(argv: list[str] | None = None) -> None:
    start(run, rank_options(__doc__, ranks=8, steps=STEPS).parse_args(argv), keep_memory=True)


if __name__ == "__main__":
    main()
