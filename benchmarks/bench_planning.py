"""How long planners and the bound make a user wait, and how far plans of the largest steps are above the bound.

Every row is made in a process that has loaded its loops, compiled (`fast`) or plain (`base`, numba kept out), once, on
lengths that the process has not seen. Processor time counts for the targets; wall time stands beside it, and is much
longer where other processes share the cores. The last row is a whole `seqloom plan` of a new installation, with its
start: nothing compiled is on disk yet.

    python benchmarks/bench_planning.py --out benchmarks/results/planning.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from common import Check, K, options, progress, show, show_checks
from plan_timer import Blocked
from record import commit, write

from seqloom.api import cost_model, lower_bound
from seqloom.cost import CostModel
from seqloom.describe import sample
from seqloom.planners import make_plan
from seqloom.planners.compiled import compile_loops
from seqloom.planners.hydraulis import propose_strategies

LONGEST = 128 * K
GAP_PERCENT = 1.5
FIRST_PLAN_S = 5.0
FIRST_PLAN = "plan --lengths wikipedia --cluster 8x8xH200 --model llama3-8b --max-length 131072 --batch-size 512 --json"


class Row(NamedTuple):
    """What is timed, and the most processor seconds that it may take."""

    what: str
    most_s: float
    call: Callable[[], Any]
    gap: Callable[[Any], float] | None = None  # How far the result is above the bound, %


def model(cluster: str, **given: Any) -> CostModel:
    """Llama 3 8B on a cluster, documents of at most 128K tokens."""
    return cost_model(cluster, "llama3-8b", **({"max_length": LONGEST} | given))


def rows(install: str, seed: int, quick: bool) -> Iterator[Row]:
    """The rows of an install; quick: one of them, small."""
    size, ranks = (64, "2x8xH200") if quick else (256, "8x8xH200")
    staged = model(ranks, stages=8)
    for source in ("wikipedia", "github", "commoncrawl"):
        lengths = sample(source, size, seed=seed, max_length=LONGEST)
        yield Row(
            f"pipeline:8, {size} documents, {source}",
            0.5,
            lambda lengths=lengths: make_plan("pipeline:8", lengths, staged),
        )
        if quick:
            return
    data, free = sample("wikipedia", 20_000, seed=seed, max_length=64 * K), {"sharding": "free", "stages": 2}
    own = model("4x8xH100", max_length=64 * K, **free)
    yield Row("propose, 20,000 documents, 32 GPUs", 10.0, lambda: propose_strategies(data, own, tokens_per_step=K * K))
    if install == "base":
        return
    for source in ("wikipedia", "github", "prolong", "commoncrawl"):
        small = sample(source, 64, seed=seed, max_length=LONGEST)
        yield Row(
            f"zones, 64 documents, 16 GPUs, {source}", 0.05, lambda s=small: make_plan("zones", s, model("2x8xH200"))
        )
    for source in ("wikipedia", "commoncrawl"):
        large, cost = sample(source, 8_192, seed=seed, max_length=LONGEST), model("128x8xH200")
        yield Row(f"auto, 8,192 documents, 1,024 GPUs, {source}", 1.0, lambda s=large, c=cost: make_plan("auto", s, c))
        yield from _largest(source, sample(source, 32_768, seed=seed, max_length=LONGEST), model("512x8xH200"))


def _largest(source: str, lengths: np.ndarray, cost: CostModel) -> Iterator[Row]:
    """The bound, `zones` and `flex` of a step of 32,768 documents on 4,096 GPUs."""
    bounds: list[int] = []
    yield Row(f"bound, 32,768 documents, 4,096 GPUs, {source}", 2.0, lambda: bounds.append(lower_bound(lengths, cost)))
    for planner in ("zones", "flex"):
        yield Row(
            f"{planner}, 32,768 documents, 4,096 GPUs, {source}",
            1.0,
            lambda planner=planner: make_plan(planner, lengths, cost),
            lambda plan: 100 * (cost.plan_ns(plan) / bounds[0] - 1),
        )


def work(install: str, seed: int, quick: bool) -> list[dict[str, Any]]:
    """Time the rows of an install in this process."""
    if install == "base":
        sys.meta_path.insert(0, Blocked())
    compiled = compile_loops()
    assert compiled == (install == "fast"), f"{install} install, but compiled is {compiled}"
    found = []
    for row in rows(install, seed, quick):
        progress(f"{install}: {row.what}")
        wall, busy = time.perf_counter(), time.process_time()
        result = row.call()
        wall_s, busy_s = time.perf_counter() - wall, time.process_time() - busy
        gap = None if row.gap is None else row.gap(result)
        found.append(
            {
                "what": f"{install}: {row.what}",
                "most_s": row.most_s,
                "wall_s": wall_s,
                "cpu_s": busy_s,
                "gap_percent": gap,
            }
        )
    return found


def first_plan() -> dict[str, Any]:
    """A whole `seqloom plan` where nothing compiled is on disk; the compiler that it starts runs on."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-m", "seqloom", *FIRST_PLAN.split()]
        before, begin = os.times().children_user, time.perf_counter()
        subprocess.run(command, check=True, capture_output=True, env=os.environ | {"NUMBA_CACHE_DIR": folder})
        wall_s, busy_s = time.perf_counter() - begin, os.times().children_user - before
    return {
        "what": "first plan of an installation",
        "most_s": FIRST_PLAN_S,
        "wall_s": wall_s,
        "cpu_s": busy_s,
        "gap_percent": None,
    }


def main(argv: list[str] | None = None) -> None:
    """Time every row of both installs."""
    parser = options(__doc__, lengths=False)
    parser.add_argument("--install", choices=("fast", "base"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.install:
        print(json.dumps(work(arguments.install, arguments.seed, arguments.quick)))
        return
    commit()  # what runs from here on, whatever is committed in the meantime
    found = []
    for install in ("fast", "base"):
        command = [sys.executable, __file__, "--install", install, "--seed", str(arguments.seed)]
        command += ["--quick"] * arguments.quick
        found += json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    found += [] if arguments.quick else [first_plan()]
    report(found, arguments)


def report(found: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Print and write the rows beside their targets."""
    checks = [Check(f"{row['what']}: seconds", row["cpu_s"], row["most_s"]) for row in found]
    gaps = [row for row in found if row["gap_percent"] is not None]
    checks += [Check(f"{row['what']}: % above the bound", row["gap_percent"], GAP_PERCENT) for row in gaps]
    show(
        "waiting for plans",
        ("", "processor s", "wall s", "% above the bound"),
        [
            (
                row["what"],
                f"{row['cpu_s']:.3f}",
                f"{row['wall_s']:.3f}",
                "" if row["gap_percent"] is None else f"{row['gap_percent']:.2f}",
            )
            for row in found
        ],
    )
    show_checks(checks)
    write(arguments.out, __file__, arguments, {"rows": found, "first_plan": FIRST_PLAN}, checks, lengths="samplers")


if __name__ == "__main__":
    main()
