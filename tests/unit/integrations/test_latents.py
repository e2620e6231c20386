"""Latent attention of transformers (MLA): who hands latents on, what undoes it, and what stays as it is."""

import copy

import pytest
import torch

from seqloom.dist import SingleRankTransport, bind, run_ranks
from seqloom.errors import SeqloomError
from seqloom.integrations.transformers import attach, model_adapter
from seqloom.integrations.transformers.describe import describe_model
from seqloom.integrations.transformers.latents import hands_on_latents, is_latent
from seqloom.layout import Span
from seqloom.models.adapter import ModelWithLoss
from seqloom.models.compile import compile_layers
from seqloom.models.float8 import use_float8
from seqloom.plan import Checkpoint, Group, StageMicroBatch
from support.model_steps import assert_near, run_step, summed
from support.tiny_models import LATENTS, MODELS, documents, gradients, one_by_one, targets, tiny_model

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of tiny configs
SPREAD = Group((0, 1), 1, 2, (Span(0, 0, 9), Span(1, 0, 6)), latent=True)


@pytest.mark.parametrize("name", LATENTS)
def test_the_model_keeps_its_names_and_is_itself_again_under_another_attention(name):
    plain = tiny_model(name)
    model = attach(attach(copy.deepcopy(plain)))  # twice is once
    assert any(map(hands_on_latents, model.modules())) and [*model.state_dict()] == [*plain.state_dict()]
    (ids,) = documents([11])
    model.set_attn_implementation("sdpa")
    plain.set_attn_implementation("sdpa")
    found, wanted = (each(input_ids=ids[None], use_cache=False).logits for each in (model, plain))
    assert torch.equal(found, wanted)


def test_others_have_no_latents():
    assert not any(is_latent(each) for name in MODELS for each in tiny_model(name).modules())


@pytest.mark.parametrize("name", LATENTS)
def test_the_shapes_are_those_of_the_model(name):
    model = tiny_model(name)
    spec = describe_model(attach(model), name)
    assert (spec.latent, spec.rotated, spec.kv_heads) == (6, 4, 4) and spec.tensor_degrees == (1,)
    if name == "longcat-flash":  # two attentions in a layer
        return
    first = next(each for each in model.modules() if is_latent(each))
    own = sum(each.numel() for each in first.parameters() if each.ndim == 2)
    wider = max(0, spec.value_dim - 10) * 4 * (spec.query_latent or spec.hidden)  # keys count as wide as values
    assert spec.attention_parameters(spec.layers - 1) == own + wider + max(0, spec.value_dim - 10) * 4 * spec.latent


def test_tensor_parallelism_is_refused():
    adapter = model_adapter(attach(tiny_model("minicpm3")))
    with pytest.raises(SeqloomError, match=r"latent \(MLA\), and a latent that all heads share is not cut"):
        adapter.check_tp_degree(2)


def test_a_projection_with_an_adapter_stays_the_models_own():
    """Its keys and values travel, whatever the plan says, and the result is the same."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_model("minicpm3"), LoraConfig(r=2, lora_dropout=0.0, target_modules=["kv_b_proj"]))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.normal_(generator=torch.Generator().manual_seed(len(key)))
    assert not any(is_latent(each) for each in model.modules())
    plain, ids = copy.deepcopy(model), documents([9, 6])
    logits = one_by_one(plain, ids)
    wanted = summed(logits, ids), gradients(plain)
    labels = [targets(each) for each in ids]
    models = [attach(copy.deepcopy(model)) for _ in range(2)]

    def body(transport):
        context = bind(StageMicroBatch((SPREAD,), Checkpoint.NONE), transport)
        rows = [torch.cat([each[d][a:b] for d, a, b in context.spans]) for each in (ids, labels)]
        loss = ModelWithLoss(model_adapter(models[transport.rank]))(*rows, context)
        loss.backward()
        return float(loss)

    loss, each = sum(run_ranks(2, body)), [gradients(own) for own in models]
    assert_near((loss, {name: sum(found[name] for found in each) for name in each[0]}), wanted, 1e-9)


def test_the_projection_is_never_in_float8():
    model = attach(tiny_model("youtu", hidden_size=32, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8))
    use_float8(model_adapter(model).layers, narrowest=16)
    chosen = {name.rpartition(".")[2] for name, each in model.named_modules() if getattr(each, "float8", False)}
    assert "kv_b_proj" not in chosen and {"q_a_proj", "q_b_proj"} <= chosen


@pytest.mark.slow
def test_compiled_layers_are_cut_where_latents_travel():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    plain, model = (tiny_model("minicpm3", seed=1, num_hidden_layers=4) for _ in range(2))
    ids = documents([7, 5])
    one_by_one(plain, ids)
    adapter = model_adapter(attach(model))
    compile_layers(adapter.layers, backend="aot_eager")
    labels, spans = torch.cat([targets(each) for each in ids]), (Span(0, 0, 7), Span(1, 0, 5))
    for latent, graphs in ((False, 1), (True, 7)):  # six pieces, for any number of layers
        model.zero_grad()
        work = StageMicroBatch((Group((0,), 1, 1, spans, latent=latent),), Checkpoint.NONE)
        ModelWithLoss(adapter)(torch.cat(ids), labels, bind(work, SingleRankTransport())).backward()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= graphs
        for wanted, found in zip(gradients(plain).values(), gradients(model).values(), strict=True):
            assert float((found - wanted).norm()) <= 1e-5 * float(wanted.norm())


def test_plans_without_latents_leave_the_model_its_own_method(monkeypatch):
    model, ids = tiny_model("youtu"), documents([9, 6])
    called = []
    kind = type(next(each for each in model.modules() if is_latent(each)))
    own = kind.expand_kv
    monkeypatch.setattr(kind, "expand_kv", lambda *given: called.append(given[0]) or own(*given))
    groups = Group((0, 1), 2, 1, SPREAD.spans)
    for latent, times in ((False, 4), (True, 0)):
        called.clear()
        work = [(Group(groups.ranks, 2, 1, groups.spans, latent=latent),)]
        run_step(model, ids, work, 2, Checkpoint.NONE, None)
        assert len(called) == times  # two layers on two ranks
