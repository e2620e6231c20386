"""What the executor itself costs per action: the rows of a middle stage, run with stages and a network that do nothing.

Time inside the stages and autograd is taken off; what is left is the executor's. Nothing waits here, so time is the
thread's own: what else the machine does has no part in it.

    python benchmarks/pipeline_overhead.py --out benchmarks/results/pipeline_overhead.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from record import commit, hardware, libraries

from seqloom.engine import bind_plan, run_step
from seqloom.layout import Span
from seqloom.models.split_backward import WeightGradients
from seqloom.plan import Checkpoint, Group, Limits, Pipeline, Plan, Reduce, Round, Sharding, Stage, StageMicroBatch
from seqloom.schedules import build_schedule

# Name -> pieces of a sequence, stages of a host.
SCHEDULES = {"1f1b": (1, 1), "seq1f1b": (4, 1), "seq1f1b-zb": (4, 1), "interleaved": (1, 2), "zb-v": (1, 2)}
HOSTS, RANK, SEQUENCES, TOKENS = 8, 3, 16, 64
TARGET_US = 200.0


class Instant:
    """A network in which every message is there at once."""

    rank, ranks, waits_in_stream = RANK, HOSTS, False

    def on(self, channel: object) -> Instant:
        """Return itself."""
        return self

    def exchange(self, sends: object, receives: object) -> Instant:
        """Send nothing."""
        return self

    def all_reduce(self, tensor: torch.Tensor, block: object) -> None:
        """Say that one label counts."""
        tensor.fill_(1.0)

    def wait(self) -> None:
        """Do nothing."""

    def done(self) -> bool:
        """Say yes."""
        return True


class Hollow:
    """Parameters of stages that hand on what they are given; adds up the time of what is not the executor's."""

    def __init__(self) -> None:
        self.weight_gradients, self.shard_ranks, self.seconds = WeightGradients(), (RANK,), 0.0

    def timed(self, work: Callable[[], Any]) -> Any:
        """Run a stage's work."""
        begin = time.thread_time()
        result = work()
        self.seconds += time.thread_time() - begin
        return result

    def empty_hidden_states(self, tokens: int) -> torch.Tensor:
        """See `Parameters.empty_hidden_states`."""
        return self.timed(lambda: torch.zeros(tokens, 64))

    def forward(self, part: Any, given: torch.Tensor, labels: torch.Tensor | None, context: object) -> torch.Tensor:
        """See `Parameters.forward`."""
        return self.timed(lambda: given * 1.0)

    def backward(self, output: Any, gradient: torch.Tensor, *, reduce: bool) -> None:
        """See `Parameters.backward`."""
        self.timed(lambda: torch.autograd.backward(output, gradient))

    def unshard(self, part: Any = None) -> None:
        """Do nothing."""

    prefetch = reduce = reshard = finish_gradients = zero_grad = unshard

    def gradient_norm(self) -> float:
        """Return a number."""
        return 1.0


def plan_of(name: str, pieces: int, chunks: int) -> Plan:
    """Return a plan with one rank per host, in the order of a schedule."""
    schedule = build_schedule(name, HOSTS, SEQUENCES, pieces, chunks)
    cuts = pairwise(range(len(schedule.pp_ranks) + 1))
    stages = tuple(Stage((host,), layers) for host, layers in zip(schedule.pp_ranks, cuts, strict=True))
    units = [Span(sequence, TOKENS * piece, TOKENS * (piece + 1)) for sequence, piece, _ in schedule.units]
    works = [
        tuple(StageMicroBatch((Group(s.ranks, 1, 1, (span,)),), Checkpoint.NONE) for s in stages) for span in units
    ]
    limits = Limits(HOSTS, HOSTS, 8, ((Checkpoint.NONE, 10**6),))
    line = Pipeline(stages, tuple(map(Round, works)), schedule.pipeline_actions())
    plan = Plan(limits, Sharding.FULL, Reduce.STEP, (TOKENS * pieces,) * SEQUENCES, (line,), name)
    plan.validate()
    return plan


def measure(plan: Plan, repeat: int) -> dict[str, Any]:
    """Return microseconds per action of a rank, the median of several steps."""
    begin = time.thread_time()
    bound, found = bind_plan(plan, Instant(), check=False), []
    bind_ms = 1e3 * (time.thread_time() - begin)
    for _ in range(repeat):
        hollow, begin = Hollow(), time.thread_time()
        run_step(bound, hollow, lambda context: (torch.zeros(0), torch.zeros(0)), 1)
        found.append((time.thread_time() - begin - hollow.seconds) / len(bound.actions))
    kinds = Counter(action.kind.value for action in bound.actions)
    return {"actions": len(bound.actions), "kinds": kinds, "us_per_action": 1e6 * median(found), "bind_ms": bind_ms}


def main(argv: list[str] | None = None) -> None:
    """Measure every schedule and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeat", type=int, default=21)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    figures = {name: measure(plan_of(name, *sizes), arguments.repeat) for name, sizes in SCHEDULES.items()}
    for name, each in figures.items():
        count, each_us, bind_ms = each["actions"], each["us_per_action"], each["bind_ms"]
        print(f"{name:12} {count:4} actions, {each_us:6.1f} us each, bind {bind_ms:.1f} ms")
    worst = max(each["us_per_action"] for each in figures.values())
    print(f"worst {worst:.1f} us, target {TARGET_US:.0f}: {'met' if worst <= TARGET_US else 'MISSED'}")
    if arguments.out:
        command = "python benchmarks/pipeline_overhead.py"
        record = {"benchmark": "pipeline_overhead", "command": command, "date": datetime.now(UTC).date().isoformat()}
        record |= {"commit": commit(), "hardware": hardware(False), "libraries": libraries(), "figures": figures}
        arguments.out.write_text(json.dumps(record | {"worst_us": worst, "target_us": TARGET_US}, indent=1) + "\n")


if __name__ == "__main__":
    main()
