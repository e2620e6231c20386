"""The kernels of a CPU against the truth: every mask, every dtype, rows in no segment."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.attention.kernels.cpu import MASKED_QUERIES, CpuFlash, Reference
from seqloom.attention.kernels.interface import AttentionShape, Saved
from seqloom.attention.masks import Segments
from support.oracle import attention_truth, difference
from support.segment_cases import SCALE, Case, kernel_errors, random_tensors, segment_cases

torch.set_num_threads(1)

KERNELS = {"reference": Reference, "cpu_flash": CpuFlash}
CPU = torch.device("cpu")
HEADS = st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1), (6, 3)])
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}


def shape_of(heads: int, kv_heads: int, dtype: torch.dtype = torch.float64, dim: int = 8) -> AttentionShape:
    return AttentionShape(heads, kv_heads, dim, dtype, CPU, SCALE)


@pytest.mark.parametrize("name", KERNELS)
@given(case=segment_cases(), heads=HEADS, seed=st.integers(0, 99))
@settings(max_examples=40)
def test_any_segments(name, case, heads, seed):
    errors = kernel_errors(KERNELS[name](), case, shape_of(*heads), seed)
    assert max(errors.values()) < 1e-12, errors


@given(case=segment_cases(), heads=HEADS, softcap=st.sampled_from([0.3, 2.0, 50.0]))
@settings(max_examples=25)
def test_capped_logits(case, heads, softcap):
    shape = replace(shape_of(*heads), softcap=softcap)
    assert max(kernel_errors(Reference(), case, shape).values()) < 1e-12
    assert CpuFlash.capabilities.unsupported(case.segments, shape) == f"cpu_flash: softcap {softcap}; it caps no logits"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("mask", [{}, {"causal": False}, {"window": 6}], ids=str)
def test_every_dtype(name, dtype, mask):
    """Not on drawn cases: with a query on two keys, gradients may cancel to any relative error."""
    segments = Segments.of([(0, 12, 3, 20, 5), (13, 20, 20, 26, 0), (20, 30, 26, 30, 3)], **{"causal": True} | mask)
    for heads in ((4, 2), (3, 1)):
        errors = kernel_errors(KERNELS[name](), Case(segments, 30, 30), shape_of(*heads, dtype, dim=16))
        assert max(errors.values()) < TOLERANCE[dtype], errors


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dim", [1, 3, 40, 256])
def test_any_head_dim(name, dim):
    case = Case(Segments.of([(0, 7, 0, 7, 0), (7, 9, 8, 14, 4)], window=5), 10, 14)
    assert max(kernel_errors(KERNELS[name](), case, shape_of(4, 2, dim=dim)).values()) < 1e-12


@pytest.mark.parametrize("mask", [{}, {"causal": False}, {"window": 300}, {"window": 1}], ids=str)
def test_documents_longer_than_a_block(mask):
    assert MASKED_QUERIES < 600
    lengths = [600, 1, 257, 30]
    shape = shape_of(2, 1)
    tensors = random_tensors(Case(Segments.packed(lengths), 888, 888), shape)
    prepared = CpuFlash().prepare(Segments.packed(lengths, **mask), shape)
    out, lse = prepared.forward(*tensors[:3])
    truth = attention_truth(*tensors, lengths, scale=SCALE, **mask)
    found = (out, lse, *prepared.backward(tensors.dout, Saved(*tensors[:3], out, lse)))
    assert max(map(difference, found, truth)) < 1e-12


def test_a_piece_with_its_prefix_longer_than_a_block():
    case = Case(Segments.of([(0, 300, 0, 420, 120), (300, 330, 420, 425, 3)]), 330, 425)
    assert max(kernel_errors(CpuFlash(), case, shape_of(2, 1)).values()) < 1e-12


@pytest.mark.parametrize("name", KERNELS)
def test_half_precision_does_not_lose_sums_over_many_heads(name):
    case = Case(Segments.packed([400]), 400, 400)
    errors = kernel_errors(KERNELS[name](), case, shape_of(16, 1, torch.bfloat16, dim=32))
    assert max(errors.values()) < 4e-3, errors


@pytest.mark.parametrize("name", KERNELS)
@given(lengths=st.lists(st.integers(1, 9), min_size=2, max_size=5), data=st.data())
@settings(max_examples=15)
def test_a_document_does_not_depend_on_the_others(name, lengths, data):
    segments = Segments.packed(lengths)
    shape = shape_of(4, 2, torch.float32)
    rows = sum(lengths)
    before = random_tensors(Case(segments, rows, rows), shape)
    changed = data.draw(st.integers(0, len(lengths) - 1))
    start, stop = int(segments.q_start[changed]), int(segments.q_stop[changed])
    after = before._replace(**{name: tensor.clone() for name, tensor in before._asdict().items()})
    for tensor in after:
        tensor[start:stop] += 1
    results = []
    for tensors in (before, after):
        tensors = tensors._replace(**{name: tensor.contiguous() for name, tensor in tensors._asdict().items()})
        prepared = KERNELS[name]().prepare(segments, shape)
        out, lse = prepared.forward(*tensors[:3])
        results.append((out, lse.T, *prepared.backward(tensors.dout, Saved(*tensors[:3], out, lse))))
    others = torch.ones(rows, dtype=torch.bool)
    others[start:stop] = False
    for one, two in zip(*results, strict=True):
        assert torch.equal(one[others], two[others])


@pytest.mark.parametrize("name", KERNELS)
def test_backward_with_the_sums_of_more_keys(name):
    """Two tiles of one document, merged: each backward gets the output and the log-sum-exp of both."""
    shape = shape_of(4, 2)
    whole = Case(Segments.of([(0, 6, 0, 10, 4)]), 6, 10)
    tensors = random_tensors(whole, shape)
    kernel = KERNELS[name]()
    everything = kernel.prepare(whole.segments, shape)
    out, lse = everything.forward(*tensors[:3])
    wanted = everything.backward(tensors.dout, Saved(*tensors[:3], out, lse))
    first = kernel.prepare(Segments.of([(0, 6, 0, 4, 6)]), shape)
    second = kernel.prepare(Segments.of([(0, 6, 0, 6, 0)]), shape)
    one = first.backward(tensors.dout, Saved(tensors.q, tensors.k[:4], tensors.v[:4], out, lse))
    two = second.backward(tensors.dout, Saved(tensors.q, tensors.k[4:], tensors.v[4:], out, lse))
    assert difference(one[0] + two[0], wanted[0]) < 1e-12
    for index in (1, 2):
        assert difference(torch.cat([one[index], two[index]]), wanted[index]) < 1e-12


@pytest.mark.parametrize("name", KERNELS)
def test_nothing_to_do(name):
    shape = shape_of(2, 1, torch.float32)
    tensors = random_tensors(Case(Segments.of([]), 3, 2), shape)
    prepared = KERNELS[name]().prepare(Segments.of([]), shape)
    out, lse = prepared.forward(*tensors[:3])
    assert not out.any() and lse.isneginf().all()
    assert not any(grad.any() for grad in prepared.backward(tensors.dout, Saved(*tensors[:3], out, lse)))
