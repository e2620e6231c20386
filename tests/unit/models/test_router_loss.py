"""The router loss in parts against the formula over all tokens: value, gradients, and what is refused."""

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from seqloom.data import Batch, RowReader, StoreWriter, open_source
from seqloom.dist import SingleRankTransport, bind, bind_single_rank, run_ranks
from seqloom.engine import bind_plan, run_step
from seqloom.errors import SeqloomError
from seqloom.integrations.transformers import attach, inputs, model_adapter
from seqloom.layout import Span
from seqloom.models.compile import compile_layers
from seqloom.models.router_loss import RouterLoss, add_loss
from seqloom.params import ReplicatedParameters
from seqloom.plan import Checkpoint, Group, StageMicroBatch
from support.steps import one_stage_plan
from support.tiny_models import VOCABULARY, documents, gradients, one_by_one, tiny_model

torch.set_num_threads(1)
CPU = torch.device("cpu")
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.25}


def logits_of(*tokens):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(n, 5, generator=generator, dtype=torch.float64, requires_grad=True) for n in tokens]


def test_parts_add_up_to_the_loss_of_all_tokens():
    """Two layers, of which each sees the tokens in parts of 7, 0 and 4."""
    layers, loss = [logits_of(7, 0, 4), logits_of(7, 0, 4)], RouterLoss(0.25, 5, 2)
    with loss.counting(CPU) as counted:
        assert all(loss.of_tokens(part) is None for parts in layers for part in parts)
    with loss.step(counted) as value:
        outputs = [add_loss(part * 0, loss.of_tokens(part)) for parts in layers for part in parts]
        sum(output.sum() for output in outputs).backward()
    whole = [torch.cat([part.detach() for part in parts]).requires_grad_() for parts in layers]
    wanted = 0.25 * load_balancing_loss_func(tuple(whole), 5, 2)
    wanted.backward()
    assert float(value) == pytest.approx(wanted.item(), rel=1e-6)  # transformers sums in float32
    for parts, exact in zip(layers, whole, strict=True):
        assert torch.allclose(torch.cat([part.grad for part in parts]), exact.grad, rtol=1e-5, atol=1e-9)


def test_an_output_is_left_as_it_is_and_its_gradient_too():
    output, term = (torch.randn(3, requires_grad=True) for _ in range(2))
    found = add_loss(output, term.square().sum())
    assert torch.equal(found, output)
    (2 * found).sum().backward()
    assert torch.equal(output.grad, torch.full((3,), 2.0)) and torch.equal(term.grad, 2 * term)


def test_gradients_outside_of_a_step_are_refused():
    """A loop of one's own would leave the loss out, or take that of one call."""
    model, context = attach(tiny_model("mixtral", **ROUTED)), bind_single_rank([6])
    (ids,) = documents([6])
    with pytest.raises(SeqloomError, match=r"0.25 outside of a step.*run_step.*output_router_logits=False"):
        model(**inputs(ids, context.positions, context))
    with torch.no_grad():
        found = model(**inputs(ids, context.positions, context)).logits[0]
    assert torch.allclose(found, one_by_one(tiny_model("mixtral"), [ids])[0])


def test_a_loop_of_one_s_own_counts_first():
    """One document over two ranks: loss and gradients are those of plain transformers in one call."""
    (ids,) = documents([9])
    plain = tiny_model("mixtral", **ROUTED)
    plain.set_attn_implementation("sdpa")
    wanted = plain(input_ids=ids[None], labels=ids[None], use_cache=False).loss
    wanted.backward()
    models = [attach(tiny_model("mixtral", **ROUTED)) for _ in range(2)]
    work = StageMicroBatch((Group((0, 1), 1, 2, (Span(0, 0, 9),)),), Checkpoint.NONE)

    def body(transport):
        model, context = models[transport.rank], bind(work, transport)
        routers = model_adapter(model).router_loss
        call = inputs(ids[context.positions], context.positions, context)
        with torch.no_grad(), routers.counting(CPU) as counted:
            model(**call)
        transport.all_reduce(counted, (0, 1))
        with routers.step(counted) as value:
            labels = torch.cat([ids[1:], torch.tensor([-100])])[context.positions]
            loss = cross_entropy(model(**call).logits[0], labels, reduction="sum", ignore_index=-100) / 8
            loss.backward()
        return float(loss.detach()), float(value)

    (first, value), (second, same) = run_ranks(2, body)
    assert value == same and first + second + value == pytest.approx(wanted.item(), rel=1e-6)
    found = [gradients(model) for model in models]
    for name, gradient in gradients(plain).items():
        assert torch.allclose(found[0][name] + found[1][name], gradient, rtol=1e-4, atol=1e-7), name


def test_compiled_layers_are_refused():
    adapter = model_adapter(attach(tiny_model("mixtral", **ROUTED)))
    assert adapter.router_loss is not None and model_adapter(attach(tiny_model("mixtral"))).router_loss is None
    with pytest.raises(SeqloomError, match="MixtralDecoderLayer has a router loss, which a compiled layer would leave"):
        compile_layers(adapter.layers)


def test_rows_that_a_reader_gives_once_serve_both_passes(tmp_path):
    """As in a run; loss and gradients are those of plain transformers on the one document."""
    (ids,) = documents([9])
    with StoreWriter(tmp_path / "store", vocabulary=VOCABULARY) as writer:
        writer.add(ids.numpy())
    source = open_source(tmp_path / "store", vocabulary=VOCABULARY)
    batch = Batch(np.arange(1), np.array(source.lengths), np.array(source.valid))
    plain, model = (tiny_model("mixtral", **ROUTED) for _ in range(2))
    plain.set_attn_implementation("sdpa")
    wanted = plain(input_ids=ids[None], labels=ids[None], use_cache=False).loss
    wanted.backward()
    parameters = ReplicatedParameters(model_adapter(attach(model)), SingleRankTransport())
    plan = one_stage_plan([[Group((0,), 1, 1, (Span(0, 0, 9),))]], ranks=1)
    rank_plan = bind_plan(plan, SingleRankTransport())
    with RowReader(rank_plan, source, batch) as rows:
        result = run_step(rank_plan, parameters, rows, batch.valid_tokens)
    assert result.loss == pytest.approx(wanted.item(), rel=1e-6)
    for name, gradient in gradients(plain).items():
        assert torch.allclose(gradients(model)[name], gradient, rtol=1e-4, atol=1e-7), name
