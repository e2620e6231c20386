"""What a step would gain if the exchanges of Ulysses took no time: the most that hiding them could ever bring.

Exchanges wait in the layers' stream. They could be hidden, the heads in two halves: one half is exchanged while the
other computes, which hides at most half of them and takes more kernel calls. `flex` plans batches of 512 sequences
(256 on one node), context 128K. "same plan" prices the plan again with exchanges that are free, "replanned" is the
plan that they would lead to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from common import K, batches, options, progress, show
from record import write

from seqloom.api import cost_model
from seqloom.cost.communication import Communication, Flow
from seqloom.cost.plan_cost import plan_ns
from seqloom.planners.registry import PlannerChoice

CONTEXT = 128 * K
CLUSTERS = ("1x8xH200", "8x8xH200", "8x8xH100", "8x8xA100-80G", "4x8xL40S")
MODELS = ("qwen3-1.7b", "llama3-8b")
LARGEST = {"4x8xL40S": "qwen3-1.7b"}
"""The only model that a cluster holds."""


@contextmanager
def free_exchanges() -> Iterator[None]:
    """Price exchanges of heads at nothing, in cost models that are made inside."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(Communication, "ulysses", lambda *_: Flow()))
        stack.enter_context(patch.object(Communication, "ulysses_latency", lambda *_: 0.0))
        yield


def gains(cluster: str, model: str, source: str, seed: int, count: int) -> tuple[float, float]:
    """Return by how many per cent a step is longer than with free exchanges: in the same plan, and replanned."""
    planner, found = PlannerChoice("flex"), []
    for lengths in batches(source, count, seed=seed, context=CONTEXT, size=256 if cluster.startswith("1x") else 512):
        cost = cost_model(cluster, model, max_length=CONTEXT)
        plan = planner.plan(lengths, cost)
        with free_exchanges():
            free = cost_model(cluster, model, max_length=CONTEXT)
            same, replanned = plan_ns(free, plan), plan_ns(free, planner.plan(lengths, free))
        found.append((plan_ns(cost, plan) / same - 1, plan_ns(cost, plan) / replanned - 1))
    same, replanned = (100 * np.mean(found, axis=0)).tolist()
    return same, replanned


def main(argv: list[str] | None = None) -> None:
    """Measure, show and write."""
    arguments = options(__doc__).parse_args(argv)
    sources = {arguments.lengths: "Wikipedia"} | {name: name for name in ("prolong", "agent-traces", "meta128k")}
    clusters, count = (CLUSTERS[:1], 1) if arguments.quick else (CLUSTERS, 3)
    rows: list[dict[str, Any]] = []
    for cluster in clusters:
        for model in (LARGEST[cluster],) if cluster in LARGEST else MODELS:
            for source, name in sources.items():
                progress(f"{cluster}, {model}, {name}")
                same, replanned = gains(cluster, model, source, arguments.seed, count)
                rows.append(
                    {"cluster": cluster, "model": model, "data": name, "same plan": same, "replanned": replanned}
                )
    shown = [(r["cluster"], r["model"], r["data"], f"{r['same plan']:.2f}", f"{r['replanned']:.2f}") for r in rows]
    show("a step against one with free exchanges, %", ("cluster", "model", "data", "same plan", "replanned"), shown)
    write(arguments.out, __file__, arguments, {"per cent": rows}, [], gpu=False)


if __name__ == "__main__":
    main()
