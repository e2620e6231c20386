"""Attention as an operator, and its opaque handles: what torch asks of operators, and who keeps what alive."""

import gc
import weakref

import pytest
import torch

from seqloom.attention import attention
from seqloom.attention.kernels.dispatch import default_dispatcher
from seqloom.dist import bind, bind_single_rank, run_ranks
from seqloom.errors import SeqloomError
from seqloom.layout import Route, Span
from seqloom.models.compile import handle_object, opaque_handle, register_operator
from seqloom.plan import Checkpoint, Group, Method, StageMicroBatch

LENGTHS = (7, 1, 12)
TOKENS = sum(LENGTHS)
OPTIONS = (True, None, None, 0.0, None)
register_operator()


class Thing:
    """Something that can be watched."""


def tensors(rows=TOKENS, heads=4, kv_heads=2, dim=4):
    drawn = torch.Generator().manual_seed(0)
    sizes = [(rows, count, dim) for count in (heads, kv_heads, kv_heads)]
    return [torch.randn(size, generator=drawn, dtype=torch.float64, requires_grad=True) for size in sizes]


def test_a_handle_and_its_views_keep_the_object_and_nothing_else_does():
    gc.disable()
    try:
        thing = Thing()
        watched, first, other = weakref.ref(thing), opaque_handle(thing), opaque_handle(None)
        assert handle_object(first) is thing and handle_object(other) is None
        view = first.detach().view(1)
        del thing, first
        assert handle_object(view) is watched()
        del view
        assert watched() is None and handle_object(other) is None
    finally:
        gc.enable()


@pytest.mark.parametrize("window", [None, 3])
def test_the_operator_is_one_that_torch_can_trust(window):
    """Torch's own check: no input is changed or returned, and shapes are what they are said to be."""
    arguments = (*tensors(), opaque_handle(bind_single_rank(LENGTHS)), True, window, 0.5, 0.0, None)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.seqloom.attention.default, arguments, test_utils=tests)


@pytest.mark.parametrize("window", [None, 3])
def test_operator_and_function_give_the_same_bits(window):
    context, found = bind_single_rank(LENGTHS), []
    for given in (context, opaque_handle(context)):
        inputs = tensors()
        out = attention(*inputs, given, window=window)
        (out.cos().sum() + out[3].sum()).backward()
        found.append((out, *(each.grad for each in inputs)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("method", Method)
def test_operator_and_function_give_the_same_bits_in_several_groups(method, live_handles):
    """Rank 0 is in three groups at once, rank 1 only passes on what ranks 0 and 2 send, rank 3 holds nothing else."""
    groups = (
        Group((0, 2), 1, 2, (Span(0, 0, 21),), method, Route((1, 3), 2)),
        Group((2, 3), 2, 1, (Span(1, 0, 8),)),
        Group((0,), 1, 1, (Span(2, 0, 6), Span(3, 0, 5))),
    )

    def body(transport):
        context, found = bind(StageMicroBatch(groups, Checkpoint.NONE), transport, node_size=2), []
        for given in (context, opaque_handle(context)):
            inputs = tensors(rows=context.tokens)
            out = attention(*inputs, given)
            out.cos().sum().backward()
            found.append((out, *(each.grad for each in inputs)))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        return context.tokens

    assert run_ranks(4, body, strict=True) == [22, 0, 14, 4] and not live_handles


def test_memory_is_that_of_the_graph_and_goes_with_it(live_handles):
    """The handle of saved tensors has none of q, k, v and out: the graph may use their memory again."""
    inputs = tensors()
    out, kept = torch.ops.seqloom.attention(*inputs, opaque_handle(bind_single_rank(LENGTHS)), *OPTIONS)
    pointers = {each.untyped_storage().data_ptr() for each in (*inputs, out)}
    tensors_of_groups = handle_object(kept).tensors
    assert [each.shape for each in tensors_of_groups] == [(4, TOKENS)]
    assert not pointers & {each.untyped_storage().data_ptr() for each in tensors_of_groups}
    del out, kept, tensors_of_groups
    assert not live_handles


def test_a_row_of_nobody_on_a_rank_without_tokens():
    inputs = tensors(rows=1)
    out = attention(*inputs, opaque_handle(bind_single_rank(())))
    out.sum().backward()
    assert out.shape == (1, 4, 4) and not out.any()
    assert all(each.grad.shape == each.shape and not each.grad.any() for each in inputs)


def test_what_attention_refuses_the_operator_refuses():
    handed = opaque_handle(bind_single_rank(LENGTHS))
    with pytest.raises(SeqloomError, match="19 rows of q, k, v"):
        attention(*tensors(rows=19), handed)
    with pytest.raises(SeqloomError, match=r"dropout 0\.1"):
        attention(*tensors(), handed, dropout=0.1)
    with pytest.raises(SeqloomError, match="leave them out, or do not compile"):
        attention(*tensors(), handed, kernels=default_dispatcher(torch.device("cpu")))
