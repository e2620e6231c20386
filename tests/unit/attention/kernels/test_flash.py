"""Packed flash attention without a GPU: the real index work over a plain implementation of the same contract."""

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from seqloom import compat
from seqloom.attention.kernels import flash as flash_attn
from seqloom.attention.kernels.cpu import Reference
from seqloom.attention.kernels.flash import FlashAttn2, FlashAttn3, PreparedVarlen, Varlen, varlen_calls
from seqloom.attention.kernels.interface import AttentionShape, InPlaceAttention, Saved
from seqloom.attention.masks import Segments
from support.segment_cases import SCALE, Case, kernel_errors, segment_cases

torch.set_num_threads(1)

CPU = torch.device("cpu")
CAPABILITIES = {kernel.capabilities.name: kernel.capabilities for kernel in (Varlen, FlashAttn2, FlashAttn3)}


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


class PlainFlash:
    """Flash attention with the signature of `VarlenFunctions`."""

    def forward(self, q, k, v, arguments):
        assert arguments.max_seqlen_q == np.diff(arguments.cu_seqlens_q.numpy()).max()
        assert arguments.max_seqlen_k == np.diff(arguments.cu_seqlens_k.numpy()).max()
        return self._packed(q, k, arguments).forward(q, k, v)

    def backward(self, dout, saved, arguments):
        assert dout.dtype == saved.out.dtype == saved.q.dtype and saved.lse.is_contiguous()
        return compat.Gradients(*self._packed(saved.q, saved.k, arguments).backward(dout, saved))

    def _packed(self, q, k, arguments):
        return packed(q, k, *arguments[:2], *arguments[5:], arguments.softmax_scale)


class PlainVarlen:
    """`Varlen` over `PlainFlash`."""

    capabilities = Varlen.capabilities

    def prepare(self, segments, shape):
        return PreparedVarlen(varlen_calls(segments, shape), shape, PlainFlash())


def package_2() -> ModuleType:
    """A stand-in for flash_attn 2.7 with the signatures of its documentation."""

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None,
    ):  # fmt: skip
        assert (dropout_p, softcap, alibi_slopes, return_softmax) == (0.0, 0.0, None, False)
        mask = (causal, window_size_left, window_size_right)
        kernel = packed(q, k, cu_seqlens_q, cu_seqlens_k, *mask, softmax_scale)
        return (*kernel.forward(q, k, v), torch.empty(0), torch.empty(2))

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None,
    ):  # fmt: skip
        assert (dropout_p, softcap, alibi_slopes) == (0.0, 0.0, None)
        mask = (causal, window_size_left, window_size_right)
        kernel = packed(q, k, cu_seqlens_q, cu_seqlens_k, *mask, softmax_scale)
        for buffer, grad in zip((dq, dk, dv), kernel.backward(dout, Saved(q, k, v, out, softmax_lse)), strict=True):
            buffer.copy_(grad)
        return torch.empty(0)

    module = ModuleType("flash_attn.flash_attn_interface")
    module._flash_attn_varlen_forward = _flash_attn_varlen_forward
    module._flash_attn_varlen_backward = _flash_attn_varlen_backward
    return module


def package_3() -> ModuleType:
    """A stand-in for flash_attn_interface 3.0, the arguments that are not used left out."""

    def _flash_attn_forward(
        q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None,
        causal=False, window_size_left=-1, window_size_right=-1,
    ):  # fmt: skip
        mask = (causal, window_size_left, window_size_right)
        kernel = packed(q, k, cu_seqlens_q, cu_seqlens_k, *mask, softmax_scale)
        return (*kernel.forward(q, k, v), torch.empty(0), torch.empty(0))

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, *, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
        max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, window_size_left=-1,
        window_size_right=-1,
    ):  # fmt: skip
        mask = (is_causal, window_size_left, window_size_right)
        kernel = packed(q, k, cu_seqlens_q, cu_seqlens_k, *mask, softmax_scale)
        for buffer, grad in zip((dq, dk, dv), kernel.backward(dout, Saved(q, k, v, out, softmax_lse)), strict=True):
            buffer.copy_(grad)
        return torch.empty(0)

    module = ModuleType("flash_attn_interface")
    module._flash_attn_forward, module._flash_attn_backward = _flash_attn_forward, _flash_attn_backward
    return module


@pytest.fixture(scope="module")
def kernels():
    """The three kernels over plain implementations; the packages stand in `sys.modules`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
        patch.setitem(sys.modules, "flash_attn.flash_attn_interface", package_2())
        patch.setitem(sys.modules, "flash_attn_interface", package_3())
        yield {"varlen": PlainVarlen(), "flash_attn_2": FlashAttn2(), "flash_attn_3": FlashAttn3()}


@pytest.mark.parametrize("name", CAPABILITIES)
@given(case=segment_cases(offsets=False), heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]))
@settings(max_examples=25)
def test_squares(kernels, name, case, heads):
    shape = AttentionShape(*heads, 8, torch.float64, CPU, SCALE)
    assert max(kernel_errors(kernels[name], case, shape).values()) < 1e-12


@pytest.mark.parametrize("name", CAPABILITIES)
@given(case=segment_cases(longest=6))
@settings(max_examples=40)
def test_whatever_is_supported(kernels, name, case):
    segments = case.segments.select(CAPABILITIES[name].supports(case.segments))
    assume(len(segments))
    shape = AttentionShape(2, 1, 8, torch.float64, CPU, SCALE)
    assert max(kernel_errors(kernels[name], case._replace(segments=segments), shape).values()) < 1e-12


@pytest.mark.parametrize("name", CAPABILITIES)
def test_prefixes_and_tiles_without_mask_share_a_causal_rule(kernels, name):
    rows = [(0, 3, 0, 9, 6), (3, 5, 9, 12, 7), (6, 10, 13, 17, 0), (10, 11, 17, 20, 2)]
    shape = AttentionShape(2, 1, 8, torch.float64, CPU, SCALE)
    for window in (None, 4, 20):
        segments = Segments.of(rows, window=window)
        taken = segments.select(CAPABILITIES[name].supports(segments))
        assert len(taken) == (3 if window == 4 else 4)
        assert max(kernel_errors(kernels[name], Case(taken, 12, 20), shape).values()) < 1e-12


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
    assert max(kernel_errors(PlainVarlen(), case, shape).values()) < 6e-3


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


def test_packages_are_looked_for_without_importing_them(monkeypatch):
    looked = []
    monkeypatch.setattr(flash_attn, "find_spec", lambda name: looked.append(name))
    assert not flash_attn.installed("flash_attn_2") and not flash_attn.installed("flash_attn_3")
    assert looked == ["flash_attn", "flash_attn_interface"]
