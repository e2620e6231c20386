"""Forward: one program per tile of queries and query head, online softmax over the keys of the tile.

Exponentials are base 2: `scale` is the logit scale times log2(e), and the log-sum-exp is turned back at the end.
"""

# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl

from seqloom.attention.kernels.triton_blocks import (
    count_steps,
    first_column,
    hide,
    load_rows,
    read_tile,
    row_ends,
    store_rows,
    whereabouts,
)

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(
    acc,
    top,
    total,
    q,
    k,
    v,
    k_stride,
    v_stride,
    tile,
    low,
    high,
    scale,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOW: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take the keys of a tile that need a mask, or those that do not, into the running output, maximum and sum."""
    for step in tl.range(0, count_steps(tile, COLUMNS, MASKED)):
        start = first_column(step, tile, COLUMNS, MASKED, LOW)
        keys = load_rows(k, k_stride, start, tile[3], COLUMNS, DIM, WIDTH, MASKED)
        logits = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
        if MASKED:
            logits = hide(logits, start + tl.arange(0, COLUMNS), low, high, LOW, True)
        new_top = tl.maximum(top, tl.max(logits, 1) * scale)
        base = new_top
        if MASKED:
            base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen nothing yet
        weights = tl.exp2(logits * scale - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        values = load_rows(v, v_stride, start, tile[3], COLUMNS, DIM, WIDTH, MASKED)
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
        top = new_top
    return acc, top, total


@triton.jit(
    do_not_specialize=["tile_count", "side", "lse_head"],
    do_not_specialize_on_alignment=["lse"],
)
def forward_kernel(
    q,
    k,
    v,
    out,
    lse,
    tiles,
    segments,
    q_stride,
    k_stride,
    v_stride,
    out_stride,
    lse_head,
    tile_count,
    side,
    scale,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    JOIN: tl.constexpr,
    LOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write `out` [rows, heads, DIM] and `lse` [heads, rows] for the queries of one tile and head.

    `lse_head` is a stride. LOW: some row does not see the first column of its tile.
    """
    index, kv_head, head = whereabouts(tile_count, side, GROUP)
    tile = read_tile(tiles, index)
    row, stop = tile[0], tile[1]
    k += kv_head * k_stride[1]
    v += kv_head * v_stride[1]
    queries = load_rows(q + head * q_stride[1], q_stride, row, stop, ROWS, DIM, WIDTH, True)
    low, high = row_ends(segments, tile, ROWS, JOIN)
    acc = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    for masked in tl.static_range(2):
        # fmt: off
        acc, top, total = _attend(
            acc, top, total, queries, k, v, k_stride, v_stride, tile, low, high, scale,
            DIM, WIDTH, COLUMNS, LOW, PRECISION, masked == 1,
        )
        # fmt: on
    total = tl.where(total == 0.0, 1.0, total)  # a row that sees nothing: output 0, log-sum-exp -inf
    store_rows(out + head * out_stride[1], out_stride, row, stop, acc / total[:, None], ROWS, DIM, WIDTH)
    rows = row + tl.arange(0, ROWS)
    tl.store(lse + head * lse_head + rows, (top + tl.log2(total)) / LOG2_E, mask=rows < stop)
