"""What `cpu_pipeline` runs beside the planner: documents in chunks of equal tokens, and torch's own runtime."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from seqloom.comm import Distributed, bind_alone
from seqloom.cost import CostModel, Shape
from seqloom.describe import ModelSpec
from seqloom.models import Transformer
from seqloom.plan import Checkpoint, Pipeline, Plan, Reduce, Round, Span
from seqloom.plan.schedules import schedule_of
from seqloom.planners.pipelines import plan_pipeline
from seqloom.planners.pipelines.line import Line
from seqloom.planners.pipelines.seats import Level, Seat, work_of
from seqloom.runtime.loss import summed_loss
from seqloom.train.trials import StepTimer

LAYERS, SEQUENCES, REPEATS = 16, 2, 15
"""Of the comparison with torch: the model's layers, sequences per process, runs of both."""


def fixed_chunks(lengths: np.ndarray, cost: CostModel, line: Line, limits: Any, tokens: int) -> Plan:
    """Documents of more than `tokens` in chunks of as many, the others packed up to as many; longest first, Seq1F1B."""
    shape = Shape(min(line.width, cost.model.heads), max(1, line.width // cost.model.heads))
    by_length = np.argsort(-lengths, kind="stable").tolist()
    chains: list[list[tuple[Span, ...]]] = []
    packs: list[list[Span]] = []
    for k in by_length:
        length = int(lengths[k])
        if length > tokens:
            edges = [*range(0, length, tokens), length]
            chains.append([(Span(k, a, b),) for a, b in pairwise(edges)])
            continue
        room = (pack for pack in packs if sum(span.tokens for span in pack) + length <= tokens)
        pack = next(room, None)
        if pack is None:
            packs.append(pack := [])
        pack.append(Span(k, 0, length))
    chains += [[tuple(pack)] for pack in packs]
    order = schedule_of("seq1f1b", line.hosts, len(chains), [len(chain) for chain in chains], 1)
    rounds = []
    for spans in (spans for chain in chains for spans in chain):
        seats = (Seat(shape, 0, tuple(sorted(spans))),)
        works = [work_of(cost, line, seats, host, Level(Checkpoint.NONE)) for host in line.places]
        rounds.append(Round(tuple(works)))
    pipeline = Pipeline(line.stages, tuple(rounds), order.rows_of_plan())
    plan = Plan(limits, cost.sharding, Reduce.STEP, tuple(lengths.tolist()), (pipeline,), f"chunks of {tokens}")
    plan.validate()
    return plan


class Slice(nn.Module):
    """Some layers of the reference model, for one sequence of a fixed length: [1, tokens(, hidden)]."""

    def __init__(self, spec: ModelSpec, layers: tuple[int, int], length: int) -> None:
        super().__init__()
        whole = Transformer(spec).model
        self.embed = whole.embed_tokens if layers[0] == 0 else None
        self.norm = whole.norm if layers[1] == spec.layers else None
        self.layers = nn.ModuleList(whole.layers[slice(*layers)])
        self.context = bind_alone([length])
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


def beside_torch(cost: CostModel, transport: Distributed, chunks: int, length: int) -> dict[str, float]:
    """Forward and backward of equal sequences, one process per host: torch's runtime and ours in turns."""
    stages = transport.ranks * chunks
    if LAYERS % stages:
        return {}
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

    pairs = [(seconds(), theirs.seconds(ours.slowest)) for _ in range(REPEATS + 1)][1:]
    mine, other = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
    speed, rounds = statistics.median(b / a for a, b in pairs), len(plan.pipelines[0].rounds)
    return {"chunks": chunks, "ours_ms": mine, "torch_ms": other, "speed": speed, "rounds": rounds}
