"""Attention over documents in pieces is attention over whole documents: output, log-sum-exp and all gradients."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.attention.kernels.cpu import Reference
from seqloom.dist.thread_transport import Ranks
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group
from support.attention_cases import assemble, attend, worst
from support.kv_cache_cases import attend_pieces, evaluate_pieces
from support.oracle import difference
from support.strategies_kv_cache import pieces_cases, pieces_cases_with_prefixes

torch.set_num_threads(1)
HALF = settings(max_examples=max(1, settings().max_examples // 2))
FEW = settings(max_examples=max(1, settings().max_examples // 5))
FEWER = settings(max_examples=max(1, settings().max_examples // 10))


@pytest.fixture(scope="module")
def ranks():
    """Threads for every number of ranks, kept over examples."""
    made = cache(Ranks)
    yield made
    for world in range(1, 8):
        made(world).close()


def run(ranks, body, case, inputs, *options, strict=True):
    """What every layer gives, put together from all ranks."""
    parts = ranks(case.world).run(lambda transport: body(transport, case, inputs, *options), strict=strict)
    return [assemble(own) for own in zip(*parts, strict=True)]


@HALF
@given(case=pieces_cases(), strict=st.booleans())
def test_pieces_are_the_truth_under_every_checkpoint(ranks, case, strict):
    inputs = case.inputs(torch.float64)
    found = run(ranks, attend_pieces, case, inputs, Reference(), strict=strict)
    for layer, given_ in zip(found, inputs, strict=True):
        assert worst(layer, case.truth(given_)) < 1e-9


@FEW
@given(case=pieces_cases(), p=st.sampled_from((0.1, 0.5)))
def test_pieces_drop_the_weights_of_whole_documents(ranks, case, p):
    if case.whole.tensor > 1:
        return
    case = replace(case, whole=replace(case.whole, dropout=p))
    inputs = case.inputs(torch.float64)
    for number, layer in enumerate(run(ranks, attend_pieces, case, inputs, Reference())):
        assert worst(layer, case.truth(inputs[number], number)) < 1e-9


@FEW
@given(case=pieces_cases_with_prefixes())
def test_prefixes_within_the_first_piece_are_the_truth(ranks, case):
    inputs = case.inputs(torch.float64)
    for layer, given_ in zip(run(ranks, attend_pieces, case, inputs, Reference()), inputs, strict=True):
        assert worst(layer, case.truth(given_)) < 1e-9


@FEW
@given(case=pieces_cases())
def test_evaluation_needs_no_backward(ranks, case):
    inputs = case.inputs(torch.float64)
    for layer, given_ in zip(run(ranks, evaluate_pieces, case, inputs), inputs, strict=True):
        truth = case.truth(given_)
        assert difference(layer.out, truth.out) < 1e-9 and difference(layer.lse, truth.lse) < 1e-9


@FEWER
@given(case=pieces_cases())
def test_checkpoints_change_no_bit(ranks, case):
    """What is computed again is computed from the same numbers, whatever has happened to later pieces meanwhile."""
    inputs = case.inputs(torch.float32)
    kinds = (Checkpoint.NONE, Checkpoint.FULL, Checkpoint.SELECTIVE, Checkpoint.STAGE)
    plain, *others = (run(ranks, attend_pieces, replace(case, checkpoint=kind), inputs) for kind in kinds)
    for other in others:
        for one, same in zip(plain, other, strict=True):
            assert all(torch.equal(*pair) for pair in zip(one, same, strict=True))


@FEW
@given(case=pieces_cases(longest=150), dtype=st.sampled_from((torch.float32, torch.bfloat16)))
def test_the_kernels_of_this_device_err_at_most_twice_as_much_as_one_call(ranks, case, dtype):
    """Gradients that all but cancel may err more: those are measured against the largest one."""
    case = replace(case, whole=replace(case.whole, dim=32), layers=1)
    (inputs,) = case.inputs(dtype)
    truth = case.truth(inputs)
    spans = tuple(Span(k, 0, n) for k, n in enumerate(case.whole.lengths))
    alone = replace(case.whole, world=1, groups=(Group((0,), 1, 1, spans),))
    (found,) = run(ranks, attend_pieces, case, [inputs])
    single = assemble(ranks(1).run(lambda transport: attend(transport, alone, inputs)))
    floor = 1e-5 if dtype == torch.float32 else 1e-4
    for name, one, many, true in zip(truth._fields, single, found, truth, strict=True):
        assert difference(many, true) <= max(floor, 2 * difference(one, true)), name
