"""`flex` against the published solver with its own limit of 10 s per problem: step and plan time, batch by batch.

64 A100-40G, gpt-7b, context 192K, full sharding, FlexSP's constants; half of the batches are Wikipedia, half the
CommonCrawl stand-in. `flexsp` is the published algorithm (blaster, buckets, mixed-integer programme, warm start) with
HiGHS in place of SCIP; `static:64` shows whether it reproduces its published ratio here. With a limit in seconds its
plans depend on the machine. About a minute a batch; with --out the results are written after every batch.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from common import A100, Check, K, batches, options, progress, show, show_checks, source_name
from record import commit, write

from seqloom.api import cost_model, lower_bound
from seqloom.cost import CostModel
from seqloom.planners import make_plan
from seqloom.simulate import simulate

CONTEXT = 192 * K
PUBLISHED = {"Wikipedia": 1.72, "CommonCrawl": 1.50}
"""DeepSpeed / FlexSP, 7B at 192K, as printed in the paper."""


def compared(lengths: np.ndarray, cost: CostModel, limit_s: float) -> dict[str, Any]:
    """Steps and plan times of one batch, in seconds."""
    row: dict[str, Any] = {"bound_s": lower_bound(lengths, cost) / 1e9}
    options_of: dict[str, dict[str, Any]] = {"static:64": {}, "flex": {}, "flexsp": {"time_limit_s": limit_s}}
    for name, more in options_of.items():
        begin, busy = time.perf_counter(), time.process_time()
        plan = make_plan(name, lengths, cost, **more)
        assert plan.hash
        key = name.partition(":")[0]
        row[f"{key}_plan_s"] = time.perf_counter() - begin
        row[f"{key}_plan_processor_s"] = time.process_time() - busy
        row[f"{key}_s"] = simulate(plan, cost).step_ns / 1e9
    row["flexsp_over_flex"] = row["flexsp_s"] / row["flex_s"]
    return row


def ratios(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Per data set: the published algorithm's own speed-up over static here, beside the published one."""
    found = {}
    for data, published in PUBLISHED.items():
        own = [row for row in rows if row["data"] == data]
        if own:
            static, flexsp, flex = (
                float(np.mean([row[key] for row in own])) for key in ("static_s", "flexsp_s", "flex_s")
            )
            close = "within 10 %" if data == "Wikipedia" else "within 10 %, on lengths fitted to it"
            found[data] = {
                "static_over_flexsp": static / flexsp,
                "published": published,
                "verdict": close if abs(static / flexsp / published - 1) <= 0.10 else "not validated",
                "static_over_flex": static / flex,
            }
    return found


def checks_of(rows: list[dict[str, Any]]) -> list[Check]:
    """Never above the published solver, on at least 16 batches."""
    worse = sum(row["flex_s"] > row["flexsp_s"] for row in rows)
    return [Check("batches on which flex is above flexsp", worse, 0), Check("batches", len(rows), 16, at_least=True)]


def main(argv: list[str] | None = None) -> None:
    """Compare batch by batch."""
    parser = options(__doc__)
    parser.add_argument("--batches", type=int, default=16, help="in all, half of each data set")
    parser.add_argument("--limit", type=float, default=10.0, help="seconds per problem of the published solver")
    arguments = parser.parse_args(argv)
    commit()  # what runs from here on, whatever is committed in the meantime
    if arguments.quick:
        arguments.batches, arguments.limit = 2, 0.1
    size = 64 if arguments.quick else 512
    cost = cost_model(A100[0], A100[1], profile=A100[2], max_length=CONTEXT)
    sources = {"Wikipedia": arguments.lengths, "CommonCrawl": "commoncrawl"}
    each = -(-arguments.batches // 2)
    work = [
        (data, source, number, lengths)
        for data, source in sources.items()
        for number, lengths in enumerate(
            batches(source, each, seed=arguments.seed, context=CONTEXT, skip=10, size=size), start=10
        )
    ]
    make_plan("flex", work[0][3][:2], cost)  # loads, and compiles where that is installed
    rows: list[dict[str, Any]] = []
    for data, source, number, lengths in work:
        progress(f"{data} batch {number}: {len(rows)} of {len(work)} done")
        row = {"data": data, "lengths": source_name(source), "batch": number}
        rows.append(row | compared(lengths, cost, arguments.limit))
        figures = {"limit_s": arguments.limit, "ratios": ratios(rows), "batches": rows}
        write(arguments.out, __file__, arguments, figures, checks_of(rows))
    shown = [
        (
            f"{row['lengths'].split(',')[0]} {row['batch']}",
            f"{row['static_s']:.3f}",
            f"{row['flexsp_s']:.3f}",
            f"{row['flex_s']:.3f}",
            f"{row['bound_s']:.3f}",
            f"{100 * (row['flexsp_over_flex'] - 1):+.1f} %",
            f"{row['flexsp_plan_s']:.1f}",
            f"{row['flex_plan_s']:.3f}",
        )
        for row in rows
    ]
    notes = [
        f"{data}: static:64 / flexsp {r['static_over_flexsp']:.2f}, published {r['published']:.2f}: {r['verdict']}; "
        f"static:64 / flex {r['static_over_flex']:.2f}"
        for data, r in ratios(rows).items()
    ]
    columns = (
        "batch",
        "static:64 s",
        "flexsp s",
        "flex s",
        "bound s",
        "flexsp above flex",
        "flexsp plans in s",
        "flex in s",
    )
    show("flex and the published solver", columns, shown, notes)
    show_checks(checks_of(rows))


if __name__ == "__main__":
    main()
