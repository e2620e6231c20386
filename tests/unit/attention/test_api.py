"""The attention call: fast paths, several groups, ranks without tokens, what autograd sees."""

import pytest
import torch

from seqloom.attention import attention, attention_with_lse, prepare_attention
from seqloom.attention.kernels.cpu import Reference
from seqloom.dist.rank_tokens import bind, bind_single_rank
from seqloom.dist.thread_transport import run_ranks
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group, Method, StageMicroBatch
from support.attention_cases import Case, assemble, attend, worst
from support.transports import CountingTransport

torch.set_num_threads(1)


class Watching:
    """The reference kernel, with a record of what it was asked."""

    capabilities = Reference.capabilities

    def __init__(self):
        self.prepared, self.seen = [], []

    def prepare(self, segments, shape):
        self.prepared.append((segments, shape))
        watcher, inner = self, Reference().prepare(segments, shape)

        class Watched:
            def forward(self, q, k, v):
                watcher.seen.append((q, k, v))
                return inner.forward(q, k, v)

            backward = staticmethod(inner.backward)

        return Watched()


def random_tensors(tokens, heads=4, kv_heads=2, dim=8, dtype=torch.float64):
    return [torch.randn(tokens, n, dim, dtype=dtype, requires_grad=True) for n in (heads, kv_heads, kv_heads)]


def one_rank(body, lengths=(5, 3), counting=False):
    """Run `body(context)` on a single rank that holds whole documents."""
    work = StageMicroBatch((Group((0,), 1, 1, tuple(Span(k, 0, n) for k, n in enumerate(lengths))),), Checkpoint.NONE)
    return run_ranks(1, lambda transport: body(bind(work, CountingTransport(transport) if counting else transport)))[0]


def test_a_rank_alone_copies_and_sends_nothing():
    def body(context):
        kernel, (q, k, v) = Watching(), random_tensors(8)
        out = attention(q, k, v, context, kernels=kernel)
        out.sum().backward()
        assert [x.data_ptr() for x in kernel.seen[0]] == [x.data_ptr() for x in (q, k, v)]
        assert all(context.transport.traffic(verb).calls == 0 for verb in ("all_to_all", "exchange"))

    one_rank(body, counting=True)


def test_index_work_is_done_once_for_all_layers():
    def body(transport):
        kernel = Watching()
        work = StageMicroBatch((Group((0, 1, 2, 3), 2, 2, (Span(0, 0, 21), Span(1, 0, 6))),), Checkpoint.NONE)
        context = bind(work, transport)
        q, k, v = random_tensors(context.tokens)
        for _ in range(3):
            attention(q, k, v, context, kernels=kernel).sum().backward()
        tiles = len(kernel.prepared)
        assert tiles == 2  # a square, and a tile with the keys of the other index
        attention(q, k, v, context, kernels=kernel, window=4)
        assert len(kernel.prepared) > tiles, "another mask is another piece of work"

    run_ranks(4, body)


def test_only_local_heads_reach_the_kernel():
    def body(transport):
        kernel = Watching()
        context = bind(StageMicroBatch((Group((0, 1, 2), 3, 1, (Span(0, 0, 7),)),), Checkpoint.NONE), transport)
        attention(*random_tensors(context.tokens, heads=8, kv_heads=2), context, kernels=kernel)
        (_, shape), (q, k, _) = kernel.prepared[0], kernel.seen[0]
        return shape.heads, shape.kv_heads, tuple(q.shape), tuple(k.shape)

    # The middle rank reads one head of the first kv head and two of the second: one copy per query head.
    assert run_ranks(3, body) == [
        (3, 1, (7, 3, 8), (7, 1, 8)),
        (3, 3, (7, 3, 8), (7, 3, 8)),
        (2, 1, (7, 2, 8), (7, 1, 8)),
    ]


def test_the_plain_call_equals_the_one_with_lse():
    def body(context):
        q, k, v = random_tensors(8)
        out, lse = attention_with_lse(q, k, v, context, window=2)
        assert torch.equal(attention(q, k, v, context, window=2), out)
        assert lse.shape == (4, 8) and not lse.requires_grad and out.requires_grad

    one_rank(body)


def test_strided_inputs_and_gradients():
    """Heads of a fused projection, transposed axes, and the gradient of a sum, which has strides of 0."""

    def body(context):
        fused = torch.randn(8, 3, 4, 8, dtype=torch.float64, requires_grad=True)
        transposed = torch.randn(8, 4, 8, dtype=torch.float64).transpose(1, 2).contiguous().transpose(1, 2)
        q, k, v = fused.unbind(1)
        found = attention(q, k, v, context).sum() + attention(transposed, k, v, context).sum()
        (gradient,) = torch.autograd.grad(found, fused)
        plain = [x.detach().contiguous().requires_grad_() for x in (q, k, v)]
        expected = attention(*plain, context).sum() + attention(transposed.contiguous(), *plain[1:], context).sum()
        torch.testing.assert_close(gradient, torch.stack(torch.autograd.grad(expected, plain), 1))

    one_rank(body)


def test_no_gradient_is_asked_for():
    def body(context):
        q, k, v = (x.detach() for x in random_tensors(8))
        assert not attention(q, k, v, context).requires_grad
        with torch.no_grad():
            assert not attention(*random_tensors(8), context).requires_grad

    one_rank(body)


def test_gradients_of_gradients_are_refused():
    def body(context):
        q, k, v = random_tensors(8)
        (gradient,) = torch.autograd.grad(attention(q, k, v, context).square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()

    one_rank(body)


def test_ranks_without_tokens_take_part():
    """Two tokens on 2 x 3 ranks: some blocks hold none, some ranks of a block hold none. Rank 6 is in no group."""
    for method in Method:
        group = Group(tuple(range(6)), 2, 3, (Span(0, 0, 1), Span(1, 0, 1)), method)
        case = Case((1, 1), 4, 2, 8, world=7, groups=(group,))
        inputs = case.inputs(torch.float64)
        parts = run_ranks(7, lambda transport, case=case, inputs=inputs: attend(transport, case, inputs), strict=True)
        assert [len(part.rows) for part in parts] == [1, 1, 0, 0, 0, 0, 0]
        assert worst(assemble(parts), case.truth(inputs)) < 1e-12


def test_groups_that_share_ranks():
    """A long document over all, shorter ones over halves, short ones on single ranks; rows lie between each other."""
    groups = (
        Group((0, 1, 2, 3), 2, 2, (Span(2, 0, 40),)),
        Group((2, 3), 1, 2, (Span(0, 0, 11), Span(4, 0, 9))),
        Group((0, 1), 2, 1, (Span(1, 0, 8),)),
        Group((1,), 1, 1, (Span(3, 0, 5),)),
        Group((3,), 1, 1, ()),
    )
    case = Case((11, 8, 40, 5, 9), 4, 2, 8, world=4, groups=groups)
    inputs = case.inputs(torch.float64)
    parts = run_ranks(4, lambda transport: attend(transport, case, inputs), strict=True)
    assert worst(assemble(parts), case.truth(inputs)) < 1e-12


def test_hundreds_of_tiny_documents_and_a_long_one():
    case = Case.one_group((1, 2, 3) * 100 + (200,), 4, 2, 8, 2, 3)
    inputs = case.inputs(torch.float64)
    parts = run_ranks(6, lambda transport: attend(transport, case, inputs))
    assert worst(assemble(parts), case.truth(inputs)) < 1e-12


def test_training_state_is_not_held_twice():
    """With a group of one rank beside others, backward reads the output that the caller has."""
    groups = (Group((0,), 1, 1, (Span(0, 0, 6),)), Group((0,), 1, 1, (Span(1, 0, 4),)))

    def body(transport):
        context = bind(StageMicroBatch(groups, Checkpoint.NONE), transport)
        q, k, v = random_tensors(10)
        out = attention(q, k, v, context)
        held = {x.untyped_storage().data_ptr() for x in out.grad_fn.saved_tensors if x is not None}
        own = {x.untyped_storage().data_ptr() for x in (q, k, v, out)}
        assert len(held - own) == 2, "only the two log-sum-exps are extra"

    run_ranks(1, body)


def test_index_work_can_be_done_beforehand():
    prepared = []

    class Noting(Reference):
        def prepare(self, segments, shape):
            prepared.append(shape)
            return super().prepare(segments, shape)

    kernels = Noting()
    context = bind_single_rank([3, 4])
    prepare_attention(context, 4, 2, 8, torch.float64, window=2, kernels=kernels)
    assert len(prepared) == 1
    q, k = torch.randn(7, 4, 8, dtype=torch.float64), torch.randn(7, 2, 8, dtype=torch.float64)
    attention(q, k, k, context, window=2, kernels=kernels)
    assert len(prepared) == 1, "the same call finds it done"
    attention(q, k, k, context, kernels=kernels)
    assert len(prepared) == 2, "another mask is another call"
