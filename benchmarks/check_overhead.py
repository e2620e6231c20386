"""What a run's checks of itself cost: those of every step, and those at intervals, as a share of the steps.

Two CPU processes train a model of a few million parameters on documents of up to 2,048 tokens. What is due at intervals
is checked after every step, so that there is enough to measure; the share is that of the default interval. Steps and
checks are passes of one model, so their ratio hardly depends on the machine.

    python benchmarks/check_overhead.py --out benchmarks/results/check_overhead.json
"""

from __future__ import annotations

import json
import re
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import record
from common import Check, options, progress, show, show_checks

from seqloom.api import cost_model
from seqloom.dist import Communicators, TorchTransport
from seqloom.plan import GroupFamily, Plan
from seqloom.planners import make_plan
from seqloom.planners.plan_ahead import StepPlan
from seqloom.train.config import Checks, Config
from seqloom.train.launch import RankProcess, run_on_processes, train_on_processes
from seqloom.train.trainer import PlanBroadcast

ROOT = Path(__file__).parents[1]
MODEL = """
layers = 4
hidden = 256
heads = 8
kv_heads = 4
head_dim = 32
ffn = 704
gated = true
vocabulary = 4096
tied = true
"""
SHARDINGS = ("full", "hybrid", "none")
RANKS, AGREEMENTS = 2, 200
LIMIT = 0.005


def settings(folder: Path, sharding: str, steps: int) -> list[str]:
    """Return what a run has otherwise than the recipe."""
    (folder / "model.toml").write_text(MODEL)
    changes: dict[str, Any] = {"model.spec": folder / "model.toml", "data.max_length": 2048, "plan.capacity": 4096}
    changes |= {"data.sequences": 12, "data.validation": "", "evaluation.every": 0, "checkpoint.every": 0}
    changes |= {"run.steps": steps, "run.output": folder / sharding, "plan.sharding": sharding, "checks.every": 1}
    changes |= {"plan.cluster": f"{RANKS}x1xCPU", "schedule.warmup": 0, "optimiser.lr": 1e-4, "plan.planner": "flex"}
    return [f"{name}={value}" for name, value in changes.items()]


def agreement_ms(process: RankProcess, plan: str, lengths: list[int]) -> float:
    """Return what it takes ranks to compare the plan of a step, in the middle."""
    communicators = Communicators(GroupFamily(process.job_rank.ranks, process.job_rank.ranks))
    communicators.warm_up()
    plans = PlanBroadcast(TorchTransport(communicators), None)
    step_plan = StepPlan(1, plan, Plan.from_json(plan).hash, predicted_ns=0)
    times = []
    for _ in range(AGREEMENTS):
        start = time.perf_counter()
        plans.check_all_ranks(1, lengths, step_plan)
        times.append(1e3 * (time.perf_counter() - start))
    return median(times[AGREEMENTS // 10 :])


def measure(folder: Path, sharding: str, steps: int) -> dict[str, Any]:
    """Train; return milliseconds of steps and of checks, in the middle, without the first of each."""
    config = Config.load(ROOT / "recipes" / "tiny-cpu.toml", settings(folder, sharding, steps))
    train_on_processes(config, RANKS, show=False)
    lines = [json.loads(line) for line in (folder / sharding / "metrics.jsonl").read_text().splitlines()]
    taken = [float(found[1]) for each in lines if (found := re.match(r"checked in ([\d.]+) ms", each.get("note", "")))]
    if len(taken) != steps:
        raise SystemExit(f"{len(taken)} checks in {steps} steps")
    step_ms = median(each["measured_ms"] for each in lines[1:] if "measured_ms" in each)
    return {"sharding": sharding, "steps": steps, "step_ms": step_ms, "check_ms": median(taken[1:])}


def main() -> None:
    """Measure, show and write."""
    parser = options(__doc__, lengths=False)
    parser.add_argument("--steps", type=int, default=12, help="of every sharding")
    arguments = parser.parse_args()
    every, rows, checks = Checks().every, [], []
    with tempfile.TemporaryDirectory() as made:
        for sharding in SHARDINGS[:1] if arguments.quick else SHARDINGS:
            progress(f"training with sharding {sharding}")
            rows.append(measure(Path(made), sharding, 3 if arguments.quick else arguments.steps))
    lengths = [200] * 512
    plan = make_plan("static:1", lengths, cost_model("1x8xH200", "qwen3-0.6b"))
    compare_ms = run_on_processes(agreement_ms, RANKS, plan.to_json(), lengths)
    for row in rows:
        row["share"] = (row["check_ms"] / every + compare_ms) / row["step_ms"]
        checks.append(Check(f"share of a step, sharding {row['sharding']}", row["share"], LIMIT))
    table = [
        (row["sharding"], f"{row['step_ms']:.0f}", f"{row['check_ms']:.0f}", f"{row['share']:.2%}") for row in rows
    ]
    show("checks", ("sharding", "step, ms", f"check every {every} steps, ms", "share of all checks"), table)
    show("every step", ("", "ms"), [("ranks compare a plan of 512 documents", f"{compare_ms:.3f}")])
    show_checks(checks)
    figures = {"every": every, "ranks": RANKS, "agreement_ms": compare_ms, "runs": rows}
    record.write(arguments.out, __file__, arguments, figures, checks, gpu=False, lengths="made-up documents")


if __name__ == "__main__":
    main()
