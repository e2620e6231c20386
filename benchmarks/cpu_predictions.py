"""40 random plans of all kinds as real steps on CPU processes: each step predicted beside measured.

Fixed before measuring: the model below, Wikipedia, GitHub and ProLong lengths cut at 1K in turn, two documents a rank
and step. The machine is measured first (`profiling.calibration`) on plans that are none of these. A plan is drawn by
its kind, below, with a batch of its own; all plans of a kind run once to warm up, then in turns, and the median step of
each counts. A step is bind, moving parameters if they move, forward, backward, reduction, clipping and AdamW; its time
is that of the slowest rank.

    python benchmarks/cpu_predictions.py --ranks 16 --out benchmarks/results/cpu_predictions.json

groups      any planner of one stage, parameters on every rank
sharded     the same, with parameters in shards over all ranks
stages      2, 4 or 8 stages, any order, any number of pieces
strategies  pipelines of different shape side by side, parameters move
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from common import Check, batches, show, show_checks
from cpu_ranks import Say, rank_options, start
from record import write

from seqloom.cost import CostModel
from seqloom.describe import Cluster, ModelSpec
from seqloom.dist import TorchTransport
from seqloom.errors import SeqloomError
from seqloom.plan import Plan, Stage
from seqloom.planners import make_plan
from seqloom.planners.hydraulis import plan_strategies, propose_strategies
from seqloom.planners.pipeline import plan_pipeline
from seqloom.planners.pipeline.stage_layout import StageLayout
from seqloom.profiling.calibration import Calibrator, StepTimer
from seqloom.simulate import predicted_ns

SOURCES = ("wikipedia", "github", "prolong")
LONGEST, PER_RANK, TURNS = 1_024, 2, 5
COUNTS = {"groups": 14, "sharded": 6, "stages": 12, "strategies": 8}
PLANNERS = ("static", "adaptive", "flex", "zones", "hbp", "te-cp", "llama-cp", "hybrid-dp", "zeppelin", "wlb-llm")
ORDERS = ("1f1b", "seq1f1b", "zb-h1", "seq1f1b-zb", "balanced", "gpipe")
SIZES = {"layers": 8, "hidden": 128, "ffn": 384, "vocabulary": 512, "heads": 4, "kv_heads": 4, "head_dim": 32}
WANTED_ERROR, WANTED_CORRELATION = 0.10, 0.95
Kind = Iterator[tuple[str, Plan, CostModel, tuple[Stage, ...]]]
"""Name, plan, what prices it, and the stages of all plans that its model can run; () for one stage."""


def drawn_plans(draw: Callable[[], tuple[str, Plan]], count: int) -> Iterator[tuple[str, Plan]]:
    """Yield so many plans of those that memory and planner allow."""
    while count:
        try:
            yield draw()
        except SeqloomError:  # such as a planner that asks for another number of heads
            continue
        count -= 1


def kinds(
    cost_of: Callable[[str], CostModel], pick: np.random.Generator, lengths: Callable[[], np.ndarray]
) -> dict[str, Kind]:
    """Return the plans of every kind, drawn when they are asked for."""

    def groups(count: int, sharding: str) -> Kind:
        cost = cost_of(sharding)
        degrees = [f"static:{size}" for size in cost.family.sizes if cost.ranks % size == 0]

        def draw() -> tuple[str, Plan]:
            name = str(pick.choice([*PLANNERS, *degrees]))
            return name, make_plan(name, lengths(), cost)

        yield from ((name, plan, cost, ()) for name, plan in drawn_plans(draw, count))

    def stages(count: int) -> Kind:
        cost = cost_of("none")
        for size, own in zip((2, 4, 8), np.array_split(np.arange(count), 3), strict=True):
            if cost.ranks % size:
                continue

            def draw(size: int = size) -> tuple[str, Plan]:
                order, pieces = str(pick.choice(ORDERS)), int(pick.integers(2, 9))
                given = {"schedule": order} | ({"pieces": pieces} if order.startswith("seq") else {})
                return f"{size} stages, {order}", plan_pipeline(lengths(), cost, stages=size, **given)

            layout = StageLayout.of(cost, size).stages
            yield from ((name, plan, cost, layout) for name, plan in drawn_plans(draw, len(own)))

    def strategies(count: int) -> Kind:
        cost = cost_of("free")
        proposed = list(propose_strategies(lengths(), cost))

        def draw() -> tuple[str, Plan]:
            strategy = proposed[int(pick.integers(len(proposed)))]
            return str(strategy), plan_strategies(lengths(), cost, strategies=[strategy])

        yield from ((name, plan, cost, ()) for name, plan in drawn_plans(draw, count))

    counts = COUNTS
    return {
        "groups": groups(counts["groups"], "none"),
        "sharded": groups(counts["sharded"], "full"),
        "stages": stages(counts["stages"]),
        "strategies": strategies(counts["strategies"]),
    }


def measured(kind: Kind, transport: TorchTransport, turns: int) -> list[dict[str, Any]]:
    """Run the plans of a kind in turns; return what each was predicted to take, and took."""
    timers: dict[tuple[Any, ...], StepTimer] = {}
    sides = []
    for name, plan, cost, stages in kind:
        key = (cost.sharding, stages)
        if key not in timers:
            timers[key] = StepTimer(cost, transport, torch.device("cpu"), torch.float32, stages)
        sides.append((name, plan, cost, timers[key]))
    runs = [[timer.seconds(plan) for _, plan, _, timer in sides] for _ in range(1 + turns)]
    return [
        {"plan": name, "hash": plan.hash, "predicted_s": predicted_ns(plan, cost) / 1e9, "measured_s": median}
        for (name, plan, cost, _), median in zip(sides, np.median(runs[1:], axis=0).tolist(), strict=True)
    ]


def rank_correlation(first: list[float], second: list[float]) -> float:
    """Return Spearman's."""
    ranks = np.argsort(np.argsort([first, second]))
    return float(np.corrcoef(ranks)[0, 1])


def judged(rows: list[dict[str, Any]]) -> list[Check]:
    """Return the targets."""
    off = [abs(row["predicted_s"] / row["measured_s"] - 1) for row in rows]
    order = rank_correlation(*([row[name] for row in rows] for name in ("predicted_s", "measured_s")))
    return [
        Check("median error of a step", statistics.median(off), WANTED_ERROR),
        Check("rank correlation of predicted and measured steps", order, WANTED_CORRELATION, at_least=True),
    ]


def run(transport: TorchTransport, arguments: argparse.Namespace, say: Say) -> None:
    """Measure the machine, then the plans of every kind."""
    quick, ranks = arguments.quick, transport.ranks
    longest = 256 if quick else LONGEST
    where = (Cluster.parse(f"1x{ranks}xCPU"), ModelSpec("small", gated=True, tied=False, **SIZES))
    limits: dict[str, Any] = {"max_length": longest, "capacity": longest}
    given = CostModel(*where, "cpu", sharding="none", **limits)
    calibrator = Calibrator(given, transport, torch.device("cpu"), torch.float32)
    found = calibrator.calibrate(longest, say, stages=min(ranks, 8), quick=quick)
    pick, size = np.random.default_rng(arguments.seed), PER_RANK * ranks
    sources = [iter(batches(each, 40, seed=arguments.seed, context=10**9, size=size)) for each in SOURCES]

    def lengths() -> np.ndarray:
        return np.minimum(next(sources[int(pick.integers(len(sources)))]), longest)

    rows: list[dict[str, Any]] = []
    everything = kinds(lambda sharding: CostModel(*where, found.profile, sharding=sharding, **limits), pick, lengths)
    for kind, plans in everything.items():
        rows += [{"kind": kind} | row for row in measured(plans, transport, 1 if quick else TURNS)]
        say(f"{kind}: {len(rows)} plans in all")
        if transport.rank == 0:
            figures = {"ranks": ranks, "model": SIZES, "longest": longest, "plans": rows}
            write(arguments.out, __file__, arguments, figures, judged(rows), gpu=False, lengths=", ".join(SOURCES))
    if transport.rank == 0:
        columns = ("kind", "plan", "predicted, s", "measured, s", "off")
        table = [
            (row["kind"], row["plan"], f"{there:.3f}", f"{here:.3f}", f"{there / here - 1:+.1%}")
            for row in rows
            for there, here in [(row["predicted_s"], row["measured_s"])]
        ]
        show(f"{ranks} processes", columns, table)
        show_checks(judged(rows))


def main(argv: list[str] | None = None) -> None:
    arguments = rank_options(__doc__, ranks=16, steps=0).parse_args(argv)
    if arguments.quick:
        arguments.ranks = 4
    start(run, arguments, keep_memory=True)


if __name__ == "__main__":
    main()
