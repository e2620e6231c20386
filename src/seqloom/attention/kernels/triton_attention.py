"""Seqloom's Triton attention over segments: tiles that start where documents start, gradients without atomics.

A row of one side (a query, or a key) sees a run of rows of the other side (its columns), `low <= column < high`. Both
ends only grow along a segment, so causal masks, windows, offsets and full rectangles are one rule, and the ends of a
tile are those of its first and last row. A tile starts where its segment starts, so a document of 512 costs its own
blocks and no more; very short segments share a tile when they are neighbours, and the ends of each row keep them
apart.

    columns   low      full_low        full_high      high
    of a tile  |  mask  |    no mask       |    mask    |      in steps of `columns` of the Config

This file cuts segments into tiles on the host; `triton_kernels.py` has the device code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import torch

from seqloom.attention.dropout import drop_threshold
from seqloom.attention.kernels.interface import (
    AttentionShape,
    Capabilities,
    Gradients,
    KernelBuild,
    KernelUse,
    Saved,
)
from seqloom.attention.masks import Segments
from seqloom.attention.merge import MAX_PARTS, PartialGradient, PartialOutput, merge_ops, sum_dtype
from seqloom.errors import SeqloomError

Kind = Literal["forward", "dq", "dkdv"]

_FAR = 1 << 30  # farther than any row; twice that is still 32 bits
_SHARED_BYTES = 24 << 20  # of the other side, read again by programs that run at the same time; half of an L2 cache


@dataclass(frozen=True, slots=True)
class Config:
    """How one kernel is cut and compiled.

    Attributes:
        rows: of a tile: queries for "forward" and "dq", keys for "dkdv". At least 16.
        columns: of one step of a tile's loop. At least 16.
        warps, stages: of a program, as Triton counts them.
        join: let neighbours share a tile; their rows are then kept apart by a mask on every block.
        side: kv heads whose programs run side by side; None: as many as the cache holds.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    join: bool = False
    side: int | None = None


Pick = Callable[[Kind, int, torch.dtype, int], Config]

_FLOAT32 = {
    16: Config(64, 64, warps=4, stages=2),
    32: Config(64, 64, warps=4, stages=2),
    64: Config(128, 32, warps=8, stages=2),
    128: Config(64, 32, warps=8, stages=1),
    256: Config(32, 16, warps=4, stages=1),
}
"""By padded width, small enough for the shared memory of an A100: a product splits both factors, which doubles them."""


def default_config(kind: Kind, dim: int, dtype: torch.dtype, length: int) -> Config:
    """Choose a Config: the one table to tune. `length` counts rows of a segment, on the side that the tiles cut."""
    if dtype == torch.float32:
        config = _FLOAT32[padded_width(dim)]
        return replace(config, join=length <= config.rows // 2)
    width = dim * dtype.itemsize  # bytes of a row: what shared memory must hold
    if width > 256:
        return Config(64, 32, warps=8, stages=2, join=length <= 32)
    if length <= 64:
        return Config(64, 64, warps=4, stages=2, join=length <= 32)
    if kind == "forward":
        return Config(128, 64, warps=8, stages=3)
    return Config(128, 64, warps=8, stages=2 if dim > 64 else 3)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """One side of segments, in the order of its rows.

    Row r of segment i sees the columns from `r + low_shift[i]` to before `r + high_shift[i]`, as far as they lie in
    `other_start[i] .. other_stop[i]`.

    Attributes:
        start, stop, other_start, other_stop, low_shift, high_shift: int64[n].
    """

    start: np.ndarray
    stop: np.ndarray
    other_start: np.ndarray
    other_stop: np.ndarray
    low_shift: np.ndarray
    high_shift: np.ndarray

    @classmethod
    def queries(cls, segments: Segments) -> Rows:
        """Return the query rows with the keys each sees."""
        own = segments.k_start - segments.q_start + segments.offset  # from a query's row to the row of its own key
        far = np.full_like(own, _FAR)
        low = -far if segments.window is None else own - segments.window + 1
        high = own + 1 if segments.causal else far
        return cls._sorted(segments.q_start, segments.q_stop, segments.k_start, segments.k_stop, low, high)

    @classmethod
    def keys(cls, segments: Segments) -> Rows:
        """Return the key rows with the queries that see each."""
        own = segments.q_start - segments.k_start - segments.offset
        far = np.full_like(own, _FAR)
        low = own if segments.causal else -far
        high = far if segments.window is None else own + segments.window
        return cls._sorted(segments.k_start, segments.k_stop, segments.q_start, segments.q_stop, low, high)

    @classmethod
    def _sorted(cls, start: np.ndarray, *columns: np.ndarray) -> Rows:
        order = np.argsort(start, kind="stable")
        return cls(start[order], *(column[order] for column in columns))

    @property
    def lengths(self) -> np.ndarray:
        """Rows of every segment."""
        return self.stop - self.start

    @property
    def covered(self) -> int:
        """Rows that are in a segment."""
        return int(self.lengths.sum())

    def ends(self, segment: np.ndarray, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (low, high) of rows that lie in these segments."""
        first, last = self.other_start[segment], self.other_stop[segment]
        low = np.clip(row + self.low_shift[segment], first, last)
        high = np.clip(row + self.high_shift[segment], first, last)
        return low, high

    def table(self) -> np.ndarray:
        """Return int32[n, 8]: start, other_start, other_stop, low_shift, high_shift, 0, 0, 0."""
        zero = np.zeros_like(self.start)
        low, high = self.shifts(slice(None))
        columns = (self.start, self.other_start, self.other_stop, low, high, zero, zero, zero)
        return np.stack(columns, axis=1).astype(np.int32)

    def shifts(self, segment: np.ndarray | slice) -> tuple[np.ndarray, np.ndarray]:
        """Return low and high shift of segments, within 32 bits when a row is added."""
        low, high = self.low_shift[segment], self.high_shift[segment]
        return np.clip(low, -_FAR, _FAR), np.clip(high, -_FAR, _FAR)


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """Tiles of the segments that share a Config: one launch.

    Attributes:
        table: int32[n, 8]: row, stop, low, high, full_low, full_high, then low and high shift of the segment, or,
            where segments share tiles, the first one and how many; long segments first, and in a segment the tiles
            with most columns first, so that the last programs to start are short.
        longest: most columns of a segment.
    """

    table: np.ndarray
    longest: int
    config: Config


def cut(rows: Rows, choose: Callable[[int], Config]) -> list[Tiles]:
    """Cut all segments into tiles, grouped by the Config that `choose` returns for a segment's length."""
    lengths, which = np.unique(rows.lengths, return_inverse=True)
    configs = [choose(int(length)) for length in lengths]
    used = list(dict.fromkeys(configs))
    group = np.array([used.index(config) for config in configs], dtype=np.int64)[which]
    return [_cut(rows, np.flatnonzero(group == index), config) for index, config in enumerate(used)]


def _cut(rows: Rows, chosen: np.ndarray, config: Config) -> Tiles:
    """Cut the chosen segments, given in row order, into tiles of one Config."""
    first, last = _join(rows, chosen, config.rows) if config.join else (chosen, chosen)
    start, stop = rows.start[first], rows.stop[last]
    count = -(-(stop - start) // config.rows)
    whole = np.repeat(np.arange(len(first)), count)
    row = start[whole] + (np.arange(len(whole)) - np.repeat(np.cumsum(count) - count, count)) * config.rows
    end = np.minimum(row + config.rows, stop[whole])
    low, least_high = rows.ends(first[whole], row)
    most_low, high = rows.ends(last[whole], end - 1)
    step = config.columns
    full_low = low + -(-(most_low - low) // step) * step
    full_high = low + (least_high - low) // step * step
    none = full_high <= full_low
    full_low, full_high = np.where(none, low, full_low), np.where(none, low, full_high)
    rule = (first[whole], (last - first + 1)[whole]) if config.join else rows.shifts(first[whole])
    table = np.stack([row, end, low, high, full_low, full_high, *rule], axis=1).astype(np.int32)
    columns = rows.other_stop[last] - rows.other_start[first]
    order = np.lexsort((low - high, whole, -((stop - start) * columns)[whole]))
    return Tiles(table[order], int(columns.max(initial=0)), config)


def _join(rows: Rows, chosen: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Return first and last segment of every run of neighbours that fits into one tile, both sides counted."""
    start, stop = rows.start[chosen], rows.stop[chosen]
    other_start, other_stop = rows.other_start[chosen], rows.other_stop[chosen]
    near = np.zeros(len(chosen), dtype=bool)  # begins where the one before ends, on both sides
    near[1:] = (start[1:] == stop[:-1]) & (other_start[1:] == other_stop[:-1])
    runs: list[int] = []
    columns = (near.tolist(), start.tolist(), stop.tolist(), other_start.tolist(), other_stop.tolist())
    row = column = 0
    for index, (neighbour, begin, end, other_begin, other_end) in enumerate(zip(*columns, strict=True)):
        if not (neighbour and end - row <= limit and other_end - column <= limit):
            runs.append(index)
            row, column = begin, other_begin
    head = np.array(runs, dtype=np.int64)
    tail = np.append(head[1:], len(chosen))[: len(head)] - 1
    return chosen[head], chosen[tail]


def parallel_kv_heads(tiles: Tiles, kv_heads: int, row_bytes: int) -> int:
    """Return how many kv heads run in parallel: the most that divide `kv_heads` and whose columns stay in cache.

    Programs of one kv head read `row_bytes` of every row of the other side.
    """
    wanted = tiles.config.side or max(1, _SHARED_BYTES // max(1, tiles.longest * row_bytes))
    return max(side for side in range(1, kv_heads + 1) if kv_heads % side == 0 and side <= max(1, wanted))


def upload(tables: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copy int32 tables to the device in one transfer that nothing waits for; each starts at a multiple of 32 bytes."""
    sizes = [-(-table.size // 8) * 8 for table in tables]
    whole = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    parts = [part[: table.size] for part, table in zip(whole.split(sizes), tables, strict=True)]
    for part, table in zip(parts, tables, strict=True):
        part.copy_(torch.from_numpy(np.ascontiguousarray(table).reshape(-1)))
    moved = whole.to(device, non_blocking=True)
    views = [part[: table.size] for part, table in zip(moved.split(sizes), tables, strict=True)]
    return [view.view(table.shape) for view, table in zip(views, tables, strict=True)]


@dataclass(frozen=True, slots=True)
class TritonSegments:
    """The kernel of this project for packed documents and for tiles of a ring, on NVIDIA GPUs.

    Attributes:
        pick: chooses block sizes by kernel, width of a head, dtype and segment length.
    """

    pick: Pick = default_config
    capabilities = Capabilities(
        name="triton",
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16, torch.float32),
        max_dim=256,
        dim_multiple=16,
        softcap=True,
        dropout=True,
    )

    def prepare(self, segments: Segments, shape: AttentionShape) -> PreparedTriton:
        """Cut the segments into tiles and copy the tables to the device."""
        if find_spec("triton") is None:
            raise SeqloomError("kernel 'triton': the package triton is not installed; use another kernel")
        if not shape.scale > 0:
            raise SeqloomError(f"scale {shape.scale}: kernel 'triton' needs a positive one; put the sign into q")
        sides = {"forward": Rows.queries(segments), "dq": Rows.queries(segments), "dkdv": Rows.keys(segments)}
        kinds: list[Kind] = ["forward", "dq", "dkdv"]
        tiles = {kind: cut(sides[kind], partial(self.pick, kind, shape.dim, shape.dtype)) for kind in kinds}
        flat = [one for kind in kinds for one in tiles[kind]]
        tables = [sides["forward"].table(), sides["dkdv"].table(), *(one.table for one in flat)]
        q_segments, k_segments, *moved = upload(tables, shape.device)
        on_device = iter(moved)
        flags = {
            "forward": {"LOW": segments.window is not None},
            "dq": {"LOW": segments.window is not None},
            "dkdv": {"LOW": segments.causal, "HIGH": segments.window is not None},
        }
        launches = {
            kind: [_launch(one, next(on_device), shape, kind, flags[kind]) for one in tiles[kind]] for kind in kinds
        }
        return PreparedTriton(
            shape,
            q_segments,
            k_segments,
            sides["forward"].covered,
            sides["dkdv"].covered,
            launches,
        )

    def builds(self, shape: AttentionShape, use: KernelUse) -> list[KernelBuild]:
        """Compile every kernel that documents of these lengths need, by running a short one of each kind."""
        kinds: list[Kind] = ["forward", "dq", "dkdv"]
        longest = use.longest if use.tokens is None else min(use.longest, use.tokens)
        lengths = [1 << k for k in range(longest.bit_length())]
        by_config = {tuple(self.pick(kind, shape.dim, shape.dtype, n) for kind in kinds): n for n in reversed(lengths)}
        runs: list[KernelBuild] = []
        for length in by_config.values():
            masks = [Segments.packed([length])]
            masks += [Segments.packed([length], window=min(use.window, length))] if use.window is not None else []
            masks += [Segments.packed([length], causal=False)] if use.tiles else []
            for segments in masks:
                runs += [partial(self._run_once, segments, shape, backward=backward) for backward in (False, True)]
        if use.tiles:
            runs += [partial(_merge_once, shape, parts) for parts in range(2, MAX_PARTS + 1)]
        return runs

    def _run_once(self, segments: Segments, shape: AttentionShape, *, backward: bool) -> None:
        prepared, (q, k) = self.prepare(segments, shape), shape.zeros(int(segments.q_stop.max()))
        if backward:
            lse = torch.zeros(shape.heads, len(q), dtype=torch.float32, device=shape.device)
            prepared.backward(q, Saved(q, k, k, q, lse))
        else:
            prepared.forward(q, k, k)


def _merge_once(shape: AttentionShape, parts: int) -> None:
    """Merge so many outputs and gradients of queries, and add gradients of keys, as a ring does."""
    ops, (q, k), wide = merge_ops(shape.device, shape.dtype), shape.zeros(1), sum_dtype(shape.dtype)
    lse = torch.zeros(shape.heads, 1, dtype=wide, device=shape.device)
    for dtype in dict.fromkeys((shape.dtype, wide)):  # wide: four are merged, and more will come
        ops.merge_outputs([PartialOutput(q, lse, 0)] * parts, 1, dtype)
        ops.add_gradients([PartialGradient(q, 0)] * parts, 1, dtype)
    total = torch.cat((k, k), dim=1).to(wide)[:, : shape.kv_heads]
    for fresh in (True, False):
        ops.accumulate(total, k, fresh)


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """One kernel launch, all but the tensors.

    Attributes:
        tiles: int32[n, 8] on the device.
        grid: programs.
        side: kv heads side by side.
        options: compile-time arguments, warps and stages.
    """

    tiles: torch.Tensor
    grid: tuple[int]
    side: int
    options: dict[str, Any]


def _launch(tiles: Tiles, table: torch.Tensor, shape: AttentionShape, kind: Kind, flags: dict[str, bool]) -> Launch:
    group = shape.heads // shape.kv_heads
    config: Config = tiles.config
    streams = 2 * group if kind == "dkdv" else 2  # heads of rows that a kv head's programs read per column
    side = parallel_kv_heads(tiles, shape.kv_heads, streams * shape.dim * shape.dtype.itemsize)
    options: dict[str, Any] = {
        "GROUP": group,
        "DIM": shape.dim,
        "WIDTH": padded_width(shape.dim),
        "ROWS": config.rows,
        "COLUMNS": config.columns,
        "JOIN": config.join,
        # float32 as three products of its halves on tensor cores: exact to 2^-22, and a tenth of the code of "ieee"
        "PRECISION": "tf32x3" if shape.dtype == torch.float32 else "tf32",
        "CAP": shape.softcap,
        "DROP": None if shape.dropout is None else drop_threshold(shape.dropout.heads.p),
        "KEEP": 1.0 if shape.dropout is None else 1 / (1 - shape.dropout.heads.p),
        "num_warps": config.warps,
        "num_stages": config.stages,
        **{name: value or config.join for name, value in flags.items()},
    }
    programs = len(tiles.table) * (shape.kv_heads if kind == "dkdv" else shape.heads)
    return Launch(table, (programs,), side, options)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedTriton:
    """Segments cut into tiles, ready to run.

    Attributes:
        q_segments, k_segments: int32[n, 8], the segments in the order of their query rows and of their key rows.
        q_covered, k_covered: rows in a segment.
        launches: of every kind, one per Config in use.
    """

    shape: AttentionShape
    q_segments: torch.Tensor
    k_segments: torch.Tensor
    q_covered: int
    k_covered: int
    launches: dict[Kind, list[Launch]]

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse)."""
        rows, heads, _ = q.shape
        out = self._empty_result(q, self.q_covered)
        lse = torch.empty(heads, rows, dtype=torch.float32, device=q.device)
        if rows != self.q_covered:
            lse.fill_(-math.inf)
        self.forward_into(q, k, v, out, lse)
        return out, lse

    def forward_into(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """Write the rows of the segments, see `InPlaceAttention`."""
        from seqloom.attention.kernels.triton_kernels import forward_kernel

        q, k, v = _unit_stride(q, k, v)
        numbers = (*_strides(q, k, v, out), lse.stride(0))
        scale = self.shape.scale * math.log2(math.e)
        self._run("forward", forward_kernel, (q, k, v, out, lse), self.q_segments, numbers, scale)

    def backward(self, dout: torch.Tensor, saved: Saved) -> Gradients:
        """Return (dq, dk, dv)."""
        covered = (self.q_covered, self.k_covered, self.k_covered)
        dq, dk, dv = map(self._empty_result, saved[:3], covered)
        self.backward_into(dout, saved, (dq, dk, dv))
        return dq, dk, dv

    def backward_into(self, dout: torch.Tensor, saved: Saved, gradients: Gradients) -> None:
        """Write the rows of the segments, see `InPlaceAttention`."""
        dout, *rest = _unit_stride(dout, *saved)
        saved, (dq, dk, dv) = Saved(*rest), gradients
        lse = saved.lse
        delta = torch.empty_strided(lse.shape, lse.stride(), dtype=torch.float32, device=lse.device)
        self.dq_into(dout, saved, delta, dq)
        self.dkdv_into(dout, saved, delta, dk, dv)

    def dq_into(self, dout: torch.Tensor, saved: Saved, delta: torch.Tensor, dq: torch.Tensor) -> None:
        """Write dq and, with the shape and strides of lse, delta: the row sums of dout * out."""
        from seqloom.attention.kernels.triton_kernels import dq_kernel

        q, k, v, out, lse = saved
        numbers, tensors = (*_strides(q, k, v, out, dout, dq), lse.stride(0)), (q, k, v, out, dout, lse, delta, dq)
        self._run("dq", dq_kernel, tensors, self.q_segments, numbers, self.shape.scale)

    def dkdv_into(
        self, dout: torch.Tensor, saved: Saved, delta: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor
    ) -> None:
        """Write dk and dv, given the delta of `dq_into`."""
        from seqloom.attention.kernels.triton_kernels import dkdv_kernel

        q, k, v, _, lse = saved
        numbers, tensors = (*_strides(q, k, v, dout, dk, dv), lse.stride(0)), (q, k, v, dout, lse, delta, dk, dv)
        self._run("dkdv", dkdv_kernel, tensors, self.k_segments, numbers, self.shape.scale)

    def _run(
        self,
        kind: Kind,
        kernel: Any,
        tensors: tuple[torch.Tensor, ...],
        segments: torch.Tensor,
        numbers: tuple[Any, ...],
        scale: float,
    ) -> None:
        """Launch a kernel for every Config in use, on the device of the tensors."""
        from seqloom.attention.kernels.triton_kernels import run_kernel

        drop = self.shape.dropout
        dropped = (None, None, 0) if drop is None else (drop.query_keys, drop.key_positions, drop.heads.first_head)
        with _on(segments.device):
            for launch in self.launches[kind]:
                numbers_of_launch = (*numbers, len(launch.tiles), launch.side, scale, *dropped)
                arguments = (*tensors, launch.tiles, segments, *numbers_of_launch)
                run_kernel(kernel, launch.grid, *arguments, **launch.options)

    def _empty_result(self, like: torch.Tensor, covered: int) -> torch.Tensor:
        """Return a buffer for results; rows in no segment are 0."""
        make: Callable[..., torch.Tensor] = torch.empty if len(like) == covered else torch.zeros
        return make(like.shape, dtype=self.shape.dtype, device=like.device)


def padded_width(dim: int) -> int:
    """Return the width of a head's rows in a block: the next power of two."""
    return max(16, 1 << (dim - 1).bit_length())


def _unit_stride(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors with a contiguous last axis."""
    return tuple(tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors)


def _strides(*tensors: torch.Tensor) -> list[tuple[int, int]]:
    """Return row and head stride of every tensor [rows, heads, dim]."""
    return [(tensor.stride(0), tensor.stride(1)) for tensor in tensors]


def _on(device: torch.device):
    """Make the device current, where there is a choice."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
