"""Backward: two kernels, every gradient summed by one program in a fixed order.

With P = exp(logits - lse), D = rowsum(dout * out), dS = P * (dout v^T - D):

    dq = scale dS k         a program per tile of queries and query head; it also leaves D for the other kernel
    dv = P^T dout           a program per tile of keys and kv head, which walks over all query heads that read it
    dk = scale dS^T q

`lse` and `out` are those of the whole softmax, which may have more keys than are given here. Exponentials are base 2.
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
def _load_lse(lse, rows, stop):
    """Load log-sum-exps in base 2; infinite where the row saw nothing, so that its probabilities are 0."""
    value = tl.load(lse + rows, mask=rows < stop, other=float("inf"))
    return tl.where(value == float("-inf"), float("inf"), value * LOG2_E)


@triton.jit
def _add_dq(
    dq,
    q,
    dout,
    lse,
    delta,
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
    """Add to dq, without the scale, what the keys of a tile give that need a mask, or those that do not."""
    for step in tl.range(0, count_steps(tile, COLUMNS, MASKED)):
        start = first_column(step, tile, COLUMNS, MASKED, LOW)
        keys = load_rows(k, k_stride, start, tile[3], COLUMNS, DIM, WIDTH, MASKED)
        values = load_rows(v, v_stride, start, tile[3], COLUMNS, DIM, WIDTH, MASKED)
        logits = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
        if MASKED:
            logits = hide(logits, start + tl.arange(0, COLUMNS), low, high, LOW, True)
        weights = tl.exp2(logits * scale - lse[:, None])
        slopes = weights * (tl.dot(dout, tl.trans(values), input_precision=PRECISION) - delta[:, None])
        dq = tl.dot(slopes.to(keys.dtype), keys, dq, input_precision=PRECISION)
    return dq


@triton.jit(
    do_not_specialize=["lse_head", "tile_count", "side"],
    do_not_specialize_on_alignment=["lse", "delta"],
)
def dq_kernel(
    q,
    k,
    v,
    out,
    dout,
    lse,
    delta,
    dq,
    tiles,
    segments,
    q_stride,
    k_stride,
    v_stride,
    out_stride,
    dout_stride,
    dq_stride,
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
    """Write `dq` [rows, heads, DIM] and `delta` [heads, rows] for the queries of one tile and head."""
    index, kv_head, head = whereabouts(tile_count, side, GROUP)
    tile = read_tile(tiles, index)
    row, stop = tile[0], tile[1]
    k += kv_head * k_stride[1]
    v += kv_head * v_stride[1]
    queries = load_rows(q + head * q_stride[1], q_stride, row, stop, ROWS, DIM, WIDTH, True)
    douts = load_rows(dout + head * dout_stride[1], dout_stride, row, stop, ROWS, DIM, WIDTH, True)
    outs = load_rows(out + head * out_stride[1], out_stride, row, stop, ROWS, DIM, WIDTH, True)
    deltas = tl.sum(outs.to(tl.float32) * douts.to(tl.float32), 1)
    rows = row + tl.arange(0, ROWS)
    tl.store(delta + head * lse_head + rows, deltas, mask=rows < stop)
    lses = _load_lse(lse + head * lse_head, rows, stop)
    low, high = row_ends(segments, tile, ROWS, JOIN)
    acc = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    for masked in tl.static_range(2):
        # fmt: off
        acc = _add_dq(
            acc, queries, douts, lses, deltas, k, v, k_stride, v_stride, tile, low, high, scale * LOG2_E,
            DIM, WIDTH, COLUMNS, LOW, PRECISION, masked == 1,
        )
        # fmt: on
    store_rows(dq + head * dq_stride[1], dq_stride, row, stop, acc * scale, ROWS, DIM, WIDTH)


@triton.jit
def _add_dkdv(
    dk,
    dv,
    k,
    v,
    q,
    dout,
    lse,
    delta,
    q_stride,
    dout_stride,
    lse_head,
    tile,
    low,
    high,
    scale,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add to dk, without the scale, and dv what the queries of a tile give that need a mask, or those that do not.

    One loop walks the blocks of queries of all heads that read this kv head, so that its pipeline does not drain
    between two heads.
    """
    count = count_steps(tile, COLUMNS, MASKED)
    for step in tl.range(0, count * GROUP):
        member = (step // count).to(tl.int64)
        start = first_column(step % count, tile, COLUMNS, MASKED, LOW)
        columns = start + tl.arange(0, COLUMNS)
        queries = load_rows(q + member * q_stride[1], q_stride, start, tile[3], COLUMNS, DIM, WIDTH, MASKED)
        douts = load_rows(dout + member * dout_stride[1], dout_stride, start, tile[3], COLUMNS, DIM, WIDTH, MASKED)
        lses = _load_lse(lse + member * lse_head, columns, tile[3])
        deltas = tl.load(delta + member * lse_head + columns, mask=columns < tile[3], other=0.0)
        logits = tl.dot(k, tl.trans(queries), input_precision=PRECISION)
        if MASKED:
            logits = hide(logits, columns, low, high, LOW, HIGH)
        weights = tl.exp2(logits * scale - lses[None, :])
        dv = tl.dot(weights.to(douts.dtype), douts, dv, input_precision=PRECISION)
        slopes = weights * (tl.dot(v, tl.trans(douts), input_precision=PRECISION) - deltas[None, :])
        dk = tl.dot(slopes.to(queries.dtype), queries, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(
    do_not_specialize=["lse_head", "tile_count", "side"],
    do_not_specialize_on_alignment=["lse", "delta"],
)
def dkdv_kernel(
    q,
    k,
    v,
    dout,
    lse,
    delta,
    dk,
    dv,
    tiles,
    segments,
    q_stride,
    k_stride,
    v_stride,
    dout_stride,
    dk_stride,
    dv_stride,
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
    HIGH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write `dk` and `dv` [rows, kv heads, DIM] for the keys of one tile and kv head.

    HIGH: some row does not see the last column of its tile.
    """
    index, kv_head, _ = whereabouts(tile_count, side, 1)
    tile = read_tile(tiles, index)
    row, stop = tile[0], tile[1]
    keys = load_rows(k + kv_head * k_stride[1], k_stride, row, stop, ROWS, DIM, WIDTH, True)
    values = load_rows(v + kv_head * v_stride[1], v_stride, row, stop, ROWS, DIM, WIDTH, True)
    low, high = row_ends(segments, tile, ROWS, JOIN)
    head = kv_head * GROUP
    q += head * q_stride[1]
    dout += head * dout_stride[1]
    lse += head * lse_head
    delta += head * lse_head
    acc_k = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    acc_v = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    for masked in tl.static_range(2):
        # fmt: off
        acc_k, acc_v = _add_dkdv(
            acc_k, acc_v, keys, values, q, dout, lse, delta, q_stride, dout_stride, lse_head, tile, low, high,
            scale * LOG2_E, GROUP, DIM, WIDTH, COLUMNS, LOW, HIGH, PRECISION, masked == 1,
        )
        # fmt: on
    store_rows(dk + kv_head * dk_stride[1], dk_stride, row, stop, acc_k * scale, ROWS, DIM, WIDTH)
    store_rows(dv + kv_head * dv_stride[1], dv_stride, row, stop, acc_v, ROWS, DIM, WIDTH)
