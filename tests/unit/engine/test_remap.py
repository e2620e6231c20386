"""Rounds with two layouts: what travels under every checkpointing, with plain and compiled layers; what is refused."""

from dataclasses import replace

import pytest
import torch

from seqloom.attention import attention
from seqloom.dist import run_ranks
from seqloom.engine.rank_actions import bind_plan
from seqloom.errors import SeqloomError
from seqloom.layout import Layout, Span
from seqloom.layout.move import move_between
from seqloom.models.adapter import ModelWithLoss
from seqloom.models.layer_wrapper import recompute_layers
from seqloom.plan import Checkpoint, Group, Remap, Sharding
from support.attention_cases import CountingKernel
from support.steps import Step, one_stage_plan, tiny_spec
from support.transports import CountingTransport
from support.two_layouts import with_works

torch.set_num_threads(1)
SPEC = tiny_spec()
STEP = Step((24, 9, 3), SPEC)
GROUPS = [
    Group((0, 1), 1, 2, (Span(0, 0, 24),)),
    Group((0,), 1, 1, (Span(1, 0, 9),)),
    Group((3,), 1, 1, (Span(2, 0, 3),)),
]
LINEAR = Layout.of([(0, 0, 0, 10), (1, 0, 10, 20), (2, 0, 20, 24), (2, 1, 0, 6), (3, 1, 6, 9), (0, 2, 0, 3)])
KINDS = (Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL)
WIDTHS = {Remap.ATTENTION: (4 + 2 + 2 + 4) * 4, Remap.MLP: 2 * 16}
"""Elements of a token that go in and come out."""


def planned(remap, checkpoint=Checkpoint.NONE, linear=LINEAR):
    plan = one_stage_plan([GROUPS], ranks=4, checkpoint=checkpoint, sharding=Sharding.FULL)
    return with_works(plan, lambda work: replace(work, linear=linear, remap=remap))


def traffic(plan, **options):
    """Calls of all-to-all, its elements from this rank and calls of exchange, forward and backward, on every rank."""

    def body(transport):
        counting, adapter = CountingTransport(transport), STEP.model_adapter()
        recompute_layers(adapter.layers, **options)
        context = bind_plan(plan, counting).rounds[0].context
        counting.reset()
        ModelWithLoss(adapter)(*STEP.rows()(context), context).backward()
        sent, passed = counting.traffic("all_to_all"), counting.traffic("exchange")
        return sent.calls, sent.bytes // 8, passed.calls

    return run_ranks(4, body, strict=True)


@pytest.mark.parametrize("remap", Remap)
def test_what_travels_is_the_move_four_times_a_layer(remap):
    """In and out, forward and backward; keys and values go round as often as without."""
    plan = planned(remap)
    work = plan.pipelines[0].rounds[0].by_stage[0]
    ways = (move_between(work.attention_layout(), LINEAR), move_between(LINEAR, work.attention_layout()))
    inner = 4 * 4 if remap == Remap.ATTENTION else 16  # elements of what comes out
    out, into = ways if remap == Remap.ATTENTION else ways[::-1]
    plain = traffic(planned(remap, linear=None))
    for rank, (calls, elements, passed) in enumerate(traffic(plan)):
        sent = {way: int(way.sizes[way.remote & (way.sender == rank)].sum()) for way in ways}
        forward = sent[into] * (WIDTHS[remap] - inner) + sent[out] * inner
        backward = sent[into] * inner + sent[out] * (WIDTHS[remap] - inner)
        assert (calls, elements) == (4 * SPEC.layers, SPEC.layers * (forward + backward))
        assert plain[rank] == (0, 0, passed)


@pytest.mark.parametrize(
    ("remap", "checkpoint", "more", "again"),
    [
        (Remap.ATTENTION, Checkpoint.SELECTIVE, 1, 0),  # q, k and v; the output is kept
        (Remap.ATTENTION, Checkpoint.FULL, 2, 1),
        (Remap.MLP, Checkpoint.SELECTIVE, 1, 0),  # what goes in; nobody reads what comes out again
        (Remap.MLP, Checkpoint.FULL, 1, 1),
    ],
)
def test_what_recomputation_sends_again(remap, checkpoint, more, again):
    """`more` exchanges of a layer, and the ring's forward `again` or not."""
    first, found = traffic(planned(remap)), traffic(planned(remap, checkpoint))
    for rank, (before, after) in enumerate(zip(first, found, strict=True)):
        assert after[0] == before[0] + more * SPEC.layers
        assert after[2] == before[2] + again * SPEC.layers * (rank < 2), "a ring of two passes keys and values once"


@pytest.mark.parametrize("remap", Remap)
@pytest.mark.parametrize(("checkpoint", "forwards"), list(zip(KINDS, (1, 1, 2), strict=True)))
def test_selective_runs_no_kernel_twice(monkeypatch, remap, checkpoint, forwards):
    kernel = CountingKernel()
    monkeypatch.setattr("seqloom.attention.plan._default_kernel", lambda device: kernel)
    traffic(planned(remap))
    plain = kernel.calls["forward"]
    traffic(planned(remap, checkpoint))
    assert kernel.calls["forward"] == (1 + forwards) * plain


def test_attention_keeps_no_more_than_with_ulysses():
    """q, k and v as they came, the output as the kernel left it and as it went back, and the log-sum-exp."""
    plan, held = planned(Remap.ATTENTION), [0] * 4

    def body(transport):
        context, seen = bind_plan(plan, transport).rounds[0].context, {}
        q, k, v = (torch.randn(context.tokens, n, 4, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2))
        project = torch.nn.Linear(16, 16, bias=False, dtype=torch.float64)

        def keep(tensor):
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            project(attention(q, k, v, context).flatten(1)).sum()
        seen.pop(project.weight.untyped_storage().data_ptr())
        held[transport.rank] = sum(seen.values())

    run_ranks(4, body, strict=True)
    assert sum(held) == 8 * sum(STEP.lengths) * ((4 + 2 + 2 + 2 * 4) * 4 + 4)


def test_a_linear_layout_across_islands_is_refused():
    """On all ranks that run the round; of rank 2 without shards in common nobody knows that it should."""
    plan = replace(planned(Remap.ATTENTION), sharding=Sharding.NONE)

    def body(transport):
        if transport.rank == 2:
            return
        with pytest.raises(SeqloomError, match=rf"on ranks {transport.rank}, which .* shard parameters over more"):
            bind_plan(plan, transport, check=False)

    run_ranks(4, body)
