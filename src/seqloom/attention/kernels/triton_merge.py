"""Joining partial attention results in one pass over memory: `merge_parts` and `add_shares` of attention/merge.py.

Sums are float32. A row that saw nothing has output 0 and log-sum-exp -inf and changes nothing, bit for bit. Outputs are
[rows, heads, dim] with a contiguous last axis, log-sum-exps [heads, rows] with contiguous rows.
"""

# ruff: noqa: N803
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from seqloom.attention.kernels.triton_kernels import run_kernel, store_rows
from seqloom.attention.lse import AT_ONCE, Part, Share
from seqloom.errors import SeqloomError

_ROWS = 32  # of one program


@triton.jit
def _weigh(lses, top):
    """Return e^(lse - top), 0 for -inf."""
    return tl.exp(lses - tl.where(top == float("-inf"), 0.0, top))


@triton.jit
def _read_part(part_lse, head, row, begin, end):
    """Load the log-sum-exps of one part, -inf for rows it does not have."""
    return tl.load(part_lse + head * (end - begin) + row - begin, (row >= begin) & (row < end), float("-inf"))


# Numbers that follow the batch are not specialised, and so cannot be in tuples: a new one must not compile anything.
@triton.jit(do_not_specialize=["begin_0", "begin_1", "begin_2", "begin_3", "end_0", "end_1", "end_2", "end_3", "rows"])
def _merge_parts_kernel(
    outs,
    lses,
    strides,
    out,
    lse,
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
):
    program = tl.program_id(0)
    head = (program % HEADS).to(tl.int64)
    start = program // HEADS * ROWS
    row = start + tl.arange(0, ROWS)
    begins, ends = (begin_0, begin_1, begin_2, begin_3), (end_0, end_1, end_2, end_3)
    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    for part in tl.static_range(COUNT):
        top = tl.maximum(top, _read_part(lses[part], head, row, begins[part], ends[part]))
    total = tl.zeros([ROWS], dtype=tl.float32)
    acc = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    column = tl.arange(0, WIDTH)[None, :]
    for part in tl.static_range(COUNT):
        weight = _weigh(_read_part(lses[part], head, row, begins[part], ends[part]), top)
        total += weight
        own = (row - begins[part])[:, None].to(tl.int64)
        there = (own >= 0) & (own < ends[part] - begins[part]) & (column < DIM)
        pointers = outs[part] + head * strides[part][1] + own * strides[part][0] + column
        acc += tl.load(pointers, mask=there, other=0.0).to(tl.float32) * weight[:, None]
    total = tl.where(top == float("-inf"), 1.0, total)
    store_rows(out + head * DIM, (HEADS * DIM,), start, rows, acc / total[:, None], ROWS, DIM, WIDTH)
    tl.store(lse + head * rows + row, top + tl.log(total), mask=row < rows)


@triton.jit(do_not_specialize=["begin_0", "begin_1", "begin_2", "begin_3", "end_0", "end_1", "end_2", "end_3", "rows"])
def _add_shares_kernel(
    shares,
    strides,
    total,
    total_stride,
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
):
    program = tl.program_id(0)
    head = (program % HEADS).to(tl.int64)
    start = program // HEADS * ROWS
    row = start + tl.arange(0, ROWS)
    begins, ends = (begin_0, begin_1, begin_2, begin_3), (end_0, end_1, end_2, end_3)
    acc = tl.zeros([ROWS, WIDTH], dtype=tl.float32)
    column = tl.arange(0, WIDTH)[None, :]
    for part in tl.static_range(COUNT):
        own = (row - begins[part])[:, None].to(tl.int64)
        there = (own >= 0) & (own < ends[part] - begins[part]) & (column < DIM)
        pointers = shares[part] + head * strides[part][1] + own * strides[part][0] + column
        acc += tl.load(pointers, mask=there, other=0.0).to(tl.float32)
    store_rows(total + head * total_stride[1], total_stride, start, rows, acc, ROWS, DIM, WIDTH)


def merge_parts(parts: Sequence[Part], rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """See `merge.merge_parts`; at most four parts, lse in float32."""
    _check_count(parts)
    heads, dim = parts[0].out.shape[1:]
    out = torch.empty(rows, heads, dim, dtype=dtype, device=parts[0].out.device)
    lse = torch.empty(heads, rows, dtype=torch.float32, device=out.device)
    outs = tuple(part.out for part in parts)
    lses = tuple(part.lse.contiguous() for part in parts)  # small; a copy of its own is always aligned
    strides = tuple(one.stride()[:2] for one in outs)
    ends = _ends([(part.begin, len(part.out)) for part in parts])
    grid, options = _options(rows, heads, dim)
    if rows:
        run_kernel(_merge_parts_kernel, grid, outs, lses, strides, out, lse, *ends, rows, COUNT=len(outs), **options)
    return out, lse


def add_shares(shares: Sequence[Share], rows: int, dtype: torch.dtype) -> torch.Tensor:
    """See `merge.add_shares`; at most four shares."""
    _check_count(shares)
    like = shares[0].gradient
    total = torch.empty(rows, *like.shape[1:], dtype=dtype, device=like.device)
    _add(shares, total)
    return total


def accumulate(total: torch.Tensor, gradient: torch.Tensor, fresh: bool) -> None:
    """See `merge.accumulate`."""
    _add([Share(gradient, 0)] if fresh else [Share(total, 0), Share(gradient, 0)], total)


def _add(shares: Sequence[Share], total: torch.Tensor) -> None:
    """Write the sum of shares; one of them may be `total` itself, whose elements are read before they are written."""
    rows, heads, dim = total.shape
    gradients = tuple(share.gradient for share in shares)
    strides = tuple(gradient.stride()[:2] for gradient in gradients)
    ends = _ends([(share.begin, len(share.gradient)) for share in shares])
    grid, options = _options(rows, heads, dim)
    if rows:
        tensors = (gradients, strides, total, total.stride()[:2])
        run_kernel(_add_shares_kernel, grid, *tensors, *ends, rows, COUNT=len(gradients), **options)


def _check_count(parts: Sequence[object]) -> None:
    if not 1 <= len(parts) <= AT_ONCE:
        raise SeqloomError(f"{len(parts)} results to join: one pass takes 1 to {AT_ONCE}; join in several passes")


def _ends(places: Sequence[tuple[int, int]]) -> list[int]:
    """First and last row of every part, and of none up to `AT_ONCE`."""
    ends = [number for begin, length in places for number in (begin, begin + length)]
    return ends + [0, 0] * (AT_ONCE - len(places))


def _options(rows: int, heads: int, dim: int) -> tuple[tuple[int], dict[str, int]]:
    """Return the grid, heads of the same rows side by side, and the compile-time arguments."""
    width = max(16, 1 << (dim - 1).bit_length())
    return (-(-rows // _ROWS) * heads,), {"HEADS": heads, "DIM": dim, "WIDTH": width, "ROWS": _ROWS, "num_warps": 4}
