"""What is made of the cells of `bench_zeppelin.py`: the rival put to the test, targets, tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from common import Check, show
from zeppelin_cells import CLUSTERS, GPUS, OURS, RIVALS

Row = dict[str, Any]
AVERAGE = 2.80
"""Published average speed-up over ring context parallelism (arXiv 2509.21841)."""
ABLATION = {"routing": 1.6, "partitioning": 3.2, "routing + partitioning": 3.51, "+ remapping": 3.64}
"""Published speed-ups over ring context parallelism on ArXiv; partitioning "up to"."""
CLOSE = 0.20


def validation(rows: list[Row]) -> dict[str, Any]:
    """Mean speed-ups of zeppelin over te-cp with their range, each beside the published one."""
    result = {name: _beside(AVERAGE, found) for name, found in _parts(rows)}
    tried = [one for one in rows if "published_ablation" in one]
    for where, members in (("", tried), (f", {GPUS[0]} GPUs", [one for one in tried if one["gpus"] == GPUS[0]])):
        for name, published in ABLATION.items():
            seconds = [one["published_ablation"] for one in members]
            result[name + where] = _beside(published, [one["te-cp"] / one[name] for one in seconds])
    return result


def _parts(rows: list[Row]) -> Iterator[tuple[str, list[float]]]:
    """(name, te-cp / zeppelin of its cells): all cells, each cluster, each number of GPUs."""
    parts: dict[str, list[Row]] = {"all cells": rows}
    parts |= {f"cluster {cluster}": [one for one in rows if one["cluster"] == cluster] for cluster in CLUSTERS}
    parts |= {f"{gpus} GPUs": [one for one in rows if one["gpus"] == gpus] for gpus in GPUS}
    for name, members in parts.items():
        if members:
            yield name, [one["seconds"]["te-cp"] / one["seconds"]["zeppelin"] for one in members]


def _beside(published: float, ratios: list[float]) -> Row:
    found = float(np.mean(ratios))
    verdict = "validated" if abs(found / published - 1) <= CLOSE else "not validated"
    return {"found": found, "published": published, "verdict": verdict, "range": (min(ratios), max(ratios))}


def own_ablation_of(rows: list[Row]) -> dict[str, float]:
    """How many times as long a step takes with one of our means taken away, mean over the cells."""
    tried = [one["own_ablation"] for one in rows if "own_ablation" in one]
    return {name: float(np.mean([seconds[name] / seconds["auto"] for seconds in tried])) for name in tried[0]}


def checks_of(rows: list[Row], tested: dict[str, Any]) -> list[Check]:
    """The targets: the rival validated, never slower than it, half of the way to the bound."""
    checks = []
    for name in ("all cells", *ABLATION):
        off = 100 * abs(tested[name]["found"] / tested[name]["published"] - 1)
        checks.append(Check(f"zeppelin over te-cp, {name}: off {tested[name]['published']}x, %", off, 100 * CLOSE))
    return checks + own_checks(rows)


def own_checks(rows: list[Row]) -> list[Check]:
    """The targets of our planners: never slower than the rival, half of the way to the bound."""
    slower = sum(one["seconds"]["auto"] > one["seconds"]["zeppelin"] for one in rows)
    closed = float(np.mean([one["closed"] for one in rows]))
    return [
        Check("cells in which auto is slower than zeppelin", slower, 0),
        Check("mean share closed of the way from the best rival to the bound", closed, 0.5, at_least=True),
    ]


def show_tables(rows: list[Row], tested: dict[str, Any]) -> None:
    """Print the validation, the cells and our ablation."""
    shown = [
        (name, f"{one['found']:.2f}x", "{:.2f}-{:.2f}".format(*one["range"]), f"{one['published']}x", one["verdict"])
        for name, one in tested.items()
    ]
    notes = [
        "Simulated. Means over the cells; the last eight on ArXiv only. The published ones are for a model and",
        "a number of GPUs that could not be read; its 13B and 30B ran with tensor parallelism, so with shorter rings.",
    ]
    show("zeppelin as published: speed-up over te-cp", ("", "here", "range", "published", ""), shown, notes)
    show_cells(rows)
    means = own_ablation_of(rows)
    show("auto, on ArXiv", ("", "time of a step"), [(name, f"{value:.3f}x") for name, value in means.items()])


def show_cells(rows: list[Row]) -> None:
    """Print a line for each cell."""
    names = (*RIVALS, *OURS, "bound")
    shown = [
        (
            f"{one['cluster']} {one['model'].removeprefix('llama-')} {one['data']} {one['gpus']}",
            *(f"{one['seconds'][name]:.3g}" for name in names),
            one["best_rival"],
            f"{one['best_rival_over_auto']:.2f}x",
            f"{100 * one['closed']:.0f}",
        )
        for one in rows
    ]
    columns = ("cell", *names, "best rival", "auto over it", "closed %")
    lost = [row[0] for row, one in zip(shown, rows, strict=True) if one["best_rival_over_auto"] < 1]
    notes = [f"Simulated seconds per step. Lost to the best rival: {', '.join(lost) or 'nowhere'}."]
    show("cells", columns, shown, notes)
