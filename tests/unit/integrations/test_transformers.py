"""How an attached model is called, and what a call may not be."""

import json
import subprocess
import sys

import pytest
import torch
import transformers as hf

from seqloom.dist import bind, bind_single_rank, run_ranks
from seqloom.errors import SeqloomError
from seqloom.integrations.transformers import attach, head, hidden_states, inputs, model_adapter
from seqloom.layout import Span
from seqloom.models.layer_wrapper import LayerWrapper
from seqloom.models.loss import PRODUCTS, Logits
from seqloom.plan import Checkpoint, Group, StageMicroBatch
from support.tiny_models import MODELS, SIZES, documents, one_by_one, randomised, tiny_model

torch.set_num_threads(1)
LENGTHS = [5, 3]


@pytest.fixture
def model():
    return attach(tiny_model("llama"))


@pytest.fixture
def context():
    return bind_single_rank(LENGTHS)


@pytest.fixture
def ids():
    return torch.cat(documents(LENGTHS))


def test_the_model_is_the_same_and_can_be_switched_back(ids, context):
    plain = tiny_model("llama")
    classes = [type(module) for module in plain.modules()]
    wanted = torch.cat(one_by_one(plain, documents(LENGTHS)))
    assert attach(plain) is plain
    assert attach(plain) is plain  # again changes nothing
    assert [type(module) for module in plain.modules()] == classes
    assert torch.allclose(plain(**inputs(ids, context.positions, context)).logits[0], wanted, rtol=1e-9)
    again = torch.cat(one_by_one(plain, documents(LENGTHS)))
    assert torch.equal(again, wanted)


def test_the_call_spelt_out(model, ids, context):
    named = model(
        input_ids=ids[None], position_ids=context.positions[None], use_cache=False, seqloom_context=context
    ).logits
    assert torch.equal(named, model(**inputs(ids, context.positions, context)).logits)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "phi"])
def test_hidden_states_and_head_give_the_logits(name, ids, context):
    model = attach(tiny_model(name))
    weight, tied, logits, bias = head(model)
    assert logits == PRODUCTS and (bias is not None) == (name == "phi")
    assert tied == (name == "llama-tied")
    assert weight is model.lm_head.weight and (weight is model.model.embed_tokens.weight) == tied
    logits = torch.nn.functional.linear(hidden_states(model, ids, context.positions, context), weight, bias)
    assert torch.allclose(logits, model(**inputs(ids, context.positions, context)).logits[0], rtol=1e-12)


def test_a_rank_without_tokens_takes_part_and_gets_zero_gradients():
    work = StageMicroBatch((Group((0, 1), 1, 2, (Span(0, 0, 1),)),), Checkpoint.NONE)
    models = [attach(tiny_model("llama")) for _ in range(2)]

    def body(transport):
        context = bind(work, transport)
        ids = torch.zeros(context.tokens, dtype=torch.int64)
        hidden = hidden_states(models[transport.rank], ids, context.positions, context)
        hidden.sum().backward()
        return len(hidden)

    counts = run_ranks(2, body, strict=True)
    assert sorted(counts) == [0, 1]
    empty = models[counts.index(0)]
    trained = [p for name, p in empty.named_parameters() if not name.startswith("lm_head")]
    assert all(p.grad is not None and not p.grad.any() for p in trained)


def test_saved_models_load_anywhere_and_give_the_same_logits(tmp_path, capfd):
    model, context = attach(tiny_model("qwen3", dtype=torch.float32)), bind_single_rank(LENGTHS)
    ids = torch.cat(documents(LENGTHS))
    wanted = model(**inputs(ids, context.positions, context)).logits
    model.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    assert "seqloom" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    plain = torch.cat(one_by_one(loaded, documents(LENGTHS)))
    assert torch.allclose(plain, wanted[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(attach(loaded)(**inputs(ids, context.positions, context)).logits, wanted)


def test_the_runtime_is_told_of_layers_and_head(model, ids, context):
    found = model_adapter(model)
    assert found.module is model and found.layers == tuple(model.model.layers) and found.head is model.lm_head
    assert torch.equal(found.hidden(ids, context), hidden_states(model, ids, context.positions, context))
    model._no_split_modules = None  # layers are then those that checkpoint gradients
    assert model_adapter(model).layers == found.layers


@pytest.mark.parametrize("name", MODELS)
def test_all_index_work_can_be_done_before_the_first_layer(name, ids, context):
    found = model_adapter(attach(tiny_model(name)))
    found.prepare(context, torch.float64)
    before = set(context._cache)
    assert len(before) == (2 if name == "qwen2-windows" else 1)
    found.hidden(ids, context)
    assert set(context._cache) == before


# -- refused in the call ------------------------------------------------------------------------------------------


def test_layers_that_do_not_hand_keywords_on_are_given_the_context(ids, context):
    model = attach(randomised(hf.NemotronForCausalLM(hf.NemotronConfig(**SIZES)), 0).double())
    found = model(**inputs(ids, context.positions, context)).logits[0]
    model.set_attn_implementation("sdpa")
    wanted = [model(input_ids=each[None], use_cache=False).logits[0] for each in ids.split(LENGTHS)]
    torch.testing.assert_close(found, torch.cat(wanted), rtol=1e-9, atol=1e-9)


def test_a_model_that_loses_the_context_is_refused(ids, context):
    model = attach(hf.NemotronForCausalLM(hf.NemotronConfig(**SIZES)).double())
    for layer in model.model.layers:
        LayerWrapper.of(layer).hooks.clear()
    with pytest.raises(SeqloomError, match="does not hand keywords on to attention"):
        model(**inputs(ids, context.positions, context))


def test_a_batch_is_refused(model, ids, context):
    arguments = inputs(ids, context.positions, context)
    arguments["input_ids"] = arguments["input_ids"].expand(2, -1)
    with pytest.raises(SeqloomError, match="a batch of 2"):
        model(**arguments)


def test_a_cache_is_refused(model, ids, context):
    with pytest.raises(SeqloomError, match="use_cache=False"):
        model(**{**inputs(ids, context.positions, context), "use_cache": True})


def test_other_positions_are_refused(model, ids, context):
    arguments = inputs(ids, context.positions, context)
    copied = {**arguments, "position_ids": arguments["position_ids"].clone()}
    assert torch.equal(model(**copied).logits, model(**arguments).logits)
    with pytest.raises(SeqloomError, match=r"position_ids=context.positions\[None\]"):
        model(**{**arguments, "position_ids": None})  # counts rows
    with pytest.raises(SeqloomError, match="not the positions"):
        model(**{**arguments, "position_ids": torch.arange(8)[None].expand(1, 8)})


def test_padding_is_refused_and_a_mask_of_ones_is_not(model, ids, context):
    arguments = inputs(ids, context.positions, context)
    mask = torch.ones(1, len(ids), dtype=torch.int64)
    assert torch.equal(model(**arguments, attention_mask=mask).logits, model(**arguments).logits)
    mask[0, -1] = 0
    with pytest.raises(SeqloomError, match=r"padding.*leave attention_mask out"):
        model(**arguments, attention_mask=mask)
    with pytest.raises(SeqloomError, match="was given a mask"):
        model(**arguments, attention_mask=torch.zeros(1, 1, len(ids), len(ids)))


def test_tokens_of_another_round_are_refused(model, ids, context):
    with pytest.raises(SeqloomError, match="holds 8 tokens"):
        inputs(ids[:-1], context.positions[:-1], context)
    with pytest.raises(SeqloomError, match="6 tokens in the model call: rank 0 holds 8"):
        model(input_ids=ids[None, :6], use_cache=False, seqloom_context=context)


def test_a_window_that_a_layer_keeps_to_itself_is_refused(ids, context):
    keys = {**SIZES, "sliding_window": 3, "num_local_experts": 2, "router_aux_loss_coef": 0.0, "lm_head_bias": False}
    quiet = {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0}
    model = attach(hf.PhimoeForCausalLM(hf.PhimoeConfig(**keys, **quiet)).double())
    with pytest.raises(SeqloomError, match="sliding window of 3, but the layer does not pass it"):
        model(**inputs(ids, context.positions, context))


@pytest.mark.parametrize(
    ("keyword", "words"),
    [
        ("dropout", "dropout"),
        ("indices", "sparse"),
        ("is_causal", "causal"),
    ],
)
def test_what_a_layer_asks_for_and_the_engine_has_not_is_refused(keyword, words, model, context):
    from seqloom.integrations.transformers.attach import attention_function

    layer = model.model.layers[0].self_attn
    q, k = torch.zeros(1, 4, 8, 4), torch.zeros(1, 2, 8, 4)
    value = {"dropout": 0.1, "is_causal": False}.get(keyword, torch.zeros(4))
    with pytest.raises(SeqloomError, match=words):
        attention_function(layer, q, k, k, None, seqloom_context=context, **{keyword: value})


def test_what_a_layer_asks_for_and_the_engine_has(model, context):
    from seqloom.integrations.transformers.attach import attention_function

    layer = model.model.layers[0].self_attn
    q, k = torch.zeros(1, 4, 8, 4), torch.zeros(1, 2, 8, 4)
    out, _ = attention_function(layer, q, k, torch.ones(1, 2, 8, 6), None, seqloom_context=context)
    assert out.shape == (1, 8, 4, 6) and torch.allclose(out, torch.ones(()))
    sinks = torch.zeros(4)  # as large as the logit of a key
    out, _ = attention_function(layer, q, k, torch.ones(1, 2, 8, 4), None, seqloom_context=context, s_aux=sinks)
    seen = torch.cat([torch.arange(1, length + 1) for length in LENGTHS])
    assert torch.allclose(out[0, :, 0, 0], seen / (seen + 1))


@pytest.mark.parametrize(
    ("family", "keys", "logits"),
    [
        ("Cohere", {"logit_scale": 0.25}, Logits(0.25)),
        ("Granite", {"logits_scaling": 4.0}, Logits(0.25)),
        ("Gemma2", {"final_logit_softcapping": 2.0, "head_dim": 4}, Logits(1.0, 2.0)),
    ],
)
def test_the_head_says_what_the_model_makes_of_its_products(family, keys, logits, ids, context):
    config = getattr(hf, f"{family}Config")(**SIZES, **keys, pad_token_id=0, attn_implementation="eager")
    model = attach(randomised(getattr(hf, f"{family}ForCausalLM")(config), 0).double())
    assert head(model).logits == logits
    products = hidden_states(model, ids, context.positions, context) @ head(model).weight.T
    made, _ = logits.apply(products, needs_slope=False)
    assert torch.allclose(made, model(**inputs(ids, context.positions, context)).logits[0], rtol=1e-6)


def test_a_mask_that_a_model_adds_is_refused():
    from seqloom.integrations.transformers.attach import mask_function

    assert mask_function(batch_size=1, q_length=3, kv_length=3) is None
    with pytest.raises(SeqloomError, match="a mask of its own"):
        mask_function(q_length=3, kv_length=3, use_vmap=True)


# -- the extra ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("package", "before"),
    [
        ("torch", "seqloom"),
        pytest.param("transformers", "seqloom.models, seqloom.engine", marks=pytest.mark.slow),
    ],
)
def test_without_the_extra_the_message_says_what_to_install(package, before):
    """Nothing else imports transformers."""
    code = f"import sys; sys.modules[{package!r}] = None; import {before}; print('so far'); "
    code += "import seqloom.integrations.transformers"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode != 0 and result.stdout == "so far\n"
    assert "SeqloomError" in result.stderr and "pip install 'seqloom[train,hf]'" in result.stderr
