"""Is `auto` ever worse than a static degree? Real training steps, after the cost model has learned from 20 of them.

As in `seqloom train` without a profile for the machine: a quick calibration first, then steps of planner `auto`, whose
measured times refit the factors of the profile. Then every coming batch is run under `auto`, which goes on learning,
and under every static degree, one after the other, in an order that turns from batch to batch; planners
that make the same plan share its run. A ratio is that of one batch: the best static degree of all batches over `auto`.

    python benchmarks/cpu_never_worse.py --ranks 4 --out benchmarks/results/cpu_never_worse_4.json
    python benchmarks/cpu_never_worse.py --ranks 4 --share-gpu --out benchmarks/results/nccl_never_worse_4.json
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from common import Check, batches, show, show_checks
from cpu_ranks import Say, rank_options, start
from record import write

from seqloom.cost import CostModel
from seqloom.cost.feedback import Factors, Feedback, Measurement
from seqloom.cost.speeds import BusyTime
from seqloom.describe import Cluster, ModelSpec
from seqloom.dist import TorchTransport
from seqloom.plan import Plan
from seqloom.planners import make_plan
from seqloom.planners.plan_ahead import PlanAhead, StepPlan
from seqloom.profiling.calibration import Calibrator, StepTimer
from seqloom.profiling.race import median_interval
from seqloom.train.trainer import gather_values

SOURCES = ("wikipedia", "github", "prolong")
LEARNING, LONGEST, PER_RANK = 20, 4_096, 4
WANTED = 0.98
COMMON = {"vocabulary": 512, "gated": True, "tied": False}
EXPERTS = {"ffn": 256, "experts": 8, "active_experts": 2, "expert_ffn": 128, "moe_layers": (0, 1)}
MODELS = {
    "2 heads": ModelSpec("2-heads", layers=2, hidden=128, heads=2, kv_heads=2, head_dim=64, ffn=384, **COMMON),
    "8 heads": ModelSpec("8-heads", layers=4, hidden=128, heads=8, kv_heads=2, head_dim=16, ffn=256, **COMMON),
    "8 experts": ModelSpec("8-experts", layers=2, hidden=128, heads=4, kv_heads=4, head_dim=32, **EXPERTS, **COMMON),
}


class Side:
    """A planner's steps on these ranks: rank 0 decides on a plan, all of them run it."""

    def __init__(self, cost: CostModel, timer: StepTimer, transport: TorchTransport, device: torch.device) -> None:
        self.cost, self.timer, self._transport, self._device = cost, timer, transport, device
        self.feedback = Feedback(cost)
        self._ahead = (
            PlanAhead(cost, first_patience_s=300, patience_s=60, feedback=True) if not transport.rank else None
        )

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *error: object) -> None:
        if self._ahead is not None:
            self._ahead.close()

    def auto_plan(self, number: int, lengths: np.ndarray) -> tuple[StepPlan | None, Plan]:
        """Return the plan of planner auto, by what has been learned; on rank 0 also what it is predicted to take."""
        found = None if self._ahead is None else self._ahead.take(number, lengths)
        text = self._transport.broadcast(None if found is None else found.plan_json.encode())
        return found, Plan.from_json(text.decode())

    def learn(self, step: StepPlan | None, seconds: float) -> None:
        """Compare a step with its prediction, as the trainer does."""
        result = self.timer.last_result
        assert result is not None
        busy = gather_values([result.layers.loss, float(result.layers.loss_tokens)], self._transport, self._device)
        if self._ahead is None or step is None or step.factor_ns is None:
            return
        factors, derivatives = Factors(*step.factors).resolved(self.cost), Factors(*step.factor_ns)
        self.feedback.observe(
            Measurement.of(factors, derivatives, step.predicted_ns, 1e9 * seconds),
            [BusyTime(*each) for each in busy.tolist()],
        )
        self._ahead.factors, self._ahead.error = self.feedback.factors, self.feedback.error
        self._ahead.speeds = self.feedback.speeds.values


def static_plans(lengths: np.ndarray, cost: CostModel) -> Iterator[tuple[str, Plan]]:
    """Yield the plan of every static degree."""
    for degree in (size for size in cost.family.sizes if cost.ranks % size == 0):
        yield f"static:{degree}", make_plan(f"static:{degree}", lengths, cost)


def compete(side: Side, drawn: list[np.ndarray], say: Say) -> dict[str, Any]:
    """Learn from the first batches, run the others under auto and every static degree; return seconds and ratios."""
    for number, lengths in enumerate(drawn[:LEARNING]):
        step, plan = side.auto_plan(number, lengths)
        side.learn(step, side.timer.seconds(plan))
    seconds: dict[str, list[float]] = {}
    off: list[float] = []
    for turn, lengths in enumerate(drawn[LEARNING:]):
        step, auto = side.auto_plan(LEARNING + turn, lengths)
        plans = {"auto": auto, **dict(static_plans(lengths, side.cost))}
        names, measured = list(plans), dict[str, float]()
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            key = plans[name].hash
            measured[key] = measured[key] if key in measured else side.timer.seconds(plans[name])
            if name == "auto":
                side.learn(step, measured[key])
        for name, plan in plans.items():
            seconds.setdefault(name, []).append(measured[plan.hash])
        if step is not None:
            off.append(step.predicted_ns / 1e9 / seconds["auto"][-1] - 1)
        say(f"batch {turn + 1}: " + ", ".join(f"{name} {own[-1]:.3f}" for name, own in seconds.items()))
    count = len(seconds["auto"])
    whole = {name: sum(own) for name, own in seconds.items() if len(own) == count and name != "auto"}
    best = min(whole, key=whole.__getitem__)
    ratios = [there / here for there, here in zip(seconds[best], seconds["auto"], strict=True)]
    found = {"best static": best, "ratio": statistics.median(ratios), "interval": median_interval(ratios)}
    errors = {"median prediction error": statistics.median(map(abs, off)) if off else None}
    return found | errors | {"seconds": {name: sum(own) for name, own in seconds.items()}, "ratios": ratios}


def drawn_batches(source: str, arguments: argparse.Namespace, longest: int) -> list[np.ndarray]:
    """Return the batches to learn from and those that count; long documents are cut."""
    count, size = LEARNING + arguments.steps, PER_RANK * arguments.ranks
    return [np.minimum(each, longest) for each in batches(source, count, seed=arguments.seed, context=10**9, size=size)]


def run(transport: TorchTransport, arguments: argparse.Namespace, say: Say) -> None:
    """Run every model on every source, and write the table as it grows."""
    device = torch.device("cuda" if arguments.share_gpu else "cpu")
    few = 1 if arguments.quick else len(SOURCES)
    longest = min(LONGEST, 512 * transport.ranks)
    limits = {"sharding": "none", "capacity": longest, "max_length": longest}  # so that every degree holds every batch
    figures: dict[str, Any] = {}
    for name, spec in [*MODELS.items()][:few]:
        where = (Cluster.parse(f"1x{transport.ranks}xCPU"), spec)
        say(f"{name}: measuring this machine")
        calibrator = Calibrator(CostModel(*where, "cpu", **limits), transport, device, torch.float32)
        cost = CostModel(*where, calibrator.calibrate(longest, quick=True).profile, **limits)
        for source in SOURCES[:few]:
            case, timer = f"{name}, {source}", StepTimer(cost, transport, device, torch.float32)
            with Side(cost, timer, transport, device) as side:
                drawn = drawn_batches(source, arguments, longest)
                figures[case] = compete(side, drawn, lambda text, case=case: say(f"{case}, {text}"))
            if transport.rank == 0:
                gpu, sources = arguments.share_gpu, ", ".join(SOURCES[:few])
                write(arguments.out, __file__, arguments, figures, judged(figures), gpu=gpu, lengths=sources)
    if transport.rank == 0:
        rows = [
            (case, own["best static"], f"{own['ratio']:.3f}", "{:.3f} - {:.3f}".format(*own["interval"]))
            for case, own in figures.items()
        ]
        title = f"{transport.ranks} processes, after {LEARNING} steps"
        show(title, ("case", "best static degree", "its time / auto's, median", "95 %"), rows)
        show_checks(judged(figures))


def judged(figures: dict[str, Any]) -> list[Check]:
    """Return the target of every case."""
    return [Check(f"{case}: best static / auto", own["ratio"], WANTED, at_least=True) for case, own in figures.items()]


def main(argv: list[str] | None = None) -> None:
    parser = rank_options(__doc__, ranks=4, steps=12)
    parser.add_argument("--share-gpu", action="store_true", help="ranks over NCCL that share the GPU")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.ranks, arguments.steps = 2, 2
    start(run, arguments, share_gpu=arguments.share_gpu)


if __name__ == "__main__":
    main()
