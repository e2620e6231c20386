"""Our pipeline runtime beside torch's own, on equal sequences: the same layers, loss, order and processes.

Schedule1F1B with one stage per process and ScheduleInterleaved1F1B with two, forwards and backwards alone, in turns;
speed is the median over pairs. Ours has the reduction, the whole loss and the gradient norm in it, torch's has not.

    python benchmarks/cpu_torch_pipeline.py --out results/cpu_torch_pipeline.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import record
import torch
import torch.distributed as dist
from common import Check, show_checks
from cpu_pipeline import SIZES
from cpu_ranks import Say, rank_options, start
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from seqloom.cost import CostModel
from seqloom.describe import Cluster, ModelSpec
from seqloom.dist import TorchTransport, bind_single_rank
from seqloom.models import Transformer
from seqloom.models.loss import summed_loss
from seqloom.planners.pipeline import plan_pipeline
from seqloom.profiling.calibration import StepTimer

LAYERS, SEQUENCES, TOKENS, PAIRS = 16, 2, 512, 15
"""The model's layers, sequences per process and their tokens, runs of both that count."""
LEAST = 0.97


class Slice(nn.Module):
    """Some layers of the reference model, for one sequence of a fixed length: [1, tokens(, hidden)]."""

    def __init__(self, spec: ModelSpec, layers: tuple[int, int], length: int) -> None:
        super().__init__()
        whole = Transformer(spec).model
        self.embed = whole.embed_tokens if layers[0] == 0 else None
        self.norm = whole.norm if layers[1] == spec.layers else None
        self.layers = nn.ModuleList(whole.layers[slice(*layers)])
        self.context = bind_single_rank([length])
        self.table = whole.rope.table(self.context.positions, spec.head_dim, torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layers."""
        x = x[0] if self.embed is None else self.embed(x[0])
        for layer in self.layers:
            x = layer(x, self.table, self.context)
        return (x if self.norm is None else self.norm(x)).unsqueeze(0)


class TorchSide:
    """Equal sequences through torch's schedule, on the same layers, loss and processes."""

    def __init__(self, spec: ModelSpec, length: int, count: int, chunks: int) -> None:
        """Make this rank's stages, one host per rank; the first takes ids, the last has the loss."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self._first, self._last = rank == 0, rank == ranks - 1
        stages, each = ranks * chunks, spec.layers // (ranks * chunks)
        self._parts = [Slice(spec, (s * each, (s + 1) * each), length) for s in range(rank, stages, ranks)]
        self._head = nn.Linear(spec.hidden, spec.vocabulary, bias=False)
        self._ids = torch.randint(spec.vocabulary, (count, length), generator=torch.Generator().manual_seed(0))
        made = [
            PipelineStage(part, rank + k * ranks, stages, torch.device("cpu")) for k, part in enumerate(self._parts)
        ]
        options: dict[str, Any] = {"n_microbatches": count, "loss_fn": self._loss, "scale_grads": False}
        self._schedule = ScheduleInterleaved1F1B(made, **options) if chunks > 1 else Schedule1F1B(made[0], **options)

    def _loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return summed_loss(hidden[0], self._head.weight, labels[0]) / self._ids.numel()

    def seconds(self, together: Callable[[float], float]) -> float:
        """Run forward and backward of all sequences once; seconds of the slowest rank."""
        together(0.0)
        begin = time.perf_counter()
        given = (self._ids,) if self._first else ()
        self._schedule.step(*given, **({"target": self._ids, "losses": []} if self._last else {}))
        for part in (*self._parts, self._head):
            part.zero_grad(set_to_none=True)
        return together(time.perf_counter() - begin)


def beside_torch(cost: CostModel, transport: TorchTransport, chunks: int, length: int, times: int) -> dict[str, float]:
    """Forward and backward of equal sequences, one process per host: torch's runtime and ours in turns."""
    stages = transport.ranks * chunks
    count = SEQUENCES * transport.ranks
    even = [LAYERS // stages] * stages
    given = {"stages": transport.ranks, "chunks": chunks, "schedule": ("1f1b", "interleaved")[chunks - 1]}
    plan = plan_pipeline(np.full(count, length), cost, **given, layers=even, pieces=1)
    ours = StepTimer(cost, transport, torch.device("cpu"), torch.float32, plan.pipelines[0].stages)
    theirs = TorchSide(cost.model, length, count, chunks)
    bound = ours.bind(plan)  # once, as torch's runtime gets its schedule once

    def seconds() -> float:
        ours.slowest(0.0)
        begin = time.perf_counter()
        ours.gradients(bound)
        return ours.slowest(time.perf_counter() - begin)

    pairs = [(seconds(), theirs.seconds(ours.slowest)) for _ in range(times + 1)][1:]
    mine, other = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
    speed, rounds = statistics.median(b / a for a, b in pairs), len(plan.pipelines[0].rounds)
    return {"chunks": chunks, "ours_ms": mine, "torch_ms": other, "speed": speed, "rounds": rounds}


def run(transport: TorchTransport, arguments: argparse.Namespace, say: Say) -> None:
    """Compare both schedules, as many times as `--steps` says."""
    model = ModelSpec("small", gated=True, tied=False, **(SIZES | {"layers": LAYERS}))
    cost = CostModel(Cluster.parse(f"1x{transport.ranks}xCPU"), model, "cpu", sharding="none")
    found = []
    for chunks in (1, 2):
        found.append(beside_torch(cost, transport, chunks, 64 if arguments.quick else TOKENS, arguments.steps))
        say(f"{chunks} stages per process: {found[-1]}")
    if transport.rank:
        return
    checks = [Check(f"ours / torch, {each['chunks']} per process", each["speed"], LEAST, True) for each in found]
    settings = {
        "ranks": transport.ranks,
        "model": SIZES | {"layers": LAYERS},
        "tokens": TOKENS,
        "pairs": arguments.steps,
    }
    record.write(arguments.out, __file__, arguments, settings | {"schedules": found}, checks, gpu=False)
    show_checks(checks)


def main(argv: list[str] | None = None) -> None:
    start(run, rank_options(__doc__, ranks=8, steps=PAIRS).parse_args(argv), keep_memory=True)


if __name__ == "__main__":
    main()
