"""Soft-capped logits, sinks and values of another width: exact on every shape of group, in pieces and in a graph."""

from dataclasses import replace

import pytest
import torch

from seqloom.attention import attention
from seqloom.dist import bind_single_rank, run_ranks
from seqloom.layout import Span
from seqloom.models.compile import opaque_handle, register_operator
from seqloom.plan import Checkpoint, Group
from support.attention_cases import Case, assemble, attend, worst
from support.kv_cache_cases import PiecesCase, attend_pieces
from support.oracle import attention_truth, difference

torch.set_num_threads(1)
LENGTHS = (17, 5, 1, 24)
SINKS = (0.7, -1.5, 3.0, 0.0)
OPTIONS = {
    "capped": {"softcap": 1.5},
    "sinks": {"sinks": SINKS},
    "both, in a window": {"softcap": 0.8, "sinks": SINKS, "window": 6},
    "both, not causal": {"softcap": 0.8, "sinks": SINKS, "causal": False},
}
SHAPES = [(1, 1, "ring"), (4, 1, "ring"), (3, 1, "ring"), (1, 3, "ring"), (2, 2, "ring"), (1, 4, "gather")]


def check(case, parts):
    """Compare what all ranks found with one process."""
    inputs = case.inputs(torch.float64)
    sinks = case.sink_leaf(inputs.q)
    assert worst(assemble(parts), case.truth(inputs, sinks)) < 1e-9
    if sinks is not None:
        assert difference(sum(part.dsinks for part in parts), sinks.grad) < 1e-9


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("ulysses", "ring", "method"), SHAPES)
def test_groups_of_every_shape(name, ulysses, ring, method):
    case = Case.one_group(LENGTHS, 4, 2, 8, ulysses, ring, method=method, **OPTIONS[name])
    inputs = case.inputs(torch.float64)
    check(case, run_ranks(case.world, lambda transport: attend(transport, case, inputs), strict=True))


@pytest.mark.parametrize("name", OPTIONS)
def test_ranks_whose_query_heads_share_kv_heads_unequally(name):
    """Of 8 heads on 3 ranks the second has heads 3, 4, 5: one reads kv head 0, two read kv head 1."""
    options = {**OPTIONS[name], **({"sinks": 2 * SINKS} if "sinks" in OPTIONS[name] else {})}
    case = Case.one_group(LENGTHS, 8, 2, 8, 3, 1, **options)
    inputs = case.inputs(torch.float64)
    check(case, run_ranks(case.world, lambda transport: attend(transport, case, inputs), strict=True))


@pytest.mark.parametrize("name", OPTIONS)
def test_several_groups_at_once(name):
    groups = (
        Group((0, 1), 1, 2, (Span(0, 0, 17),)),
        Group((0,), 1, 1, (Span(1, 0, 5), Span(2, 0, 1))),
        Group((1, 2), 2, 1, (Span(3, 0, 24),)),
    )
    case = Case(LENGTHS, 4, 2, 8, 3, groups, **OPTIONS[name])
    inputs = case.inputs(torch.float64)
    check(case, run_ranks(case.world, lambda transport: attend(transport, case, inputs), strict=True))


@pytest.mark.parametrize("checkpoint", [Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL])
@pytest.mark.parametrize(("ulysses", "ring"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("name", ["capped", "sinks", "both, in a window"])
def test_documents_in_pieces(name, ulysses, ring, checkpoint):
    whole = replace(Case.one_group(LENGTHS, 4, 2, 8, ulysses, ring, **OPTIONS[name]), groups=())
    rounds = [[Span(0, 0, 9), Span(1, 0, 5)], [Span(3, 0, 10), Span(0, 9, 17)], [Span(2, 0, 1), Span(3, 10, 24)]]
    case = PiecesCase.on_one_group(whole, rounds, ulysses, ring, checkpoint=checkpoint)
    inputs = case.inputs(torch.float64)
    parts = run_ranks(case.world, lambda transport: attend_pieces(transport, case, inputs), strict=True)
    check(whole, [layers[0] for layers in parts])


@pytest.mark.parametrize("given", ["context", "handle"])
@pytest.mark.parametrize("width", [3, 8, 11])
def test_values_of_another_width_and_the_operator_of_a_graph(width, given):
    register_operator()
    draw = torch.Generator().manual_seed(0)
    tokens, sinks = sum(LENGTHS), torch.tensor(SINKS, dtype=torch.float64, requires_grad=True)
    sizes = [(4, 8), (2, 8), (2, width), (4, width)]
    q, k, v, dout = (torch.randn(tokens, *size, generator=draw, dtype=torch.float64) for size in sizes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    context = bind_single_rank(LENGTHS)
    where = context if given == "context" else opaque_handle(context)
    out = attention(*leaves, where, window=7, softcap=1.5, sinks=sinks)
    assert out.shape == dout.shape
    *found, dsinks = torch.autograd.grad(out, (*leaves, sinks), dout)
    exact = sinks.detach().requires_grad_()
    truth = attention_truth(q, k, v, dout, LENGTHS, window=7, softcap=1.5, sinks=exact)
    for one, right in zip((out, *found, dsinks), (truth.out, *truth[2:], exact.grad), strict=True):
        assert difference(one.detach(), right) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sinks_in_lower_precision(dtype):
    """As far from the truth as attention without them, which is rounded in the same places."""
    plain = Case.one_group(LENGTHS, 4, 2, 8, 2, 2)
    errors = []
    for case in (plain, replace(plain, sinks=SINKS)):
        inputs = case.inputs(dtype)
        parts = run_ranks(4, lambda transport, case=case, inputs=inputs: attend(transport, case, inputs))
        errors.append(worst(assemble(parts), case.truth(inputs)))
    assert errors[1] <= 2 * errors[0]
