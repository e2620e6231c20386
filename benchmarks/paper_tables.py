"""Published figures beside ours, one table per paper: what `seqloom bench` lists, runs and prints.

A table reads the result of one script, fresh or committed. To add one, write a function from the result's figures to
`Figure`s and add a row to `TABLES`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from common import K
from hydraulis_constants import REPLAYED

RESULTS = Path(__file__).parent / "results"
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


def zeppelin(found: Figures) -> Iterator[Figure]:
    parts: dict[str, Callable[[Figures], bool]] = {"all cells": lambda _: True}
    parts |= {f"cluster {name}": lambda cell, name=name: cell["cluster"] == name for name in found["clusters"]}
    parts |= {f"{gpus} GPUs": lambda cell, gpus=gpus: cell["gpus"] == gpus for gpus in (16, 32, 64, 128)}
    for name, row in found["validation"].items():
        cells = [cell["seconds"] for cell in found["cells"] if name in parts and parts[name](cell)]
        ours = float(np.mean([seconds["te-cp"] / seconds["auto"] for seconds in cells])) if cells else None
        yield Figure(name, row["published"], row["found"], ours)


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a paper, and the script whose result it reads."""

    script: str  # without .py
    about: str
    read: Callable[[Figures], Iterable[Figure]]
    close: float  # a figure that is off by more is not validated

    @property
    def committed(self) -> Path:
        """The committed result."""
        return RESULTS / f"{self.script.removeprefix('bench_')}.json"

    def result(self, *, quick: bool = False, committed: bool = False) -> dict[str, Any]:
        """Return the committed result, or run the script; ``quick``: its smallest run."""
        if committed:
            return json.loads(self.committed.read_text())
        with TemporaryDirectory() as folder, redirect_stdout(StringIO()):  # the script's own, longer report
            out = Path(folder) / self.committed.name
            import_module(self.script).main(["--out", str(out), *(["--quick"] if quick else [])])
            return json.loads(out.read_text())


TABLES = {
    "flexsp-cells": Table("bench_flexsp_cells", "FlexSP, main result: 18 cells on 64 A100", flexsp_cells, 0.10),
    "flexsp-study": Table("bench_flexsp_study", "FlexSP, case study and scaling", flexsp_study, 0.20),
    "flexsp-solver": Table("bench_flexsp_solver", "FlexSP, its solver with 10 s per problem", flexsp_solver, 0.10),
    "hydraulis": Table("bench_hydraulis", "Hydraulis, beside a replay of its constants, 32B", hydraulis, 0.10),
    "usp": Table("bench_usp", "USP, 44 layouts on 8 and 16 A800", usp, 0.20),
    "seq1f1b": Table("bench_seq1f1b", "Seq1F1B, throughput and memory of 18 settings", seq1f1b, 0.20),
    "hbp": Table("bench_hbp", "HBP, times as fast as plain packing; evenness", hbp, 0.10),
    "zeppelin": Table("bench_zeppelin", "Zeppelin, times as fast as TE CP: average, ablation", zeppelin, 0.20),
}
