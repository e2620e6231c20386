"""One row of `bench_speed.py`, in a process of its own: a row as JSON in, its times and peak memory as JSON out."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from importlib.machinery import ModuleSpec
from typing import Any, NamedTuple

from common import K, batches

CONTEXT = 192 * K
PLANNERS = ("flex", "adaptive", "static")
KIB_OR_BYTE = 1 if sys.platform == "darwin" else K
"""The unit of a process's peak memory, bytes."""


class Case(NamedTuple):
    """One row of the table."""

    install: str
    cluster: str
    model: str
    profile: str | None
    sharding: str
    data: str
    size: int
    plans: int


class Blocked:
    """Keeps a module from being imported, as if it were not installed."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.split(".")[0] in ("numba", "llvmlite"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def work(case: Case, source: str, seed: int) -> dict[str, Any]:
    """Plan the batches of one row in this process."""
    if case.install == "base":
        sys.meta_path.insert(0, Blocked())
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    from seqloom.api import cost_model
    from seqloom.planners import make_plan
    from seqloom.planners.compiled import compile_loops
    from seqloom.planners.uniform import fastest_static_degree

    compiled = compile_loops()
    assert (case.install == "fast") == compiled, f"{case.install} install, but compiled is {compiled}"
    cost = cost_model(case.cluster, case.model, profile=case.profile, sharding=case.sharding, max_length=CONTEXT)
    first, *others = batches(source, case.plans + 1, seed=seed, context=CONTEXT, skip=10, size=case.size)
    found: dict[str, Any] = {"gpus": cost.ranks, "wall_ms": {}, "processor_ms": {}}
    for name in PLANNERS:
        options = {"degree": fastest_static_degree([first], cost)} if name == "static" else {}
        kept = others if name == "flex" else others[: max(3, case.plans // 6)]
        warm = first if compiled else first[:2]
        wall, processor = [], []
        for lengths in (warm, *kept):
            begin, busy = time.perf_counter(), time.process_time()
            assert make_plan(name, lengths, cost, seed=seed, **options).hash
            wall.append(1e3 * (time.perf_counter() - begin))
            processor.append(1e3 * (time.process_time() - busy))
        found["wall_ms"][name], found["processor_ms"][name] = wall[1:], processor[1:]
        if name == "flex":
            found["warm_up_ms"] = wall[0]
            found["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB_OR_BYTE / 1e6
    return found


if __name__ == "__main__":
    print(json.dumps(work(Case(*json.loads(sys.argv[1])), sys.argv[2], int(sys.argv[3]))))
