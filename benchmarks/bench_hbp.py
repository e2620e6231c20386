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

Nothing is fitted. A row whose gain differs from the published one by more than 10 % is "not validated".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from common import K, options, progress, show
from record import write

from seqloom.cost import CostModel
from seqloom.describe import Cluster, ModelSpec
from seqloom.packing import hbp, plain_packing
from seqloom.planners import make_plan
from seqloom.planners.registry import fastest
from seqloom.simulate import predicted_ns

LONGEST, STEPS, TOLERANCE = 128 * K, 8, 0.1
LONG_SHARE, CHAT = 0.045, (6.2, 1.1)
DEGREES = (1, 8)
QWEN: dict[str, Any] = {"kv_heads": 8, "head_dim": 128, "gated": True, "vocabulary": 152_064, "tied": False}
DEEPSEEK_V2 = ModelSpec(
    "deepseek-v2-236b",
    **{"layers": 60, "hidden": 5120, "heads": 128, "kv_heads": 128, "head_dim": 192, "ffn": 12_288, "gated": True},
    **{"vocabulary": 102_400, "tied": False, "latent": 512, "rotated": 64, "value_dim": 128, "query_latent": 1536},
    **{"experts": 160, "active_experts": 6, "expert_ffn": 1536, "shared_ffn": 3072},
    moe_layers=tuple(range(1, 60)),
)


class Cell(NamedTuple):
    """A row of the published table."""

    model: ModelSpec
    nodes: int  # of eight H100
    plain: float  # GPU-days
    hbp: float


CELLS = (
    Cell(ModelSpec.load("llama3-8b"), 4, 5.22, 3.73),
    Cell(ModelSpec("qwen2.5-32b", layers=64, hidden=5120, heads=40, ffn=27_648, **QWEN), 4, 21.3, 16.0),
    Cell(ModelSpec.load("llama3-70b"), 4, 44.4, 31.1),
    Cell(ModelSpec("qwen2.5-72b", layers=80, hidden=8192, heads=64, ffn=29_568, **QWEN), 4, 47.1, 33.7),
    Cell(DEEPSEEK_V2, 32, 57.1, 23.8),
)


def drawn(tokens: int, steps: int, seed: int) -> np.ndarray:
    """Return documents of so many steps, int64[n]."""
    generator, most = np.random.default_rng(seed), steps * tokens // K
    chats = np.clip(generator.lognormal(*CHAT, most), 16, 32 * K)
    long = generator.uniform(1 * K, LONGEST, most)
    lengths = np.where(generator.random(most) < LONG_SHARE, long, chats).astype(np.int64)
    count = int(np.searchsorted(lengths.cumsum(), steps * tokens, side="right"))
    return lengths[:count]


def in_order(lengths: np.ndarray, tokens: int) -> list[np.ndarray]:
    """Return batches of at most so many tokens, in data order."""
    return np.split(lengths, np.flatnonzero(np.diff((lengths.cumsum() - 1) // tokens)) + 1)


def measured(cell: Cell, arguments: Any) -> dict[str, Any]:
    """Return seconds of the data set on every side, and the gains beside the published one."""
    ranks, steps = 8 * cell.nodes, 2 if arguments.quick else STEPS
    tokens = ranks * 16 * K
    lengths = drawn(tokens, steps, arguments.seed)
    cluster = Cluster.parse(f"{cell.nodes}x8xH100")
    degrees = DEGREES if cell.model.experts else (1,)
    costs = [CostModel(cluster, cell.model, max_length=LONGEST, expert=degree) for degree in degrees]

    def best(run: Callable[[CostModel], Sequence[int] | np.ndarray]) -> tuple[float, int]:
        def timed(cost: CostModel) -> tuple[int, int]:
            return (total := int(np.sum(run(cost)))), total

        total = fastest(costs, timed)
        return total / 1e9, next(own.expert for own in costs if timed(own)[1] == total)

    def ours(cost: CostModel) -> list[int]:
        return [predicted_ns(make_plan("flex", each, cost), cost) for each in in_order(lengths, tokens)]

    sides = {
        "plain": best(lambda cost: plain_packing(lengths, cost, tokens).step_ns),
        "hbp": best(lambda cost: hbp(lengths, cost, tokens).step_ns),
        "flex": best(ours),
    }
    seconds = {name: took for name, (took, _) in sides.items()}
    gain, published = seconds["plain"] / seconds["hbp"], cell.plain / cell.hbp
    return {
        "model": cell.model.name,
        "gpus": ranks,
        "documents": len(lengths),
        "seconds": seconds,
        "expert_degree": {name: degree for name, (_, degree) in sides.items()},
        "published": published,
        "simulated": gain,
        "difference": gain / published - 1,
        "validated": abs(gain / published - 1) <= TOLERANCE,
        "ours": seconds["plain"] / seconds["flex"],
    }


def main(argv: list[str] | None = None) -> None:
    arguments = options(__doc__, lengths=False).parse_args(argv)
    rows = []
    for cell in CELLS[::4] if arguments.quick else CELLS:
        rows.append(measured(cell, arguments))
        progress(f"{rows[-1]['model']}: {rows[-1]['seconds']}")
    table = [
        (
            f"{row['model']} on {row['gpus']}",
            *(f"{row[key]:.2f}" for key in ("published", "simulated")),
            f"{row['difference']:+.0%}",
            "" if row["validated"] else "not validated",
            f"{row['ours']:.2f}",
        )
        for row in rows
    ]
    columns = ("plain / HBP", "published", "simulated", "difference", "", "plain / flex")
    show(
        "times as fast as plain packing",
        columns,
        table,
        ["lengths are a stand-in: those of the published data are not public"],
    )
    write(arguments.out, __file__, arguments, {"cells": rows}, [], gpu=False, lengths="stand-in, see the script")


if __name__ == "__main__":
    main()
