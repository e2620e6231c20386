"""What the Triton kernels compute, in Triton's interpreter on the CPU; `test_triton_interpreted.py` runs this file.

The interpreter must be chosen before triton is first imported, hence a process of its own. float16 stands for bf16,
which the interpreter does not multiply; bf16 is tested on a GPU.
"""

import math

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from seqloom.attention.dropout import HeadDropout
from seqloom.attention.kernels.interface import AttentionShape, Saved
from seqloom.attention.kernels.triton_attention import Config, TritonSegments
from seqloom.attention.kernels.triton_kernels import accumulate, add_gradients, merge_outputs
from seqloom.attention.masks import MaskRule, Segments
from seqloom.attention.merge import PartialGradient, PartialOutput
from seqloom.attention.tiles import packed_tiles
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from support.dropout import expected_weights

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _loop_ends_with_new_numpy(monkeypatch):
    """Triton 3.6 turns arrays of one element into loop ends with `int`, which numpy 2.4 refuses."""
    patch = interpreter._patch_lang_tensor

    def repaired(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", repaired)


def pick(kind, dim, dtype, length):
    """Small tiles, so that few rows make many: joined ones up to 10 rows, unequal ones above."""
    if length <= 10:
        return Config(16, 16, warps=4, stages=2, join=True)
    return Config(32, 16, warps=4, stages=2) if kind != "dkdv" else Config(16, 32, warps=4, stages=2, side=1)


def visible(segments, rows, columns):
    """The whole mask, bool[rows, columns]."""
    mask = torch.zeros(rows, columns, dtype=torch.bool)
    table = (segments.q_start, segments.q_stop, segments.k_start, segments.k_stop, segments.offset)
    for q_start, q_stop, k_start, k_stop, offset in zip(*(column.tolist() for column in table), strict=True):
        back = torch.arange(q_stop - q_start)[:, None] + offset - torch.arange(k_stop - k_start)
        seen = torch.ones_like(back, dtype=torch.bool)
        if segments.causal:
            seen &= back >= 0
        if segments.window is not None:
            seen &= back < segments.window
        mask[q_start:q_stop, k_start:k_stop] = seen
    return mask


def dense(mask, q, k, v, scale, softcap=None, keep=1.0):
    """Attention under a dense mask: (out, lse); weights are multiplied with `keep`."""
    group = q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(group, dim=1) for part in (k, v))
    logits = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    lse = logits.masked_fill(~mask, -math.inf).logsumexp(-1)
    weights = torch.exp(logits - lse.masked_fill(lse.isinf(), 0)[..., None]).masked_fill(~mask, 0)
    return torch.einsum("hqk,khd->qhd", weights * keep, v), lse


def far(found, wanted):
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))


def errors(
    segments,
    rows,
    columns,
    heads=2,
    kv_heads=1,
    dim=16,
    dtype=torch.float32,
    kernel=None,
    views=False,
    softcap=None,
    dropout=None,
):
    """Relative errors of out, lse, dq, dk, dv against float64, and of plain torch in the same dtype."""
    draw = torch.Generator().manual_seed(rows)
    sizes = [(rows, heads), (columns, kv_heads), (columns, kv_heads), (rows, heads)]
    q, k, v, dout = (torch.randn(*size, dim, generator=draw).to(dtype) for size in sizes)
    if views:  # views of wider buffers, as an exchange leaves them
        q, k, v, dout = (torch.cat([part] * 3, dim=1)[:, part.shape[1] : -part.shape[1]] for part in (q, k, v, dout))
    drop, keep = None, 1.0
    if dropout is not None:  # rows are tokens of one document, at positions of their own
        queries, keys = torch.arange(rows) * 7 + 3, torch.arange(columns) * 5 + 2**20
        drop = dropout.of_rows((torch.full_like(queries, 11), queries), (torch.full_like(keys, 11), keys))
        numbers = (dropout.layer, dropout.first_head + heads, dropout.p)
        keep = torch.from_numpy(expected_weights(dropout.seed, 11, queries.numpy(), keys.numpy(), *numbers))
        keep = keep[dropout.first_head :].to(torch.float32)
    shape = AttentionShape(heads, kv_heads, dim, dtype, torch.device("cpu"), 0.3, softcap, drop)
    prepared = (kernel or TritonSegments(pick=pick)).prepare(segments, shape)
    out, lse = prepared.forward(q, k, v)
    found = [out, lse, *prepared.backward(dout, Saved(q, k, v, out, lse))]
    mask = visible(segments, rows, columns)

    def plain(kind):
        leaves = [part.to(kind).detach().requires_grad_() for part in (q, k, v)]
        out, lse = dense(mask, *leaves, 0.3, softcap, keep if dropout is None else keep.to(kind))
        return [out, lse, *torch.autograd.grad(out, leaves, dout.to(kind))]

    exact, rough = plain(torch.float64), plain(dtype)
    assert torch.equal(found[1].isinf(), exact[1].isinf())
    assert not found[0][~mask.any(1)].any()
    for results in (found, exact, rough):
        results[1] = results[1].masked_fill(results[1].isinf(), 0)
    pairs = zip(found, rough, exact, strict=True)
    return [(far(one, right), far(other, right)) for one, other, right in pairs]


PACK = [5, 3, 1, 20, 7, 9, 38, 1]
OFFSETS = [(3, 40, 5, 30, -5), (50, 60, 31, 80, 39), (60, 64, 80, 84, 2), (64, 70, 0, 4, 0)]


@pytest.mark.parametrize(
    ("mask", "heads"), [({}, (4, 2)), ({"causal": False}, (3, 1)), ({"window": 6}, (1, 1))], ids=str
)
def test_packed_documents(mask, heads):
    segments = Segments.packed(PACK, **mask)
    assert max(mine for mine, _ in errors(segments, sum(PACK), sum(PACK), *heads)) < 1e-6


@pytest.mark.parametrize("window", [None, 6])
def test_prefixes_that_see_themselves(window):
    spans = [Span(document, 0, length) for document, length in enumerate(PACK)]
    tiles = packed_tiles(spans, MaskRule(window=window, prefixes={0: 5, 3: 11, 6: 30}))
    assert len(tiles) == 2
    for segments, queries, keys in tiles:
        assert max(mine for mine, _ in errors(segments, queries.stop - queries.start, keys.stop - keys.start)) < 1e-6


@pytest.mark.parametrize("mask", [{}, {"causal": False}, {"window": 9}], ids=str)
def test_offsets_and_rows_in_no_segment(mask):
    assert max(mine for mine, _ in errors(Segments.of(OFFSETS, **mask), 75, 90, views=True)) < 1e-6


@pytest.mark.parametrize("softcap", [0.5, 30.0])
@pytest.mark.parametrize("mask", [{}, {"window": 9}], ids=str)
def test_capped_logits(mask, softcap):
    assert max(mine for mine, _ in errors(Segments.of(OFFSETS, **mask), 75, 90, softcap=softcap)) < 5e-6


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("mask", [{}, {"causal": False}, {"window": 9}], ids=str)
def test_dropped_weights(mask, softcap):
    dropout = HeadDropout(0.3, 2**41 + 5, layer=3, first_head=6)
    found = errors(Segments.of(OFFSETS, **mask), 75, 90, 4, 2, softcap=softcap, dropout=dropout)
    assert max(mine for mine, _ in found) < 5e-6
    packed = errors(Segments.packed(PACK, **mask), sum(PACK), sum(PACK), 3, 1, softcap=softcap, dropout=dropout)
    assert max(mine for mine, _ in packed) < 5e-6


@pytest.mark.parametrize("dim", [16, 48])
def test_half_precision_is_as_good_as_plain_torch(dim):
    for mine, plain in errors(Segments.packed(PACK), sum(PACK), sum(PACK), 1, 1, dim, torch.float16, views=True):
        assert mine <= 2 * plain


def test_random_segments():
    draw = np.random.default_rng(0)
    for _ in range(4):
        q = np.sort(draw.choice(60, 8, replace=False)).reshape(4, 2)
        k = draw.permutation(np.sort(draw.choice(90, 8, replace=False)).reshape(4, 2))
        causal = bool(draw.integers(2))
        window = int(draw.integers(1, 20)) if causal and draw.integers(2) else None
        rows = [(*one, *other, draw.integers(-20, 60)) for one, other in zip(q, k, strict=True)]
        segments = Segments.of(rows, causal=causal, window=window)
        assert max(mine for mine, _ in errors(segments, 60, 90, heads=1)) < 1e-6


def test_keys_in_two_parts_are_merged():
    """A ring: two halves of the keys, merged; gradients of each half from the merged out and lse."""
    draw = torch.Generator().manual_seed(1)
    q, k, v, dout = (torch.randn(24, 2, 16, generator=draw) for _ in range(4))
    shape = AttentionShape(2, 2, 16, torch.float32, torch.device("cpu"), 0.25)
    halves = [slice(0, 10), slice(10, 24)]
    parts = [Segments.of([(0, 24, 0, 10, 0)]), Segments.of([(0, 24, 0, 14, -10)])]
    prepared = [TritonSegments(pick=pick).prepare(part, shape) for part in parts]
    results = [one.forward(q, k[half], v[half]) for one, half in zip(prepared, halves, strict=True)]
    out, lse = merge_outputs([PartialOutput(*result, 0) for result in results], 24, torch.float32)
    gradients = [
        one.backward(dout, Saved(q, k[half], v[half], out, lse)) for one, half in zip(prepared, halves, strict=True)
    ]
    dq = add_gradients([PartialGradient(gradient[0], 0) for gradient in gradients], 24, torch.float32)
    found = [out, lse, dq, *(torch.cat([first[n], second[n]]) for first, second in [gradients] for n in (1, 2))]
    leaves = [part.double().requires_grad_() for part in (q, k, v)]
    wanted, wanted_lse = dense(visible(Segments.packed([24]), 24, 24), *leaves, 0.25)
    exact = [wanted, wanted_lse, *torch.autograd.grad(wanted, leaves, dout.double())]
    assert max(far(one, right) for one, right in zip(found, exact, strict=True)) < 1e-6


def test_merging_a_row_that_saw_nothing_changes_no_bit():
    draw = torch.Generator().manual_seed(2)
    out, lse = torch.randn(40, 2, 16, generator=draw), torch.randn(2, 40, generator=draw)
    out[7], lse[:, 7] = 0, -math.inf
    nothing = PartialOutput(torch.zeros_like(out).half(), torch.full_like(lse, -math.inf), 0)
    for parts in ([PartialOutput(out, lse, 0), nothing], [nothing, PartialOutput(out, lse, 0)]):
        merged, merged_lse = merge_outputs(parts, 40, torch.float32)
        assert torch.equal(merged, out) and torch.equal(merged_lse, lse)


def test_parts_of_some_rows_only():
    draw = torch.Generator().manual_seed(3)
    out, lse = torch.randn(40, 2, 16, generator=draw), torch.randn(2, 40, generator=draw)
    parts = [PartialOutput(out[5:20], lse[:, 5:20], 3), PartialOutput(out[:6], lse[:, :6], 30)]
    merged, merged_lse = merge_outputs(parts, 38, torch.float32)
    wanted, wanted_lse = torch.zeros(38, 2, 16), torch.full((2, 38), -math.inf)
    wanted[3:18], wanted[30:36] = out[5:20], out[:6]
    wanted_lse[:, 3:18], wanted_lse[:, 30:36] = lse[:, 5:20], lse[:, :6]
    assert torch.equal(merged, wanted) and torch.equal(merged_lse, wanted_lse)
    added = add_gradients(
        [PartialGradient(out[5:20], 3), PartialGradient(out[:6], 30), PartialGradient(out[:1], 4)], 38, torch.float32
    )
    wanted[4] += out[0]
    assert torch.equal(added, wanted)
    total = torch.full((40, 5, 16), math.nan)
    accumulate(total[3:40, 1:3], out[3:].half(), fresh=True)
    accumulate(total[3:40, 1:3], out[3:], fresh=False)
    assert torch.equal(total[3:, 1:3], out[3:].half().float() + out[3:]) and total[:3].isnan().all()
    assert total[:, 0].isnan().all() and total[:, 3:].isnan().all()


def test_a_scale_that_is_not_positive_is_refused():
    with pytest.raises(SeqloomError, match="positive"):
        TritonSegments().prepare(
            Segments.packed([3]), AttentionShape(1, 1, 16, torch.float32, torch.device("cpu"), -1.0)
        )


def test_five_results_are_too_many_for_one_pass():
    part = PartialOutput(torch.zeros(1, 1, 16), torch.zeros(1, 1), 0)
    with pytest.raises(SeqloomError, match="1 to 4"):
        merge_outputs([part] * 5, 1, torch.float32)
