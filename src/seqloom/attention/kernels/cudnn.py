"""cuDNN's attention over a fixed grid of shapes: the fastest kernel on Hopper from short documents up.

It goes through cuDNN's own Python frontend rather than torch's operators: the frontend reads document lengths from
the GPU, so one plan serves every pack, and it writes into our buffers, so nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch

from seqloom.attention.kernels import cudnn_graphs as names
from seqloom.attention.kernels.cudnn_calls import KEY_TENSORS, Gaps, PlacedCall, Tensors
from seqloom.attention.kernels.cudnn_graphs import Graph, GraphCache, GraphKey
from seqloom.attention.kernels.cudnn_warm import Rehearsal
from seqloom.attention.kernels.grid import CallShape, all_shapes, plan_calls
from seqloom.attention.kernels.kernel import Ability, Gradients, Prepared, Saved, Shape
from seqloom.attention.segments import Segments

STREAMS = {False: 3, True: 2}
"""Packed calls run side by side, forward and backward: the end of one, when it no longer fills the GPU, overlaps the
next. Every stream of a backward needs scratch memory of its own."""


@dataclass(frozen=True, slots=True, eq=False)
class Cudnn:
    """cuDNN attention for bf16 and fp16 on Hopper and later: squares and segments without mask."""

    graphs: GraphCache = field(default_factory=GraphCache)
    streams: dict[int, list[torch.cuda.Stream]] = field(default_factory=dict)

    @property
    def ability(self) -> Ability:
        """What it can do."""
        return Ability(
            name="cudnn",
            devices=("cuda",),
            dtypes=(torch.bfloat16, torch.float16),
            max_dim=128,
            dim_multiple=8,
            windows=False,
            offsets=False,
            spills=True,
        )

    @staticmethod
    def available(device: torch.device) -> bool:
        """Say whether the frontend is installed and the GPU is one that reads document lengths (Hopper on)."""
        if device.type != "cuda" or find_spec("cudnn") is None:
            return False
        return torch.cuda.get_device_capability(device) >= (9, 0)

    def prepare(self, segments: Segments, shape: Shape) -> Prepared:
        """Lay the segments on the grid and upload where they lie."""
        calls = tuple(PlacedCall.of(call, segments, shape.device) for call in plan_calls(segments))
        q_gaps = Gaps.of(segments.q_start, segments.q_stop, shape.device)
        k_gaps = Gaps.of(segments.k_start, segments.k_stop, shape.device)
        return PreparedCudnn(self, shape, calls, q_gaps, k_gaps)

    def warm_up(
        self,
        shape: Shape,
        longest: int,
        *,
        tokens: int | None = None,
        strides: tuple[int, int, int] | None = None,
        report: Callable[[int, int], None] | None = None,
    ) -> int:
        """Build and load every graph that documents of up to `longest` tokens can reach.

        Args:
            shape: heads, width, dtype and device.
            longest: tokens of a document.
            tokens: of all documents of a call, at most; None: any number.
            strides: row strides of q, k and v in elements; contiguous tensors if left out.
            report: called as report(done, total) after every shape.

        Returns:
            Number of shapes.
        """
        contiguous = (shape.heads * shape.dim, shape.kv_heads * shape.dim, shape.kv_heads * shape.dim)
        keys = [graph_key(call, shape, strides or contiguous) for call in all_shapes(longest, tokens)]
        with torch.cuda.device(shape.device):
            rehearsal = Rehearsal(keys, shape.device)
            for done, key in enumerate(keys, 1):
                for backward in (False, True):
                    rehearsal.run(self.graphs, key, backward=backward)
                if report is not None:
                    report(done, len(keys))
            torch.cuda.synchronize()
        return len(keys)

    def side_streams(self, device: torch.device) -> list[torch.cuda.Stream]:
        """Return the streams of a device, made once."""
        index = torch.cuda.current_device() if device.index is None else device.index
        if index not in self.streams:
            self.streams[index] = [torch.cuda.Stream(index) for _ in range(max(STREAMS.values()))]
        return self.streams[index]


def graph_key(call: CallShape, shape: Shape, strides: tuple[int, int, int]) -> GraphKey:
    """Return the key of a call's graphs."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return GraphKey(call, shape.heads, shape.kv_heads, shape.dim, shape.dtype, shape.scale, strides, deterministic)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedCudnn:
    """Segments laid on the grid; `q_gaps` and `k_gaps` are the rows between and behind them."""

    kernel: Cudnn
    shape: Shape
    calls: tuple[PlacedCall, ...]
    q_gaps: Gaps
    k_gaps: Gaps

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse), see `Prepared`."""
        q, k, v = (_heads_together(tensor) for tensor in (q, k, v))
        out = q.new_empty(q.shape)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        tensors = {names.Q: q, names.K: k, names.V: v, names.OUT: out, names.LSE: lse}
        self._run(tensors, backward=False)
        self.q_gaps.fill(out, 0)
        self.q_gaps.fill(lse, -torch.inf)
        return out, lse.t().contiguous()

    def backward(self, dout: torch.Tensor, saved: Saved) -> Gradients:
        """Return (dq, dk, dv), see `Prepared`."""
        q, k, v, out, lse = saved
        q, k, v = (_heads_together(tensor) for tensor in (q, k, v))
        dq, dk, dv = (tensor.new_empty(tensor.shape) for tensor in (q, k, v))
        tensors = {names.Q: q, names.K: k, names.V: v, names.OUT: out.to(q.dtype).contiguous()}
        tensors |= {names.LSE: lse.t().contiguous(), names.DOUT: dout.contiguous()}
        tensors |= {names.DQ: dq, names.DK: dk, names.DV: dv}
        self._run(tensors, backward=True)
        self.q_gaps.fill(dq, 0)
        self.k_gaps.fill(dk, 0)
        self.k_gaps.fill(dv, 0)
        return dq, dk, dv

    def _run(self, tensors: Tensors, *, backward: bool) -> None:
        """Run dense calls one after the other (each may spill over the next one's rows), then the packed ones."""
        packed = [placed for placed in self.calls if placed.call.shape.packed]
        for placed in self.calls[: len(self.calls) - len(packed)]:
            self._dense(placed, tensors, backward)
        main = torch.cuda.current_stream(self.shape.device)
        lanes = min(STREAMS[backward], len(packed))
        streams = self.kernel.side_streams(self.shape.device)[:lanes] if lanes > 1 else [main]
        # Everything that a launch reads is made before the streams part.
        pointers = [placed.pointers(tensors) for placed in packed]
        scratch = [self._scratch(packed[lane :: len(streams)], tensors, backward) for lane in range(len(streams))]
        if lanes > 1:
            for stream in streams:
                stream.wait_stream(main)
        for number, placed in enumerate(packed):
            lane = number % len(streams)
            self._launch(placed, pointers[number], tensors, backward, scratch[lane], streams[lane])
        if lanes > 1:
            for stream in streams:
                main.wait_stream(stream)

    def _dense(self, placed: PlacedCall, tensors: Tensors, backward: bool) -> None:
        """Run one long document, rounded up into the rows behind it (or behind a copy, at the end of a buffer)."""
        q_row, k_row, queries, keys = placed.rows
        shape = placed.call.shape
        rows = {
            name: (k_row, shape.k_length, keys) if name in KEY_TENSORS else (q_row, shape.q_length, queries)
            for name in tensors
        }
        ends = any(row + length > len(tensors[name]) for name, (row, length, _) in rows.items())
        views = {}
        for name, (row, length, true) in rows.items():
            if name == names.LSE and backward:
                # A surplus row must have probability 0 for every key, whatever it holds.
                views[name] = torch.full((length, self.shape.heads), torch.inf, device=self.shape.device)
                views[name][:true] = tensors[name][row : row + true]
            elif ends:
                views[name] = _padded_copy(tensors[name], row, true, length)
            else:
                views[name] = tensors[name][row : row + length]
        scratch = self._scratch([placed], views, backward)
        pointers = {name: view.data_ptr() for name, view in views.items()}
        self._launch(placed, pointers, views, backward, scratch, torch.cuda.current_stream(self.shape.device))
        if ends:
            for name in (names.DQ, names.DK, names.DV) if backward else (names.OUT, names.LSE):
                row, _, true = rows[name]
                tensors[name][row : row + true] = views[name][:true]

    def _graph(self, placed: PlacedCall, tensors: Tensors, backward: bool) -> Graph:
        strides = (tensors[names.Q].stride(0), tensors[names.K].stride(0), tensors[names.V].stride(0))
        known = (strides, backward, torch.are_deterministic_algorithms_enabled())
        if known not in placed.graphs:
            key = graph_key(placed.call.shape, self.shape, strides)
            placed.graphs[known] = self.kernel.graphs.graph(key, backward=backward)
        return placed.graphs[known]

    def _scratch(self, calls: list[PlacedCall], tensors: Tensors, backward: bool) -> torch.Tensor:
        """Memory for calls that run one after the other."""
        size = max((self._graph(placed, tensors, backward).workspace for placed in calls), default=1)
        return torch.empty(size, dtype=torch.uint8, device=self.shape.device)

    def _launch(
        self,
        placed: PlacedCall,
        pointers: dict[int, int],
        tensors: Tensors,
        backward: bool,
        scratch: torch.Tensor,
        stream: torch.cuda.Stream,
    ) -> None:
        graph = self._graph(placed, tensors, backward)
        graph.run(pointers, scratch.data_ptr(), self.kernel.graphs.handle(stream))


def _heads_together(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy whose heads lie one after the other."""
    together = tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2]
    return tensor if together else tensor.contiguous()


def _padded_copy(tensor: torch.Tensor, row: int, true: int, length: int) -> torch.Tensor:
    """Copy `true` rows and add zero rows up to `length`, with the row stride kept."""
    stride = tensor.stride(0)
    copy = tensor.new_zeros(length * stride)
    copy = copy.as_strided((length, *tensor.shape[1:]), tensor.stride())
    copy[:true] = tensor[row : row + true]
    return copy
