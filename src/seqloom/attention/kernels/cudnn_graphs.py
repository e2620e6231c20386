"""The fixed grid of shapes that may reach cuDNN, and how segments are laid on it.

cuDNN builds a plan for every new shape, about 0.1 s each time, and lengths in training are almost always new. So
lengths are rounded up to a few classes, all of which can be built before the first step. There are two ways up:

    packed   documents of one octave (513..1024 tokens, say) in one call, true lengths read from the GPU: exact, and
             nothing is computed for the surplus. Missing documents of a call have length 0.
    dense    one long document, rounded up by at most 2 % into the tokens that follow it: under a causal mask these
             come later, so its own rows do not see them, and the surplus rows are thrown away. About 5 % faster than
             packed where a document is long.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from seqloom.attention.masks import Segments

OCTAVES = tuple(128 << k for k in range(18))
"""Longest document of every packed class, tokens: 128 to 16M."""
DENSE_FROM, DENSE_TO, DENSE_STEP = 16_384, 131_072, 1.02
EXACT_FROM = 8_192
TILE_FROM = 4_096
MAX_BATCH = 512
MAX_PACKED_TOKENS = 1 << 18
"""Documents of a packed call times its class: bounds cuDNN's scratch memory, which is that of the padded batch."""


@dataclass(frozen=True, slots=True, order=True)
class CallShape:
    """What a call looks like to cuDNN.

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
    """Lengths of the dense classes, multiples of 128 tokens, each at most `DENSE_STEP` above the last."""
    lengths = [DENSE_FROM]
    while lengths[-1] < DENSE_TO:
        grown = int(lengths[-1] * DENSE_STEP) // 128 * 128
        lengths.append(min(max(grown, lengths[-1] + 128), DENSE_TO))
    return tuple(lengths)


def all_shapes(longest: int, tokens: int | None = None) -> list[CallShape]:
    """Every shape that documents of up to `longest` tokens, `tokens` in all, can reach: what a warm-up builds."""
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
    """Lay segments (squares, or without mask) on the grid. Dense calls come first, in row order, then packed ones.

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

    A segment without mask must have exactly its keys, so it is dense only where its lengths are powers of two, as the
    chunks of documents are that were cut at a context length. A square of such a chunk is dense from `EXACT_FROM`.
    """
    found = np.zeros((len(segments), 2), dtype=np.int64)
    q_len, k_len = segments.q_len, segments.k_len
    grid = np.array(dense_lengths())
    long = causal & (q_len >= DENSE_FROM) & (q_len <= DENSE_TO)
    found[long] = grid[np.searchsorted(grid, q_len[long])][:, None]
    found[causal & (q_len == EXACT_FROM)] = EXACT_FROM
    exact = ~causal & (q_len & (q_len - 1) == 0) & (k_len & (k_len - 1) == 0) & (np.minimum(q_len, k_len) >= TILE_FROM)
    found[exact] = np.stack([q_len[exact], k_len[exact]], axis=1)
    return found


def _packed_calls(segments: Segments, causal: np.ndarray, members: np.ndarray) -> Iterator[Call]:
    """Group segments by mask and octave, then cut each group into calls of a batch on the grid."""
    octaves = np.array(OCTAVES)
    columns = (causal, *(octaves[np.searchsorted(octaves, size)] for size in (segments.q_len, segments.k_len)))
    kinds = np.stack(columns, axis=1)[members]
    for kind in sorted({tuple(row) for row in kinds.tolist()}, key=lambda kind: (-kind[1] * kind[2], kind)):
        same = members[(kinds == kind).all(axis=1)]
        for part in _split(same, _batches(max(kind[1:]))[-1]):
            batch = 1 << (len(part) - 1).bit_length()
            yield Call(CallShape(batch, kind[1], kind[2], causal=bool(kind[0]), packed=True), part)


def _split(members: np.ndarray, largest: int) -> Iterator[np.ndarray]:
    """Cut into parts that nearly fill a batch: a missing document still costs the launch of its blocks."""
    while len(members):
        batch = min(largest, 1 << (len(members) - 1).bit_length())
        if 4 * len(members) < 3 * batch:
            batch //= 2
        yield members[:batch]
        members = members[batch:]


def _batches(octave: int) -> list[int]:
    """Batches of a class: powers of two."""
    largest = min(MAX_BATCH, max(1, MAX_PACKED_TOKENS // octave))
    return [1 << k for k in range(largest.bit_length())]


# ---- merged: attention.kernels.cudnn_graphs
# cuDNN attention graphs through its Python frontend: built once per shape, run on raw pointers.


Q, K, V, OUT, LSE, DOUT, DQ, DK, DV = range(1, 10)
"""Names (uids) of tensors in a graph."""
LENGTH_Q, LENGTH_K = 20, 21
ROWS = 30
"""ROWS + name: where each document's rows begin in that tensor, in elements."""


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
    strides: tuple[int, int, int]
    deterministic: bool = False

    def stride(self, name: int) -> int:
        """Elements from one row to the next of a tensor."""
        if name in (Q, K, V):
            return self.strides[name - Q]
        if name == LSE:
            return self.heads
        return (self.kv_heads if name in (DK, DV) else self.heads) * self.dim


class Graph:
    """One pass, forward or backward, for one key."""

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
        """Launch on the handle's stream. `pointers` has the address of every named tensor."""
        self._graph.execute(pointers, workspace, handle)

    def _forward(self) -> None:
        q, k, v = (self._tensor(name) for name in (Q, K, V))
        out, lse = self._graph.sdpa(name="sdpa", q=q, k=k, v=v, generate_stats=True, **self._options())
        self._output(out, OUT)
        self._output(lse, LSE)

    def _backward(self) -> None:
        names = {"q": Q, "k": K, "v": V, "o": OUT, "dO": DOUT, "stats": LSE}
        inputs = {argument: self._tensor(name) for argument, name in names.items()}
        gradients = self._graph.sdpa_backward(
            name="sdpa_backward",
            use_deterministic_algorithm=self._key.deterministic,
            **inputs,
            **self._options(),
        )
        for tensor, name in zip(gradients, (DQ, DK, DV), strict=True):
            self._output(tensor, name)

    def _options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"attn_scale": self._key.scale, "use_causal_mask": self._key.call.causal}
        if self._key.call.packed:
            lengths = {"seq_len_q": LENGTH_Q, "seq_len_kv": LENGTH_K}
            options |= {name: self._index(uid, self._key.call.batch, 32) for name, uid in lengths.items()}
            options["use_padding_mask"] = True
        return options

    def _layout(self, name: int) -> tuple[list[int], list[int]]:
        """Dimensions and strides as cuDNN wants them: batch, heads, rows, width."""
        key, call = self._key, self._key.call
        keys = name in (K, V, DK, DV)
        heads, rows = (key.kv_heads, call.k_length) if keys else (key.heads, call.q_length)
        width = 1 if name == LSE else key.dim
        stride = key.stride(name)
        return [call.batch, heads, rows, width], [rows * stride, width, stride, 1]

    def _tensor(self, name: int) -> Any:
        dim, stride = self._layout(name)
        options = {"data_type": self._cudnn.data_type.FLOAT} if name == LSE else {}
        tensor = self._graph.tensor(name=f"t{name}", dim=dim, stride=stride, uid=name, **options)
        return self._place(tensor, name)

    def _output(self, tensor: Any, name: int) -> None:
        dim, stride = self._layout(name)
        tensor.set_output(True).set_dim(dim).set_stride(stride).set_uid(name)
        if name == LSE:
            tensor.set_data_type(self._cudnn.data_type.FLOAT)
        self._place(tensor, name)

    def _place(self, tensor: Any, name: int) -> Any:
        """Say where the documents' rows begin, for a packed call."""
        if self._key.call.packed:
            tensor.set_ragged_offset(self._index(ROWS + name, self._key.call.batch + 1, 64))
        return tensor

    def _index(self, uid: int, count: int, bits: int) -> Any:
        kind = self._cudnn.data_type.INT32 if bits == 32 else self._cudnn.data_type.INT64
        shape, stride = [count, 1, 1, 1], [1, 1, 1, 1]
        return self._graph.tensor(name=f"i{uid}", dim=shape, stride=stride, data_type=kind, uid=uid)


class GraphCache:
    """Graphs by key, shared by all threads; handles by thread and stream (a handle belongs to one of each)."""

    def __init__(self) -> None:
        """Start empty."""
        self._graphs: dict[tuple[GraphKey, bool], Graph] = {}
        self._lock = threading.Lock()
        self._local = threading.local()

    def __len__(self) -> int:
        """Number of graphs built."""
        return len(self._graphs)

    def graph(self, key: GraphKey, *, backward: bool) -> Graph:
        """Return the graph of a key, building it the first time."""
        found = self._graphs.get((key, backward))
        if found is None:
            with self._lock:
                found = self._graphs.get((key, backward))
                if found is None:
                    found = Graph(key, backward=backward, handle=self.handle(torch.cuda.current_stream()))
                    self._graphs[key, backward] = found
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
