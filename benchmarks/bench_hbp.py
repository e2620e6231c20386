"""The models of HBP's evaluation, simulated: the gain of its packing over plain packing, beside the published one.

Published (arXiv 2503.07680): GPU-days with packs of 128K tokens (ISF) and with hierarchical balance packing, on 32
H100, 256 for DeepSeek-V2, whose row is the only one with experts. Here:

- lengths of the data, Tulu 3 up to 32K tokens with LongCite up to 128K, are not published. Their stand-in is chat
  lengths (log-normal, as in `longalign-mix`) with 4.5 % of documents, LongCite's share, uniform up to 128K. A first run
  took `longalign-mix` itself, whose longest documents have 64K. A step has 512K tokens on 32 GPUs and 4M on 256
- plain packing is `plain_packing`: first fit into packs as long as the longest document, in data order
- parameters are sharded over all GPUs; a model with experts has the expert degree that is fastest for each side, of 1
  and 8
- ours is `flex` on batches of the same number of tokens, documents in data order
- for Llama 3.1 8B, the evenness of steps too: imbalance of attention work (ABR) and of tokens (DBR) between ranks,
  share of tokens that communicate (CR), as `seqloom.packing.Balance` has them; and FlexSP on the same batches, whose
  figures the authors measured with its released code

Nothing is fitted. A row whose gain differs from the published one by more than 10 % is "not validated".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from common import K, options, progress, show
from hbp_cells import CELLS, DEGREES, EVENNESS, FLEXSP_GAIN, LONGEST, STEPS, TOLERANCE, Cell, drawn, in_order
from record import write

from seqloom.cost import CostModel
from seqloom.describe import Cluster
from seqloom.packing import Balance, Packing, hbp, plain_packing, plans_balance
from seqloom.planners import make_plan
from seqloom.planners.registry import fastest

SHOWN = ("published", "simulated", "difference")


def sides_of(cell: Cell, lengths: np.ndarray, tokens: int) -> dict[str, Callable[[CostModel], Balance]]:
    """Return what runs the data set: plain packing, HBP and our planner; for the first row FlexSP too."""

    def packed(pack: Callable[[np.ndarray, CostModel, int], Packing]) -> Callable[[CostModel], Balance]:
        return lambda cost: pack(lengths, cost, tokens).balance

    def planned(name: str) -> Callable[[CostModel], Balance]:
        def run(cost: CostModel) -> Balance:
            return plans_balance([make_plan(name, each, cost) for each in in_order(lengths, tokens)], cost)

        return run

    sides = {"plain": packed(plain_packing), "hbp": packed(hbp), "flex": planned("flex")}
    return sides | {"flexsp": planned("flexsp")} if cell is CELLS[0] else sides


def measured(cell: Cell, arguments: Any) -> dict[str, Any]:
    """Return seconds and evenness of the data set on every side, and the gains beside the published one."""
    ranks, steps = 8 * cell.nodes, 2 if arguments.quick else STEPS
    tokens = ranks * 16 * K
    lengths = drawn(tokens, steps, arguments.seed)
    cluster = Cluster.parse(f"{cell.nodes}x8xH100")
    degrees = DEGREES if cell.model.experts else (1,)
    costs = [CostModel(cluster, cell.model, max_length=LONGEST, expert=degree) for degree in degrees]

    def best(run: Callable[[CostModel], Balance]) -> tuple[float, int, Balance]:
        def timed(cost: CostModel) -> tuple[int, tuple[float, int, Balance]]:
            found = run(cost)
            total = round(found.step_ns * found.steps)
            return total, (total / 1e9, cost.expert, found)

        return fastest(costs, timed)

    sides = {name: best(run) for name, run in sides_of(cell, lengths, tokens).items()}
    seconds = {name: took for name, (took, *_) in sides.items()}
    gain, published = seconds["plain"] / seconds["hbp"], cell.plain / cell.hbp
    return {
        "model": cell.model.name,
        "gpus": ranks,
        "documents": len(lengths),
        "seconds": seconds,
        "expert_degree": {name: degree for name, (_, degree, _) in sides.items()},
        "published": published,
        "simulated": gain,
        "difference": gain / published - 1,
        "validated": abs(gain / published - 1) <= TOLERANCE,
        "ours": seconds["plain"] / seconds["flex"],
        "evenness": {name: found.as_dict() for name, (_, _, found) in sides.items()},
    }


def lines_of(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Cells of the printed table: gains, then for the first row how even steps are."""
    table = [
        (
            f"{row['model']} on {row['gpus']}",
            *(f"{row[key]:.2f}" for key in SHOWN[:2]),
            f"{row['difference']:+.0%}",
            "" if row["validated"] else "not validated",
            f"{row['ours']:.2f}",
        )
        for row in rows
    ]
    seconds, even = rows[0]["seconds"], rows[0]["evenness"]
    gains = (f"{FLEXSP_GAIN:.2f}", f"{seconds['plain'] / seconds['flexsp']:.2f}", "", "", f"{rows[0]['ours']:.2f}")
    table.append(("the first row, FlexSP", *gains))
    for side, shares in EVENNESS.items():
        for name, share in shares.items():
            here, ours = even[side][name], even["flex"][name]
            table.append((f"{side}: {name.upper()}", f"{share:.3f}", f"{here:.3f}", "", "", f"{ours:.3f}"))
    return table


def main(argv: list[str] | None = None) -> None:
    arguments = options(__doc__, lengths=False).parse_args(argv)
    rows = []
    for cell in CELLS[:1] if arguments.quick else CELLS:
        rows.append(measured(cell, arguments))
        progress(f"{rows[-1]['model']}: {rows[-1]['seconds']}")
    columns = ("plain / HBP", *SHOWN, "", "flex")
    notes = ["lengths are a stand-in: those of the published data are not public"]
    show("times as fast as plain packing; evenness of steps", columns, lines_of(rows), notes)
    write(arguments.out, __file__, arguments, {"cells": rows}, [], gpu=False, lengths="stand-in, see the script")


if __name__ == "__main__":
    main()
