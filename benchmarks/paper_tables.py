"""The papers' tables: what `seqloom bench` lists, runs and prints.

A table reads the result of one script, fresh or committed. To add one, write a reader in `paper_figures` and add a row
to `TABLES`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import paper_figures as read
from paper_figures import Figure, Figures

RESULTS = Path(__file__).parent / "results"


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
    "flexsp-cells": Table("bench_flexsp_cells", "FlexSP, main result: 18 cells on 64 A100", read.flexsp_cells, 0.10),
    "flexsp-study": Table("bench_flexsp_study", "FlexSP, case study and scaling", read.flexsp_study, 0.20),
    "flexsp-solver": Table("bench_flexsp_solver", "FlexSP, its solver with 10 s per problem", read.flexsp_solver, 0.10),
    "flexsp-buckets": Table(
        "bench_flexsp_buckets", "FlexSP, tokens added by buckets, worst batch", read.flexsp_buckets, 0.2
    ),
    "hydraulis": Table("bench_hydraulis", "Hydraulis, beside a replay of its constants, 32B", read.hydraulis, 0.10),
    "usp": Table("bench_usp", "USP, 44 layouts on 8 and 16 A800", read.usp, 0.20),
    "usp-costs": Table("bench_usp_costs", "USP, its memory and cost tables", read.usp_costs, 0.20),
    "seq1f1b": Table("bench_seq1f1b", "Seq1F1B, throughput and memory of 18 settings", read.seq1f1b, 0.20),
    "hbp": Table("bench_hbp", "HBP, times as fast as plain packing; evenness", read.hbp, 0.10),
    "megatron": Table("bench_megatron", "Megatron dynamic CP, times as fast as static packing", read.megatron, 0.20),
    "zeppelin": Table("bench_zeppelin", "Zeppelin, times as fast as TE CP: average, ablation", read.zeppelin, 0.20),
}
