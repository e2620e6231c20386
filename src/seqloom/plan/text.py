"""A plan as text for people: a header, the documents, then one line per stage, group and row of actions.

    seqloom plan 1
    planner flex
    ranks 8
    ...
    documents 3
      0: 9000 512 700
    pipeline 0
    stage 0 ranks 0-7 layers 0-32 tensor 1
    round 0 stage 0 checkpoint selective
      group ranks 0-3 ulysses 4 ring 1: 0[0:4096)
      group ranks 4 ulysses 1 ring 1: 1 2
    host 0: 0F0 0B0 0REDUCE

A document's number alone stands for the whole document. Layers 0-32 are 0 to 31, as in `[0:32)`. An explicit
layout follows its groups, one line per rank. Host 0 is the ranks of stage 0, host 1 the next ranks that a stage
names, and so on; stages with the same ranks share a row, such as `host 0: 0F0 0SEND_F0 2RECV_F0 2F0`. Blank
lines and lines that begin with # are skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import groupby

from seqloom.plan.group import Method
from seqloom.plan.layout import Layout
from seqloom.plan.pipeline import Pipeline
from seqloom.plan.plan import Plan
from seqloom.plan.round import Remap, Work
from seqloom.plan.text_reader import read_plan

_PER_LINE = 16


def to_text(plan: Plan) -> str:
    """Write the readable form."""
    return "\n".join(_lines(plan)) + "\n"


def from_text(text: str) -> Plan:
    """Read what `to_text` wrote."""
    return read_plan(text)


def _lines(plan: Plan) -> Iterator[str]:
    yield "seqloom plan 1"
    plain = re.fullmatch(r"[A-Za-z0-9_.+-]+", plan.planner)
    yield f"planner {plan.planner if plain else json.dumps(plan.planner)}"
    for name in ("ranks", "node_size", "heads", "granule", "communicators"):
        yield f"{name} {getattr(plan.limits, name)}"
    for checkpoint, tokens in plan.limits.capacity:
        yield f"capacity {checkpoint} {tokens}"
    yield f"sharding {plan.sharding}"
    yield f"reduce {plan.reduce}"
    yield f"documents {len(plan.documents)}"
    for start in range(0, len(plan.documents), _PER_LINE):
        yield f"  {start}: {' '.join(map(str, plan.documents[start : start + _PER_LINE]))}"
    for number, pipeline in enumerate(plan.pipelines):
        yield f"pipeline {number}"
        yield from _pipeline_lines(pipeline, plan.documents)


def _pipeline_lines(pipeline: Pipeline, documents: tuple[int, ...]) -> Iterator[str]:
    for s, stage in enumerate(pipeline.stages):
        extent = f"layers {stage.layers[0]}-{stage.layers[1]}"
        yield f"stage {s} ranks {_runs(stage.ranks)} {extent} tensor {stage.tensor}"
    for r, current in enumerate(pipeline.rounds):
        if not current.work:
            yield f"round {r}"
        for s, work in enumerate(current.work):
            remap = "" if work.remap == Remap.ATTENTION else f" remap {work.remap}"
            offload = " offload" if work.offload else ""
            yield f"round {r} stage {s} checkpoint {work.checkpoint}{remap}{offload}"
            yield from _work_lines(work, documents)
    for h, row in enumerate(pipeline.actions):
        yield f"host {h}: {' '.join(map(str, row))}".rstrip()


def _work_lines(work: Work, documents: tuple[int, ...]) -> Iterator[str]:
    for group in work.groups:
        spans = " ".join(_span(span, documents) for span in group.spans)
        shape = f"ulysses {group.ulysses} ring {group.ring}"
        if group.method != Method.RING:
            shape += f" method {group.method}"
        if group.route is not None:
            shape += f" route {_runs(group.route.proxies)} slices {group.route.slices}"
        yield f"  group ranks {_runs(group.ranks)} {shape}: {spans}".rstrip()
    for name, layout in (("attention", work.attention), ("linear", work.linear)):
        if layout is not None:
            yield f"  {name} axes {layout.axes}"
            yield from _layout_lines(layout)


def _layout_lines(layout: Layout) -> Iterator[str]:
    rows = zip(*(column.tolist() for column in layout.columns()), strict=True)
    for rank, boxes in groupby(rows, key=lambda row: row[0]):
        words = (f"{item}[{start}:{stop})" + _second(*second) for _, item, start, stop, *second in boxes)
        yield f"    rank {rank}: {' '.join(words)}"


def _second(*interval: int) -> str:
    return f"x[{interval[0]}:{interval[1]})" if interval else ""


def _span(span: tuple[int, int, int], documents: tuple[int, ...]) -> str:
    document, start, stop = span
    whole = start == 0 and 0 <= document < len(documents) and stop == documents[document]
    return f"{document}" if whole else f"{document}[{start}:{stop})"


def _runs(ranks: Iterable[int]) -> str:
    """Write ranks as runs, in their order: (0, 1, 2, 8, 9) is 0-2,8-9."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in runs) or "none"
