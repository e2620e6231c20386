"""The published figures in the results of the scripts, each beside the simulated one and ours: a reader per table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from common import K
from hydraulis_constants import REPLAYED

Figures = dict[str, Any]
"""The key `figures` of a script's result."""


class Figure(NamedTuple):
    """A published figure, the same one simulated with the published algorithm, and what our planner has there."""

    what: str  # with its unit
    published: float | None = None
    simulated: float | None = None
    ours: float | None = None

    @property
    def difference(self) -> float | None:
        """Simulated over published, less 1."""
        return None if self.published is None or self.simulated is None else self.simulated / self.published - 1


def flexsp_cells(found: Figures) -> Iterator[Figure]:
    for cell in found["cells"]:
        where = f"{cell['model']} {cell['context']} {cell['data']}"
        published, seconds = cell["published_seconds"], cell["seconds"]
        yield Figure(f"{where}: DeepSpeed, s", published["DeepSpeed"], seconds["static:64"], seconds["flex"])
        yield Figure(f"{where}: BatchAda, s", published["BatchAda"], seconds["adaptive"], seconds["flex"])
        solved = found["flexsp"]["static_over_flexsp"] if where == "gpt-7b 192K Wikipedia" else None
        yield Figure(f"{where}: DeepSpeed / FlexSP", cell["published_ratio"], solved, cell["ratio"])


def flexsp_study(found: Figures) -> Iterator[Figure]:
    from bench_flexsp_study import CASES, GROWTH, PLANNERS

    for case in found["cases"]:
        rows = case["planners"]
        for name, published in zip(PLANNERS, CASES[case["micro_batches"]], strict=False):
            what = f"case of {case['micro_batches']}, {name}: all-to-all, %"
            yield Figure(what, 100 * published, 100 * rows[name]["all_to_all"], 100 * rows["flex"]["all_to_all"])
    seconds = {(row["gpus"], row["context"]): row["seconds"] for row in found["scaling"]}
    for (few, many), published in GROWTH.items():
        if (few, 128) in seconds and (many, 128) in seconds:
            own = [seconds[few, 128][name] / seconds[many, 128][name] for name in ("flexsp", "flex")]
            yield Figure(f"throughput on {many} GPUs over {few}", published, *own)


def flexsp_solver(found: Figures) -> Iterator[Figure]:
    for data, row in found["ratios"].items():
        own = (row["static_over_flexsp"], row["static_over_flex"])
        yield Figure(f"{data}: DeepSpeed / FlexSP", row["published"], *own)
    most = [max(row[f"{name}_plan_s"] for row in found["batches"]) for name in ("flexsp", "flex")]
    yield Figure("most s to plan a batch (5 - 15)", 15.0, *most)


def flexsp_buckets(found: Figures) -> Iterator[Figure]:
    for row in found["rows"]:
        for k, name in enumerate(("dynamic programme", "equal width")):
            yield Figure(f"{row['data']}, {name}, %", 100 * row["published"][k], 100 * row["most"][k])


def hydraulis(found: Figures) -> Iterator[Figure]:
    """The rungs beside a replay of the released constants; the paper prints no seconds for this setting."""
    for context in found["contexts"]:
        rungs = context["rungs"]
        for name, replayed in REPLAYED[context["context"]].items():
            what = f"{context['context'] // K}K, {name}, s"
            yield Figure(what, replayed, rungs[name]["s"], rungs["proposed list"]["s"])


def usp(found: Figures) -> Iterator[Figure]:
    for row in found["rows"]:
        layout = "x".join(map(str, row["layout"]))
        what = f"{row['model']} {row['tokens'] // K}K x {row['documents']}, {row['gpus']} GPUs, {layout}, s"
        oom = "" if row["published_s"] else " (out of memory there)"
        yield Figure(what + oom, row["published_s"], row["seconds"], row["ours_s"])


def usp_costs(found: Figures) -> Iterator[Figure]:
    for row in found["rows"]:
        yield Figure(row["what"], row["published"], row["simulated"])


def seq1f1b(found: Figures) -> Iterator[Figure]:
    units = {"tokens/s": ("published_tokens_s", "tokens_s"), "GB": ("published_gb", "peak_gib")}
    for cell in found["cells"]:
        where = f"{cell['model']} {cell['context'] // K}K x {cell['micro_batches']}"
        ours = cell["orders"]["ours, memory of Seq1F1B"]
        for order, row in cell["orders"].items():
            for unit, (published, simulated) in units.items():
                if row.get(published):
                    yield Figure(f"{where}, {order}, {unit}", row[published], row[simulated], ours[simulated])


def hbp(found: Figures) -> Iterator[Figure]:
    from hbp_cells import EVENNESS, FLEXSP_GAIN

    for row in found["cells"]:
        yield Figure(f"{row['model']} on {row['gpus']}", row["published"], row["simulated"], row["ours"])
    first = found["cells"][0]
    yield Figure(
        "the first, FlexSP", FLEXSP_GAIN, first["seconds"]["plain"] / first["seconds"]["flexsp"], first["ours"]
    )
    even = first["evenness"]
    for side, shares in EVENNESS.items():
        for name, share in shares.items():
            yield Figure(f"the first, {side}: {name.upper()}", share, even[side][name], even["flex"][name])


def megatron(found: Figures) -> Iterator[Figure]:
    for row in found["rows"]:
        yield Figure(f"{row['gpus']} GPUs", row["published"], row["dev"], row["auto"])


def zeppelin(found: Figures) -> Iterator[Figure]:
    parts: dict[str, Callable[[Figures], bool]] = {"all cells": lambda _: True}
    parts |= {f"cluster {name}": lambda cell, name=name: cell["cluster"] == name for name in found["clusters"]}
    parts |= {f"{gpus} GPUs": lambda cell, gpus=gpus: cell["gpus"] == gpus for gpus in (16, 32, 64, 128)}
    for name, row in found["validation"].items():
        cells = [cell["seconds"] for cell in found["cells"] if name in parts and parts[name](cell)]
        ours = float(np.mean([seconds["te-cp"] / seconds["auto"] for seconds in cells])) if cells else None
        yield Figure(name, row["published"], row["found"], ours)
