"""Parameters that plans place anew: what moves when, what a rank holds, what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from seqloom.dist import Channel, SingleRankTransport, bind_single_rank
from seqloom.engine import bind_plan, evaluate, run_step
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.models import ModelAdapter
from seqloom.models.adapter import ModelWithLoss
from seqloom.params import ReshardingParameters
from seqloom.params.interface import check_fixed_layout, check_tensor_degree
from seqloom.params.resharding import ReshardedStages
from seqloom.plan import Group, Reduce, Sharding
from seqloom.train.model import prepare_layers
from support.shapes import Shape, gathered_per_pass, in_nodes_of, shaped_plan
from support.steps import Found, Step, one_stage_plan, tiny_spec
from support.tiny_models import tiny_model
from support.transports import CountingTransport

torch.set_num_threads(1)
SPEC = tiny_spec(layers=3, tied=True)
STEP = Step((14, 6, 9, 4, 3), SPEC)
TP_GROUPS = (Shape(1, 2), Shape(2, 1, 1, 1, 3))
"""A tp_group of two ranks beside a pipeline of two stages, with a document in pieces."""


def planned(*shapes, ranks=4, step=STEP):
    return shaped_plan(step.lengths, shapes, ranks=ranks, layers=step.spec.layers, heads=step.spec.heads)


def run(plan, transport, parameters, step=STEP):
    return run_step(bind_plan(plan, transport), parameters, step.rows(), step.valid)


def test_one_model_runs_plans_of_any_shape(threads):
    """Neither modules nor parameters are made anew, and a rank holds what its stage needs."""
    shapes = [TP_GROUPS, (Shape(1, 1, 2, 2),), (Shape(3),), (Shape(1, 2, 1, 2),), TP_GROUPS]

    def body(transport):
        adapter = prepare_layers(STEP.model_adapter())
        parameters = ReshardingParameters(adapter, transport)
        before = [id(each) for each in (*adapter.module.modules(), *adapter.module.parameters())]
        found, shares = [], []
        for each in shapes:
            result = run(planned(*each), transport, parameters)
            gradients = {name: gradient.clone() for name, gradient in parameters.full_gradients()}
            found.append(Found(result.loss, result.gradient_norm, gradients))
            shares.append(sum(copy.numel() for copy in parameters.compute_weights()))
        assert before == [id(each) for each in (*adapter.module.modules(), *adapter.module.parameters())]
        return found, shares

    wanted, table = STEP.alone(), 23 * 16
    matrices, norms = 16 * 16 * 2 + 8 * 16 * 2 + 24 * 16 * 3, 2 * 16
    layer, sliced = matrices + norms, matrices // 2 + norms
    for rank, (found, shares) in enumerate(threads(4).run(body, strict=True)):
        assert max(each.worst(wanted) for each in found) < 1e-9
        tp_group, everything = table + 3 * sliced + 16, table + 3 * layer + 16
        lines = (tp_group, tp_group, table + layer, table + 2 * layer + 16)
        held = [lines, (everything,) * 4, (table + layer, layer, table + layer + 16, 0), (tp_group,) * 4, lines]
        assert shares == [each[rank] for each in held]


PASSES = {
    "beside a tp_group, which has none to share with": ((Shape(1, 2), Shape(1, 1, 2, 1, 3)), (0,), (2, 3)),
    "tp_groups in columns": ((Shape(1, 2, 2, 1, 2),), (0,), (0, 1, 2, 3)),
    "one stage of two, halves": ((Shape(2, 1, 2, 1, 2, "seq1f1b-zb"),), (1,), (2, 3)),
    "a fold, with the table on both ends": ((Shape(2, 1, 2, 1, 1, "zb-v"),), (0, 2, 3), (0, 1, 2, 3)),
}
"""Shapes, the stages that are gathered, the ranks that then hold less between passes."""
QUICK, *LONGER = PASSES


@pytest.mark.parametrize("name", [QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in LONGER)])
def test_stages_may_be_gathered_for_every_pass(threads, name):
    """Between passes a rank keeps a share, also of gradients; after the step no copy of such a stage has memory."""
    shapes, stages, fewer = PASSES[name]
    step = replace(STEP, spec=tiny_spec(layers=4, tied=True))
    whole = planned(*shapes, step=step)
    plan = gathered_per_pass(whole, stages)

    def body(transport):
        adapter = prepare_layers(step.model_adapter())
        parameters, found, held = ReshardingParameters(adapter, transport), [], []
        for each in (plan, whole, plan):
            result = run(each, transport, parameters, step)
            gradients = {name: gradient.clone() for name, gradient in parameters.full_gradients()}
            found.append(Found(result.loss, result.gradient_norm, gradients))
            held.append(sum(copy.numel() for copy in parameters.compute_weights()))
        loss = evaluate(bind_plan(plan, transport), parameters, step.rows(), step.valid)
        assert loss == pytest.approx(step.alone().loss, rel=1e-12)
        return found, held

    wanted = step.alone()
    for rank, (found, (kept, every, again)) in enumerate(threads(4).run(body, strict=True)):
        assert max(each.worst(wanted) for each in found) < 1e-9
        assert kept == again <= every and (kept < every) == (rank in fewer)


def test_ranks_without_tokens_take_part_in_every_pass(threads):
    """Documents of fewer tokens than their group has ranks, under every way of keeping activations."""
    step = Step((3, 1, 2, 1), SPEC)
    plan = gathered_per_pass(planned(Shape(1, 1, 2, 2), step=step), (0,))
    for found in threads(4).run(lambda transport: step.spread(plan, transport), strict=True):
        assert found.worst(step.alone()) < 1e-9


def test_a_layer_s_gradients_are_in_shares_before_the_next_layer_s(threads, monkeypatch):
    """Of whole gradients a backward has the head's, one layer's at a time, and at its end the embedding's."""
    step = replace(STEP, spec=tiny_spec(layers=4))
    plan = gathered_per_pass(planned(Shape(1, 1, 2, 2), step=step), (0,))
    sizes = {name: each.numel() for name, each in step.model().named_parameters()}
    layer = sum(size for name, size in sizes.items() if ".layers.0." in name)
    outside = sum(size for name, size in sizes.items() if ".layers." not in name)
    most, plain = [], ReshardedStages._reduce_bucket

    def noted(stages, layers, bucket):
        most.append(sum(copy.grad.numel() for copy in stages._copies.parameters if copy.grad is not None))
        plain(stages, layers, bucket)

    monkeypatch.setattr(ReshardedStages, "_reduce_bucket", noted)
    for found in threads(4).run(lambda transport: step.spread(plan, transport), strict=True):
        assert found.worst(step.alone()) < 1e-9
    assert len(most) == 4 * 3 * (4 + 2) and max(most) == layer > outside


NODES = {
    "replicas": (Shape(),) * 4,
    "tp_groups and stages": TP_GROUPS,
    "tp_groups": (Shape(1, 2),) * 2,
    "stages, with the table on both ends": (Shape(2),) * 2,
    "ranks of a stage in both nodes": (Shape(1, 1, 2, 2),),
}
"""Shapes with all parameters in each of two nodes of two ranks."""


@pytest.mark.parametrize("name", NODES)
def test_parameters_cross_to_a_node_once_and_gradients_back(threads, name):
    """A node has one half of them: the rows that its ranks own, as all weights here divide into four."""
    step = replace(STEP, spec=replace(SPEC, vocabulary=24))
    near = planned(*NODES[name], step=step)
    plans = near, in_nodes_of(2, near)

    def body(transport):
        found, sent, others = [], [], range(2, 4) if transport.rank < 2 else range(2)
        for plan in plans:
            counting = CountingTransport(transport)
            parameters = ReshardingParameters(prepare_layers(step.model_adapter()), counting)
            result = run(plan, transport, parameters, step)
            sent.append(sum(counting.bytes_to(peer) for peer in others))
            gradients = {name: gradient.clone() for name, gradient in parameters.full_gradients()}
            found.append(Found(result.loss, result.gradient_norm, gradients))
        return found, sent

    results, wanted = threads(4).run(body, strict=True), step.alone()
    assert max(each.worst(wanted) for found, _ in results for each in found) < 1e-9
    known, crossed = np.array([sent for _, sent in results]).sum(axis=0).tolist()
    assert crossed == 2 * 8 * step.spec.parameters() < known, "there and back, in float64"


def test_evaluation_leaves_gradients_and_nothing_under_way(threads):
    def body(transport):
        parameters = ReshardingParameters(prepare_layers(STEP.model_adapter()), transport)
        losses = [evaluate(bind_plan(planned(*TP_GROUPS), transport), parameters, STEP.rows(), STEP.valid)]
        losses.append(run(planned(Shape(1, 2, 2)), transport, parameters).loss)
        norm = float(parameters.gradient_norm())
        losses.append(evaluate(bind_plan(planned(Shape(3)), transport), parameters, STEP.rows(), STEP.valid))
        return losses, norm == float(parameters.gradient_norm())

    for losses, kept in threads(4).run(body, strict=True):
        assert losses == pytest.approx([STEP.alone().loss] * 3, rel=1e-12) and kept


def test_what_does_not_learn_has_no_gradient(threads):
    def freeze(adapter):
        for name, parameter in adapter.module.named_parameters():
            parameter.requires_grad_("layers.1.mlp" in name or "layers.2.self_attn.v" in name)
        return adapter

    def body(transport):
        found = []
        for shapes in (TP_GROUPS, (Shape(3),)):
            parameters = ReshardingParameters(freeze(prepare_layers(STEP.model_adapter())), transport)
            run(planned(*shapes), transport, parameters)
            found.append(dict(parameters.full_gradients()))
            assert parameters.master_weights().keys() == found[-1].keys()
            assert len(dict(parameters.full_parameters())) > len(found[-1])
        return found

    wanted = STEP.alone().gradients
    for found in threads(4).run(body, strict=True):
        for gradients in found:
            assert len(gradients) == 4
            for name, each in gradients.items():
                assert float((each - wanted[name]).norm() / wanted[name].norm()) < 1e-9


def test_half_precision_adds_up_in_float32(threads):
    step = replace(STEP, dtype=torch.float32)

    def body(transport):
        parameters = ReshardingParameters(prepare_layers(step.model_adapter()), transport, param_dtype=torch.bfloat16)
        result = run(planned(*TP_GROUPS), transport, parameters, step)
        assert {each.grad.dtype for each in parameters.master_weights().values()} == {torch.float32}
        assert {each.dtype for each in parameters.compute_weights()} == {torch.bfloat16}
        return Found(
            result.loss, result.gradient_norm, {name: each.clone() for name, each in parameters.full_gradients()}
        )

    found = threads(4).run(body, strict=True)[0]
    single = replace(STEP, dtype=torch.bfloat16).alone().worst(STEP.alone())
    assert 1e-4 < found.worst(STEP.alone()) < 2 * single


class Recording:
    """A transport whose exchanges of parameters are recorded: when they start, and when they are waited for."""

    def __init__(self, transport, log, channel=Channel.LAYERS):
        self._transport, self._log, self._channel = transport, log, channel

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def on(self, channel):
        return Recording(self._transport.on(channel), self._log, channel)

    def exchange(self, sends, receives):
        handle = self._transport.exchange(sends, receives)
        return (
            _Watched(handle, self._log, sum(e.startswith("start") for e in self._log))
            if self._channel == Channel.PARAMETERS
            else handle
        )


class _Watched:
    def __init__(self, handle, log, number):
        self._handle, self._log, self._number = handle, log, number
        log.append(f"start {number}")

    def wait(self):
        self._log.append(f"wait {self._number}")
        self._handle.wait()


def test_parameters_and_gradients_travel_while_layers_compute(threads):
    """Buckets 0 to 4 are the embedding, three layers, norm and head; 5 to 9 their gradients, from the last."""
    spans = tuple(Span(k, 0, n) for k, n in enumerate(STEP.lengths))
    rounds = [[Group((0, 1, 2, 3), 2, 2, spans[:3])], [Group((0, 1, 2, 3), 2, 2, spans[3:])]]
    step = replace(STEP, spec=replace(SPEC, tied=False))
    plan = one_stage_plan(rounds, ranks=4, layers=3, sharding=Sharding.FREE)

    def body(transport):
        log, adapter = [], step.model_adapter()
        for number, layer in enumerate(adapter.layers):
            layer.register_forward_hook(lambda *_, number=number: log.append(f"forward {number}"))
        parameters = ReshardingParameters(adapter, Recording(transport, log))
        for number, layer in enumerate(adapter.layers):
            layer.input_layernorm.weight.register_hook(lambda _, number=number: log.append(f"backward {number}"))
        run(plan, transport, parameters, step)
        return log

    for log in threads(4).run(body, strict=True):
        assert log[:5] == [f"start {k}" for k in range(5)]
        first = ["wait 0", "wait 1", "forward 0", "wait 2", "forward 1", "wait 3", "forward 2", "wait 4"]
        assert log[5:13] == first
        backwards = ["backward 2", "backward 1", "backward 0"]
        assert log[13:19] == [*backwards, "forward 0", "forward 1", "forward 2"]
        last = log[19:]
        assert last.index("start 5") < last.index("backward 2") < last.index("start 6") < last.index("backward 1")
        assert last.index("start 7") < last.index("backward 0") < last.index("start 8") < last.index("start 9")
        assert last[-5:] == [f"wait {k}" for k in range(5, 10)]


def test_a_single_rank_computes_with_the_masters():
    step = replace(STEP, spec=tiny_spec())
    parameters = ReshardingParameters(step.model_adapter(), SingleRankTransport())
    found = run(planned(Shape(), ranks=1, step=step), SingleRankTransport(), parameters, step)
    assert found.loss == pytest.approx(step.alone().loss, rel=1e-12)
    masters, copies = parameters.master_weights().values(), parameters.compute_weights()
    assert [each.data_ptr() for each in masters] == [each.data_ptr() for each in copies]


def message(threads, plan, make=ReshardingParameters, step=STEP):
    def body(transport):
        return run(plan, transport, make(prepare_layers(step.model_adapter()), transport), step)

    with pytest.raises(SeqloomError) as refused:
        threads(4).run(body)
    return str(refused.value)


def test_plans_that_do_not_suit_are_refused(threads):
    free = planned(Shape(1, 2), Shape(2))
    assert 'a plan with none sharding for ReshardingParameters; plan with sharding "free"' in message(
        threads, replace(planned(Shape()), sharding=Sharding.NONE)
    )
    spans = tuple(Span(k, 0, n) for k, n in enumerate(STEP.lengths))
    some = one_stage_plan([[Group((0, 1), 1, 2, spans)]], ranks=4, layers=3, sharding=Sharding.FREE, reduce=Reduce.STEP)
    absent = r"0UNSHARD0 of pipeline 0 gathers parameters for a round in which ranks [2, 3] have no group"
    assert absent in message(threads, gathered_per_pass(some, (0,)))
    deeper = replace(STEP, spec=tiny_spec(layers=4))
    assert "a plan for 3 layers and a model with 4" in message(threads, free, step=deeper)
    with pytest.raises(SeqloomError, match="for parameters that stay where they were placed; use ReshardingParameters"):
        check_fixed_layout(free)
    with pytest.raises(SeqloomError, match="tensor degree 1, 2 for parameters whose weights are divided over 1 rank"):
        check_tensor_degree(replace(free, sharding=Sharding.FULL), 1)
    assert "tensor degree 4: Transformer has kv heads 2" in message(threads, planned(Shape(1, 4)))


def test_layers_that_are_not_called_as_modules_are_refused():
    def around(adapter):
        """The same model, whose last layers nobody calls."""
        decoder = adapter.module.model
        hidden = lambda ids, c: decoder.norm(decoder.body(decoder.embed(ids, c.positions), c.positions, c, 0, 2))  # noqa: E731
        return ModelAdapter(adapter.module, adapter.layers, hidden, adapter.head)

    plan = planned(Shape(), ranks=1)
    with pytest.raises(SeqloomError, match=r"layers 0 to 2 have run before model.layers.2.\S+ was there"):
        run(plan, SingleRankTransport(), ReshardingParameters(around(STEP.model_adapter()), SingleRankTransport()))


def test_gradients_without_a_plan_are_refused():
    with pytest.raises(SeqloomError, match=r"call prefetch\(plan\) first"):
        ReshardingParameters(STEP.model_adapter(), SingleRankTransport()).finish_gradients()


def test_models_without_a_free_layout_are_refused():
    mixed, scalar = STEP.model_adapter(), STEP.model_adapter()
    mixed.module.model.norm.to(torch.float32)
    with pytest.raises(SeqloomError, match="added up in one dtype"):
        ReshardingParameters(mixed, SingleRankTransport())
    mixed.module.to(torch.float32).model.norm.to(torch.bfloat16)
    with pytest.raises(SeqloomError, match=r"parameters in torch.bfloat16, torch.float32: .* as param_dtype="):
        ReshardingParameters(mixed, SingleRankTransport())
    scalar.module.scale = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
    with pytest.raises(SeqloomError, match="parameter scale has no axis"):
        ReshardingParameters(scalar, SingleRankTransport())


@pytest.mark.parametrize(("name", "shapes"), [("qwen3", TP_GROUPS), ("qwen3", (Shape(1, 2, 2),)), ("phi", TP_GROUPS)])
def test_models_of_transformers(threads, name, shapes):
    from seqloom.integrations.transformers import attach
    from seqloom.integrations.transformers import model_adapter as described

    made = [described(attach(tiny_model(name, num_hidden_layers=3))) for _ in range(5)]
    context = bind_single_rank(STEP.lengths)
    loss = ModelWithLoss(made[4])(*STEP.rows()(context), context) / STEP.valid
    loss.backward()
    gradients = {name: each.grad for name, each in made[4].module.named_parameters()}
    wanted = Found(loss.item(), torch.stack([each.norm() for each in gradients.values()]).norm().item(), gradients)

    def body(transport):
        parameters = ReshardingParameters(prepare_layers(made[transport.rank]), transport)
        result = run(planned(*shapes), transport, parameters)
        return Found(
            result.loss, result.gradient_norm, {name: each.clone() for name, each in parameters.full_gradients()}
        )

    assert max(each.worst(wanted) for each in threads(4).run(body, strict=True)) < 1e-9
