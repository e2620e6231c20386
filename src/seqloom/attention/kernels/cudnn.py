"""A cuDNN call and where its documents lie: addresses of rows, and lengths, on the GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

import numpy as np
import torch

from seqloom.attention.kernels import cudnn_graphs as names
from seqloom.attention.kernels.cudnn_graphs import Call, CallShape, Graph, GraphCache, GraphKey, all_shapes, plan_calls
from seqloom.attention.kernels.interface import Ability, AttentionShape, Gradients, Prepared, Saved, rows_of
from seqloom.attention.masks import Segments
from seqloom.dist.rows import on_device

KEY_TENSORS = (names.K, names.V, names.DK, names.DV)

Tensors = dict[int, torch.Tensor]
"""Tensors [rows, heads, dim] (log-sum-exp: [rows, heads]) by their name in a graph."""


@dataclass(frozen=True, slots=True, eq=False)
class PlacedCall:
    """A call and where its documents lie.

    Attributes:
        rows: first (query row, key row) and lengths of a dense call's only segment.
        q_rows, k_rows: int64[batch + 1] on the GPU, where documents begin in the query and the key buffer.
        q_lengths, k_lengths: int32[batch] on the GPU.
        scaled: q_rows or k_rows in elements of a tensor with a given row stride, made on demand.
        graphs: by strides and pass, so that a call finds its graph without hashing all of its key.
    """

    call: Call
    rows: tuple[int, int, int, int]
    q_rows: torch.Tensor
    k_rows: torch.Tensor
    q_lengths: torch.Tensor
    k_lengths: torch.Tensor
    scaled: dict[tuple[bool, int], torch.Tensor] = field(default_factory=dict)
    graphs: dict[tuple, Graph] = field(default_factory=dict)

    @classmethod
    def of(cls, call: Call, segments: Segments, device: torch.device) -> PlacedCall:
        """Upload the rows and lengths of a call; missing documents have length 0."""
        chosen = segments.select(call.segments)
        spare = call.shape.batch - len(chosen)
        columns = []
        for start, stop in ((chosen.q_start, chosen.q_stop), (chosen.k_start, chosen.k_stop)):
            begins = np.concatenate([start, np.repeat(stop[-1:], spare + 1)])
            lengths = np.concatenate([stop - start, np.zeros(spare, dtype=np.int64)])
            columns.append((on_device(begins, device), on_device(lengths.astype(np.int32), device)))
        (q_rows, q_lengths), (k_rows, k_lengths) = columns
        q_start, q_stop, k_start, k_stop, _ = next(chosen.rows())
        rows = (q_start, k_start, q_stop - q_start, k_stop - k_start)
        return cls(call, rows, q_rows, k_rows, q_lengths, k_lengths)

    def begins(self, keys: bool, stride: int) -> int:
        """Return the address of the rows' begins in elements of a tensor with this row stride."""
        if (keys, stride) not in self.scaled:
            self.scaled[keys, stride] = (self.k_rows if keys else self.q_rows) * stride
        return self.scaled[keys, stride].data_ptr()

    def pointers(self, tensors: Tensors) -> dict[int, int]:
        """Return the addresses that a packed call needs."""
        found = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            found[names.ROWS + name] = self.begins(name in KEY_TENSORS, tensor.stride(0))
        found[names.LENGTH_Q] = self.q_lengths.data_ptr()
        found[names.LENGTH_K] = self.k_lengths.data_ptr()
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Gaps:
    """The rows of a buffer that no segment holds.

    Attributes:
        between: rows between segments, on the device where they are not one run; None without any.
        end: where the rows behind the last segment begin.
    """

    between: slice | torch.Tensor | None
    end: int

    @classmethod
    def of(cls, start: np.ndarray, stop: np.ndarray, device: torch.device) -> Gaps:
        """Find what intervals of rows leave out."""
        order = np.argsort(start)
        begins, ends = np.concatenate([[0], stop[order][:-1]]), start[order]
        apart = begins < ends
        between = rows_of(begins[apart], ends[apart], device) if apart.any() else None
        return cls(between, int(stop.max()))

    def fill(self, tensor: torch.Tensor, value: float) -> None:
        """Write a value into these rows of a tensor: a launch or two, however many gaps there are."""
        if isinstance(self.between, torch.Tensor):
            tensor.index_fill_(0, self.between, value)
        elif self.between is not None:
            tensor[self.between] = value
        if self.end < len(tensor):
            tensor[self.end :] = value


# ---- merged: attention.kernels.cudnn_warm
# The first run of a graph, before the first step needs it.
#
# Building a graph compiles its kernel; the first launch loads it, which holds up the host for 2 to 6 ms. A pack of
# new
# lengths meets a dozen such graphs, enough to leave the GPU idle. So a warm-up also runs every graph once: packed
# ones
# over documents of no tokens, dense ones in full, which the GPU does while the host builds the next graph.


FORWARD = (names.Q, names.K, names.V, names.OUT, names.LSE)
BACKWARD = (*FORWARD, names.DOUT, names.DQ, names.DK, names.DV)


class Rehearsal:
    """Memory to run graphs in when nobody wants the result: all tensors of a graph lie on top of each other."""

    def __init__(self, keys: Sequence[GraphKey], device: torch.device) -> None:
        """Reserve what the largest graph reads and writes; scratch memory comes on top, as in any run."""
        bytes_needed = max(_elements(key) * key.dtype.itemsize for key in keys)
        documents = 1 + max(key.call.batch for key in keys)
        self._tensors = torch.zeros(bytes_needed, dtype=torch.uint8, device=device)
        self._zeros = torch.zeros(documents, dtype=torch.int64, device=device)

    def run(self, graphs: GraphCache, key: GraphKey, *, backward: bool) -> None:
        """Build a graph and launch it on the current stream, without waiting for it."""
        graph = graphs.graph(key, backward=backward)
        pointers = {name: self._tensors.data_ptr() for name in (BACKWARD if backward else FORWARD)}
        if key.call.packed:
            index = (*(names.ROWS + name for name in pointers), names.LENGTH_Q, names.LENGTH_K)
            pointers |= {name: self._zeros.data_ptr() for name in index}
        scratch = torch.empty(graph.workspace, dtype=torch.uint8, device=self._tensors.device)
        graph.run(pointers, scratch.data_ptr(), graphs.handle(torch.cuda.current_stream(self._tensors.device)))


def _elements(key: GraphKey) -> int:
    """Elements of the largest tensor of a graph; one row where documents have no tokens."""
    rows = 1 if key.call.packed else max(key.call.q_length, key.call.k_length)
    return rows * max(*key.strides, key.heads * key.dim, 2 * key.heads)


# ---- merged: attention.kernels.cudnn
# cuDNN's attention over a fixed grid of shapes: the fastest kernel on Hopper from short documents up.
#
# It goes through cuDNN's own Python frontend rather than torch's operators: the frontend reads document lengths
# from
# the GPU, so one plan serves every pack, and it writes into our buffers, so nothing is copied.


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

    def prepare(self, segments: Segments, shape: AttentionShape) -> Prepared:
        """Lay the segments on the grid and upload where they lie."""
        calls = tuple(PlacedCall.of(call, segments, shape.device) for call in plan_calls(segments))
        q_gaps = Gaps.of(segments.q_start, segments.q_stop, shape.device)
        k_gaps = Gaps.of(segments.k_start, segments.k_stop, shape.device)
        return PreparedCudnn(self, shape, calls, q_gaps, k_gaps)

    def warm_up(
        self,
        shape: AttentionShape,
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


def graph_key(call: CallShape, shape: AttentionShape, strides: tuple[int, int, int]) -> GraphKey:
    """Return the key of a call's graphs."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    return GraphKey(call, shape.heads, shape.kv_heads, shape.dim, shape.dtype, shape.scale, strides, deterministic)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedCudnn:
    """Segments laid on the grid; `q_gaps` and `k_gaps` are the rows between and behind them."""

    kernel: Cudnn
    shape: AttentionShape
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
