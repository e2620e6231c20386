"""Real training steps on CPU processes of one core each: planners side by side, measured beside predicted.

Fixed before measuring: Wikipedia lengths cut at 16K, 64 sequences a step, 2,048 tokens of a rank in a round, and the
model below, as deep, wide and many-headed as BERT-Tiny. The machine is measured first (`profiling.calibration`), on
plans that are none of the benchmark's. Then every batch is run under every planner, one after the other, in an order
that turns from batch to batch; planners that make the same plan share its run. A step is bind, forward, backward,
reduction, clipping and AdamW; its time is that of the slowest rank. Plans are made before: a trainer plans ahead.

    python benchmarks/cpu_training.py --lengths wikipedia_lengths.npz --out benchmarks/results/cpu_training.json
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from cpu_ranks import Say, rank_options, start
from training_report import Report

from seqloom.cost import CostModel
from seqloom.describe import Cluster, ModelSpec, lengths_from
from seqloom.dist import TorchTransport
from seqloom.planners.registry import TimedPlan, plan_batches
from seqloom.profiling.calibration import Calibrator

LONGEST, SEQUENCES, CAPACITY, STEPS = 16_384, 64, 2_048, 20
SHARDING = "none"  # a small model: every rank has all of it, and gradients are summed once per step
SIZES = {"layers": 2, "hidden": 128, "ffn": 384, "vocabulary": 512}
HEADS = 2  # the gain depends on it, see README.md: with more heads, static needs less of a ring
QUICK = {"longest": 512, "capacity": 256, "sequences": 8, "steps": 1}


def settings(arguments: argparse.Namespace) -> dict[str, int]:
    """What is fixed; with fewer ranks, documents are cut at what all of them hold."""
    if arguments.quick:
        return QUICK
    longest = min(LONGEST, arguments.ranks * CAPACITY)
    sequences = max(1, SEQUENCES * arguments.ranks // 16)
    return {"longest": longest, "capacity": CAPACITY, "sequences": sequences, "steps": arguments.steps}


def drawn(arguments: argparse.Namespace, fixed: dict[str, int]) -> list[np.ndarray]:
    """The batch of the warm-up and those of the benchmark, in the order of the source."""
    count = (fixed["steps"] + 1) * fixed["sequences"]
    lengths = lengths_from(arguments.lengths, seed=arguments.seed, count=count, max_length=10**9)
    return list(np.minimum(lengths[:count], fixed["longest"]).reshape(-1, fixed["sequences"]))


def run(transport: TorchTransport, arguments: argparse.Namespace, say: Say) -> None:
    """Measure the machine, plan, and run every batch under every planner."""
    heads = {"heads": arguments.heads, "kv_heads": arguments.heads, "head_dim": SIZES["hidden"] // arguments.heads}
    fixed, spec = settings(arguments), ModelSpec("small", gated=True, tied=False, **SIZES, **heads)
    where = (Cluster.parse(f"1x{transport.ranks}xCPU"), spec)
    limits = {"sharding": SHARDING, "max_length": fixed["longest"], "capacity": fixed["capacity"]}
    calibrator = Calibrator(CostModel(*where, "cpu", **limits), transport, torch.device("cpu"), torch.float32)
    found = calibrator.calibrate(fixed["longest"] // 2, say)
    cost = CostModel(*where, found.profile, **limits)
    degrees = [d for d in cost.family.sizes if d & (d - 1) == 0 and d * fixed["capacity"] >= fixed["longest"]]
    names = [*(f"static:{degree}" for degree in degrees), "adaptive", "flex", "zones", "auto"]
    report = Report(names, found, {"fixed": fixed, "model": SIZES | heads, "sharding": SHARDING})
    if transport.rank == 0:
        report.write(__file__, arguments)
    say(f"calibrated, {max(map(abs, found.errors)):.0%} off at most; planning")
    for number, made in enumerate(plan_all(drawn(arguments, fixed), names, cost)):
        plans = {each.plan.hash: each.plan for each in made.values()}
        turn = sorted(plans)
        turn = turn[number % len(turn) :] + turn[: number % len(turn)]
        seconds = {key: calibrator.timer.seconds(plans[key]) for key in turn}
        row = {name: report.entry(each, cost, seconds[each.plan.hash]) for name, each in made.items()}
        say(f"batch {number}, ms, in brackets predicted: {report.line(row)}")
        if number and transport.rank == 0:  # the first batch warms up
            report.rows.append(row)
            report.write(__file__, arguments)
    if transport.rank == 0:
        report.show()


def plan_all(batches: list[np.ndarray], names: list[str], cost: CostModel) -> list[dict[str, TimedPlan]]:
    """What every planner makes of every batch: each rank plans some of them, and all get all."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shares: list[Any] = [None] * ranks
    dist.all_gather_object(shares, [plan_batches(names, [batch], cost)[0] for batch in batches[rank::ranks]])
    return [shares[number % ranks][number // ranks] for number in range(len(batches))]


def main(argv: list[str] | None = None) -> None:
    parser = rank_options(__doc__, ranks=16, steps=STEPS)
    parser.add_argument("--heads", type=int, default=HEADS, help="another model, no evidence for the target")
    start(run, parser.parse_args(argv))


if __name__ == "__main__":
    main()
