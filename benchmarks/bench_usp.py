"""USP's evaluation, simulated: tensor x Ulysses x ring of one step on one and two nodes of 8 A800, beside the paper's.

All our figures are simulated under the profile of the A800; none is measured and nothing is fitted. A cell is one
layout for the whole step, as in the paper, priced with the optimiser spread over all GPUs and parameters and gradients
whole on each (ZeRO-1: sharding `free`), and the fastest checkpointing that fits 80 GiB: the paper does not say which it
used. The published TFLOPS count attention as if no token were masked; divided into that count they give back seconds
per step. `ours` is planner ``auto`` with parameters sharded over all GPUs, under 0.9 of the memory, without tensor
parallelism. A cell off by more than 20 % is "not validated".
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from common import Check, K, options, progress, show, show_checks
from record import write
from usp_tables import TABLES, Table

from seqloom.api import cost_model
from seqloom.cost import CostModel, GroupShape
from seqloom.describe import ModelSpec
from seqloom.plan import Checkpoint, Plan, Reduce, StageMicroBatch
from seqloom.planners import make_plan
from seqloom.planners.problem import build_plan, whole_documents
from seqloom.simulate import simulate

GIB = 1024**3
CARD_GIB = 80.0
CLOSE = 0.20
FASTEST_FIRST = (Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL)


@cache
def cost_of(table: int, sharding: str) -> CostModel:
    """Prices of a table's model on its nodes."""
    each = TABLES[table]
    return cost_model(f"{each.nodes}x8xA800", each.model, sharding=sharding, max_length=each.tokens * K)


def published_flops(model: ModelSpec, tokens: int) -> float:
    """FLOPs of a document as the paper counts them: every token sees every other."""
    weights = sum(model.layer_parameters(layer) for layer in range(model.layers)) + model.vocabulary * model.hidden
    return 6 * weights * tokens + 12 * tokens**2 * model.heads * model.head_dim * model.layers


def simulated(table: int, tensor: int, ulysses: int, ring: int) -> dict[str, Any]:
    """One layout for all documents of a step, each group one document a round; no seconds if nothing fits."""
    each, cost = TABLES[table], cost_of(table, "free").with_tensor(tensor)
    found: dict[str, Any] = {"seconds": None, "checkpoint": None}
    for checkpoint in FASTEST_FIRST:
        result = simulate(one_layout(each, cost, GroupShape(tensor * ulysses, ring), checkpoint), cost.cluster_cost)
        found["peak_gib"] = float(result.peak_memory.max()) / GIB
        if found["peak_gib"] <= CARD_GIB:
            return found | {"seconds": result.step_ns / 1e9, "checkpoint": checkpoint.value}
    return found


def one_layout(table: Table, cost: CostModel, shape: GroupShape, checkpoint: Checkpoint) -> Plan:
    """Return the plan whose groups all have this shape, side by side."""
    lengths, starts = [table.tokens * K] * table.documents, range(0, cost.ranks, shape.degree)
    rounds = []
    for first in range(0, table.documents, len(starts)):
        documents = range(first, min(first + len(starts), table.documents))
        groups = [
            whole_documents(cost, shape, range(start, start + shape.degree), [document], lengths)
            for start, document in zip(starts, documents, strict=False)
        ]
        rounds.append(StageMicroBatch(tuple(groups), checkpoint))
    return build_plan(cost, lengths, rounds, Reduce.STEP, "usp")


def rows_of(table: int) -> list[dict[str, Any]]:
    """Every layout of a table, simulated beside published, and our planner on the same documents."""
    each, cost = TABLES[table], cost_of(table, "full")
    common = {"model": each.model, "gpus": cost.ranks, "tokens": each.tokens * K, "documents": each.documents}
    progress(f"{each.model} {each.tokens}K x {each.documents}")
    plan = make_plan("auto", [each.tokens * K] * each.documents, cost)
    ours = {"ours_s": simulate(plan, cost).step_ns / 1e9}
    flops = each.documents * published_flops(cost.model, each.tokens * K) / cost.ranks
    rows = []
    for layout, tflops in each.cells:
        published = None if tflops is None else flops / (tflops * 1e12)
        row = {"layout": layout, "published_s": published} | common | simulated(table, *layout) | ours
        rows.append(row | {"verdict": verdict(row["seconds"], published)})
    return rows


def verdict(seconds: float | None, published: float | None) -> str:
    """Whether the published figure is met, or that it did not fit."""
    if seconds is None or published is None:
        return "out of memory, both" if seconds is published else "not validated (memory)"
    return "within 20 %" if abs(seconds / published - 1) <= CLOSE else "not validated"


def line_of(row: dict[str, Any]) -> tuple[str, ...]:
    """Cells of the printed table."""
    seconds, published = row["seconds"], row["published_s"]
    layout = "x".join(map(str, row["layout"]))
    return (
        f"{row['model']} {row['tokens'] // K}K x {row['documents']} on {row['gpus']}: {layout}",
        f"{published:.2f}" if published else "out of memory",
        f"{seconds:.2f}" if seconds else "out of memory",
        f"{seconds / published - 1:+.0%}" if seconds and published else "",
        f"{row['peak_gib']:.0f}",
        row["checkpoint"] or "",
        f"{row['ours_s']:.2f}",
        row["verdict"],
    )


def main(argv: list[str] | None = None) -> None:
    """Run all cells."""
    arguments = options(__doc__, lengths=False).parse_args(argv)
    rows = [row for table in (range(1) if arguments.quick else range(len(TABLES))) for row in rows_of(table)]
    columns = ("tensor x Ulysses x ring", "published s", "simulated s", "off", "peak GiB", "recomputes", "ours s", "")
    show("USP's settings, simulated", columns, [line_of(row) for row in rows])
    met = [row for row in rows if row["seconds"] and row["published_s"]]
    off = [row["seconds"] / row["published_s"] - 1 for row in met]
    fastest: dict[tuple[Any, ...], float] = {}
    for row in met:
        key = row["model"], row["tokens"], row["documents"], row["ours_s"]
        fastest[key] = min(fastest.get(key, np.inf), row["seconds"])
    checks = [
        Check("simulated beside published seconds, mean off", float(np.abs(off).mean()), CLOSE),
        Check("auto over the fastest layout of a table, worst", max(key[-1] / s for key, s in fastest.items()), 1.0),
    ]
    show_checks(checks)
    figures = {"simulated": True, "rows": rows, "off": {"least": min(off), "most": max(off)}}
    figures["not validated"] = sum(row["verdict"].startswith("not") for row in rows)
    write(arguments.out, __file__, arguments, figures, checks, gpu=False, lengths="as published")


if __name__ == "__main__":
    main()
