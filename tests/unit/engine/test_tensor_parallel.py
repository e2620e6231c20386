"""The reference model in TP groups has the loss and the gradients of one process, whatever is recomputed or split."""

from dataclasses import replace

import pytest
import torch

from seqloom.attention.context_parallel import KVCache
from seqloom.dist import bind, run_ranks
from seqloom.dist.layer_times import LayerTimes
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.models import TransformerOptions
from seqloom.models.adapter import ModelAdapter, ModelWithLoss
from seqloom.models.compile import compile_layers
from seqloom.models.layer_wrapper import recompute_layers
from seqloom.models.split_backward import defer_weight_gradients
from seqloom.plan import Checkpoint, Group, LayerRange, StageMicroBatch
from support.steps import Found, Step, tiny_spec
from support.tensor_parallel import slice_parameters, whole_gradients
from support.transports import CountingTransport

torch.set_num_threads(1)
LENGTHS = (21, 2, 9)
SPANS = tuple(Span(document, 0, length) for document, length in enumerate(LENGTHS))
GROUPED = Step(
    LENGTHS,
    tiny_spec(heads=8, kv_heads=4, windows=(None, 5), vocabulary=24),
    TransformerOptions(qk_norm=True, qkv_bias=True),
)
TIED = Step(LENGTHS, tiny_spec(heads=4, kv_heads=4, tied=True, vocabulary=24))


def one_group(tensor, ulysses=1, ring=1, spans=SPANS):
    """A group of all ranks; `ulysses` counts TP groups."""
    return Group(tuple(range(tensor * ulysses * ring)), tensor * ulysses, ring, spans)


def in_tp_groups(step, tensor, rounds, checkpoint=Checkpoint.NONE, *, split=False, backend=None, pieces=None):
    """Run rounds, lists of groups, forward in order and backward in reverse on strict transports."""

    def body(transport):
        adapter = step.model_adapter()
        if split:
            adapter = replace(adapter, weight_gradients=defer_weight_gradients(adapter.layers))
        if backend:
            compile_layers(adapter.layers, backend=backend)
        recompute_layers(adapter.layers)
        cuts = slice_parameters(adapter, tensor, transport.rank % tensor)
        kv_cache, losses = KVCache(), []
        for groups in rounds:
            options = {"pieces": pieces, "kv_cache": kv_cache, "tensor": tensor}
            context = bind(StageMicroBatch(tuple(groups), checkpoint), transport, **options)
            adapter.prepare(context, step.dtype)
            losses.append(ModelWithLoss(adapter)(*step.rows()(context), context) / step.valid)
        for number, loss in reversed(list(enumerate(losses))):
            if split:
                with adapter.weight_gradients.deferred(number):
                    loss.backward()
            else:
                loss.backward()
        if split:
            assert adapter.layers[0].self_attn.o_proj.weight.grad is None
            for number in range(len(losses)):
                adapter.weight_gradients.run(number)
        kv_cache.check_empty()
        found = {name: each.grad for name, each in adapter.module.named_parameters()}
        return sum(loss.item() for loss in losses), found, cuts

    ranks = 1 + max(rank for groups in rounds for group in groups for rank in group.ranks)
    results = run_ranks(ranks, body, strict=True)
    gradients = whole_gradients([share for _, share, _ in results], results[0][2], tensor)
    norm = torch.stack([each.norm() for each in gradients.values()]).norm()
    return Found(sum(loss for loss, _, _ in results), norm.item(), gradients)


@pytest.mark.parametrize(("tensor", "ulysses", "ring"), [(2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 1, 2), (2, 2, 2)])
def test_loss_and_gradients_are_those_of_one_process(tensor, ulysses, ring):
    step = TIED if tensor == 4 else GROUPED
    assert len(step.model_adapter().cut_tables(tensor)) == 2 - step.spec.tied, "embedding and head are cut, too"
    found = in_tp_groups(step, tensor, [[one_group(tensor, ulysses, ring)]])
    assert found.worst(step.alone()) <= 1e-9


@pytest.mark.parametrize("checkpoint", Checkpoint)
def test_whatever_is_kept_and_put_off(checkpoint):
    rounds = [[one_group(2, 2, spans=SPANS[:1])], [Group((2, 3), 2, 1, SPANS[1:2])], [Group((0, 1), 2, 1, SPANS[2:])]]
    found = in_tp_groups(GROUPED, 2, rounds, checkpoint, split=True)
    assert found.worst(GROUPED.alone()) <= 1e-9


@pytest.mark.parametrize(
    ("checkpoint", "ring"),
    [(Checkpoint.NONE, 2), (Checkpoint.SELECTIVE, 1), (Checkpoint.SELECTIVE, 2), (Checkpoint.FULL, 1)],
)
def test_a_document_in_pieces(checkpoint, ring):
    pieces = (Span(0, 0, 9), Span(0, 9, 10), Span(0, 10, 21))
    rounds = [(pieces[0],), (SPANS[1], pieces[1]), (pieces[2], SPANS[2])]
    groups = [[one_group(2, 3 - ring, ring, spans)] for spans in rounds]
    found = in_tp_groups(GROUPED, 2, groups, checkpoint, pieces={0: pieces})
    assert found.worst(GROUPED.alone()) <= 1e-9


def in_float64(step):
    """A step with the same numbers for parameters, and nothing rounded after."""

    class Wide(Step):
        def model(self):
            return step.model().double()

    return Wide(step.lengths, step.spec, step.options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_stays_within_twice_that_of_one_process(dtype):
    step = replace(GROUPED, dtype=dtype)
    exact = in_float64(step).alone()
    error = in_tp_groups(step, 1, [[one_group(1)]]).worst(exact)
    for tensor in (2, 4):
        assert in_tp_groups(step, tensor, [[one_group(tensor)]]).worst(exact) <= 2 * error


def test_compiled_layers_run_as_they_stand():
    found = in_tp_groups(GROUPED, 2, [[one_group(2)]], Checkpoint.SELECTIVE, backend="eager")
    assert found.worst(GROUPED.alone()) <= 1e-9


def test_a_layer_gathers_twice_and_sums_twice_each_way():
    """No message of a TP group but those: 2 regions, 2 ways, forward and backward, of its tokens' hidden states.

    And 3 of the embedding (ids, sum, gradient), and 4 of the head (hidden states, labels, a chunk's sums, gradient).
    """

    def body(transport):
        counting, adapter = CountingTransport(transport), GROUPED.model_adapter()
        slice_parameters(adapter, 2, transport.rank)
        context = bind(StageMicroBatch((one_group(2),), Checkpoint.NONE), counting, tensor=2)
        ModelWithLoss(adapter)(*GROUPED.rows()(context), context).backward()
        return counting.traffic("exchange").calls

    assert run_ranks(2, body, strict=True) == [2 * 2 * 2 * GROUPED.spec.layers + 3 + 4] * 2


@pytest.mark.parametrize(("vocabulary", "measured"), [(23, sum(LENGTHS)), (24, 0)])
def test_a_loss_in_which_ranks_wait_says_nothing_of_their_speed(vocabulary, measured):
    step = replace(GROUPED, spec=replace(GROUPED.spec, vocabulary=vocabulary))

    def body(transport):
        adapter, times = step.model_adapter(), LayerTimes(torch.device("cpu"), complete=False)
        slice_parameters(adapter, 2, transport.rank)
        context = bind(StageMicroBatch((one_group(2),), Checkpoint.NONE), transport, tensor=2)
        context.times = times
        times.start()
        ModelWithLoss(adapter)(*step.rows()(context), context)
        times.stop()
        return times.seconds().loss_tokens

    assert sum(run_ranks(2, body, strict=True)) == measured


@pytest.mark.parametrize(
    ("changes", "degree", "words"),
    [
        ({}, 3, r"degree 3: Transformer has heads 4, kv heads 2, and .*; nearest: tensor = 2 \(possible: 1, 2\)"),
        ({}, 4, r"degree 4: Transformer has kv heads 2, and .*; nearest: tensor = 2"),
        ({"kv_heads": 4, "ffn": 25}, 2, r"degree 2: Transformer has MLP width 25, and .*; nearest: tensor = 1"),
        ({}, 0, r"degree 0: .*; nearest: tensor = 1"),
    ],
)
def test_degrees_that_shapes_do_not_allow(changes, degree, words):
    adapter = Step(LENGTHS, tiny_spec(**changes)).model_adapter()
    adapter.check_tp_degree(1)
    with pytest.raises(SeqloomError, match=words):
        adapter.check_tp_degree(degree)


def test_a_network_that_nobody_has_cut():
    own = GROUPED.model_adapter()
    with pytest.raises(SeqloomError, match=r"Transformer cannot be sharded: nobody has said .*; plan with tensor = 1"):
        ModelAdapter(own.module, own.layers, own.hidden, own.head).check_tp_degree(2)


@pytest.mark.parametrize("sliced", [False, True])
def test_weights_that_are_not_the_members_share(sliced):
    """A tp_group with whole weights, and slices without a tp_group."""

    def body(transport):
        adapter = GROUPED.model_adapter()
        if sliced:
            slice_parameters(adapter, 2, transport.rank)
        group = one_group(1, 2)
        context = bind(StageMicroBatch((group,), Checkpoint.NONE), transport, tensor=1 if sliced else 2)
        layers = LayerRange(0, 2, 2)
        with pytest.raises(SeqloomError, match=r"\d+ of (24|32) rows of a weight in a TP group of \d.*sharding 'free'"):
            adapter.run(layers, GROUPED.rows()(context)[0], context)

    run_ranks(2, body, strict=True)
