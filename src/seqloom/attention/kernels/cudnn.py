"""cuDNN's attention on a fixed set of shapes: the fastest kernel on Hopper from short documents up.

cuDNN builds an execution plan for every new shape, about 0.1 s each time, and lengths in training are almost always
new. So lengths are rounded up to a few classes, and a warm-up builds all of them before the first step:

    packed   documents of one octave (513..1024 tokens, say) in one call, true lengths read from the GPU: exact, and
             nothing is computed for the surplus. Missing documents of a call have length 0.
    dense    one long document, rounded up by at most 2 % into the tokens that follow it: under a causal mask these
             come later, so its own rows do not see them, and the surplus rows are thrown away. About 5 % faster than
             packed where a document is long.

Calls go through cuDNN's own Python frontend rather than torch's operators: the frontend reads document lengths from the
GPU, so one plan serves every pack, and it writes into our buffers, so nothing is copied.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from seqloom.attention.kernels.interface import (
    AttentionShape,
    Capabilities,
    Gradients,
    KernelBuild,
    KernelUse,
    PreparedAttention,
    RowStrides,
    Saved,
    device_rows,
)
from seqloom.attention.masks import Segments
from seqloom.dist.rows import on_device

OCTAVES = tuple(128 << k for k in range(18))
"""Longest document of every packed class, tokens: 128 to 16M."""
DENSE_FROM, DENSE_TO, DENSE_STEP = 16_384, 131_072, 1.02
EXACT_FROM = 8_192
TILE_FROM = 4_096
MAX_BATCH = 512
MAX_PACKED_TOKENS = 1 << 18
"""Documents of a packed call times its class: bounds cuDNN's scratch memory, which is that of the padded batch."""
MAX_GRAPHS = 4_096
"""That a process keeps: all that ten kinds of heads and strides need."""
STREAMS = {False: 3, True: 2}
"""CUDA streams for the packed calls of a forward (False) and a backward (True): the end of one call, when it no longer
fills the GPU, overlaps the next. Every stream of a backward needs scratch memory of its own."""

Q, K, V, OUT, LSE, DOUT, DQ, DK, DV = range(1, 10)
"""Uids of tensors in a graph."""
LENGTH_Q, LENGTH_K = 20, 21
ROW_OFFSETS = 30
"""ROW_OFFSETS + uid: where each document's rows begin in that tensor, in elements."""
KEY_TENSORS = (K, V, DK, DV)
FORWARD_TENSORS = (Q, K, V, OUT, LSE)
BACKWARD_TENSORS = (*FORWARD_TENSORS, DOUT, DQ, DK, DV)

Tensors = dict[int, torch.Tensor]
"""Tensors [rows, heads, dim] (log-sum-exp: [rows, heads]) by uid."""


# -- shapes: which calls a set of segments becomes --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, order=True)
class CallShape:
    """Shape of a cuDNN call.

    Attributes:
        batch: documents.
        q_length, k_length: longest query and key part, tokens.
        causal: a square under a causal mask; otherwise no mask.
        packed: lengths are read from the GPU.
    """

    batch: int
    q_length: int
    k_length: int
    causal: bool
    packed: bool


@dataclass(frozen=True, slots=True)
class Call:
    """A shape and the segments (indices into `Segments`) it computes, at most `shape.batch` of them."""

    shape: CallShape
    segments: np.ndarray


def dense_lengths() -> tuple[int, ...]:
    """Return lengths of the dense classes, multiples of 128 tokens, each at most `DENSE_STEP` above the last."""
    lengths = [DENSE_FROM]
    while lengths[-1] < DENSE_TO:
        grown = int(lengths[-1] * DENSE_STEP) // 128 * 128
        lengths.append(min(max(grown, lengths[-1] + 128), DENSE_TO))
    return tuple(lengths)


def all_shapes(longest: int, tokens: int | None = None) -> list[CallShape]:
    """Return every shape that documents of up to `longest` tokens, `tokens` in all, can need: what a warm-up builds."""
    lengths = (EXACT_FROM, *dense_lengths())
    dense = [CallShape(1, length, length, causal=True, packed=False) for length in lengths]
    packed = [
        CallShape(batch, octave, octave, causal=True, packed=True) for octave in OCTAVES for batch in _batches(octave)
    ]
    longest = longest if tokens is None else min(longest, tokens)
    reached = [shape for shape in dense + packed if shape.q_length < 2 * max(longest, OCTAVES[0])]
    return reached if tokens is None else [shape for shape in reached if _fewest_tokens(shape) <= tokens]


def _fewest_tokens(shape: CallShape) -> int:
    """Tokens that a call has at least: its batch is more than half full, of documents beyond the octave below."""
    shortest = shape.q_length // 2 + 1 if shape.q_length > OCTAVES[0] else 1
    return (shape.batch // 2 + 1) * shortest if shape.packed else 1


def plan_calls(segments: Segments) -> list[Call]:
    """Assign segments (squares, or unmasked) to calls: dense ones first, in row order, then packed ones.

    A dense call also writes the surplus rows behind its document; whatever owns these rows must run after it. Where
    keys lie in another order than queries, no order is right for both, and only calls without surplus are dense.
    """
    causal = segments.causal & (segments.offset == 0) & (segments.q_len == segments.k_len)
    dense = _dense_lengths_of(segments, causal)
    order = np.argsort(segments.q_start, kind="stable")
    if np.any(np.diff(segments.k_start[order]) < 0):
        dense[dense[:, 0] > segments.q_len] = 0
    calls = [
        Call(CallShape(1, *dense[index].tolist(), causal=bool(causal[index]), packed=False), np.array([index]))
        for index in order[dense[order, 0] > 0]
    ]
    return calls + list(_packed_calls(segments, causal, order[dense[order, 0] == 0]))


def _dense_lengths_of(segments: Segments, causal: np.ndarray) -> np.ndarray:
    """Query and key length of the dense class of every segment, int64[n, 2], 0 where it is packed.

    An unmasked segment must have exactly its keys, so it is dense only where its lengths are powers of two, as the
    chunks of documents are that were cut at a context length. A square of such a chunk is dense from `EXACT_FROM`.
    """
    found = np.zeros((len(segments), 2), dtype=np.int64)
    q_len, k_len = segments.q_len, segments.k_len
    classes = np.array(dense_lengths())
    long = causal & (q_len >= DENSE_FROM) & (q_len <= DENSE_TO)
    found[long] = classes[np.searchsorted(classes, q_len[long])][:, None]
    found[causal & (q_len == EXACT_FROM)] = EXACT_FROM
    exact = ~causal & (q_len & (q_len - 1) == 0) & (k_len & (k_len - 1) == 0) & (np.minimum(q_len, k_len) >= TILE_FROM)
    found[exact] = np.stack([q_len[exact], k_len[exact]], axis=1)
    return found


def _packed_calls(segments: Segments, causal: np.ndarray, members: np.ndarray) -> Iterator[Call]:
    """Group segments by mask and octave, then cut each group into calls of a legal batch."""
    octaves = np.array(OCTAVES)
    columns = (causal, *(octaves[np.searchsorted(octaves, size)] for size in (segments.q_len, segments.k_len)))
    kinds = np.stack(columns, axis=1)[members]
    for kind in sorted({tuple(row) for row in kinds.tolist()}, key=lambda kind: (-kind[1] * kind[2], kind)):
        same = members[(kinds == kind).all(axis=1)]
        for part in _split_batches(same, _batches(max(kind[1:]))[-1]):
            batch = 1 << (len(part) - 1).bit_length()
            yield Call(CallShape(batch, kind[1], kind[2], causal=bool(kind[0]), packed=True), part)


def _split_batches(members: np.ndarray, largest: int) -> Iterator[np.ndarray]:
    """Cut into parts that nearly fill a batch: a missing document still costs the launch of its blocks."""
    while len(members):
        batch = min(largest, 1 << (len(members) - 1).bit_length())
        if 4 * len(members) < 3 * batch:
            batch //= 2
        yield members[:batch]
        members = members[batch:]


def _batches(octave: int) -> list[int]:
    """Batches of a packed class: powers of two."""
    largest = min(MAX_BATCH, max(1, MAX_PACKED_TOKENS // octave))
    return [1 << k for k in range(largest.bit_length())]


# -- graphs: cuDNN's execution plans, built once per shape, run on raw pointers ---------------------------------------


@dataclass(frozen=True, slots=True)
class GraphKey:
    """Everything a graph depends on. Strides are between rows, in elements; heads lie `dim` apart.

    Attributes:
        strides: row strides of q, k, v. Outputs, their gradients and the log-sum-exp are contiguous.
        deterministic: the backward gives the same bits every time, at about 15 % of its speed.
    """

    call: CallShape
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    scale: float
    strides: RowStrides
    deterministic: bool = False

    @classmethod
    def of(cls, call: CallShape, shape: AttentionShape, strides: RowStrides) -> GraphKey:
        """Return the key of a call on tensors of this shape."""
        deterministic = torch.are_deterministic_algorithms_enabled()
        return cls(call, shape.heads, shape.kv_heads, shape.dim, shape.dtype, shape.scale, strides, deterministic)

    def stride(self, uid: int) -> int:
        """Return the elements from one row to the next of a tensor."""
        if uid in (Q, K, V):
            return self.strides[uid - Q]
        if uid == LSE:
            return self.heads
        return (self.kv_heads if uid in (DK, DV) else self.heads) * self.dim

    @property
    def largest_tensor_bytes(self) -> int:
        """Memory of the largest tensor; one row where documents have no tokens (packed)."""
        rows = 1 if self.call.packed else max(self.call.q_length, self.call.k_length)
        return rows * max(*self.strides, self.heads * self.dim, 2 * self.heads) * self.dtype.itemsize


class Graph:
    """A built cuDNN graph: one pass, forward or backward, for one key."""

    def __init__(self, key: GraphKey, *, backward: bool, handle: Any) -> None:
        """Build and compile; takes about 50 ms."""
        import cudnn

        self._cudnn, self._key = cudnn, key
        kind = cudnn.data_type.BFLOAT16 if key.dtype == torch.bfloat16 else cudnn.data_type.HALF
        self._graph = cudnn.pygraph(
            io_data_type=kind,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=handle,
        )
        (self._backward if backward else self._forward)()
        self._graph.validate()
        self._graph.build_operation_graph()
        self._graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        self._graph.check_support()
        self._graph.build_plans()

    @cached_property
    def workspace(self) -> int:
        """Bytes of scratch memory that a run needs."""
        return max(1, self._graph.get_workspace_size())

    def run(self, pointers: dict[int, int], workspace: int, handle: Any) -> None:
        """Launch on the handle's stream. `pointers` has the address of every tensor by uid."""
        self._graph.execute(pointers, workspace, handle)

    def _forward(self) -> None:
        q, k, v = (self._input(uid) for uid in (Q, K, V))
        out, lse = self._graph.sdpa(name="sdpa", q=q, k=k, v=v, generate_stats=True, **self._options())
        self._set_output(out, OUT)
        self._set_output(lse, LSE)

    def _backward(self) -> None:
        uids = {"q": Q, "k": K, "v": V, "o": OUT, "dO": DOUT, "stats": LSE}
        inputs = {argument: self._input(uid) for argument, uid in uids.items()}
        gradients = self._graph.sdpa_backward(
            name="sdpa_backward",
            use_deterministic_algorithm=self._key.deterministic,
            **inputs,
            **self._options(),
        )
        for tensor, uid in zip(gradients, (DQ, DK, DV), strict=True):
            self._set_output(tensor, uid)

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"attn_scale": self._key.scale, "use_causal_mask": self._key.call.causal}
        if self._key.call.packed:
            lengths = {"seq_len_q": LENGTH_Q, "seq_len_kv": LENGTH_K}
            options |= {name: self._index(uid, self._key.call.batch, 32) for name, uid in lengths.items()}
            options["use_padding_mask"] = True
        return options

    def _layout(self, uid: int) -> tuple[list[int], list[int]]:
        """Return dimensions and strides as cuDNN wants them: batch, heads, rows, width."""
        key, call = self._key, self._key.call
        heads, rows = (key.kv_heads, call.k_length) if uid in KEY_TENSORS else (key.heads, call.q_length)
        width = 1 if uid == LSE else key.dim
        stride = key.stride(uid)
        return [call.batch, heads, rows, width], [rows * stride, width, stride, 1]

    def _input(self, uid: int) -> Any:
        dim, stride = self._layout(uid)
        options = {"data_type": self._cudnn.data_type.FLOAT} if uid == LSE else {}
        tensor = self._graph.tensor(name=f"t{uid}", dim=dim, stride=stride, uid=uid, **options)
        return self._set_row_offsets(tensor, uid)

    def _set_output(self, tensor: Any, uid: int) -> None:
        dim, stride = self._layout(uid)
        tensor.set_output(True).set_dim(dim).set_stride(stride).set_uid(uid)
        if uid == LSE:
            tensor.set_data_type(self._cudnn.data_type.FLOAT)
        self._set_row_offsets(tensor, uid)

    def _set_row_offsets(self, tensor: Any, uid: int) -> Any:
        if self._key.call.packed:
            tensor.set_ragged_offset(self._index(ROW_OFFSETS + uid, self._key.call.batch + 1, 64))
        return tensor

    def _index(self, uid: int, count: int, bits: int) -> Any:
        kind = self._cudnn.data_type.INT32 if bits == 32 else self._cudnn.data_type.INT64
        shape, stride = [count, 1, 1, 1], [1, 1, 1, 1]
        return self._graph.tensor(name=f"i{uid}", dim=shape, stride=stride, data_type=kind, uid=uid)


class GraphCache:
    """Graphs by key, shared by all threads; handles by thread and stream (a handle belongs to one of each).

    It has `MAX_GRAPHS` at most: a new one drops the one that was asked for longest ago.
    """

    def __init__(self) -> None:
        self._graphs: OrderedDict[tuple[GraphKey, bool], Graph] = OrderedDict()
        self._lock = threading.Lock()
        self._local = threading.local()

    def __len__(self) -> int:
        return len(self._graphs)

    def graph(self, key: GraphKey, *, backward: bool) -> Graph:
        """Return the graph of a key, building it the first time."""
        with self._lock:
            found = self._graphs.get((key, backward))
            if found is None:
                found = Graph(key, backward=backward, handle=self.handle(torch.cuda.current_stream()))
                self._graphs[key, backward] = found
                if len(self._graphs) > MAX_GRAPHS:
                    self._graphs.popitem(last=False)
            self._graphs.move_to_end((key, backward))
        return found

    def handle(self, stream: torch.cuda.Stream) -> Any:
        """Return this thread's cuDNN handle for a stream."""
        handles = self._local.__dict__.setdefault("handles", {})
        key = (stream.device_index, stream.cuda_stream)
        if key not in handles:
            import cudnn

            with torch.cuda.device(stream.device_index):
                handles[key] = cudnn.create_handle()
            cudnn.set_stream(handle=handles[key], stream=stream.cuda_stream)
        return handles[key]


class GraphWarmUp:
    """Memory to run graphs in for their first time, results unused: all tensors of a graph lie on top of each other.

    Building a graph compiles its kernel; the first launch loads it, which blocks the host for 2 to 6 ms. A pack of new
    lengths needs a dozen such graphs, enough to leave the GPU idle. So a warm-up also runs every graph once: packed
    ones over documents of no tokens, dense ones in full, which the GPU does while the host builds the next graph.
    """

    def __init__(self, keys: Sequence[GraphKey], device: torch.device) -> None:
        """Take the graphs; the first run reserves what the largest reads and writes, scratch memory comes on top."""
        self._keys, self._device = keys, device

    def run(self, graphs: GraphCache, key: GraphKey) -> None:
        """Build both passes of a key and launch them on the current stream, without waiting for them."""
        with torch.cuda.device(self._device):
            for backward in (False, True):
                self._run(graphs, key, backward=backward)

    @cached_property
    def _tensors(self) -> torch.Tensor:
        size = max(key.largest_tensor_bytes for key in self._keys)
        return torch.zeros(size, dtype=torch.uint8, device=self._device)

    @cached_property
    def _zeros(self) -> torch.Tensor:
        documents = 1 + max(key.call.batch for key in self._keys)
        return torch.zeros(documents, dtype=torch.int64, device=self._device)

    def _run(self, graphs: GraphCache, key: GraphKey, *, backward: bool) -> None:
        graph = graphs.graph(key, backward=backward)
        pointers = {uid: self._tensors.data_ptr() for uid in (BACKWARD_TENSORS if backward else FORWARD_TENSORS)}
        if key.call.packed:
            index = (*(ROW_OFFSETS + uid for uid in pointers), LENGTH_Q, LENGTH_K)
            pointers |= {uid: self._zeros.data_ptr() for uid in index}
        scratch = torch.empty(graph.workspace, dtype=torch.uint8, device=self._device)
        graph.run(pointers, scratch.data_ptr(), graphs.handle(torch.cuda.current_stream(self._device)))


# -- rows: where the documents of a call lie --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class PlacedCall:
    """A call with the rows of its documents.

    Attributes:
        rows: first (query row, key row) and lengths of a dense call's only segment.
        q_rows, k_rows: int64[batch + 1] on the GPU, where documents begin in the query and the key buffer.
        q_lengths, k_lengths: int32[batch] on the GPU.
        offsets: q_rows or k_rows in elements of a tensor with a given row stride, computed on demand.
        graphs: by strides and pass, so that a call finds its graph without hashing all of its key.
    """

    call: Call
    rows: tuple[int, int, int, int]
    q_rows: torch.Tensor
    k_rows: torch.Tensor
    q_lengths: torch.Tensor
    k_lengths: torch.Tensor
    offsets: dict[tuple[bool, int], torch.Tensor] = field(default_factory=dict)
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

    def pointers(self, tensors: Tensors) -> dict[int, int]:
        """Return the addresses that a packed call needs, by uid."""
        found = {uid: tensor.data_ptr() for uid, tensor in tensors.items()}
        for uid, tensor in tensors.items():
            keys, stride = uid in KEY_TENSORS, tensor.stride(0)
            if (keys, stride) not in self.offsets:
                self.offsets[keys, stride] = (self.k_rows if keys else self.q_rows) * stride
            found[ROW_OFFSETS + uid] = self.offsets[keys, stride].data_ptr()
        found[LENGTH_Q] = self.q_lengths.data_ptr()
        found[LENGTH_K] = self.k_lengths.data_ptr()
        return found


@dataclass(frozen=True, slots=True, eq=False)
class UncoveredRows:
    """Rows of a buffer that no segment holds.

    Attributes:
        between: rows between segments, on the device where they are not one run; None without any.
        end: where the rows behind the last segment begin.
    """

    between: slice | torch.Tensor | None
    end: int

    @classmethod
    def of(cls, start: np.ndarray, stop: np.ndarray, device: torch.device) -> UncoveredRows:
        """Return the rows that intervals leave out."""
        order = np.argsort(start)
        begins, ends = np.concatenate([[0], stop[order][:-1]]), start[order]
        gaps = begins < ends
        between = device_rows(begins[gaps], ends[gaps], device) if gaps.any() else None
        return cls(between, int(stop.max()))

    def fill(self, tensor: torch.Tensor, value: float) -> None:
        """Write a value into these rows of a tensor: a launch or two, however many gaps there are."""
        if isinstance(self.between, torch.Tensor):
            tensor.index_fill_(0, self.between, value)
        elif self.between is not None:
            tensor[self.between] = value
        if self.end < len(tensor):
            tensor[self.end :] = value


# -- the kernel -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Cudnn:
    """cuDNN attention for bf16 and fp16 on Hopper and later: squares and unmasked segments."""

    graphs: GraphCache = field(default_factory=GraphCache)
    streams: dict[int, list[torch.cuda.Stream]] = field(default_factory=dict)

    capabilities = Capabilities(
        name="cudnn",
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        max_dim=128,
        dim_multiple=8,
        windows=False,
        offsets=False,
        overwrites=True,
    )

    @staticmethod
    def available(device: torch.device) -> bool:
        """Return whether the frontend is installed and the GPU reads document lengths (Hopper on)."""
        if device.type != "cuda" or find_spec("cudnn") is None:
            return False
        return torch.cuda.get_device_capability(device) >= (9, 0)

    def prepare(self, segments: Segments, shape: AttentionShape) -> PreparedAttention:
        """Assign the segments to calls and upload their rows."""
        calls = tuple(PlacedCall.of(call, segments, shape.device) for call in plan_calls(segments))
        q_uncovered = UncoveredRows.of(segments.q_start, segments.q_stop, shape.device)
        k_uncovered = UncoveredRows.of(segments.k_start, segments.k_stop, shape.device)
        return PreparedCudnn(self, shape, calls, q_uncovered, k_uncovered)

    def builds(self, shape: AttentionShape, use: KernelUse) -> list[KernelBuild]:
        """Build and run every graph that documents of up to `longest` tokens can need, see `SupportsBuilds`."""
        calls = all_shapes(min(use.longest, use.window or use.longest), use.tokens)  # a window that hides nothing
        keys = [GraphKey.of(call, shape, each) for each in use.strides or (shape.contiguous_strides,) for call in calls]
        memory = GraphWarmUp(keys, shape.device)
        return [KernelBuild(partial(memory.run, self.graphs, key), cached=False) for key in keys]

    def side_streams(self, device: torch.device) -> list[torch.cuda.Stream]:
        """Return the side streams of a device, created once."""
        index = torch.cuda.current_device() if device.index is None else device.index
        if index not in self.streams:
            self.streams[index] = [torch.cuda.Stream(index) for _ in range(max(STREAMS.values()))]
        return self.streams[index]


@dataclass(frozen=True, slots=True, eq=False)
class PreparedCudnn:
    """Calls of segments; `q_uncovered` and `k_uncovered` are the rows between and behind the segments."""

    kernel: Cudnn
    shape: AttentionShape
    calls: tuple[PlacedCall, ...]
    q_uncovered: UncoveredRows
    k_uncovered: UncoveredRows

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse)."""
        q, k, v = (_heads_contiguous(tensor) for tensor in (q, k, v))
        out = q.new_empty(q.shape)
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        self._run({Q: q, K: k, V: v, OUT: out, LSE: lse}, backward=False)
        self.q_uncovered.fill(out, 0)
        self.q_uncovered.fill(lse, -torch.inf)
        return out, lse.t().contiguous()

    def backward(self, dout: torch.Tensor, saved: Saved) -> Gradients:
        """Return (dq, dk, dv)."""
        q, k, v = (_heads_contiguous(tensor) for tensor in saved[:3])
        dq, dk, dv = (tensor.new_empty(tensor.shape) for tensor in (q, k, v))
        tensors = {Q: q, K: k, V: v, OUT: saved.out.to(q.dtype).contiguous(), LSE: saved.lse.t().contiguous()}
        self._run({**tensors, DOUT: dout.contiguous(), DQ: dq, DK: dk, DV: dv}, backward=True)
        self.q_uncovered.fill(dq, 0)
        self.k_uncovered.fill(dk, 0)
        self.k_uncovered.fill(dv, 0)
        return dq, dk, dv

    def _run(self, tensors: Tensors, *, backward: bool) -> None:
        """Run dense calls one after the other (each may overwrite the next one's rows), then the packed ones."""
        packed = [placed for placed in self.calls if placed.call.shape.packed]
        for placed in self.calls[: len(self.calls) - len(packed)]:
            self._run_dense(placed, tensors, backward)
        main = torch.cuda.current_stream(self.shape.device)
        count = min(STREAMS[backward], len(packed))
        streams = self.kernel.side_streams(self.shape.device)[:count] if count > 1 else [main]
        # Everything that a launch reads is made before the streams part.
        pointers = [placed.pointers(tensors) for placed in packed]
        scratch = [self._scratch(packed[n :: len(streams)], tensors, backward) for n in range(len(streams))]
        if count > 1:
            for stream in streams:
                stream.wait_stream(main)
        for number, placed in enumerate(packed):
            n = number % len(streams)
            self._launch(placed, pointers[number], tensors, backward, scratch[n], streams[n])
        if count > 1:
            for stream in streams:
                main.wait_stream(stream)

    def _run_dense(self, placed: PlacedCall, tensors: Tensors, backward: bool) -> None:
        """Run one long document, rounded up into the rows behind it (or behind a copy, at the end of a buffer)."""
        q_row, k_row, queries, keys = placed.rows
        shape = placed.call.shape
        rows = {
            uid: (k_row, shape.k_length, keys) if uid in KEY_TENSORS else (q_row, shape.q_length, queries)
            for uid in tensors
        }
        past_end = any(row + length > len(tensors[uid]) for uid, (row, length, _) in rows.items())
        views = {}
        for uid, (row, length, true) in rows.items():
            if uid == LSE and backward:
                # A surplus row must have probability 0 for every key, whatever it holds.
                views[uid] = torch.full((length, self.shape.heads), torch.inf, device=self.shape.device)
                views[uid][:true] = tensors[uid][row : row + true]
            elif past_end:
                views[uid] = _padded_copy(tensors[uid], row, true, length)
            else:
                views[uid] = tensors[uid][row : row + length]
        scratch = self._scratch([placed], views, backward)
        pointers = {uid: view.data_ptr() for uid, view in views.items()}
        self._launch(placed, pointers, views, backward, scratch, torch.cuda.current_stream(self.shape.device))
        if past_end:
            for uid in (DQ, DK, DV) if backward else (OUT, LSE):
                row, _, true = rows[uid]
                tensors[uid][row : row + true] = views[uid][:true]

    def _graph(self, placed: PlacedCall, tensors: Tensors, backward: bool) -> Graph:
        strides = (tensors[Q].stride(0), tensors[K].stride(0), tensors[V].stride(0))
        known = (strides, backward, torch.are_deterministic_algorithms_enabled())
        if known not in placed.graphs:
            key = GraphKey.of(placed.call.shape, self.shape, strides)
            placed.graphs[known] = self.kernel.graphs.graph(key, backward=backward)
        return placed.graphs[known]

    def _scratch(self, calls: list[PlacedCall], tensors: Tensors, backward: bool) -> torch.Tensor:
        """Return scratch memory for calls that run one after the other."""
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


def _heads_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy whose heads lie one after the other."""
    return tensor if tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2] else tensor.contiguous()


def _padded_copy(tensor: torch.Tensor, row: int, true: int, length: int) -> torch.Tensor:
    """Copy `true` rows and add zero rows up to `length`, with the row stride kept."""
    copy = tensor.new_zeros(length * tensor.stride(0)).as_strided((length, *tensor.shape[1:]), tensor.stride())
    copy[:true] = tensor[row : row + true]
    return copy
