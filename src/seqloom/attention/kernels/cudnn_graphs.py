"""cuDNN attention graphs through its Python frontend: built once per shape, run on raw pointers."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from seqloom.attention.kernels.grid import CallShape

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
