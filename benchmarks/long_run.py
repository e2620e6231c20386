"""Hundreds of steps of a small model, each with a fresh plan, all planners in turn: nothing hangs, nothing grows.

Parameters are sharded freely, so that one run takes plans of every kind: groups of any degree, zones, pipelines with
every message between stages, strategies that change from step to step. Ranks share the GPU, if there is one, with NCCL
between them; otherwise they are CPU processes with gloo.

    python benchmarks/long_run.py --ranks 4 --steps 500 --out benchmarks/results/long_run.json
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import record
import torch
from common import Check, options, progress, show, show_checks
from process_usage import CountedStream, Usage, usage

from seqloom.cost import CostModel
from seqloom.data import LengthLimitedSource, RowReader, Sampler, open_source
from seqloom.describe import Cluster, ModelSpec
from seqloom.dist import Communicators, TorchTransport
from seqloom.engine import bind_plan, run_step
from seqloom.errors import SeqloomError
from seqloom.models import ModelAdapter, Transformer
from seqloom.params import ReshardingParameters
from seqloom.plan import GroupFamily, Plan, Sharding
from seqloom.planners.hydraulis import propose_strategies
from seqloom.planners.registry import PLANNERS, PlannerChoice
from seqloom.train.launch import RankProcess, described_device, run_on_processes
from seqloom.train.model import prepare_layers

SPEC = ModelSpec(
    name="small", layers=2, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn=256, gated=True, vocabulary=257, tied=True
)
LONGEST, CAPACITY, DOCUMENTS, EVERY = 768, 512, 8, 10
WARM = 0.4
"""Share of the steps after which nothing may grow any more: by then every kind of plan has come several times."""


def able_planners(cost: CostModel, lengths: np.ndarray) -> tuple[list[PlannerChoice], dict[str, str]]:
    """Return the planners that plan such batches, and why others do not."""
    strategies = propose_strategies(lengths, cost, tokens_per_step=int(lengths[:DOCUMENTS].sum()), seed=0)
    choices = [PlannerChoice("hydraulis", {"strategies": tuple(strategies)}), PlannerChoice("pipeline", {"stages": 2})]
    choices += [PlannerChoice(name) for name, spec in PLANNERS.items() if not spec.packs_dataset]
    able, others = [], {}
    for choice in choices:
        try:
            choice.plan(lengths[:DOCUMENTS], cost)
            able.append(choice)
        except SeqloomError as error:
            others[str(choice)] = str(error)
    return able, others


def run(process: RankProcess, steps: int, seconds_limit: float, seed: int) -> dict[str, Any]:
    """Train on one rank until all steps are done or no time is left; return what was measured, on rank 0."""
    torch.cuda.Stream = CountedStream
    job_rank, device, _ = process
    communicators = Communicators(GroupFamily(job_rank.ranks, job_rank.ranks))
    communicators.warm_up()
    transport = TorchTransport(communicators)
    cluster = Cluster.of(1, job_rank.ranks, described_device())
    cost = CostModel(cluster, SPEC, None, Sharding.FREE, None, LONGEST, CAPACITY, stages=2)
    source = LengthLimitedSource(open_source(Path("toy:4000"), vocabulary=SPEC.vocabulary), LONGEST, "truncate")
    able, others = able_planners(cost, source.lengths) if job_rank.rank == 0 else ([], {})
    turns = cycle(able)
    model = Transformer(SPEC, seed=0, dtype=torch.float32).to(device)
    parameters = ReshardingParameters(prepare_layers(ModelAdapter.of(model)), transport)
    optimiser = torch.optim.AdamW(parameters.master_weights().values(), lr=1e-3)
    sampler = Sampler(source.lengths, source.valid, seed=seed, documents=DOCUMENTS)
    used, losses, seconds, shapes = [], [], [], Counter()
    began = time.perf_counter()
    for step in range(1, steps + 1):
        batch = sampler.next_batch()
        text = None
        if job_rank.rank == 0:
            has_time = time.perf_counter() - began < seconds_limit
            text = next(turns).plan(batch.lengths, cost).to_json().encode() if has_time else b""
        text = transport.broadcast(text).decode()
        if not text:
            break
        plan, start = Plan.from_json(text), time.perf_counter()
        bound = bind_plan(plan, transport, device=device)
        with RowReader(bound, source, batch) as rows:
            result = run_step(bound, parameters, rows, batch.valid_tokens)
        optimiser.step()
        parameters.zero_grad()
        losses.append(result.loss)
        seconds.append(time.perf_counter() - start)
        shapes[plan.planner] += 1
        if step % EVERY == 0:
            used.append(asdict(usage(step, device, communicators)))
            if job_rank.rank == 0:
                progress(f"step {step}/{steps}: loss {result.loss:.3f}, {1e3 * median(seconds[-EVERY:]):.0f} ms a step")
    everyone = [None] * job_rank.ranks
    torch.distributed.all_gather_object(everyone, used)
    return {
        "ranks": job_rank.ranks,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "steps": len(losses),
        "seconds": time.perf_counter() - began,
        "median_step_ms": 1e3 * median(seconds),
        "losses": [losses[0], losses[-1]],
        "plans": dict(shapes),
        "left_out": others,
        "usage": everyone,
    }


def growth(used: list[dict[str, float]], name: str) -> float:
    """Return how much more of it there is at the end than when everything had been seen, as a share."""
    values = [each[name] for each in used]
    warm = max(1, round(WARM * len(values)))
    return max(values[warm:]) / max(max(values[:warm]), 1e-9) - 1 if max(values) else 0.0


def main() -> None:
    """Run, show and write."""
    parser = options(__doc__, lengths=False)
    parser.add_argument("--ranks", type=int, default=4, help="processes")
    parser.add_argument("--steps", type=int, default=500, help="steps, each with a fresh plan")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no step begins")
    arguments = parser.parse_args()
    steps = 40 if arguments.quick else arguments.steps
    found = run_on_processes(run, arguments.ranks, steps, arguments.seconds, arguments.seed, share_gpu=True)
    names = [name for name in Usage.__dataclass_fields__ if name != "step"]
    worst = {name: max(growth(used, name) for used in found["usage"]) for name in names}
    rows = [(name, *(f"{used[-1][name]:,.0f}" for used in found["usage"]), f"{worst[name]:+.1%}") for name in names]
    show("held at the end", ("", *(f"rank {rank}" for rank in range(arguments.ranks)), "grown since warm"), rows)
    show("plans", ("planner", "steps"), [(name, str(count)) for name, count in found["plans"].items()])
    exact = ("communicators", "streams", "file_handles", "threads")
    checks = [Check(f"growth of {name}", worst[name], 0.0 if name in exact else 0.02) for name in names]
    checks.append(Check("loss at the end, share of the first", found["losses"][1] / found["losses"][0], 0.9))
    show_checks(checks)
    found["usage"] = found["usage"][:1]
    record.write(arguments.out, __file__, arguments, found | {"growth": worst}, checks, lengths="made-up documents")
    sys.exit(not arguments.quick and not all(check.passed for check in checks))


if __name__ == "__main__":
    main()
