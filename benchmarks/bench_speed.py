"""Plan time and memory on one core: lengths in, validated and hashed plan out.

Every row is a process of its own on one core with one thread: one plan to warm up, then a fresh batch every time. Peak
memory is read when `flex` is done; `adaptive` and `static` then plan the first of the same batches. Rows `base` are
the same environment with numba kept out. Processor time stands beside wall time: the two differ where other processes
share the core. The very first plan of an installation, which compiles the loops and keeps them on disk, is a row of its
own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from common import A100, H200, Check, options, progress, show, show_checks, source_name
from plan_timer import PLANNERS, Case
from record import commit, write

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
LIMITS = {64: (50.0, 150.0), 1024: (1000.0, 1000.0)}
"""GPUs to the most ms of the median and of the 99th percentile."""


def cases(quick: bool) -> list[Case]:
    """All rows: 64 GPUs x 512 sequences and 1,024 x 8,192, the `fast` install and the base one."""
    large = [("128x8xA100-40G", *A100[1:]), ("128x8xH200", *H200[1:])]
    ways = [(sharding, data) for sharding in ("full", "hybrid") for data in ("Wikipedia", "CommonCrawl")]
    if quick:
        return [Case(install, *A100, "full", "Wikipedia", 32, 2) for install in ("fast", "base")]
    fast = [Case("fast", *setting, *way, 512, 100) for setting in (A100, H200) for way in ways]
    fast += [Case("fast", *setting, *way, 8192, 5) for setting in large for way in ways]
    base = [Case("base", *setting, *way, 512, 2) for setting in (A100, H200) for way in ways]
    return [*fast, *base, Case("base", *large[0], "full", "Wikipedia", 8192, 1)]


def worker(case: Case, arguments: argparse.Namespace, **environment: str) -> dict[str, Any]:
    """Run one row in a process of its own."""
    source = arguments.lengths if case.data == "Wikipedia" else "commoncrawl"
    timer = Path(__file__).with_name("plan_timer.py")
    command = [sys.executable, str(timer), json.dumps(case), source, str(arguments.seed)]
    everything = os.environ | dict.fromkeys(THREADS, "1") | environment
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=everything).stdout)


def first_plan(case: Case, arguments: argparse.Namespace) -> dict[str, float]:
    """The first plan of an installation: nothing compiled is on disk yet."""
    with tempfile.TemporaryDirectory() as folder:
        found = worker(case._replace(plans=1), arguments, NUMBA_CACHE_DIR=folder)
    return {"seconds": found["warm_up_ms"] / 1e3, "peak_mb": found["peak_mb"]}


def measured(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one row and sum it up."""
    found = worker(case, arguments)
    source = arguments.lengths if case.data == "Wikipedia" else "commoncrawl"
    row = case._asdict() | {key: found[key] for key in ("gpus", "warm_up_ms", "peak_mb")}
    row["lengths"] = source_name(source)
    for kind in ("wall_ms", "processor_ms"):
        for name, times in found[kind].items():
            row[f"{name}_{kind}"] = {q: float(np.percentile(times, int(q[1:]))) for q in ("p50", "p99")}
    return row


def main(argv: list[str] | None = None) -> None:
    """Measure every row."""
    arguments = options(__doc__).parse_args(argv)
    commit()  # what runs from here on, whatever is committed in the meantime
    rows, checks, shown = [], [], []
    installs = ("fast", "base") if find_spec("numba") else ("base",)
    planned = [case for case in cases(arguments.quick) if case.install in installs]
    progress("the first plan of an installation")
    compiling = first_plan(planned[0], arguments) if "fast" in installs and not arguments.quick else None
    small = [case for case in planned if case.install == "fast" and case.size <= 512 and not arguments.quick]
    for case in {(case.cluster, case.sharding): case for case in small}.values():
        worker(case._replace(plans=1), arguments)  # writes the compiled loops to disk
    for case in planned:
        progress(f"{case.install} {case.cluster} {case.sharding} {case.data}: {case.plans} x {case.size}")
        row = measured(case, arguments)
        rows.append(row)
        flex, busy = row["flex_wall_ms"], row["flex_processor_ms"]
        others = [row[f"{name}_wall_ms"]["p50"] for name in PLANNERS[1:]]
        setting = f"{case.install} {case.cluster} {case.model} {case.sharding} {case.data}"
        times = [flex["p50"], flex["p99"], busy["p50"], busy["p99"], *others]
        counts = [f"{row['gpus']:,} x {case.size:,}", str(case.plans)]
        shown.append([setting, *counts, *(f"{ms:,.1f}" for ms in times), f"{row['peak_mb']:.0f}"])
        if case.install == "fast" and not arguments.quick:
            checks.append(Check(f"median ms, {setting}", flex["p50"], LIMITS[row["gpus"]][0]))
            checks.append(Check(f"99th percentile ms, {setting}", flex["p99"], LIMITS[row["gpus"]][1]))
    for install in installs:
        checks.append(Check(f"peak MB, {install}", max(r["peak_mb"] for r in rows if r["install"] == install), 300))
    columns = ("install, setting", "GPUs x sequences", "plans", "flex p50", "p99", "cpu p50", "cpu p99", *PLANNERS[1:])
    notes = []
    if compiling:
        seconds, peak = compiling["seconds"], compiling["peak_mb"]
        notes = [f"First plan of an installation (fast, compiles once): {seconds:.1f} s, {peak:.0f} MB at peak."]
    show("plan time on one core, ms", (*columns, "peak MB"), shown, notes)
    show_checks(checks)
    write(arguments.out, __file__, arguments, {"rows": rows, "first_plan_of_an_installation": compiling}, checks)


if __name__ == "__main__":
    main()
