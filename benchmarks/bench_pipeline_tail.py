"""Long-tail batches through a pipeline of 8 stages, simulated: our units and order beside 1F1B, fixed chunks, Seq1F1B.

256 documents a step, log-normal (median 2K, 99th percentile 56K, at most 128K tokens; every other seed has one of 128K
and one of 90K). One layer of h = 4096: F = linear + attention, I = linear + 2.5 attention, W = linear; no messages.
Every unit carries 512 tokens of linear work more in F, in I and in W. Time is over the work without that; memory is
the most tokens that a host holds (from F to B or W) over the longest document; the bound holds for the same units.

    python benchmarks/bench_pipeline_tail.py --out benchmarks/results/pipeline_tail.json
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from common import Check, K, options, progress, show, show_checks
from record import commit, write

from seqloom.plan.schedules import Times, play, schedule_of
from seqloom.plan.schedules.balanced_bound import least_makespan
from seqloom.planners.pipelines.choosing import chosen
from seqloom.planners.pipelines.packing import Packed, Shape, packed

HOSTS, DOCUMENTS, SEEDS = 8, 256, 24
LONGEST, OVERHEAD, FLOOR = 128 * K, 512, K
LINEAR = 24 * 4096  # of a token, where attention to one other token is 4: 24 h^2 against 4 h, both over h
TARGETS = {2.0: 1.05, 1.6: 1.07}
OURS = (1.25, 1.6, 2.0)  # times the longest document


class Figures(NamedTuple):
    """One plan of one batch."""

    time: float
    memory: float
    units: float
    bound: float
    planning_ms: float


def lengths_of(seed: int) -> list[int]:
    """A step's documents."""
    sigma = math.log(56 / 2) / statistics.NormalDist().inv_cdf(0.99)
    drawn = np.random.default_rng(seed).lognormal(math.log(2 * K), sigma, DOCUMENTS)
    lengths = np.clip(drawn.astype(np.int64), 32, LONGEST)
    if seed % 2 == 0:
        lengths[:2] = LONGEST, 90 * K
    return lengths.tolist()


def cost(tokens: int) -> int:
    """F, I and W of the first tokens of a document, without overhead."""
    return 3 * LINEAR * tokens + 7 * tokens * tokens


def price(units: Packed) -> tuple[Times, np.ndarray]:
    """Times and tokens of units, the same on every stage."""
    tokens = np.array([sum(part.stop - part.start for part in parts) for parts in units.parts], dtype=np.int64)
    pairs = np.array([sum(p.stop**2 - p.start**2 for p in parts) for parts in units.parts], dtype=np.int64)  # twice
    linear = LINEAR * (tokens + OVERHEAD)
    columns = [np.tile(row, (HOSTS, 1)) for row in (linear + 2 * pairs, linear + 5 * pairs, linear)]
    return Times(*columns), np.tile(tokens, (HOSTS, 1))


def strict(lengths: list[int], units: Packed) -> Figures:
    """One forward, one backward over these units."""
    times, held = price(units)
    counts = [unit.pieces for unit in units.units if unit.piece == 0]
    played = play(schedule_of("seq1f1b", HOSTS, len(counts), counts), times, held)
    return figures(lengths, played.makespan, max(played.peak), times, 0.0)


def ours(lengths: list[int], memory: float) -> Figures:
    """Units and order as they are chosen for so much memory."""
    cap = int(memory * max(lengths))
    begin = time.process_time()
    found = chosen(lengths, cost, price, range(HOSTS), cap, cap, floor=FLOOR)
    spent = time.process_time() - begin
    found.schedule.validate(cap, found.held)
    played = play(found.schedule, found.times, found.held)
    return figures(lengths, played.makespan, max(played.peak), found.times, spent * 1e3)


def figures(lengths: Sequence[int], makespan: int, peak: int, times: Times, planning_ms: float) -> Figures:
    """Over the ideal, which is the work of one host without overhead, and over the longest document."""
    ideal = sum(cost(length) for length in lengths)
    bound = least_makespan(range(HOSTS), times)
    return Figures(makespan / ideal, peak / max(lengths), times.forward.shape[1], bound / ideal, planning_ms)


def plans(lengths: list[int]) -> dict[str, Figures]:
    """All plans of a batch; longest documents first everywhere."""
    longest = max(lengths)
    made = {"1F1B, packs up to the longest": packed(lengths, cost, Shape(cost(longest), cost(longest), longest))}
    for size in (4 * K, 8 * K):
        made[f"fixed chunks of {size // K}K"] = packed(lengths, lambda x: x, Shape(size, size, size, shared=True))
    for pieces in (16, 24):
        target = -(-cost(longest) // pieces)
        made[f"Seq1F1B, {pieces} equal-time pieces"] = packed(lengths, cost, Shape(target, target, 8 * K))
    rivals = {name: strict(lengths, units) for name, units in made.items()}
    return rivals | {f"ours, memory {memory}": ours(lengths, memory) for memory in OURS}


def main(argv: list[str] | None = None) -> None:
    parser = options(__doc__, lengths=False)
    arguments = parser.parse_args(argv)
    commit()  # what runs from here on, whatever is committed in the meantime
    runs = []
    for seed in range(arguments.seed, arguments.seed + (2 if arguments.quick else SEEDS)):
        progress(f"seed {seed}")
        runs.append(plans(lengths_of(seed)))
    table = {name: summary([run[name] for run in runs]) for name in runs[0]}
    checks = []
    if not arguments.quick:
        for memory in OURS:
            mine, rivals = f"ours, memory {memory}", [name for name in table if not name.startswith("ours")]
            if memory in TARGETS:
                checks.append(Check(f"{mine}: time / ideal, mean", table[mine]["time"], TARGETS[memory]))
            nearest = max(run[mine].time / min(run[name].time for name in rivals) for run in runs)
            checks.append(Check(f"{mine}: over the fastest rival of the seed, worst", nearest, 0.999))
    columns = ("plan", "time / ideal", "worst", "memory", "most", "units", "bound", "planning, CPU ms", "most")
    show("long tail", columns, [(name, *(f"{value:,.4g}" for value in row.values())) for name, row in table.items()])
    show_checks(checks)
    drawn = "log-normal, median 2K, 99th percentile 56K, at most 128K; see the script"
    write(arguments.out, __file__, arguments, table, checks, gpu=False, lengths=drawn)


def summary(rows: list[Figures]) -> dict[str, float]:
    """Means over seeds, and the worst where it matters."""
    mean = Figures(*(statistics.mean(column) for column in zip(*rows, strict=True)))
    return {
        "time": mean.time,
        "worst time": max(row.time for row in rows),
        "memory": mean.memory,
        "most memory": max(row.memory for row in rows),
        "units": mean.units,
        "bound": mean.bound,
        "planning_ms": mean.planning_ms,
        "most planning_ms": max(row.planning_ms for row in rows),
    }


if __name__ == "__main__":
    main()
