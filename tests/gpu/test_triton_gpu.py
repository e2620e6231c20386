"""The Triton kernels on a GPU: against dense attention in float64, bit for bit against themselves, and far offsets."""

import math

import pytest
import torch

from seqloom.attention.kernels.interface import AttentionShape, Saved
from seqloom.attention.kernels.triton_attention import TritonSegments
from seqloom.attention.masks import Segments

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
pytest.importorskip("triton", reason="triton is not installed")

PACK = [1, 30, 64, 5, 128, 3, 300, 65, 17, 1, 900, 129]
OFFSETS = [(3, 140, 5, 300, 155), (150, 400, 310, 700, -20), (400, 410, 700, 705, 0), (410, 412, 705, 1200, 400)]


def dense(segments, q, k, v, scale):
    """Attention under a dense mask: (out, lse)."""
    mask = torch.zeros(len(q), len(k), dtype=torch.bool, device=q.device)
    table = (segments.q_start, segments.q_stop, segments.k_start, segments.k_stop, segments.offset)
    for q_start, q_stop, k_start, k_stop, offset in zip(*(column.tolist() for column in table), strict=True):
        rows, columns = torch.arange(q_stop - q_start), torch.arange(k_stop - k_start)
        back = (rows[:, None] + offset - columns).to(q.device)
        seen = back >= 0 if segments.causal else torch.ones_like(back, dtype=torch.bool)
        mask[q_start:q_stop, k_start:k_stop] = seen if segments.window is None else seen & (back < segments.window)
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * scale
    lse = logits.masked_fill(~mask, -math.inf).logsumexp(-1)
    weights = torch.exp(logits - lse.masked_fill(lse.isinf(), 0)[..., None]).masked_fill(~mask, 0)
    return torch.einsum("hqk,khd->qhd", weights.to(v.dtype), v), lse


def run(segments, tensors, kernel=None):
    """Return (out, lse, dq, dk, dv) of the kernel."""
    q, k, v, dout = tensors
    shape = AttentionShape(q.shape[1], k.shape[1], q.shape[2], q.dtype, q.device, q.shape[2] ** -0.5)
    prepared = (kernel or TritonSegments()).prepare(segments, shape)
    out, lse = prepared.forward(q, k, v)
    return [out, lse, *prepared.backward(dout, Saved(q, k, v, out, lse))]


def plain(segments, tensors, dtype):
    """The same of dense attention in another dtype."""
    q, k, v = (part.to(dtype).detach().requires_grad_() for part in tensors[:3])
    out, lse = dense(segments, q, k, v, q.shape[2] ** -0.5)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3].to(dtype))]


def draw(rows, columns, heads, kv_heads, dim, dtype, seed=0):
    make = torch.Generator("cuda").manual_seed(seed)
    sizes = [(rows, heads), (columns, kv_heads), (columns, kv_heads), (rows, heads)]
    return [torch.randn(*size, dim, generator=make, device="cuda").to(dtype) for size in sizes]


def far(found, wanted):
    found, wanted = (torch.where(part.isinf(), 0, part).double() for part in (found, wanted))
    return float((found - wanted).norm() / wanted.norm())


CASES = {
    "packed": (Segments.packed(PACK), sum(PACK), sum(PACK)),
    "packed with gaps": (Segments.packed(PACK), sum(PACK) + 40, sum(PACK) + 30),
    "full": (Segments.packed(PACK, causal=False), sum(PACK), sum(PACK)),
    "window": (Segments.packed(PACK, window=70), sum(PACK), sum(PACK)),
    "offsets": (Segments.of(OFFSETS), 450, 1210),
    "offsets in a window": (Segments.of(OFFSETS, window=33), 450, 1210),
    "a tile": (Segments.of([(0, 700, 0, 333, 0)], causal=False), 700, 333),
}


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("case", CASES)
def test_bf16_is_at_most_twice_as_far_off_as_plain_torch(case, dim, heads):
    segments, rows, columns = CASES[case]
    tensors = draw(rows, columns, *heads, dim, torch.bfloat16)
    exact, rough = plain(segments, tensors, torch.float64), plain(segments, tensors, torch.bfloat16)
    found = run(segments, tensors)
    assert torch.equal(found[1].isinf(), exact[1].isinf())
    for name, mine, other, right in zip(("out", "lse", "dq", "dk", "dv"), found, rough, exact, strict=True):
        assert far(mine, right) <= 2 * far(other, right), name


@pytest.mark.parametrize("dim", [16, 80, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_other_widths_and_types(dtype, dim):
    segments, rows, columns = CASES["packed"]
    tensors = draw(rows, columns, 4, 2, dim, dtype)
    limit = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}[dtype]
    errors = [far(*pair) for pair in zip(run(segments, tensors), plain(segments, tensors, torch.float64), strict=True)]
    assert max(errors) < limit


def test_repeated_runs_are_equal_bit_for_bit():
    segments, rows, columns = CASES["packed"]
    tensors = draw(rows, columns, 8, 2, 128, torch.bfloat16)
    first, second = run(segments, tensors), run(segments, tensors)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_a_document_does_not_see_another_one():
    """Change one document of a pack: nothing else changes, bit for bit."""
    segments, rows, columns = CASES["packed"]
    tensors = draw(rows, columns, 4, 2, 128, torch.bfloat16)
    changed = [part.clone() for part in tensors]
    start, stop = int(segments.q_start[1]), int(segments.q_stop[1])
    for part, other in zip(changed, draw(rows, columns, 4, 2, 128, torch.bfloat16, seed=1), strict=True):
        part[start:stop] = other[start:stop]
    for one, other in zip(run(segments, tensors), run(segments, changed), strict=True):
        one, other = (part.T if part.dim() == 2 else part for part in (one, other))
        assert torch.equal(one[:start], other[:start]) and torch.equal(one[stop:], other[stop:])
        assert not torch.equal(one[start:stop], other[start:stop])


def test_views_of_one_wide_buffer():
    """q, k, v beside each other in one buffer, as an exchange leaves them."""
    segments, rows, _ = CASES["packed"]
    buffer = torch.randn(rows, 8 + 2 + 2, 128, device="cuda", dtype=torch.bfloat16)
    views = [buffer[:, :8], buffer[:, 8:10], buffer[:, 10:], torch.randn_like(buffer[:, :8])]
    copies = [part.contiguous() for part in views]
    pairs = zip(run(segments, views), run(segments, copies), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_rows_farther_than_32_bits():
    rows, wide = 70_000, 32_768
    buffer = torch.randn(rows, wide // 128, 128, device="cuda", dtype=torch.bfloat16)
    views = [buffer[:, :1], buffer[:, 1:2], buffer[:, 2:3], buffer[:, 3:4]]
    segments = Segments.packed([rows - 1000, 1000])
    found = run(segments, views)
    alone = run(Segments.packed([1000]), [view[-1000:].contiguous() for view in views])
    for one, other in zip(found, alone, strict=True):
        one = one[:, -1000:] if one.dim() == 2 else one[-1000:]
        assert torch.equal(one, other)
