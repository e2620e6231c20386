"""Steps of pipelines with four communicators for messages between stages beside the same steps with one for all.

Messages of one communicator run in the order of their calls, so with a single one a message that is received may wait
behind one that is sent, and both behind those of other stages. Neither is faster in general; four are kept, since with
one the order of calls alone would keep ranks from waiting for each other. Ranks share the GPU over sockets: the ratio
says who waits for whom, the times say nothing. With gloo there is one communicator in any case: the
ratio must be 1.

    python benchmarks/gpu_channels.py --ranks 8 --out benchmarks/results/gpu_channels.json
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np
import torch
from common import options, progress, show
from record import write

from seqloom.cost import CostModel
from seqloom.describe import Cluster, ModelSpec
from seqloom.dist import Channel, Communicators, Context, TorchTransport
from seqloom.engine import bind_plan, run_step
from seqloom.models import ModelAdapter, Transformer
from seqloom.plan import GroupFamily, Sharding
from seqloom.planners.registry import PlannerChoice
from seqloom.train.launch import RankProcess, described_device, run_on_processes
from seqloom.train.model import prepare_layers, shard_parameters

SPEC = ModelSpec(
    name="small",
    layers=8,
    hidden=512,
    heads=8,
    kv_heads=4,
    head_dim=64,
    ffn=1024,
    gated=True,
    vocabulary=257,
    tied=False,
)
LENGTH, DOCUMENTS = 512, 32
CASES = {
    # stages, chunks, schedule
    "1F1B": (4, 1, "1f1b"),
    "interleaved": (4, 2, "interleaved"),
    "zero bubble, V": (4, 2, "zb-v"),
}
MESSAGES = tuple(channel for channel in Channel if channel not in (Channel.LAYERS, Channel.PARAMETERS))
SIDES = ("four", "one")


def _rows(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.zeros(context.tokens, dtype=torch.int64, device=context.device)
    return ids, ids


def run(process: RankProcess, pairs: int, length: int) -> dict[str, dict[str, list[float]]]:
    """Return seconds of steps by case and number of communicators, both sides in turn; the slowest rank's."""
    job_rank, device, _ = process
    four, one = (Communicators(GroupFamily(job_rank.ranks, job_rank.ranks)) for _ in SIDES)
    one.channels |= {channel: one.channels[MESSAGES[0]] for channel in MESSAGES}
    transports = {}
    for side, communicators in zip(SIDES, (four, one), strict=True):
        communicators.warm_up()
        transports[side] = TorchTransport(communicators)
    cluster, found = Cluster.of(1, job_rank.ranks, described_device()), {}
    for case, (stages, chunks, schedule) in CASES.items():
        cost = CostModel(cluster, SPEC, None, Sharding.FULL, None, length, 2 * length, stages=stages * chunks)
        planner = PlannerChoice("pipeline", {"stages": stages, "chunks": chunks, "schedule": schedule})
        plan = planner.plan([length] * DOCUMENTS, cost)
        adapter = prepare_layers(ModelAdapter.of(Transformer(SPEC, seed=0, dtype=torch.float32).to(device)))
        compute = torch.bfloat16 if device.type == "cuda" else None
        parameters = shard_parameters(adapter, transports["four"], plan.pipelines[0].stages, cost, compute)
        prepare = partial(adapter.prepare, dtype=compute or torch.float32)
        bound = {side: bind_plan(plan, each, device=device, prepare=prepare) for side, each in transports.items()}
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        for number in range(pairs + 1):  # the first pair warms up
            for side in SIDES if number % 2 else SIDES[::-1]:
                torch.distributed.barrier()
                start = time.perf_counter()
                run_step(bound[side], parameters, _rows, sum(plan.documents))
                parameters.zero_grad()
                mine = torch.tensor([time.perf_counter() - start], device=device)
                torch.distributed.all_reduce(mine, torch.distributed.ReduceOp.MAX)
                if number:
                    seconds[side].append(float(mine))
        if job_rank.rank == 0:
            progress(f"{case}: {1e3 * np.median(seconds['four']):.1f} ms with four")
        found[case] = seconds
    return found


def main() -> None:
    """Measure, show and write."""
    parser = options(__doc__, lengths=False)
    parser.add_argument("--ranks", type=int, default=8, help="processes, a multiple of 4")
    parser.add_argument("--pairs", type=int, default=20, help="steps of each side")
    arguments = parser.parse_args()
    pairs, length = (2, LENGTH // 32) if arguments.quick else (arguments.pairs, LENGTH)
    seconds = run_on_processes(run, arguments.ranks, pairs, length, share_gpu=True)
    figures: dict[str, Any] = {"ranks": arguments.ranks, "pairs": pairs, "length": length}
    rows = []
    for case, sides in seconds.items():
        ratios = np.array(sides["one"]) / np.array(sides["four"])
        low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75]).tolist()
        medians = {side: 1e3 * float(np.median(values)) for side, values in sides.items()}
        figures[case] = {"one : four, quartiles": [low, middle, high], "median ms": medians}
        rows.append((case, *(f"{ms:.1f}" for ms in medians.values()), f"{middle:.2f} ({low:.2f} - {high:.2f})"))
    show("messages between stages", ("schedule", "four, ms", "one, ms", "one : four"), rows)
    write(arguments.out, __file__, arguments, figures, [], lengths="equal documents")


if __name__ == "__main__":
    main()
