"""Real steps on CPU processes of one core each, another strategy in each: against the best fixed one; the switch.

Fixed before measuring: the model below, two documents a rank and step, Wikipedia lengths cut at 512 tokens, but the
first of a step has 512, 2K and 8K tokens in turn: so the mix changes from step to step. Plans may use so much memory
that a process with all parameters holds 256 tokens: a copy of the parameters has its price, as on GPUs. The machine is
measured first (`profiling.calibration`); strategies are proposed for all lengths together. Three passes over the
batches take turns, several times, and the fastest step of a batch in a pass counts:

    switching   every step under the strategy that is predicted to be fastest for it
    fixed       every step under the strategy that is predicted to be fastest for all of them together
    own         the steps of `switching`, each after another batch of the same kind under the same strategy

The exposed switch is a step of `switching` that follows another strategy minus the same step of `own`. A step is bind,
moving parameters, forward, backward, moving gradients, clipping and AdamW; its time is that of the slowest rank.

    python benchmarks/cpu_strategies.py --lengths wikipedia_lengths.npz --out results/cpu_strategies.json
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import numpy as np
import record
import torch
import torch.distributed as dist
from cpu_ranks import Say, rank_options, start
from strategies_report import Passes, Plans, judged, row, shown

from seqloom.cost import CostModel, MemoryPolicy
from seqloom.describe import Cluster, ModelSpec, lengths_from
from seqloom.dist import TorchTransport
from seqloom.errors import SeqloomError
from seqloom.plan import Checkpoint, Plan, Reduce
from seqloom.plan.plan import plan_shape
from seqloom.planners.hydraulis import Strategy, plan_strategies, propose_strategies
from seqloom.profiling.calibration import Calibrator, StepTimer
from seqloom.simulate import predicted_ns

CUT, FIRSTS, PER_RANK, ROOM, STEPS, REPEATS = 512, (512, 2_048, 8_192), 2, 256, 9, 6
LOAD = 1_024
"""Tokens of a rank in a round of the calibration, at most."""
SIZES = {"layers": 8, "hidden": 128, "ffn": 384, "vocabulary": 512, "heads": 4, "kv_heads": 4, "head_dim": 32}
QUICK = {"cut": 32, "firsts": (32, 128, 256), "steps": 3, "repeats": 1, "room": 32, "load": 128}


def drawn(arguments: argparse.Namespace, cut: int, firsts: tuple[int, ...], steps: int) -> list[np.ndarray]:
    """The batches, each with another first document than the one before."""
    size = PER_RANK * arguments.ranks
    lengths = lengths_from(arguments.lengths, seed=arguments.seed, count=steps * size, max_length=10**9)
    batches = np.minimum(lengths[: steps * size], cut).reshape(steps, size)
    batches[:, 0] = np.resize(firsts, steps)
    return list(batches)


def budget(cost: CostModel, tokens: int) -> float:
    """GiB with which a rank that has all parameters, and recomputes all it can, holds so many tokens."""
    least = MemoryPolicy(Checkpoint.FULL, Reduce.STEP)
    memory = cost.engine.memory
    return (memory.fixed_bytes(least) + tokens * memory.token_bytes(least)) / 2**30


def planned(batches: list[np.ndarray], strategies: list[Strategy], cost: CostModel) -> Plans:
    """Every batch under every strategy that holds it: each rank plans some batches, and all get all."""

    def of(batch: np.ndarray) -> dict[Strategy, Plan]:
        return {s: plan_strategies(batch, cost, strategies=[s]) for s in strategies if batch.max() <= s.max_tokens}

    rank, ranks = dist.get_rank(), dist.get_world_size()
    shares: list[Any] = [None] * ranks
    dist.all_gather_object(shares, [of(batch) for batch in batches[rank::ranks]])
    return [shares[number % ranks][number // ranks] for number in range(len(batches))]


def best_fixed(plans: Plans, cost: CostModel) -> Strategy:
    """The strategy with the least predicted time over all batches, of those that hold all of them."""
    able = [strategy for strategy in plans[0] if all(strategy in each for each in plans)]
    if not able:
        raise SeqloomError("no strategy holds every batch, so none can be kept; give ranks more memory")
    return min(able, key=lambda strategy: sum(predicted_ns(each[strategy], cost) for each in plans))


def passes(timer: StepTimer, plans: Plans, taken: list[Strategy], fixed: Strategy) -> Passes:
    """Seconds of every batch in every pass."""
    chosen = list(zip(plans, taken, strict=True))
    alike = [plans[number - len(FIRSTS)] for number in range(len(plans))]
    return {
        "switching": [timer.seconds(each[strategy]) for each, strategy in chosen],
        "fixed": [timer.seconds(each[fixed]) for each in plans],
        "own": [
            (timer.seconds(before[strategy]), timer.seconds(each[strategy]))[1]
            for before, (each, strategy) in zip(alike, chosen, strict=True)
        ],
    }


def run(transport: TorchTransport, arguments: argparse.Namespace, say: Say) -> None:
    """Measure the machine, propose, plan, and time all passes."""
    quick, ranks = arguments.quick, transport.ranks
    cut, firsts, steps, room, load = CUT, FIRSTS, arguments.steps, ROOM, LOAD
    if quick:
        cut, firsts, steps, room, load = (QUICK[name] for name in ("cut", "firsts", "steps", "room", "load"))
    where = (Cluster.parse(f"1x{ranks}xCPU"), ModelSpec("small", gated=True, tied=False, **SIZES))
    limits: dict[str, Any] = {"sharding": "free", "max_length": max(firsts)}
    given = CostModel(*where, "cpu", **limits, capacity=load)
    calibrator = Calibrator(given, transport, torch.device("cpu"), torch.float32)
    found = calibrator.calibrate(max(firsts), say, widest=max(1, ranks // 2), stages=min(ranks, 4))
    cost = CostModel(*where, found.profile, **limits, budget_gib=budget(given, room), stages=2)
    batches = drawn(arguments, cut, firsts, steps)
    everything = np.concatenate(batches)
    strategies = list(propose_strategies(everything, cost, tokens_per_step=int(everything.sum()) // steps))
    plans = planned(batches, strategies, cost)
    taken = [min(each, key=lambda strategy: predicted_ns(each[strategy], cost)) for each in plans]
    fixed = best_fixed(plans, cost)
    say(f"{len(strategies)} strategies, taken {', '.join(plan_shape(p[s]) for p, s in zip(plans, taken, strict=True))}")
    settings = {
        "ranks": ranks,
        "model": SIZES,
        "cut": cut,
        "firsts": firsts,
        "sequences": PER_RANK * ranks,
        "room": room,
    }
    settings |= {"strategies": [str(each) for each in strategies], "fixed": str(fixed)}
    settings |= {"profile": asdict(found.profile), "calibration_off": max(map(abs, found.errors))}
    timed, rows = [], []
    for turn in range(1 + (QUICK["repeats"] if quick else REPEATS)):
        seconds = passes(calibrator.timer, plans, taken, fixed)
        say(f"turn {turn}, s: {', '.join(f'{name} {sum(each):.2f}' for name, each in seconds.items())}")
        if turn and transport.rank == 0:  # the first turn warms up; a run that is cut off still counts
            timed.append(seconds)
            rows = [row(number, plans, taken, fixed, timed, cost) for number in range(len(plans))]
            figures = settings | {"turns": turn, "steps": rows}
            record.write(arguments.out, __file__, arguments, figures, judged(rows), gpu=False)
    if rows:
        shown(rows)


def main(argv: list[str] | None = None) -> None:
    start(run, rank_options(__doc__, ranks=16, steps=STEPS).parse_args(argv), keep_memory=True)


if __name__ == "__main__":
    main()
