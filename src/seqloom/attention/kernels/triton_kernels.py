"""Device code in Triton: forward, backward, and the merge of partial attention results.

A tile is the tuple (row, stop, low, high, full_low, full_high, ...), a row of the table in `triton_attention.Tiles`; a
stride is the tuple (row, head), in elements. Exponentials of attention are base 2.

    forward    one program per tile of queries and query head, online softmax over the keys of the tile; `scale` is the
               logit scale times log2(e), and the log-sum-exp is turned back at the end
    backward   two kernels, every gradient summed by one program in a fixed order. With P = exp(logits - lse),
               D = rowsum(dout * out), dS = P * (dout v^T - D):

                   dq = scale dS k     a program per tile of queries and query head; it also leaves D for the other
                   dv = P^T dout       a program per tile of keys and kv head, which walks over all query heads
                   dk = scale dS^T q   that read it

               `lse` and `out` are those of the whole softmax, which may have more keys than are given here
    dropout    with K = 0 for a weight that is dropped, else 1 / (1 - p): out = (K * P) v, dv = (K * P)^T dout,
               dS = P * (K * (dout v^T) - D). K is the hash of `attention.dropout`, computed again wherever it is needed
    merge      `merge_outputs` and `add_gradients` of attention/merge.py in one pass over memory, sums in float32. A row
               that saw nothing has output 0 and log-sum-exp -inf and changes nothing, bit for bit. Outputs are
               [rows, heads, dim] with a contiguous last axis, log-sum-exps [heads, rows] with contiguous rows
"""

# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from seqloom.attention.merge import MAX_PARTS, PartialGradient, PartialOutput
from seqloom.errors import SeqloomError


def run_kernel(kernel: Any, grid: tuple[int], *arguments: Any, **options: Any) -> None:
    """Run a Triton kernel: options are its compile-time arguments, warps and stages."""
    kernel[grid](*arguments, **options)


@triton.jit
def program_place(tile_count, side, GROUP: tl.constexpr):
    """Return (tile, kv head, head) of this program.

    Fastest first: the query heads of a kv head, `side` kv heads, tiles, the rest of the kv heads. So programs that
    read the same keys run at about the same time.
    """
    program = tl.program_id(0)
    member = program % GROUP
    program //= GROUP
    neighbour = program % side
    program //= side
    kv_head = (program // tile_count) * side + neighbour
    return program % tile_count, kv_head.to(tl.int64), (kv_head * GROUP + member).to(tl.int64)


@triton.jit
def read_tile(tiles, index):
    """Return one tile of the table."""
    tiles += index * 8
    return (
        tl.load(tiles),
        tl.load(tiles + 1),
        tl.load(tiles + 2),
        tl.load(tiles + 3),
        tl.load(tiles + 4),
        tl.load(tiles + 5),
        tl.load(tiles + 6),
        tl.load(tiles + 7),
    )


@triton.jit
def row_ends(segments, tile, ROWS: tl.constexpr, JOIN: tl.constexpr):
    """Return the first visible column and the one after the last, for every row of a tile.

    With JOIN a row first finds its segment among those of the tile: it is the last one that starts at or before it.
    """
    rows = tile[0] + tl.arange(0, ROWS)
    if JOIN:
        others = tl.arange(0, ROWS)
        starts = tl.load(segments + (tile[6] + others) * 8, mask=others < tile[7], other=2147483647)
        segments += (tile[6] - 1 + tl.sum((starts[None, :] <= rows[:, None]).to(tl.int32), 1)) * 8
        low = tl.maximum(rows + tl.load(segments + 3), tl.load(segments + 1))
        high = tl.minimum(rows + tl.load(segments + 4), tl.load(segments + 2))
        return low, high
    else:
        return rows + tile[6], tl.minimum(rows + tile[7], tile[3])


@triton.jit
def count_steps(tile, STEP: tl.constexpr, MASKED: tl.constexpr):
    """Return how many steps of a tile need the mask, those before and those after the full ones; or how many do not."""
    if MASKED:
        return (tile[4] - tile[2]) // STEP + (tile[3] - tile[5] + STEP - 1) // STEP
    else:
        return (tile[5] - tile[4]) // STEP


@triton.jit
def first_column(step, tile, STEP: tl.constexpr, MASKED: tl.constexpr, LOW: tl.constexpr):
    """Return where a step begins. Without LOW all steps that need the mask come after the full ones."""
    if MASKED:
        column = tile[5] + step * STEP
        if LOW:
            before = (tile[4] - tile[2]) // STEP
            column = tl.where(step < before, tile[2] + step * STEP, column - before * STEP)
        return column
    else:
        return tile[4] + step * STEP


@triton.jit
def hide(logits, columns, low, high, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Set logits [rows, columns] outside `low .. high` of their row to -inf."""
    if LOW:
        logits = tl.where(columns[None, :] >= low[:, None], logits, float("-inf"))
    if HIGH:
        logits = tl.where(columns[None, :] < high[:, None], logits, float("-inf"))
    return logits


@triton.jit
def load_rows(
    base, stride, start, stop, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr
):
    """Load rows `start .. start + ROWS` of one head, [ROWS, WIDTH]; 0 from row `stop` and from column DIM on."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    pointers = base + start.to(tl.int64) * stride[0] + (row * stride[0] + column)
    if MASKED:
        if DIM == WIDTH:
            return tl.load(pointers, mask=start + row < stop, other=0.0)
        else:
            return tl.load(pointers, mask=(start + row < stop) & (column < DIM), other=0.0)
    else:
        if DIM == WIDTH:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=column < DIM, other=0.0)


@triton.jit
def store_rows(base, stride, start, stop, values, ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Store [ROWS, WIDTH] as rows `start .. stop` and columns before DIM of one head, in the type of the buffer."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    pointers = base + start.to(tl.int64) * stride[0] + (row * stride[0] + column)
    mask = start + row < stop
    if DIM != WIDTH:
        mask = mask & (column < DIM)
    tl.store(pointers, values.to(base.dtype.element_ty), mask=mask)


LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def cap_logits(logits, scale, CAP: tl.constexpr):
    """Return c tanh(logits / c) for c = CAP, both in base 2, and its slope; `scale` has log2(e) in it."""
    squashed = 1.0 - 2.0 / (tl.exp2(logits * scale * (2.0 / CAP)) + 1.0)  # tanh, also where the exponential overflows
    return squashed * (CAP * LOG2_E), 1.0 - squashed * squashed


@triton.jit
def mix32(x):
    """Mix uint32, so that each bit depends on all."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def load_query_keys(query_keys, rows, stop, head):
    """Load the random numbers of queries in one head, uint64: `dropout.module_keys` of the head."""
    x = tl.load(query_keys + rows, mask=rows < stop, other=0).to(tl.uint64, bitcast=True)
    x += (head + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def load_key_numbers(key_positions, rows, stop):
    """Load what tells the keys of a query apart, uint32."""
    return mix32(tl.load(key_positions + rows, mask=rows < stop, other=0).to(tl.uint32))


@triton.jit
def keep_factors(query_keys, key_numbers, DROP: tl.constexpr, KEEP: tl.constexpr):
    """Return 0 for weights that are dropped, KEEP for others, like `dropout.keep_mask`; the arguments broadcast."""
    drawn = mix32(mix32(query_keys.to(tl.uint32) ^ key_numbers) + (query_keys >> 32).to(tl.uint32))
    return tl.where(drawn >= DROP, KEEP, 0.0)


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
    drop_keys,
    key_positions,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOW: tl.constexpr,
    PRECISION: tl.constexpr,
    CAP: tl.constexpr,
    DROP: tl.constexpr,
    KEEP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Take the keys of a tile that need a mask, or those that do not, into the running output, maximum and sum."""
    for step in tl.range(0, count_steps(tile, COLUMNS, MASKED)):
        start = first_column(step, tile, COLUMNS, MASKED, LOW)
        keys = load_rows(k, k_stride, start, tile[3], COLUMNS, DIM, WIDTH, MASKED)
        logits = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
        if CAP is not None:
            logits, _ = cap_logits(logits, scale, CAP)
        factor = scale if CAP is None else 1.0
        if MASKED:
            logits = hide(logits, start + tl.arange(0, COLUMNS), low, high, LOW, True)
        new_top = tl.maximum(top, tl.max(logits, 1) * factor)
        base = new_top
        if MASKED:
            base = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row that has seen nothing yet
        weights = tl.exp2(logits * factor - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        if DROP is not None:
            numbers = load_key_numbers(key_positions, start + tl.arange(0, COLUMNS), tile[3])
            weights = weights * keep_factors(drop_keys[:, None], numbers[None, :], DROP, KEEP)
        values = load_rows(v, v_stride, start, tile[3], COLUMNS, DIM, WIDTH, MASKED)
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
        top = new_top
    return acc, top, total


@triton.jit(
    do_not_specialize=["tile_count", "side", "lse_head", "first_head"],
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
    query_keys,
    key_positions,
    first_head,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    JOIN: tl.constexpr,
    LOW: tl.constexpr,
    PRECISION: tl.constexpr,
    CAP: tl.constexpr,
    DROP: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Write `out` [rows, heads, DIM] and `lse` [heads, rows] for the queries of one tile and head.

    `lse_head` is a stride. LOW: some row does not see the first column of its tile. DROP: of 2^32 weights so many are
    dropped, None: none; what is kept is multiplied with KEEP. `query_keys` and `key_positions` are those of
    `dropout.WeightDropout`, `first_head` is the number of the first head in the model.
    """
    index, kv_head, head = program_place(tile_count, side, GROUP)
    tile = read_tile(tiles, index)
    row, stop = tile[0], tile[1]
    k += kv_head * k_stride[1]
    v += kv_head * v_stride[1]
    queries = load_rows(q + head * q_stride[1], q_stride, row, stop, ROWS, DIM, WIDTH, True)
    low, high = row_ends(segments, tile, ROWS, JOIN)
    drop_keys = 0
    if DROP is not None:
        drop_keys = load_query_keys(query_keys, row + tl.arange(0, ROWS), stop, first_head + head)
    acc = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    for masked in tl.static_range(2):
        # fmt: off
        acc, top, total = _attend(
            acc, top, total, queries, k, v, k_stride, v_stride, tile, low, high, scale, drop_keys, key_positions,
            DIM, WIDTH, COLUMNS, LOW, PRECISION, CAP, DROP, KEEP, masked == 1,
        )
        # fmt: on
    total = tl.where(total == 0.0, 1.0, total)  # a row that sees nothing: output 0, log-sum-exp -inf
    store_rows(out + head * out_stride[1], out_stride, row, stop, acc / total[:, None], ROWS, DIM, WIDTH)
    rows = row + tl.arange(0, ROWS)
    tl.store(lse + head * lse_head + rows, (top + tl.log2(total)) / LOG2_E, mask=rows < stop)


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
    drop_keys,
    key_positions,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOW: tl.constexpr,
    PRECISION: tl.constexpr,
    CAP: tl.constexpr,
    DROP: tl.constexpr,
    KEEP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add to dq, without the scale, what the keys of a tile give that need a mask, or those that do not."""
    for step in tl.range(0, count_steps(tile, COLUMNS, MASKED)):
        start = first_column(step, tile, COLUMNS, MASKED, LOW)
        keys = load_rows(k, k_stride, start, tile[3], COLUMNS, DIM, WIDTH, MASKED)
        values = load_rows(v, v_stride, start, tile[3], COLUMNS, DIM, WIDTH, MASKED)
        logits = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
        slope = 1.0
        if CAP is not None:
            logits, slope = cap_logits(logits, scale, CAP)
        factor = scale if CAP is None else 1.0
        if MASKED:
            logits = hide(logits, start + tl.arange(0, COLUMNS), low, high, LOW, True)
        weights = tl.exp2(logits * factor - lse[:, None])
        dweights = tl.dot(dout, tl.trans(values), input_precision=PRECISION)
        if DROP is not None:
            numbers = load_key_numbers(key_positions, start + tl.arange(0, COLUMNS), tile[3])
            dweights = dweights * keep_factors(drop_keys[:, None], numbers[None, :], DROP, KEEP)
        slopes = weights * (dweights - delta[:, None])
        if CAP is not None:
            slopes = slopes * slope
        dq = tl.dot(slopes.to(keys.dtype), keys, dq, input_precision=PRECISION)
    return dq


@triton.jit(
    do_not_specialize=["lse_head", "tile_count", "side", "first_head"],
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
    query_keys,
    key_positions,
    first_head,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    JOIN: tl.constexpr,
    LOW: tl.constexpr,
    PRECISION: tl.constexpr,
    CAP: tl.constexpr,
    DROP: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Write `dq` [rows, heads, DIM] and `delta` [heads, rows] for the queries of one tile and head."""
    index, kv_head, head = program_place(tile_count, side, GROUP)
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
    drop_keys = 0
    if DROP is not None:
        drop_keys = load_query_keys(query_keys, rows, stop, first_head + head)
    acc = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    for masked in tl.static_range(2):
        # fmt: off
        acc = _add_dq(
            acc, queries, douts, lses, deltas, k, v, k_stride, v_stride, tile, low, high, scale * LOG2_E, drop_keys,
            key_positions, DIM, WIDTH, COLUMNS, LOW, PRECISION, CAP, DROP, KEEP, masked == 1,
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
    query_keys,
    key_numbers,
    first_head,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    PRECISION: tl.constexpr,
    CAP: tl.constexpr,
    DROP: tl.constexpr,
    KEEP: tl.constexpr,
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
        slope = 1.0
        if CAP is not None:
            logits, slope = cap_logits(logits, scale, CAP)
        factor = scale if CAP is None else 1.0
        if MASKED:
            logits = hide(logits, columns, low, high, LOW, HIGH)
        weights = tl.exp2(logits * factor - lses[None, :])
        dweights = tl.dot(v, tl.trans(douts), input_precision=PRECISION)
        used = weights
        if DROP is not None:
            drop_keys = load_query_keys(query_keys, columns, tile[3], first_head + member)
            kept = keep_factors(drop_keys[None, :], key_numbers[:, None], DROP, KEEP)
            dweights = dweights * kept
            used = weights * kept
        dv = tl.dot(used.to(douts.dtype), douts, dv, input_precision=PRECISION)
        slopes = weights * (dweights - deltas[None, :])
        if CAP is not None:
            slopes = slopes * slope
        dk = tl.dot(slopes.to(queries.dtype), queries, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(
    do_not_specialize=["lse_head", "tile_count", "side", "first_head"],
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
    query_keys,
    key_positions,
    first_head,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    JOIN: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    PRECISION: tl.constexpr,
    CAP: tl.constexpr,
    DROP: tl.constexpr,
    KEEP: tl.constexpr,
):
    """Write `dk` and `dv` [rows, kv heads, DIM] for the keys of one tile and kv head.

    HIGH: some row does not see the last column of its tile.
    """
    index, kv_head, _ = program_place(tile_count, side, 1)
    tile = read_tile(tiles, index)
    row, stop = tile[0], tile[1]
    keys = load_rows(k + kv_head * k_stride[1], k_stride, row, stop, ROWS, DIM, WIDTH, True)
    values = load_rows(v + kv_head * v_stride[1], v_stride, row, stop, ROWS, DIM, WIDTH, True)
    low, high = row_ends(segments, tile, ROWS, JOIN)
    key_numbers = 0
    if DROP is not None:
        key_numbers = load_key_numbers(key_positions, row + tl.arange(0, ROWS), stop)
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
            scale * LOG2_E, query_keys, key_numbers, first_head + head, GROUP, DIM, WIDTH, COLUMNS, LOW, HIGH,
            PRECISION, CAP, DROP, KEEP, masked == 1,
        )
        # fmt: on
    store_rows(dk + kv_head * dk_stride[1], dk_stride, row, stop, acc_k * scale, ROWS, DIM, WIDTH)
    store_rows(dv + kv_head * dv_stride[1], dv_stride, row, stop, acc_v, ROWS, DIM, WIDTH)


_MERGED_ROWS = 32  # of one program


@triton.jit
def _read_part(part_lse, head, row, begin, end):
    """Load the log-sum-exps of one part, -inf for rows it does not have."""
    return tl.load(part_lse + head * (end - begin) + row - begin, (row >= begin) & (row < end), float("-inf"))


# Numbers that follow the batch are not specialised, and so cannot be in tuples: a new one must not compile anything.
@triton.jit(do_not_specialize=["begin_0", "begin_1", "begin_2", "begin_3", "end_0", "end_1", "end_2", "end_3", "rows"])
def _merge_kernel(
    parts,
    strides,
    lses,
    total,
    total_stride,
    total_lse,
    begin_0,
    end_0,
    begin_1,
    end_1,
    begin_2,
    end_2,
    begin_3,
    end_3,
    rows,
    COUNT: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """Write the sum of parts [rows of the part, heads, DIM] for some rows of one head.

    WEIGHTED: parts are outputs, weighed by e^lse; writes the log-sum-exp too. Else they are gradients, without lses.
    """
    program = tl.program_id(0)
    head = (program % HEADS).to(tl.int64)
    start = program // HEADS * ROWS
    row = start + tl.arange(0, ROWS)
    begins, ends = (begin_0, begin_1, begin_2, begin_3), (end_0, end_1, end_2, end_3)
    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    if WEIGHTED:
        for part in tl.static_range(COUNT):
            top = tl.maximum(top, _read_part(lses[part], head, row, begins[part], ends[part]))
    base = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.zeros([ROWS], dtype=tl.float32)
    acc = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    column = tl.arange(0, WIDTH)[None, :]
    for part in tl.static_range(COUNT):
        own = (row - begins[part])[:, None].to(tl.int64)
        there = (own >= 0) & (own < ends[part] - begins[part]) & (column < DIM)
        pointers = parts[part] + head * strides[part][1] + own * strides[part][0] + column
        values = tl.load(pointers, mask=there, other=0.0).to(tl.float32)
        if WEIGHTED:
            weight = tl.exp(_read_part(lses[part], head, row, begins[part], ends[part]) - base)
            weights += weight
            values = values * weight[:, None]
        acc += values
    if WEIGHTED:
        weights = tl.where(top == float("-inf"), 1.0, weights)
        acc = acc / weights[:, None]
        tl.store(total_lse + head * rows + row, top + tl.log(weights), mask=row < rows)
    store_rows(total + head * total_stride[1], total_stride, start, rows, acc, ROWS, DIM, WIDTH)


def merge_outputs(parts: Sequence[PartialOutput], rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """See `lse.merge_outputs`; at most `MAX_PARTS` parts, lse in float32."""
    out = parts[0].out.new_empty((rows, *parts[0].out.shape[1:]), dtype=dtype)
    lse = torch.empty(out.shape[1], rows, dtype=torch.float32, device=out.device)
    lses = tuple(part.lse.contiguous() for part in parts)  # small; a copy of its own is always aligned
    _merge([PartialGradient(part.out, part.first_row) for part in parts], out, lses, lse)
    return out, lse


def add_gradients(parts: Sequence[PartialGradient], rows: int, dtype: torch.dtype) -> torch.Tensor:
    """See `lse.add_gradients`; at most `MAX_PARTS` parts."""
    total = parts[0].gradient.new_empty((rows, *parts[0].gradient.shape[1:]), dtype=dtype)
    _merge(parts, total)
    return total


def accumulate(total: torch.Tensor, gradient: torch.Tensor, fresh: bool) -> None:
    """See `lse.accumulate`."""
    own = PartialGradient(gradient, 0)
    _merge([own] if fresh else [PartialGradient(total, 0), own], total)


def _merge(
    parts: Sequence[PartialGradient],
    total: torch.Tensor,
    lses: tuple[torch.Tensor, ...] | None = None,
    total_lse: torch.Tensor | None = None,
) -> None:
    """Write the sum of parts, weighed where there are lses; one part may be `total`, which is read before written."""
    if not 1 <= len(parts) <= MAX_PARTS:
        raise SeqloomError(f"{len(parts)} results to merge: one pass takes 1 to {MAX_PARTS}; merge in several passes")
    rows, heads, dim = total.shape
    tensors = tuple(part.gradient for part in parts)
    strides = tuple(tensor.stride()[:2] for tensor in tensors)
    ends = [n for part in parts for n in (part.first_row, part.first_row + len(part.gradient))]
    ends += [0, 0] * (MAX_PARTS - len(parts))
    options = {
        "COUNT": len(parts),
        "HEADS": heads,
        "DIM": dim,
        "WIDTH": max(16, 1 << (dim - 1).bit_length()),
        "ROWS": _MERGED_ROWS,
        "WEIGHTED": lses is not None,
        "num_warps": 4,
    }
    if rows:  # heads of the same rows run side by side
        arguments = (tensors, strides, lses, total, total.stride()[:2], total_lse, *ends, rows)
        run_kernel(_merge_kernel, (-(-rows // _MERGED_ROWS) * heads,), *arguments, **options)
