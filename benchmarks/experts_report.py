"""What `cpu_experts` finds: every side's sums, the paired ratios of `auto` and the best static side, the targets."""

from __future__ import annotations

from statistics import median
from typing import Any

import numpy as np
from common import Check, show, show_checks

from seqloom.profiling.race import median_interval

AUTO = "auto"
Row = dict[str, dict[str, Any]]
"""One batch: by side, what was measured and predicted."""


def judged(rows: list[Row]) -> tuple[dict[str, Any], list[Check]]:
    """Sums of every side, the paired ratios of `auto` and the best static one, and the targets."""
    keys = ("measured_ms", "predicted_ms", "wall_ms")
    total = {name: {key: sum(row[name][key] for row in rows) for key in keys} for name in rows[0]}
    off = {name: each["predicted_ms"] / each["measured_ms"] - 1 for name, each in total.items()}
    found: dict[str, Any] = {"sides": {name: total[name] | {"predicted_off": off[name]} for name in total}}
    for key in ("measured_ms", "wall_ms"):
        best = min((name for name in total if name != AUTO), key=lambda name: total[name][key])
        ratios = [row[best][key] / row[AUTO][key] for row in rows]
        found[key] = {
            "best_static": best,
            "of_sums": total[best][key] / total[AUTO][key],
            "median": median(ratios),
            "interval": median_interval(ratios),
            "quartiles": np.quantile(ratios, [0.25, 0.75]).tolist(),
        }
    best = found["measured_ms"]
    checks = [
        Check("auto / best static with its best expert degree, speed", best["median"], 1.25, at_least=True),
        Check("predicted step time off, auto, %", 100 * abs(off[AUTO]), 15),
        Check("predicted step time off, best static, %", 100 * abs(off[best["best_static"]]), 15),
    ]
    return found, checks


def show_sides(rows: list[Row]) -> None:
    """Print a line for each side, and the targets."""
    figures, checks = judged(rows)
    keys = ("measured_ms", "predicted_ms", "wall_ms", "predicted_off")
    table = [(name, *(f"{each[key]:.4g}" for key in keys)) for name, each in figures["sides"].items()]
    columns = ("planner, expert degree", "ms", "predicted", "wall-clock", "off")
    show(f"{len(rows)} steps", columns, table)
    show_checks(checks)
