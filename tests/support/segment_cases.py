"""Random segments and the truth about them: what every kernel is tested against.

Shares nothing with the kernels: one dense mask over all rows, a plain softmax in float64, autograd.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import strategies as st

from seqloom.attention.kernels.interface import AttentionShape, Kernel, Saved
from seqloom.attention.masks import Segments
from support.oracle import Truth, difference

SCALE = 0.37


class Case(NamedTuple):
    """Segments, and rows of the buffers they lie in; some rows may be in no segment."""

    segments: Segments
    q_rows: int
    k_rows: int


@st.composite
def segment_cases(draw: st.DrawFn, *, longest: int = 12, offsets: bool = True, windows: bool = True) -> Case:
    """Draw up to four segments with gaps between them, keys in another order than queries.

    Args:
        longest: rows of a segment.
        offsets: any offset and any lengths; otherwise squares.
        windows: sliding windows as well.
    """
    causal = draw(st.booleans())
    window = draw(st.none() | st.integers(1, longest + 3)) if causal and windows else None
    sizes = []
    for _ in range(draw(st.integers(1, 4))):
        queries = draw(st.integers(1, longest))
        keys = draw(st.integers(1, longest)) if offsets else queries
        sizes.append((queries, keys, draw(st.integers(-longest, 2 * longest)) if offsets else 0))
    gaps = st.lists(st.integers(0, 2), min_size=len(sizes) + 1, max_size=len(sizes) + 1)
    q_starts, q_rows = _places([queries for queries, _, _ in sizes], draw(gaps), list(range(len(sizes))))
    k_starts, k_rows = _places([keys for _, keys, _ in sizes], draw(gaps), draw(st.permutations(range(len(sizes)))))
    rows = [
        (q_start, q_start + queries, k_start, k_start + keys, offset)
        for (queries, keys, offset), q_start, k_start in zip(sizes, q_starts, k_starts, strict=True)
    ]
    return Case(Segments.of(rows, causal=causal, window=window), q_rows, k_rows)


def _places(lengths: list[int], gaps: list[int], order: list[int]) -> tuple[list[int], int]:
    """Lay intervals one after the other in this order, with gaps; return their starts and the end."""
    starts, end = [0] * len(lengths), gaps[0]
    for index, gap in zip(order, gaps[1:], strict=True):
        starts[index] = end
        end += lengths[index] + gap
    return starts, end


class Tensors(NamedTuple):
    """Inputs of one attention: q, dout [q rows, heads, dim]; k, v [k rows, kv_heads, dim]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor


def random_tensors(case: Case, shape: AttentionShape, seed: int = 0) -> Tensors:
    """Draw inputs of this shape; q, k, v are strided views of wider buffers, as an exchange leaves them."""
    make = torch.Generator().manual_seed(seed)

    def draw(rows: int, heads: int) -> torch.Tensor:
        wide = torch.randn(rows, heads + 2, shape.dim, generator=make, dtype=torch.float64)
        return wide.to(shape.dtype).to(shape.device)[:, 1:-1]

    q, k, v = draw(case.q_rows, shape.heads), draw(case.k_rows, shape.kv_heads), draw(case.k_rows, shape.kv_heads)
    return Tensors(q, k, v, draw(case.q_rows, shape.heads).contiguous())


def visible_pairs(case: Case) -> torch.Tensor:
    """Return which query row sees which key row, bool[q rows, k rows], from the definition."""
    mask = torch.zeros(case.q_rows, case.k_rows, dtype=torch.bool)
    causal, window = case.segments.causal, case.segments.window
    for q_start, q_stop, k_start, k_stop, offset in case.segments.rows():
        query, key = torch.arange(q_stop - q_start)[:, None], torch.arange(k_stop - k_start)
        visible = (key <= query + offset) | (not causal)
        mask[q_start:q_stop, k_start:k_stop] = visible & (window is None or query + offset - key < (window or 0))
    return mask


def segment_truth(case: Case, tensors: Tensors, scale: float = SCALE, softcap: float | None = None) -> Truth:
    """Return output, log-sum-exp and gradients in float64, on the CPU."""
    q, k, v = (x.detach().cpu().double().requires_grad_() for x in tensors[:3])
    mask = visible_pairs(case)
    shared = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(shared, dim=1) for x in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, keys) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    lse = logits.detach().masked_fill(~mask, -torch.inf).logsumexp(dim=-1)
    # A finite stand-in for -inf keeps rows that see nothing out of autograd's way.
    weights = torch.softmax(logits.masked_fill(~mask, -1e300), dim=-1) * mask
    out = torch.einsum("hqk,khd->qhd", weights, values)
    gradients = torch.autograd.grad(out, (q, k, v), tensors.dout.cpu().double())
    return Truth(out.detach(), lse, *gradients)


def kernel_errors(kernel: Kernel, case: Case, shape: AttentionShape, seed: int = 0) -> dict[str, float]:
    """Run a kernel forward and backward and return the relative error of every result.

    Asserts what must hold exactly: rows that see nothing, and keys that nobody sees.
    """
    tensors = random_tensors(case, shape, seed)
    prepared = kernel.prepare(case.segments, shape)
    out, lse = prepared.forward(tensors.q, tensors.k, tensors.v)
    gradients = prepared.backward(tensors.dout, Saved(tensors.q, tensors.k, tensors.v, out, lse))
    truth = segment_truth(case, tensors, shape.scale, shape.softcap)
    found = Truth(*(x.cpu() for x in (out, lse, *gradients)))
    mask = visible_pairs(case)
    blind, unseen = ~mask.any(dim=1), ~mask.any(dim=0)
    assert torch.equal(found.lse.isneginf(), truth.lse.isneginf())
    assert found.lse.dtype == (torch.float64 if shape.dtype == torch.float64 else torch.float32)
    assert not found.out[blind].any() and not found.dq[blind].any()
    assert not found.dk[unseen].any() and not found.dv[unseen].any()
    seen = ~blind
    errors = {name: difference(getattr(found, name), getattr(truth, name)) for name in ("out", "dq", "dk", "dv")}
    return {**errors, "lse": difference(found.lse[:, seen], truth.lse[:, seen])}
