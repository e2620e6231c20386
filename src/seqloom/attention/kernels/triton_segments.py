"""Attention over segments in Triton: tiles that start where documents start, gradients without atomics."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec

import torch

from seqloom.attention.kernels.kernel import Ability, Gradients, Saved, Shape
from seqloom.attention.kernels.triton_tiles import (
    Config,
    Kind,
    Pick,
    Rows,
    Tiles,
    cut,
    default_config,
    heads_side_by_side,
    upload,
)
from seqloom.attention.segments import Segments
from seqloom.errors import SeqloomError


@dataclass(frozen=True, slots=True)
class TritonSegments:
    """The kernel of this project for packed documents and for tiles of a ring, on NVIDIA GPUs.

    Attributes:
        pick: chooses block sizes by kernel, width of a head, dtype and segment length.
        result_dtype: of out, dq, dk, dv; None: the dtype of the inputs.
    """

    pick: Pick = default_config
    result_dtype: torch.dtype | None = None
    ability: Ability = field(
        default=Ability(
            name="triton",
            devices=("cuda",),
            dtypes=(torch.bfloat16, torch.float16, torch.float32),
            max_dim=256,
            dim_multiple=16,
        ),
        init=False,
    )

    def prepare(self, segments: Segments, shape: Shape) -> TritonPrepared:
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
        return TritonPrepared(
            shape,
            self.result_dtype or shape.dtype,
            q_segments,
            k_segments,
            sides["forward"].covered,
            sides["dkdv"].covered,
            launches,
        )

    def warm_up(
        self,
        shape: Shape,
        longest: int,
        *,
        tokens: int | None = None,
        report: Callable[[int, int], None] | None = None,
    ) -> int:
        """Compile what causal documents of up to `longest` tokens need, by running a short one of every kind."""
        kinds: list[Kind] = ["forward", "dq", "dkdv"]
        longest = longest if tokens is None else min(longest, tokens)
        lengths = [1 << k for k in range(longest.bit_length())]
        by_config = {tuple(self.pick(kind, shape.dim, shape.dtype, n) for kind in kinds): n for n in reversed(lengths)}
        for done, length in enumerate(by_config.values(), 1):
            prepared = self.prepare(Segments.packed([length]), shape)
            q = torch.zeros(length, shape.heads, shape.dim, dtype=shape.dtype, device=shape.device)
            k = torch.zeros(length, shape.kv_heads, shape.dim, dtype=shape.dtype, device=shape.device)
            out, lse = prepared.forward(q, k, k)
            prepared.backward(q, Saved(q, k, k, out, lse))
            if report is not None:
                report(done, len(by_config))
        return len(by_config)


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
    options: dict[str, int | bool | str]

    @property
    def numbers(self) -> tuple[int, int]:
        """Tiles, and kv heads side by side: the arguments of every kernel after the strides."""
        return len(self.tiles), self.side


def _launch(tiles: Tiles, table: torch.Tensor, shape: Shape, kind: Kind, flags: dict[str, bool]) -> Launch:
    group = shape.heads // shape.kv_heads
    config: Config = tiles.config
    streams = 2 * group if kind == "dkdv" else 2  # heads of rows that a kv head's programs read per column
    side = heads_side_by_side(tiles, shape.kv_heads, streams * shape.dim * shape.dtype.itemsize)
    options: dict[str, int | bool | str] = {
        "GROUP": group,
        "DIM": shape.dim,
        "WIDTH": max(16, 1 << (shape.dim - 1).bit_length()),
        "ROWS": config.rows,
        "COLUMNS": config.columns,
        "JOIN": config.join,
        "PRECISION": "ieee" if shape.dtype == torch.float32 else "tf32",
        "num_warps": config.warps,
        "num_stages": config.stages,
        **{name: value or config.join for name, value in flags.items()},
    }
    programs = len(tiles.table) * (shape.kv_heads if kind == "dkdv" else shape.heads)
    return Launch(table, (programs,), side, options)


@dataclass(frozen=True, slots=True, eq=False)
class TritonPrepared:
    """Segments cut into tiles, ready to run.

    Attributes:
        dtype: of out, dq, dk, dv.
        q_segments, k_segments: int32[n, 8], the segments in the order of their query rows and of their key rows.
        q_covered, k_covered: rows in a segment.
        launches: of every kind, one per Config in use.
    """

    shape: Shape
    dtype: torch.dtype
    q_segments: torch.Tensor
    k_segments: torch.Tensor
    q_covered: int
    k_covered: int
    launches: dict[Kind, list[Launch]]

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse), see `Prepared`."""
        rows, heads, _ = q.shape
        out = self._room(q, self.q_covered)
        lse = torch.empty(heads, rows, dtype=torch.float32, device=q.device)
        if rows != self.q_covered:
            lse.fill_(-math.inf)
        self.forward_into(q, k, v, out, lse)
        return out, lse

    def forward_into(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """See `Writer`."""
        from seqloom.attention.kernels.triton_blocks import run_kernel
        from seqloom.attention.kernels.triton_forward import forward_kernel

        q, k, v = _unit_stride(q, k, v)
        numbers = (*_strides(q, k, v, out), lse.stride(0))
        scale = self.shape.scale * math.log2(math.e)
        with _on(q.device):
            for launch in self.launches["forward"]:
                tensors = (q, k, v, out, lse, launch.tiles, self.q_segments)
                run_kernel(forward_kernel, launch.grid, *tensors, *numbers, *launch.numbers, scale, **launch.options)

    def backward(self, dout: torch.Tensor, saved: Saved) -> Gradients:
        """Return (dq, dk, dv), see `Prepared`."""
        covered = (self.q_covered, self.k_covered, self.k_covered)
        dq, dk, dv = map(self._room, saved[:3], covered)
        self.backward_into(dout, saved, (dq, dk, dv))
        return dq, dk, dv

    def backward_into(self, dout: torch.Tensor, saved: Saved, gradients: Gradients) -> None:
        """See `Writer`."""
        dout, q, k, v, out, lse = _unit_stride(dout, *saved)
        dq, dk, dv = gradients
        delta = torch.empty_strided(lse.shape, lse.stride(), dtype=torch.float32, device=q.device)
        self.queries_into(dout, q, k, v, out, lse, delta, dq)
        self.keys_into(dout, q, k, v, lse, delta, dk, dv)

    def queries_into(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        delta: torch.Tensor,
        dq: torch.Tensor,
    ) -> None:
        """Write dq and, with the shape and strides of lse, delta: the row sums of dout * out."""
        from seqloom.attention.kernels.triton_backward import dq_kernel
        from seqloom.attention.kernels.triton_blocks import run_kernel

        numbers = (*_strides(q, k, v, out, dout, dq), lse.stride(0))
        with _on(q.device):
            for launch in self.launches["dq"]:
                tensors = (q, k, v, out, dout, lse, delta, dq, launch.tiles, self.q_segments)
                run_kernel(
                    dq_kernel, launch.grid, *tensors, *numbers, *launch.numbers, self.shape.scale, **launch.options
                )

    def keys_into(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lse: torch.Tensor,
        delta: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
    ) -> None:
        """Write dk and dv."""
        from seqloom.attention.kernels.triton_backward import dkdv_kernel
        from seqloom.attention.kernels.triton_blocks import run_kernel

        numbers = (*_strides(q, k, v, dout, dk, dv), lse.stride(0))
        with _on(k.device):
            for launch in self.launches["dkdv"]:
                tensors = (q, k, v, dout, lse, delta, dk, dv, launch.tiles, self.k_segments)
                run_kernel(
                    dkdv_kernel, launch.grid, *tensors, *numbers, *launch.numbers, self.shape.scale, **launch.options
                )

    def _room(self, like: torch.Tensor, covered: int) -> torch.Tensor:
        """Return a buffer for results; rows in no segment are 0."""
        make: Callable[..., torch.Tensor] = torch.empty if len(like) == covered else torch.zeros
        return make(like.shape, dtype=self.dtype, device=like.device)


def _unit_stride(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors with a contiguous last axis."""
    return tuple(tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors)


def _strides(*tensors: torch.Tensor) -> list[tuple[int, int]]:
    """Return row and head stride of every tensor [rows, heads, dim]."""
    return [(tensor.stride(0), tensor.stride(1)) for tensor in tensors]


def _on(device: torch.device):
    """Make the device current, where there is a choice."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
