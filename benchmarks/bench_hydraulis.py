"""Hydraulis under its own constants: 32B, 64 GPUs, 200,000 tokens a step, 40 steps, contexts 32K and 16K.

The ladder: fixed-length packing on {16x1 x 4} (tensor x stages x pipelines; first fit decreasing to the context, packs
dealt in turn), two-stage assignment on the same strategy, the best of the published list of seven strategies at every
step, and the best of a list proposed from other documents of the same source, under the same switch cost. Documents
longer than the context are cut to it, the last of a step to the token budget.

Prices: c + sum(a s^2 + b s) per micro-batch and stage. `published clock`: every micro-batch counts like its pipeline's
largest, as in the published planner and in the replay that the targets come from (7.98, 6.25, 5.11 s and 6.45, 5.74,
4.63 s, longest-first greedy, no switch cost). The other rungs have the 1F1B recurrence for micro-batches as they are.

Switching: 300 ms for every strategy but the first (a constant stored beside the tables), or from bytes: every GPU takes
in the bf16 parameters it computes with from owners spread over all GPUs and sends float32 gradients back, through one
nic of 25 GB/s each (assumed); nothing hidden, or all but the first and last of 62 bundles behind forward and backward.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from common import Check, K, options, progress, show, show_checks
from hydraulis_constants import GPUS, NODE, REPLAYED, exposed_ns, moved_ns, published_model
from record import write

from seqloom.describe import lengths_from
from seqloom.planners.hydraulis.dispatch import rank_strategies
from seqloom.planners.hydraulis.propose import propose
from seqloom.planners.hydraulis.strategy import ParallelConfig, Strategy, place_pipelines
from seqloom.planners.packing import first_fit

TOKENS = 200_000
SHOWN = ("s", "hidden_s", "choose_ms", "choose_ms_most")
TARGETS = {context: list(rungs.values())[-1] for context, rungs in REPLAYED.items()}  # seconds
COSTS = published_model("32b").costs()
PUBLISHED = ("16x1x4", "16x1x1 8x3x2", "16x1x1 8x1x6", "16x1x1 4x1x12", "8x3x1 4x1x10", "8x1x1 4x1x14", "4x2x8")


def strategy(text: str) -> Strategy:
    """The strategy of a text: tensor x stages x pipelines."""
    parts = [map(int, part.split("x")) for part in text.split()]
    made = place_pipelines((ParallelConfig(pp, tp) for tp, pp, n in parts for _ in range(n)), COSTS, GPUS, NODE)
    assert made is not None, text
    return made


def cut_steps(lengths: np.ndarray, context: int, count: int) -> list[np.ndarray]:
    """Steps of exactly `TOKENS` tokens in file order."""
    steps, at = [], 0
    for _ in range(count):
        stop = at + int(np.searchsorted(np.cumsum(np.minimum(lengths[at : at + TOKENS], context)), TOKENS)) + 1
        steps.append(np.minimum(lengths[at:stop], context))
        steps[-1][-1] -= int(steps[-1].sum()) - TOKENS
        at = stop
    return steps


def fixed_packing_s(step: np.ndarray, context: int) -> float:
    """The baseline, seconds."""
    falling = np.sort(step)[::-1].copy()
    batch, wide = first_fit(falling, context), COSTS[ParallelConfig(1, 16)]
    packs = [wide.fixed + int(wide.documents_ns(falling[batch == k]).sum()) for k in range(batch.max() + 1)]
    return max(sum(packs[k::4]) for k in range(4)) / 1e9


def dynamic(
    steps: list[np.ndarray], listed: Sequence[Strategy], switch: Any = None, charge_largest: bool = False
) -> dict[str, Any]:
    """Mean seconds with the best of a list at every step, and what choosing took."""
    # The first call loads, and compiles where that is installed.
    rank_strategies(steps[0], listed, COSTS, switch, most=1, charge_largest=charge_largest)
    found, spent = [], []
    for step in steps:
        begin, busy = time.perf_counter(), time.process_time()
        found += rank_strategies(step, listed, COSTS, switch, most=1, charge_largest=charge_largest)
        spent.append((1e3 * (time.process_time() - busy), 1e3 * (time.perf_counter() - begin)))
    hidden = [a.ns - a.switch_ns + exposed_ns(listed[a.strategy], a.ns - a.switch_ns) for a in found]
    return {
        "s": float(np.mean([a.ns for a in found])) / 1e9,
        "hidden_s": float(np.mean(hidden)) / 1e9,
        "choose_ms": float(np.mean(spent, axis=0)[0]),
        "choose_ms_most": max(busy for busy, _ in spent),
        "choose_wall_ms": float(np.mean(spent, axis=0)[1]),
        "chosen": dict(Counter(str(listed[a.strategy]) for a in found).most_common()),
    }


def ladder(lengths: np.ndarray, context: int, count: int) -> dict[str, Any]:
    """All rungs of one context."""
    steps = cut_steps(lengths, context, count)
    listed = [strategy(text) for text in PUBLISHED]
    others = np.minimum(lengths[len(lengths) // 2 :][: 2500 * count], context)
    proposals: dict[str, list[str]] = {}
    took = 0.0
    rungs: dict[str, Any] = {
        "fixed packing": {"s": float(np.mean([fixed_packing_s(step, context) for step in steps]))},
        "two-stage, published clock": dynamic(steps, listed[:1], charge_largest=True),
        "published list, published clock": dynamic(steps, listed, charge_largest=True),
        "two-stage": dynamic(steps, listed[:1]),
    }
    charges: dict[str, Callable[[Strategy], int]] = {
        "": lambda _: 0,
        ", 300 ms a switch": lambda each: 0 if str(each) == str(listed[0]) else 300_000_000,
        ", bytes, nothing hidden": lambda each: sum(moved_ns(each)),
    }
    for charge, switch_ns in charges.items():
        rungs[f"published list{charge}"] = dynamic(steps, listed, list(map(switch_ns, listed)))
        begin = time.process_time()
        proposed = propose(others, COSTS, GPUS, NODE, tokens_per_step=TOKENS, switch_ns=switch_ns)
        took = max(took, time.process_time() - begin)
        proposals[f"proposed list{charge}"] = list(map(str, proposed))
        rungs[f"proposed list{charge}"] = dynamic(steps, proposed, list(map(switch_ns, proposed)))
    return {"context": context, "proposed": proposals, "propose_s": took, "rungs": rungs}


def list_ratios(rungs: dict[str, Any]) -> dict[str, float]:
    """Time with our list / with the published one, for every switch cost."""
    charges = [name.removeprefix("proposed list") for name in rungs if name.startswith("proposed list")]
    return {charge: rungs[f"proposed list{charge}"]["s"] / rungs[f"published list{charge}"]["s"] for charge in charges}


def main(argv: list[str] | None = None) -> None:
    """Climb the ladder for both contexts."""
    arguments = options(__doc__).parse_args(argv)
    count = 2 if arguments.quick else 40
    lengths = lengths_from(arguments.lengths, seed=arguments.seed, count=1000 * count, max_length=None).astype(np.int64)
    found = []
    for context in list(TARGETS)[arguments.quick :]:
        progress(f"context {context // K}K")
        found.append(ladder(lengths, context, count))
        rows = [(name, *(f"{r[k]:.2f}" if k in r else "" for k in SHOWN)) for name, r in found[-1]["rungs"].items()]
        show(f"{context // K}K", ("rung", "s", "bytes, hidden", "choose ms", "at most"), rows)
    times = {each["context"]: each["rungs"]["published list, published clock"]["s"] for each in found}
    checks = [Check(f"{c // K}K, published list and clock, s", s, TARGETS[c]) for c, s in times.items()]
    most = max(r.get("choose_ms_most", 0.0) for f in found for r in f["rungs"].values())
    checks += [
        Check(f"{each['context'] // K}K{charge}: proposed / published list", ratio, 1.0)
        for each in found
        for charge, ratio in list_ratios(each["rungs"]).items()
    ]
    checks.append(Check("choosing and assigning a step, processor ms at most", most, 50))
    show_checks(checks)
    write(arguments.out, __file__, arguments, {"contexts": found}, checks, gpu=False)


if __name__ == "__main__":
    main()
