"""What all attention programs share on the device: where a program is, its tile, and blocks of rows.

A tile is the tuple (row, stop, low, high, full_low, full_high, ...), a row of the table in `triton_tiles`; a stride is
the tuple (row, head), in elements.
"""

# ruff: noqa: N803
from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


def run_kernel(kernel: Any, grid: tuple[int], *arguments: Any, **options: Any) -> None:
    """Run a Triton kernel: options are its compile-time arguments, warps and stages."""
    kernel[grid](*arguments, **options)


@triton.jit
def whereabouts(tile_count, side, GROUP: tl.constexpr):
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
