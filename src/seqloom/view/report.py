"""Reports: one HTML file that shows plans of a batch, or a training run, and fetches nothing.

The file holds the figures as JSON, and report.js and report.css, which draw them. `<`, `>` and `&` are escaped in the
JSON, and the script writes text as text, so nothing that a name contains is read as HTML.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from seqloom.cost import CostModel, GroupShape
from seqloom.errors import SeqloomError
from seqloom.plan import Plan
from seqloom.planners.explain import explain, method_name
from seqloom.simulate import Simulation
from seqloom.simulate.events import EventKind
from seqloom.view.charts import FORWARD_OPACITY, PALE, rank_runs, round_edges
from seqloom.view.picture import DEGREES, END_COLOUR, NIC_COLOUR
from seqloom.view.tables import buckets

GIB = 1024**3
MOST_POINTS = 2_000
"""Points of a line; of a longer run each is the mean of several steps."""
KINDS = {
    EventKind.F: "forward",
    EventKind.B: "backward",
    EventKind.I: "backward, inputs",
    EventKind.W: "backward, weights",
    EventKind.STEP: "reduction, optimiser",
    EventKind.ALL_GATHER: "all-gather of parameters",
    EventKind.REDUCE_SCATTER: "reduce-scatter of gradients",
}
COLOURS = {
    "degrees": DEGREES,
    "end": END_COLOUR,
    "nic": NIC_COLOUR,
    "forward_opacity": FORWARD_OPACITY,
    "histogram": ("#56b4e9", "#d55e00", "#009e73"),
}
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<main></main>
<noscript>This report is drawn by a script of its own; it needs JavaScript, and no network.</noscript>
<script type="application/json" id="data">{data}</script>
<script>
{script}</script>
</body>
</html>
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True, slots=True, eq=False)
class ReportStep:
    """A simulated step of a report: its planner's name, its lower bound, and the figures that JSON outputs have."""

    name: str
    plan: Plan
    simulation: Simulation
    bound_ns: int | None
    figures: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class ReportRun:
    """A training run: the metrics of its steps, in their order, and its totals, by the names of metrics.jsonl."""

    records: Sequence[Mapping[str, Any]]
    figures: Mapping[str, Any]


def save_report(
    path: Path,
    title: str,
    steps: Sequence[ReportStep],
    cost: CostModel,
    *,
    notes: Sequence[str] = (),
    run: ReportRun | None = None,
) -> None:
    """Write a report.

    Args:
        path: the .html file.
        title: stands at its head.
        steps: of one batch under several planners; the fastest is shown first.
        cost: the cost model that priced them all.
        notes: lines below the title.
        run: stands before the steps.
    """
    path.write_text(report_html(title, steps, cost, notes=notes, run=run), encoding="utf-8")


def report_html(
    title: str,
    steps: Sequence[ReportStep],
    cost: CostModel,
    *,
    notes: Sequence[str] = (),
    run: ReportRun | None = None,
) -> str:
    """Return the report of `save_report` as text."""
    staged = any(len(p.stages) > 1 for step in steps for p in step.plan.pipelines) or any(
        len(step.plan.pipelines) > 1 for step in steps
    )
    content = {
        "title": title,
        "notes": list(notes),
        "kinds": [KINDS.get(kind, "message") for kind in EventKind],
        "pale": sorted(int(kind) for kind in PALE),
        "colours": COLOURS,
        "unit": cost.rank_word,
        "staged": staged,
        "chosen": min(range(len(steps)), key=lambda k: steps[k].simulation.step_ns, default=None),
        "steps": [_step_content(step, cost) for step in steps],
        "run": None if run is None else _run_content(run),
    }
    resources = files("seqloom.view")
    return _PAGE.format(
        policy=_POLICY,
        title=escape(title),
        style=resources.joinpath("report.css").read_text(encoding="utf-8"),
        script=resources.joinpath("report.js").read_text(encoding="utf-8"),
        data=_script_json(content),
    )


def _script_json(content: Any) -> str:
    """Write JSON that is safe inside a script element, whatever its texts contain."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _step_content(step: ReportStep, cost: CostModel) -> dict[str, Any]:
    plan, simulation = step.plan, step.simulation
    return {
        "name": step.name,
        "figures": dict(step.figures),
        "ranks": simulation.ranks,
        "node_size": simulation.node_size,
        "step_ns": simulation.step_ns,
        "bound_ns": step.bound_ns,
        "budget_gib": cost.budget_bytes / GIB,
        "memory_gib": np.round(simulation.peak_memory / GIB, 3).tolist(),
        "rounds": round_edges(simulation),
        "runs": _run_columns(simulation),
        "nics": _nic_columns(simulation),
        "groups": list(_groups(plan)),
        "lengths": [bucket._asdict() for bucket in buckets(plan.documents)],
        **_reasons(plan, cost),
    }


def _run_content(run: ReportRun) -> dict[str, Any]:
    """Return the lines of a run as columns, its totals, and how far predictions were off in the mean.

    The first step warms up, so its time says nothing about the prediction.
    """
    each = -(-len(run.records) // MOST_POINTS) or 1
    blocks = [run.records[start : start + each] for start in range(0, len(run.records), each)]
    columns: dict[str, list[float | None]] = {"step": [block[-1]["step"] for block in blocks]}
    for name in ("measured_ms", "predicted_ms", "loss", "gap_to_bound"):
        columns[name] = [_mean([record[name] for record in block]) for block in blocks]
    pairs = [(one["measured_ms"], one["predicted_ms"]) for one in run.records[1:] or run.records]
    error = _mean([abs(measured / predicted - 1) if predicted else None for measured, predicted in pairs])
    return {"figures": {**run.figures, "prediction_error": error}, "columns": columns, "each": each}


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are known."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _run_columns(simulation: Simulation) -> dict[str, list[int]]:
    """Return what neighbouring ranks do together, as columns; times in ns."""
    runs = rank_runs(simulation)
    events = runs.events
    names = ("rank", "start", "kind", "comm", "round", "group", "degree", "pipeline", "stage")
    columns = {name: getattr(events, name).tolist() for name in names}
    return columns | {"count": runs.ranks.tolist(), "length": (events.stop - events.start).tolist()}


def _nic_columns(simulation: Simulation) -> dict[str, list[float]]:
    """Return when the NICs of nodes are in use, and how far; nothing where there is one node."""
    nics = simulation.nics
    chosen = slice(None) if len(simulation.nic_busy_ns) > 1 else slice(0)
    length = np.maximum(nics.stop - nics.start, 1)
    columns = {"node": nics.node, "start": nics.start, "length": length, "use": np.round(nics.busy / length, 4)}
    return {name: column[chosen].tolist() for name, column in columns.items()}


def _groups(plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield every group of a plan with its ranks, its shape in words, and (document, start, stop) of its spans."""
    for pipeline_number, pipeline in enumerate(plan.pipelines):
        for round_number, current in enumerate(pipeline.rounds):
            for stage, work in enumerate(current.by_stage):
                for number, group in enumerate(work.groups):
                    yield {
                        "pipeline": pipeline_number,
                        "stage": stage,
                        "round": round_number,
                        "group": number,
                        "ranks": list(group.ranks),
                        "how": method_name(GroupShape.of(group)),
                        "spans": [int(value) for span in group.spans for value in span],
                    }


def _reasons(plan: Plan, cost: CostModel) -> dict[str, Any]:
    """Return why documents are placed so, or why that cannot be said of this plan."""
    try:
        explanation = explain(plan, cost)
    except SeqloomError as error:
        return {"classes": [], "unexplained": str(error)}
    return {"classes": explanation.as_dict()["classes"], "unexplained": None}
