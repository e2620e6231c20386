"""Packed flash attention without a GPU: the real index work over a plain implementation of the same contract."""

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Lock

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from seqloom import compat
from seqloom.attention.kernels.cpu import Reference
from seqloom.attention.kernels.flash import FA4_LEAST, FlashAttention4, FlashOperator, Varlen
from seqloom.attention.kernels.interface import AttentionShape, InPlaceAttention, KernelUse, Saved
from seqloom.attention.masks import Segments
from seqloom.errors import SeqloomError
from support.segment_cases import SCALE, Case, kernel_errors, segment_cases

torch.set_num_threads(1)

CPU = torch.device("cpu")
KERNELS = pytest.mark.parametrize("kernel", [Varlen(), FlashAttention4()], ids=["torch", "fa4"])


def packed(q, k, cu_q, cu_k, causal, left, right, scale, softcap=None):
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
    shape = AttentionShape(q.shape[1], k.shape[1], q.shape[2], q.dtype, CPU, scale, softcap)
    return Reference().prepare(Segments.of(rows, causal=masked, window=window), shape)


def flash_forward(q, k, v, arguments):
    assert arguments.max_seqlen_q == np.diff(arguments.cu_seqlens_q.numpy()).max()
    assert arguments.max_seqlen_k == np.diff(arguments.cu_seqlens_k.numpy()).max()
    return packed(q, k, *arguments[:2], *arguments[5:], arguments.softmax_scale).forward(q, k, v)


def flash_backward(dout, saved, arguments):
    assert dout.dtype == saved.out.dtype == saved.q.dtype and saved.lse.is_contiguous()
    plain = packed(saved.q, saved.k, *arguments[:2], *arguments[5:], arguments.softmax_scale)
    return plain.backward(dout, saved)


class PlainFlashAttention4:
    """Stands in for `flash_attn.cute.interface`: unbounded is None, all tensors have one dtype."""

    def __init__(self):
        self.masks, self.deterministic = [], []
        self._called = Lock()  # two threads that compile at a time would end the process

    def _packed(self, q, k, arguments):
        for cumulative, longest in (("cu_seqlens_q", "max_seqlen_q"), ("cu_seqlens_k", "max_seqlen_k")):
            least = int(np.diff(arguments[cumulative].numpy()).max())
            assert arguments[longest] == max(least, FA4_LEAST)
        causal, left, right = (arguments[name] for name in ("causal", "window_size_left", "window_size_right"))
        self.masks.append((causal, left, right))
        assert (left is None and right is None) or (not causal and left >= 0 and right == 0)
        bounds = [-1 if bound is None else bound for bound in (left, right)]
        lengths = arguments["cu_seqlens_q"], arguments["cu_seqlens_k"]
        return packed(q, k, *lengths, causal, *bounds, arguments["softmax_scale"], arguments["softcap"] or None)

    def _flash_attn_fwd(self, q, k, v, *, return_lse, **arguments):
        assert return_lse and self._called.acquire(blocking=False)
        out, lse = self._packed(q, k, arguments).forward(q, k, v)
        self._called.release()
        return out, lse, None, None, None

    def _flash_attn_bwd(self, q, k, v, out, dout, lse, *, deterministic, **arguments):
        assert dout.dtype == out.dtype == q.dtype and self._called.acquire(blocking=False)
        self.deterministic.append(deterministic)
        found = self._packed(q, k, arguments).backward(dout, Saved(q, k, v, out, lse))
        self._called.release()
        return found


@pytest.fixture(autouse=True, scope="module")
def plain_fa4():
    """The stand-ins of both operators; returns that of FlashAttention-4."""
    plain = PlainFlashAttention4()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "flash_forward", flash_forward)
        patch.setattr(compat, "flash_backward", flash_backward)
        patch.setitem(sys.modules, "flash_attn.cute.interface", plain)
        FlashOperator.of_fa4.cache_clear()
        yield plain
    FlashOperator.of_fa4.cache_clear()


@KERNELS
@given(case=segment_cases(offsets=False), heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]))
@settings(max_examples=25)
def test_squares(kernel, case, heads):
    shape = AttentionShape(*heads, 8, torch.float64, CPU, SCALE)
    assert max(kernel_errors(kernel, case, shape).values()) < 1e-12


@KERNELS
@given(case=segment_cases(longest=6))
@settings(max_examples=40)
def test_whatever_is_supported(kernel, case):
    segments = case.segments.select(kernel.capabilities.supports(case.segments))
    assume(len(segments))
    shape = AttentionShape(2, 1, 8, torch.float64, CPU, SCALE)
    assert max(kernel_errors(kernel, case._replace(segments=segments), shape).values()) < 1e-12


@KERNELS
def test_prefixes_and_tiles_without_mask_share_a_causal_rule(kernel):
    rows = [(0, 3, 0, 9, 6), (3, 5, 9, 12, 7), (6, 10, 13, 17, 0), (10, 11, 17, 20, 2)]
    shape = AttentionShape(2, 1, 8, torch.float64, CPU, SCALE)
    for window in (None, 4, 20):
        segments = Segments.of(rows, window=window)
        taken = segments.select(kernel.capabilities.supports(segments))
        assert len(taken) == (3 if window == 4 else 4)
        assert max(kernel_errors(kernel, Case(taken, 12, 20), shape).values()) < 1e-12


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


@given(case=segment_cases(offsets=False), softcap=st.sampled_from([0.3, 2.0, 50.0]))
@settings(max_examples=10)
def test_fa4_caps_logits(case, softcap):
    shape = AttentionShape(4, 2, 8, torch.float64, CPU, SCALE, softcap)
    assert max(kernel_errors(FlashAttention4(), case, shape).values()) < 1e-12
    assert "it caps no logits" in Varlen.capabilities.unsupported_shape(
        replace(shape, device=torch.device("cuda"), dtype=torch.float16)
    )


@pytest.mark.parametrize(
    ("use", "masks"),
    [
        (KernelUse(5000), [(True, None, None)]),
        (KernelUse(5000, tiles=True), [(True, None, None), (False, None, None)]),
        (KernelUse(5000, window=100), [(False, 99, 0), (True, None, None)]),
        (KernelUse(5000, window=9000), [(True, None, None)]),
    ],
)
def test_fa4_is_built_for_every_kind_of_mask(plain_fa4, use, masks):
    shape = AttentionShape(4, 2, 8, torch.float32, CPU, SCALE)
    plain_fa4.masks.clear()
    for build in FlashAttention4().builds(shape, use):
        build()
    assert plain_fa4.masks == [mask for mask in masks for _ in range(2)]  # forward, backward


def test_fa4_is_called_by_one_thread_at_a_time():
    case, shape = Case(Segments.packed([40, 300]), 340, 340), AttentionShape(2, 1, 8, torch.float64, CPU, SCALE)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: kernel_errors(FlashAttention4(), case, shape), range(24)))
    assert all(max(errors.values()) < 1e-12 for errors in found)


def test_fa4_is_deterministic_where_torch_is_told_to_be(plain_fa4):
    case, shape = Case(Segments.packed([4]), 4, 4), AttentionShape(2, 1, 8, torch.float64, CPU, SCALE)
    plain_fa4.deterministic.clear()
    for wanted in (False, True):
        torch.use_deterministic_algorithms(wanted)
        try:
            kernel_errors(FlashAttention4(), case, shape)
        finally:
            torch.use_deterministic_algorithms(False)
    assert plain_fa4.deterministic == [False, True]


def test_a_package_that_cannot_be_loaded_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", None)  # importing it is an ImportError
    FlashOperator.of_fa4.cache_clear()
    with pytest.raises(SeqloomError, match=r"flash-attn-4 is installed and cannot be loaded: .*; install it again"):
        FlashOperator.of_fa4()
