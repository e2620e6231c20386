"""Packed flash attention without a GPU: the real index work over a plain implementation of the same contract."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from seqloom import compat
from seqloom.attention.kernels.cpu import Reference
from seqloom.attention.kernels.flash import Varlen
from seqloom.attention.kernels.interface import AttentionShape, InPlaceAttention
from seqloom.attention.masks import Segments
from support.segment_cases import SCALE, Case, kernel_errors, segment_cases

torch.set_num_threads(1)

CPU = torch.device("cpu")


def packed(q, k, cu_q, cu_k, causal, left, right, scale):
    """Prepare a plain kernel for flash attention's packed arguments: masks end at the last query and key."""
    for cumulative, rows in ((cu_q, len(q)), (cu_k, len(k))):
        assert cumulative.dtype == torch.int32 and cumulative[0] == 0 and cumulative[-1] == rows
    rows = [
        (q0, q1, k0, k1, (k1 - k0) - (q1 - q0))
        for q0, q1, k0, k1 in zip(*(x.tolist() for x in (cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:])), strict=True)
    ]
    assert (left, right) in ((-1, -1), (-1, 0)) or (left >= 0 and right == 0 and not causal)
    masked = causal or right == 0
    window = left + 1 if left >= 0 else None
    shape = AttentionShape(q.shape[1], k.shape[1], q.shape[2], q.dtype, CPU, scale)
    return Reference().prepare(Segments.of(rows, causal=masked, window=window), shape)


def flash_forward(q, k, v, arguments):
    assert arguments.max_seqlen_q == np.diff(arguments.cu_seqlens_q.numpy()).max()
    assert arguments.max_seqlen_k == np.diff(arguments.cu_seqlens_k.numpy()).max()
    return packed(q, k, *arguments[:2], *arguments[5:], arguments.softmax_scale).forward(q, k, v)


def flash_backward(dout, saved, arguments):
    assert dout.dtype == saved.out.dtype == saved.q.dtype and saved.lse.is_contiguous()
    plain = packed(saved.q, saved.k, *arguments[:2], *arguments[5:], arguments.softmax_scale)
    return plain.backward(dout, saved)


@pytest.fixture(autouse=True, scope="module")
def _plain_operator():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "flash_forward", flash_forward)
        patch.setattr(compat, "flash_backward", flash_backward)
        yield


@given(case=segment_cases(offsets=False), heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]))
@settings(max_examples=25)
def test_squares(case, heads):
    shape = AttentionShape(*heads, 8, torch.float64, CPU, SCALE)
    assert max(kernel_errors(Varlen(), case, shape).values()) < 1e-12


@given(case=segment_cases(longest=6))
@settings(max_examples=40)
def test_whatever_is_supported(case):
    segments = case.segments.select(Varlen.capabilities.supports(case.segments))
    assume(len(segments))
    shape = AttentionShape(2, 1, 8, torch.float64, CPU, SCALE)
    assert max(kernel_errors(Varlen(), case._replace(segments=segments), shape).values()) < 1e-12


def test_prefixes_and_tiles_without_mask_share_a_causal_rule():
    rows = [(0, 3, 0, 9, 6), (3, 5, 9, 12, 7), (6, 10, 13, 17, 0), (10, 11, 17, 20, 2)]
    shape = AttentionShape(2, 1, 8, torch.float64, CPU, SCALE)
    for window in (None, 4, 20):
        segments = Segments.of(rows, window=window)
        taken = segments.select(Varlen.capabilities.supports(segments))
        assert len(taken) == (3 if window == 4 else 4)
        assert max(kernel_errors(Varlen(), Case(taken, 12, 20), shape).values()) < 1e-12


def test_a_pack_is_one_call_in_place():
    shape = AttentionShape(2, 1, 8, torch.bfloat16, CPU, SCALE)
    prepared = Varlen().prepare(Segments.packed([4, 1, 7]), shape)
    assert isinstance(prepared, InPlaceAttention)
    [call] = prepared.calls
    assert call.covers(12, 12) and not call.covers(13, 12) and not call.covers(12, 13)
    cu_q, cu_k, *rest = call.arguments
    assert cu_q.tolist() == cu_k.tolist() == [0, 4, 5, 12]
    assert rest == [7, 7, SCALE, True, -1, 0]
    case = Case(Segments.packed([4, 1, 7]), 12, 12)
    assert max(kernel_errors(Varlen(), case, shape).values()) < 6e-3


def test_segments_with_gaps_are_gathered():
    shape = AttentionShape(1, 1, 8, torch.bfloat16, CPU, 1.0)
    prepared = Varlen().prepare(Segments.of([(5, 8, 0, 3, 0), (0, 2, 4, 6, 0)]), shape)
    [call] = prepared.calls
    assert call.queries.tolist() == [0, 1, 5, 6, 7]
    assert call.keys.tolist() == [4, 5, 0, 1, 2]


@pytest.mark.parametrize(
    ("causal", "window", "spelt"),
    [(True, None, (True, -1, 0)), (False, None, (False, -1, -1)), (True, 1, (False, 0, 0)), (True, 9, (False, 8, 0))],
)
def test_how_flash_spells_a_mask(causal, window, spelt):
    assert compat.flash_mask(causal, window) == spelt
