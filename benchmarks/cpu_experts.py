"""A mixture of experts on 16 CPU processes: `auto` against the best static degree, each with its best expert degree.

Fixed before measuring: the model of `cpu_training.py` with 16 experts in every layer, of which a token takes two;
Wikipedia lengths cut at 8K, 32 sequences a step, 1,024 tokens of a rank in a round. Every static degree that holds the
longest document runs with every expert degree; the best pair is the one that took least time over all batches, and
`auto` has the expert degree that is predicted to be best for it. Every batch is run under all of them, one after the
other, three times in an order that turns; the median of three counts, and a ratio is that of two steps of one batch.

Fewer cores than processes: so ranks have clocks of their own (`rank_clocks.py`), by which the machine is also
calibrated. Links have the latency and the rate of the messages in `results/cpu_training.json`, which were measured
between 16 processes with a core each. The wall-clock time of the same steps stands beside it.

    python benchmarks/cpu_experts.py --lengths wikipedia_lengths.npz --out benchmarks/results/cpu_experts.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import record
import torch
import torch.distributed as dist
from clocked_transport import ClockedTransport
from cpu_ranks import Say, rank_options, start
from cpu_training import drawn
from experts_report import AUTO, Row, judged, show_sides
from rank_clocks import Link, RankClock
from training_report import Report

from seqloom.cost import CostModel
from seqloom.describe import Cluster, ModelSpec
from seqloom.dist import TorchTransport
from seqloom.plan import Plan
from seqloom.planners.registry import fastest, make_plan
from seqloom.profiling.calibration import Calibrator, StepTimer
from seqloom.simulate import predicted_ns

LONGEST, SEQUENCES, CAPACITY, STEPS = 8_192, 32, 1_024, 12
SHARDING = "none"  # as in cpu_training.py
LINK = Link(latency_s=1.2e-3, bytes_per_s=0.8e9)
SIZES = {"layers": 2, "hidden": 128, "ffn": 384, "vocabulary": 512, "heads": 2, "kv_heads": 2, "head_dim": 64}
EXPERTS = {"experts": 16, "active_experts": 2, "expert_ffn": 192}
REPEATS = 3
DEGREES = (1, 4, 16)  # of experts
QUICK = {"longest": 512, "capacity": 256, "sequences": 8, "steps": 1}


class Step(NamedTuple):
    """A plan and its cost model."""

    plan: Plan
    cost: CostModel


def settings(arguments: argparse.Namespace) -> dict[str, int]:
    """What is fixed; with fewer ranks, documents are cut at what all of them hold."""
    longest, sequences = min(LONGEST, arguments.ranks * CAPACITY), max(1, SEQUENCES * arguments.ranks // 16)
    own = {"longest": longest, "capacity": CAPACITY, "sequences": sequences, "steps": arguments.steps}
    return QUICK if arguments.quick else own


def plan_all(
    batches: Sequence[np.ndarray], costs: Sequence[CostModel], longest: int, capacity: int
) -> dict[str, list[Step]]:
    """Every batch under every static degree with every expert degree, and under `auto` with one for all batches.

    Each rank plans some of the batches, and all get all.
    """
    degrees = [d for d in costs[0].family.sizes if d & (d - 1) == 0 and d * capacity >= longest]
    static = {f"static:{d}, {own.expert}": (f"static:{d}", own) for own in costs for d in degrees}
    named = static | {f"{AUTO}, {own.expert}": (AUTO, own) for own in costs}
    rank, ranks = dist.get_rank(), dist.get_world_size()
    shares: list[Any] = [None] * ranks
    mine = [{name: make_plan(p, batch, own) for name, (p, own) in named.items()} for batch in batches[rank::ranks]]
    dist.all_gather_object(shares, mine)
    plans = [shares[number % ranks][number // ranks] for number in range(len(batches))]
    found = {name: [Step(each[name], named[name][1]) for each in plans] for name in named}

    def of_auto(own: CostModel) -> tuple[int, list[Step]]:
        steps = found[f"{AUTO}, {own.expert}"]
        return sum(predicted_ns(each.plan, own) for each in steps), steps

    return {name: found[name] for name in static} | {AUTO: fastest(costs, of_auto)}


def rows_of(
    taken: dict[str, list[Step]], timers: dict[int, StepTimer], wall_clock: Callable[[], float], say: Say
) -> Iterator[Row]:
    """Run every batch under every side; the first batch warms up."""
    names = list(taken)
    for number in range(len(taken[AUTO])):
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for repeat in range(REPEATS if number else 1):
            turn = (number * REPEATS + repeat) % len(names)
            for name in [*names[turn:], *names[:turn]]:
                plan, cost = taken[name][number]
                began = wall_clock()
                seconds = timers[cost.expert].seconds(plan)
                times[name].append((1e3 * seconds, 1e3 * (wall_clock() - began)))
        row: Row = {}
        for name in names:
            measured, wall = np.median(times[name], axis=0).tolist()
            predicted = predicted_ns(taken[name][number].plan, taken[name][number].cost) / 1e6
            row[name] = {"measured_ms": measured, "predicted_ms": predicted, "wall_ms": wall, "all": times[name]}
        say(f"batch {number}, ms: {Report.line(row)}")
        if number:
            yield row


def run(inner: TorchTransport, arguments: argparse.Namespace, say: Say) -> None:
    """Measure the machine, plan, and run every batch under every side."""
    fixed, clock = settings(arguments), RankClock(LINK)
    transport = ClockedTransport(inner, clock)
    where = (Cluster.parse(f"1x{inner.ranks}xCPU"), ModelSpec("small", gated=True, tied=False, **SIZES, **EXPERTS))
    limits: dict[str, Any] = {"sharding": SHARDING, "max_length": fixed["longest"], "capacity": fixed["capacity"]}
    given, device = CostModel(*where, "cpu", **limits), torch.device("cpu")
    degrees = [degree for degree in DEGREES if degree in given.expert_degrees]
    calibrator = Calibrator(given, transport, device, torch.float32, clock.read)
    quick = arguments.quick or arguments.fast
    found = calibrator.calibrate(fixed["longest"] // 2, say, quick=quick, experts=degrees[1:])
    cost = CostModel(*where, found.profile, **limits)
    costs = [cost.with_expert(degree) for degree in degrees]
    say(f"calibrated, {max(map(abs, found.errors)):.0%} off at most; planning")
    taken = plan_all(drawn(arguments, fixed), costs, fixed["longest"], fixed["capacity"])
    timers = {own.expert: StepTimer(own, transport, device, torch.float32, clock=clock.read) for own in costs}
    about = {"fixed": fixed, "model": SIZES | EXPERTS, "link": LINK._asdict(), "profile": asdict(found.profile)}
    rows: list[Row] = []
    for row in rows_of(taken, timers, time.perf_counter, say):
        rows.append(row)
        figures, checks = judged(rows)
        figures |= about | {"auto_expert_degree": taken[AUTO][0].cost.expert, "steps": rows}
        if inner.rank == 0:  # a run that is cut off still counts
            record.write(arguments.out, __file__, arguments, figures, checks, gpu=False)
    if inner.rank == 0 and rows:
        show_sides(rows)


def main(argv: list[str] | None = None) -> None:
    parser = rank_options(__doc__, ranks=16, steps=STEPS)
    parser.add_argument("--fast", action="store_true", help="calibrate with fewer plans")
    start(run, parser.parse_args(argv))


if __name__ == "__main__":
    main()
