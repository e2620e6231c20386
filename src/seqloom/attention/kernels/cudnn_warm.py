"""The first run of a graph, before the first step needs it.

Building a graph compiles its kernel; the first launch loads it, which holds up the host for 2 to 6 ms. A pack of new
lengths meets a dozen such graphs, enough to leave the GPU idle. So a warm-up also runs every graph once: packed ones
over documents of no tokens, dense ones in full, which the GPU does while the host builds the next graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from seqloom.attention.kernels import cudnn_graphs as names
from seqloom.attention.kernels.cudnn_graphs import GraphCache, GraphKey

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
