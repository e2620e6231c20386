"""Attention on any groups is attention in one process: output, log-sum-exp and all gradients."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.attention.kernels.cpu import Reference
from seqloom.dist.thread_transport import Ranks
from seqloom.layout import Span
from seqloom.plan import Group, Method
from support.attention_cases import Case, Inputs, assemble, attend, worst
from support.oracle import difference
from support.strategies_attention import (
    SHAPES,
    cases,
    cases_of_many_groups,
    cases_of_zones,
    head_counts,
    masks,
    with_prefixes,
)

torch.set_num_threads(1)
PER_SHAPE = settings(max_examples=max(1, settings().max_examples // 5))
HALF = settings(max_examples=max(1, settings().max_examples // 2))
FEW = settings(max_examples=max(1, settings().max_examples // 4))


@pytest.fixture(scope="module")
def ranks():
    """Threads for every number of ranks, kept over examples."""
    made = cache(Ranks)
    yield made
    for world in range(1, 9):
        made(world).close()


def run(ranks, case, inputs, *, kernels=None, strict=True):
    run_on_all = ranks(case.world).run
    return assemble(run_on_all(lambda transport: attend(transport, case, inputs, kernels), strict=strict))


def on_one_rank(case):
    """The same attention as one kernel call."""
    return replace(case, world=1, groups=(Group((0,), 1, 1, tuple(Span(k, 0, n) for k, n in enumerate(case.lengths))),))


def assert_true(ranks, case, dtype, tolerance, *, kernels=None, strict=True):
    """Within `tolerance` of the truth, or within twice the error of one kernel call.

    The latter is for gradients that all but cancel, as in documents of a few tokens.
    """
    inputs = case.inputs(dtype)
    truth = case.truth(inputs)
    found = run(ranks, case, inputs, kernels=kernels, strict=strict)
    if worst(found, truth) > tolerance:
        alone = run(ranks, on_one_rank(case), inputs, kernels=kernels)
        for name, one, many, true in zip(truth._fields, alone, found, truth, strict=True):
            assert difference(many, true) <= max(tolerance, 2 * difference(one, true)), name


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
@PER_SHAPE
@given(data=st.data(), strict=st.booleans())
def test_float64_is_the_truth(ranks, shape, data, strict):
    assert_true(ranks, data.draw(cases(shape)), torch.float64, 1e-10, kernels=Reference(), strict=strict)


@HALF
@given(case=cases_of_many_groups(), strict=st.booleans())
def test_a_rank_may_be_in_several_groups(ranks, case, strict):
    assert_true(ranks, case, torch.float64, 1e-10, kernels=Reference(), strict=strict)


@HALF
@given(case=cases_of_zones(), strict=st.booleans())
def test_zones_and_routes_are_the_truth(ranks, case, strict):
    """Also: whatever the overlaps, ranks never wait for each other in a circle; the transport would say so."""
    assert_true(ranks, case, torch.float64, 1e-10, kernels=Reference(), strict=strict)


@HALF
@given(case=cases() | cases_of_many_groups() | cases_of_zones(), p=st.sampled_from((0.1, 0.5, 0.9)))
def test_dropout_is_the_truth_of_an_explicit_mask(ranks, case, p):
    assert_true(ranks, replace(case, dropout=p), torch.float64, 1e-10, kernels=Reference())


@HALF
@given(case=with_prefixes(cases() | cases_of_many_groups() | cases_of_zones()), p=st.sampled_from((0.0, 0.3)))
def test_prefixes_that_see_themselves_are_the_truth(ranks, case, p):
    assert_true(ranks, replace(case, dropout=p), torch.float64, 1e-10, kernels=Reference())


@FEW
@given(case=with_prefixes(cases() | cases_of_many_groups()))
def test_prefixes_with_the_kernels_of_this_device(ranks, case):
    assert_true(ranks, case, torch.float32, 1e-5)


@FEW
@given(case=cases_of_zones())
def test_routes_and_overlap_change_no_bit(ranks, case):
    """Without routes messages go straight; without known nodes local work overlaps the exchanges of all rings."""
    inputs = case.inputs(torch.float32)
    direct = replace(case, groups=tuple(replace(group, route=None) for group in case.groups), node_size=None)
    found, plain = run(ranks, case, inputs), run(ranks, direct, inputs, strict=False)
    assert all(torch.equal(*pair) for pair in zip(found, plain, strict=True))


@HALF
@given(case=cases() | cases_of_many_groups() | cases_of_zones(), strict=st.booleans())
def test_float32_with_the_kernels_of_this_device(ranks, case, strict):
    assert_true(ranks, case, torch.float32, 1e-5, strict=strict)


@st.composite
def averaging_cases(draw):
    """Cases with so many elements that rounding errors average out and their ratio means something."""
    ulysses, ring = draw(st.sampled_from([shape for shape in SHAPES if shape != (1, 1)]))
    lengths = draw(st.lists(st.integers(20, 60), min_size=3, max_size=5))
    heads, kv_heads = draw(head_counts(ulysses))
    method = draw(st.sampled_from(("ring", "gather")))
    mask = draw(masks(least=8))
    return Case.one_group(lengths, heads, kv_heads, 64, ulysses, ring, **mask, method=method)


@FEW
@given(case=averaging_cases(), kernels=st.sampled_from((None, Reference())))
def test_bfloat16_errs_at_most_twice_as_much_as_one_kernel_call(ranks, case, kernels):
    assert_true(ranks, case, torch.bfloat16, 0.0, kernels=kernels)


@FEW
@given(data=st.data())
def test_a_token_changes_no_bit_of_another_document(ranks, data):
    case = data.draw(cases() | cases_of_many_groups())
    document = data.draw(st.integers(0, len(case.lengths) - 1))
    first = sum(case.lengths[:document])
    last = first + case.lengths[document]
    inputs = case.inputs(torch.float32)
    changed = Inputs(*(x.clone() for x in inputs))
    token = data.draw(st.integers(first, last - 1))
    for tensor in changed:
        tensor[token] += 1.0
    before, after = run(ranks, case, inputs, strict=False), run(ranks, case, changed, strict=False)
    assert not torch.equal(before.out[first:last], after.out[first:last])
    for name, old, new in zip(before._fields, before, after, strict=True):
        old, new = (old.T, new.T) if name == "lse" else (old, new)
        assert torch.equal(old[:first], new[:first]) and torch.equal(old[last:], new[last:]), name


@FEW
@given(case=cases() | cases_of_many_groups() | cases_of_zones())
def test_repeated_runs_are_equal_bit_for_bit(ranks, case):
    inputs = case.inputs(torch.float32)
    first, strictly = run(ranks, case, inputs, strict=False), run(ranks, case, inputs, strict=True)
    assert all(torch.equal(*pair) for pair in zip(first, strictly, strict=True))


@FEW
@given(case=cases((1, 1)), method=st.sampled_from(Method))
def test_every_shape_of_four_ranks_gives_the_same(ranks, case, method):
    case = replace(case, heads=case.heads * 4, kv_heads=case.kv_heads, world=4)
    inputs = case.inputs(torch.float64)
    shapes = [(4, 1), (2, 2), (1, 4)]
    groups = [Group((0, 1, 2, 3), ulysses, ring, case.groups[0].spans, method) for ulysses, ring in shapes]
    found = [run(ranks, replace(case, groups=(group,)), inputs) for group in groups]
    for other in found[1:]:
        for name, one, same in zip(other._fields, found[0], other, strict=True):
            assert (one - same).norm() < 1e-12 * max(1, same.norm()), name  # some gradients are all but zero
