"""The engine on a GPU: ranks as threads and as gloo processes on one device, and NCCL with one rank."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.attention.kernels.cpu import Reference
from seqloom.attention.kernels.dispatch import Dispatcher, available_kernels
from seqloom.dist import Communicators, TorchTransport
from seqloom.layout import Span
from seqloom.plan import Group, GroupFamily
from support.attention_cases import Case, Inputs, assemble, attend, worst
from support.oracle import difference
from support.strategies_attention import SHAPES, cases, cases_of_many_groups, cases_of_zones

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
FEW = settings(max_examples=max(1, settings().max_examples // 6))
FEWER = settings(max_examples=max(1, settings().max_examples // 12))
MASKS = ({"causal": True}, {"causal": False}, {"causal": True, "window": 50})
both = pytest.mark.parametrize("name", ["all", "triton"])
masks = pytest.mark.parametrize("mask", MASKS, ids=str)


@pytest.fixture(scope="module")
def kernels():
    """Every kernel of this GPU; FlashAttention-4, if there, for whatever it takes, and the others for the rest."""
    return {
        "all": Dispatcher(available_kernels(torch.device("cuda", 0))),
        "triton": Dispatcher(
            tuple(one for one in available_kernels(torch.device("cuda", 0)) if one.capabilities.name == "triton")
        ),
    }


def run(threads, case, inputs, kernel, *, strict=False):
    return assemble(threads(case.world).run(lambda transport: attend(transport, case, inputs, kernel), strict=strict))


def alone(case):
    """The same attention on one rank."""
    return replace(case, world=1, groups=(Group((0,), 1, 1, tuple(Span(k, 0, n) for k, n in enumerate(case.lengths))),))


@FEW
@given(case=cases() | cases_of_many_groups() | cases_of_zones(), strict=st.booleans())
def test_float64_is_the_truth(threads, case, strict):
    inputs = case.inputs(torch.float64, device="cuda")
    assert worst(run(threads, case, inputs, Reference(), strict=strict), case.truth(inputs)) < 1e-10


@st.composite
def half_precision_cases(draw):
    """Cases whose rounding errors average out, on head counts for which few kernels are compiled."""
    ulysses, ring = draw(st.sampled_from([shape for shape in SHAPES if shape[0] in (1, 2, 4)]))
    lengths = draw(st.lists(st.integers(1, 400), min_size=2, max_size=6))
    heads = draw(st.sampled_from(((8, 8), (8, 2))))
    method = draw(st.sampled_from(("ring", "gather")))
    return Case.one_group((300, *lengths), *heads, 64, ulysses, ring, method=method)


@both
@masks
@FEWER
@given(case=half_precision_cases(), strict=st.booleans())
def test_bfloat16_errs_at_most_twice_as_much_as_one_kernel_call(threads, kernels, name, mask, case, strict):
    case = replace(case, **mask)
    inputs = case.inputs(torch.bfloat16, device="cuda")
    truth = case.truth(inputs)
    one = run(threads, alone(case), inputs, kernels[name])
    many = run(threads, case, inputs, kernels[name], strict=strict)
    for field, single, spread, true in zip(truth._fields, one, many, truth, strict=True):
        assert difference(spread, true) <= max(1e-6, 2 * difference(single, true)), field


@both
@FEWER
@given(case=half_precision_cases(), window=st.none() | st.just(50), data=st.data())
def test_prefixes_that_see_themselves_in_bfloat16(threads, kernels, name, window, case, data):
    prefixes = tuple(data.draw(st.just(0) | st.integers(0, length)) for length in case.lengths)
    case = replace(case, window=window, prefixes=prefixes)
    inputs = case.inputs(torch.bfloat16, device="cuda")
    truth = case.truth(inputs)
    one = run(threads, alone(case), inputs, kernels[name])
    many = run(threads, case, inputs, kernels[name])
    for field, single, spread, true in zip(truth._fields, one, many, truth, strict=True):
        assert difference(single, true) < 2e-2, field
        assert difference(spread, true) <= max(1e-6, 2 * difference(single, true)), field


@both
@masks
@FEWER
@given(case=half_precision_cases(), data=st.data())
def test_a_token_changes_no_bit_of_another_document(threads, kernels, name, mask, case, data):
    case = replace(case, **mask)
    document = data.draw(st.integers(0, len(case.lengths) - 1))
    first = sum(case.lengths[:document])
    last = first + case.lengths[document]
    inputs = case.inputs(torch.bfloat16, device="cuda")
    changed = Inputs(*(x.clone() for x in inputs))
    for tensor in changed:
        tensor[data.draw(st.integers(first, last - 1))] += 1.0
    torch.use_deterministic_algorithms(True)
    try:
        before, after = (run(threads, case, these, kernels[name]) for these in (inputs, changed))
    finally:
        torch.use_deterministic_algorithms(False)
    assert not torch.equal(before.out[first:last], after.out[first:last])
    for field, old, new in zip(before._fields, before, after, strict=True):
        old, new = (old.T, new.T) if field == "lse" else (old, new)
        assert torch.equal(old[:first], new[:first]) and torch.equal(old[last:], new[last:]), field


def test_long_documents_round_up_into_the_next_and_at_the_end(threads, kernels):
    """Dense calls: behind the first document lies another, behind the last the buffer ends."""
    case = Case.one_group((300, 16_500, 700, 40, 16_411), 2, 1, 64)
    inputs = case.inputs(torch.bfloat16, device="cuda")
    found, expected = (run(threads, case, inputs, kernels[name]) for name in ("all", "triton"))
    for field, one, other in zip(found._fields, found, expected, strict=True):
        assert difference(one, other) < 6e-3, field


@pytest.mark.parametrize("shape", [(4, 1), (2, 2), (1, 4)], ids=str)
def test_gloo_processes_on_one_gpu(gloo_pool, shape):
    case = Case.one_group((37, 1, 5, 640, 2, 2, 190), 8, 2, 64, *shape)
    inputs = case.inputs(torch.float32, device="cpu")
    found = assemble(gloo_pool.run(attend, case, inputs, Reference(), "cuda", ranks=4, timeout_s=300))
    assert worst(found, case.truth(inputs)) < 1e-5


def test_nccl_with_one_rank(tmp_path, kernels):
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        communicators = Communicators(GroupFamily(1, node_size=1))
        communicators.warm_up()
        case = Case.one_group((300, 20, 150), 8, 2, 64)
        inputs = case.inputs(torch.bfloat16, device="cuda")
        found = assemble([attend(TorchTransport(communicators), case, inputs, kernels["all"])])
        assert worst(found, case.truth(inputs)) < 1e-2
        communicators.close()
    finally:
        dist.destroy_process_group()
