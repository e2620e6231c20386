"""Real training steps on CPU processes of one core each: planners side by side, measured beside predicted.

Fixed before measuring: Wikipedia lengths cut at 16K, 64 sequences a step, 2,048 tokens of a rank in a round, and the
model below. The machine is measured first (`seqloom.train.calibration`), on plans that are none of the benchmark's. Then
every batch is run under every planner, one after the other, in an order that turns from batch to batch; planners
that make the same plan share its run. A step is bind, forward, backward, reduction, clipping and AdamW; its time is
that of the slowest rank.

    python benchmarks/cpu_training.py --ranks 16 --lengths wikipedia_lengths.npz --out benchmarks/results/cpu_training.json
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import record
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import Check, options, progress, show, show_checks

from seqloom.comm import Communicators, Distributed
from seqloom.cost import CostModel
from seqloom.describe import Cluster, ModelSpec, lengths_from
from seqloom.plan import GroupFamily
from seqloom.planners.registry import plan_batches
from seqloom.train.calibration import Measuring
from seqloom.train.trials import StepTimer

LONGEST, SEQUENCES, CAPACITY, STEPS = 16_384, 64, 2_048, 20
SHARDING = "none"  # a small model: every rank has all of it, and gradients are summed once per step
SIZES = {"layers": 2, "hidden": 128, "heads": 4, "kv_heads": 1, "head_dim": 32, "ffn": 384, "vocabulary": 512}


def drawn(arguments: argparse.Namespace, longest: int) -> list[np.ndarray]:
    """The warm-up's batch and those of the benchmark, in the order of the source; longer documents are cut."""
    count = (arguments.steps + 1) * arguments.sequences
    lengths = lengths_from(arguments.lengths, seed=arguments.seed, count=count, max_length=None)
    return list(np.minimum(lengths[:count], longest).reshape(-1, arguments.sequences))


def rank_body(rank: int, folder: str, arguments: argparse.Namespace) -> None:
    """One process: measure the machine, plan a share of the batches, run all of them."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    ranks, began = arguments.ranks, time.perf_counter()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    communicators = Communicators.create(GroupFamily(ranks, ranks))
    communicators.warm_up()
    say = lambda text: progress(f"{time.perf_counter() - began:6.1f} s  {text}") if rank == 0 else None  # noqa: E731
    longest = min(LONGEST, ranks * CAPACITY)
    spec = ModelSpec("small", gated=True, tied=False, **SIZES)
    cluster = Cluster.parse(f"1x{ranks}xCPU")
    cost = CostModel(cluster, spec, "cpu", SHARDING, max_length=longest, capacity=CAPACITY)
    transport = Distributed(communicators)
    timer = StepTimer(cost, transport, torch.device("cpu"), torch.float32)
    found = Measuring(cost, transport, torch.device("cpu"), torch.float32).calibrate(timer, longest // 2, say)
    errors = [abs(error) for error in found.errors]
    say(f"calibrated: {max(errors):.0%} off at most, {statistics.mean(errors):.1%} on average; {found.factors}")
    cost = CostModel(cluster, spec, found.profile, SHARDING, max_length=longest, capacity=CAPACITY)
    batches = drawn(arguments, longest)
    names = [*(f"static:{d}" for d in static_degrees(cost, longest)), "adaptive", "flex", "auto"]
    planned = plan_all(batches, names, cost, rank, ranks)
    say("planned")
    rows: list[dict[str, Any]] = []
    for number, made in enumerate(planned):
        hashes = {each.plan.hash: each.plan for each in made.values()}
        turn = sorted(hashes)
        turn = turn[number % len(turn) :] + turn[: number % len(turn)]
        measured = {plan_hash: 1e3 * timer.seconds(hashes[plan_hash]) for plan_hash in turn}
        row = {
            name: {
                "measured_ms": measured[each.plan.hash],
                "predicted_ms": cost.plan_ns(each.plan) / 1e6,
                "plan_ms": each.plan_ns / 1e6,
                "rounds": len(each.plan.pipelines[0].rounds),
                "plan": each.plan.hash[:12],
            }
            for name, each in made.items()
        }
        if number:  # the first batch warms up
            rows.append(row)
        say(f"batch {number}: " + ", ".join(f"{n} {v['measured_ms']:.0f} ({v['predicted_ms']:.0f})" for n, v in row.items()))
        if rank == 0 and rows and (number % 4 == 0 or number == len(planned) - 1):
            write(arguments, rows, names, asdict(found.profile), found.errors, number == len(planned) - 1)
    dist.destroy_process_group()


def static_degrees(cost: CostModel, longest: int) -> list[int]:
    """Degrees a trainer could fix for the whole data set: powers of two that hold the longest document."""
    return [d for d in cost.family.sizes if d & (d - 1) == 0 and d * CAPACITY >= longest]


def plan_all(batches: list[np.ndarray], names: list[str], cost: CostModel, rank: int, ranks: int) -> list[Any]:
    """What every planner makes of every batch; each rank plans some, and all get all of it."""
    own = {i: plan_batches(names, [batches[i]], cost)[0] for i in range(rank, len(batches), ranks)}
    shares: list[Any] = [None] * ranks
    dist.all_gather_object(shares, own)
    together = {i: made for share in shares for i, made in share.items()}
    return [together[i] for i in range(len(batches))]


def summary(rows: list[dict[str, Any]], names: list[str]) -> dict[str, dict[str, float]]:
    """Means of every planner, and how far predictions are off."""
    found = {}
    for name in names:
        measured, predicted = (np.array([row[name][key] for row in rows]) for key in ("measured_ms", "predicted_ms"))
        off = predicted / measured - 1
        found[name] = {
            "measured_ms": measured.mean(),
            "predicted_ms": predicted.mean(),
            "off": predicted.sum() / measured.sum() - 1,
            "worst_step_off": float(off[np.abs(off).argmax()]),
            "plan_ms": statistics.mean(row[name]["plan_ms"] for row in rows),
        }
    return found


def write(arguments: argparse.Namespace, rows: Any, names: list[str], profile: Any, errors: Any, last: bool) -> None:
    """Write what is known so far; after the last batch print it too."""
    table = summary(rows, names)
    static = min((name for name in names if name.startswith("static")), key=lambda name: table[name]["measured_ms"])
    gain = table[static]["measured_ms"] / min(table[name]["measured_ms"] for name in ("flex", "auto"))
    orders = [sorted(names, key=lambda name: table[name][key]) for key in ("measured_ms", "predicted_ms")]
    checks = [
        Check("times as fast as the best static degree", gain, 1.3, at_least=True),
        Check("predicted / measured - 1, the worst planner, %", 100 * max(abs(table[n]["off"]) for n in names), 15),
        Check("planners out of the predicted order", sum(a != b for a, b in zip(*orders, strict=True)), 0),
    ]
    figures = {"model": SIZES, "planners": table, "steps": rows, "profile": profile, "calibration_errors": errors}
    record.write(arguments.out, __file__, arguments, figures, checks)
    if last:
        shown = [(n, *(f"{v:.4g}" for v in table[n].values())) for n in names]
        show("steps", ("planner", *table[names[0]]), shown)
        show_checks(checks)


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--sequences", type=int, default=SEQUENCES)
    parser.add_argument("--commit", help="names the sources where git is not at hand")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank_body, (folder, arguments), nprocs=arguments.ranks, start_method="spawn")


if __name__ == "__main__":
    main()
