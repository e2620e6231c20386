"""Every refusal, on a tiny model of a class that has the feature."""

import re
import sys
import warnings
from types import FunctionType

import pytest
import torch
import transformers as hf

from seqloom.errors import SeqloomError
from seqloom.integrations.transformers import REFUSALS, attach, check
from support.tiny_models import MODELS, SIZES, tiny_model

torch.set_num_threads(1)
MOE = {"moe_intermediate_size": 8, "num_experts_per_tok": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "n_shared_experts": 1}
GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 29, "n_positions": 32}
QUIET = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
GEMMA = {**SIZES, "head_dim": 4}


def on_meta(family: str, config: str | None = None, **keys):
    """A model without memory: what is checked is how it is built."""
    name = config or re.sub(r"(For.*|LMHeadModel|Model)$", "", family) + "Config"
    with torch.device("meta"):
        return getattr(hf, family)(getattr(hf, name)(**keys))


def with_adapters(config):
    from peft import get_peft_model

    return get_peft_model(tiny_model("llama", dtype=torch.float32), config)


def lora(**keys):
    from peft import LoraConfig

    return with_adapters(LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **keys}))


def prompt():
    from peft import PromptTuningConfig, TaskType

    return with_adapters(PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=2))


def llava():
    text = hf.LlamaConfig(**SIZES)
    vision = hf.CLIPVisionConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    return on_meta("LlavaForConditionalGeneration", text_config=text, vision_config=vision)


def multi_token():
    from transformers.modeling_layers import MtpModel

    main = on_meta("Glm4MoeForCausalLM", **{**SIZES, **MOE, "num_mtp_layers": 1, "mtp_layer_types": None})
    with torch.device("meta"):
        return MtpModel(main, 1)


def rope(kind, **keys):
    return {"rope_type": kind, "rope_theta": 1e4, **keys}


def without_numbers(model=None, **keys):
    """Return a model whose attention does not know the number of its layer."""
    model = on_meta("LlamaForCausalLM", **SIZES, **keys) if model is None else model
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx = None
    return model


def with_older_mixers(model):
    """Return a model whose convolutions are called as in transformers 5.17."""

    def forward(self, hidden_states, past_key_values=None, attention_mask=None, seq_idx=None):
        weight = self.conv.weight.squeeze(1)
        return causal_conv1d_fn(hidden_states, weight, self.conv.bias, seq_idx=seq_idx)  # noqa: F821 - of its file

    for module in model.modules():
        if "Conv" in type(module).__name__ and hasattr(module, "layer_idx"):
            own = FunctionType(forward.__code__, vars(sys.modules[type(module).__module__]))
            module.__class__ = type("OlderConv", (type(module),), {"forward": own})
    return model


LFM2 = ["conv", "full_attention"]
JETMOE = {"kv_channels": 4, "activation_function": "silu", "aux_loss_coef": 0.1, "num_key_value_heads": 2}
BLOOM = {"vocab_size": 29, "hidden_size": 16, "n_layer": 1, "n_head": 2}
CTRL = {"vocab_size": 29, "n_embd": 16, "n_layer": 1, "n_head": 2, "dff": 16}
MAMBA2 = {"vocab_size": 29, "hidden_size": 16, "num_heads": 4, "head_dim": 8, "state_size": 4, "num_hidden_layers": 1}
T5 = {"vocab_size": 29, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
CASES = {
    "no language model head": [lambda: on_meta("LlamaModel", **SIZES)],
    "encoder-decoder": [lambda: on_meta("T5ForConditionalGeneration", **T5)],
    "cross attention": [
        lambda: on_meta("GPT2LMHeadModel", **GPT2, **QUIET, add_cross_attention=True),
        lambda: on_meta("BartForCausalLM", vocab_size=29, d_model=16, decoder_layers=1, decoder_attention_heads=2),
    ],
    "several modalities": [llava],
    "layers without a name": [lambda: on_meta("CTRLLMHeadModel", **CTRL)],
    "bidirectional sliding windows": [
        lambda: on_meta("Gemma3ForCausalLM", "Gemma3TextConfig", **GEMMA, use_bidirectional_attention=True),
        lambda: on_meta("MistralForCausalLM", **SIZES, sliding_window=4, is_causal=False),
        lambda: on_meta("ModernBertForMaskedLM", **SIZES, pad_token_id=0),
    ],
    "a recurrence of its own": [
        lambda: on_meta("JambaForCausalLM", **SIZES, attn_layer_period=2, attn_layer_offset=1, num_experts=1),
        lambda: on_meta("MambaForCausalLM", vocab_size=29, hidden_size=16, state_size=4, num_hidden_layers=1),
        lambda: on_meta("MiniMaxForCausalLM", **SIZES, layer_types=["linear_attention", "full_attention"]),
    ],
    "mixers that take no keywords": [lambda: with_older_mixers(on_meta("Lfm2ForCausalLM", **SIZES, layer_types=LFM2))],
    "no attention": [lambda: on_meta("Mamba2ForCausalLM", **MAMBA2)],
    "no attention interface": [lambda: on_meta("BloomForCausalLM", **BLOOM)],
    "sparse attention": [
        lambda: on_meta("LlamaForCausalLM", **SIZES, layer_types=["full_attention", "compressed_sparse_attention"]),
        lambda: on_meta("DeepseekV32ForCausalLM", **{**SIZES, **MOE, **LATENT, "v_head_dim": 8}),
    ],
    "positions that cannot be given": [lambda: on_meta("BloomForCausalLM", **BLOOM)],
    "RoPE by the longest sequence": [
        lambda: on_meta("LlamaForCausalLM", **SIZES, rope_parameters=rope("dynamic", factor=2.0)),
        lambda: on_meta(
            "Phi3ForCausalLM",
            **{**SIZES, "pad_token_id": 0, "original_max_position_embeddings": 32},
            rope_parameters=rope("longrope", short_factor=[1.0, 1.0], long_factor=[2.0, 2.0]),
        ),
    ],
    "attention dropout in layers without a number": [lambda: without_numbers(attention_dropout=0.1)],
    "dropout that is no module of a layer": [
        lambda: on_meta("GPT2LMHeadModel", **GPT2, **{**QUIET, "embd_pdrop": 0.1}),
        lambda: on_meta("OPTForCausalLM", **{**SIZES, "ffn_dim": 16, "dropout": 0.0, "layerdrop": 0.1}),
    ],
    "LoRA dropout outside of layers": [lambda: lora(lora_dropout=0.1, target_modules=["q_proj", "lm_head"])],
    "virtual tokens": [prompt],
    "router noise": [lambda: tiny_model("mixtral", router_jitter_noise=0.1)],
    "another router loss than Mixtral's": [
        lambda: on_meta("JetMoeForCausalLM", **{**SIZES, **MOE, **JETMOE}, output_router_logits=True),
    ],
    "logits altered after the head": [
        lambda: on_meta("BertLMHeadModel", **SIZES, is_decoder=True),
        lambda: lora(target_modules=["q_proj", "lm_head"]),
    ],
    "multi-token prediction": [multi_token],
}


NUMBERS = "attention dropout in layers without a number"
OTHER_DROPOUT = "dropout that is no module of a layer"


def test_every_refusal_has_a_case():
    assert [refusal.name for refusal in REFUSALS] == list(CASES)


@pytest.mark.parametrize(("name", "build"), [(name, build) for name, builds in CASES.items() for build in builds])
def test_a_model_that_has_it_is_refused_by_name_with_the_way_out(name, build):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other packages, while they build what is refused here
        model = build()
    refusal = next(each for each in REFUSALS if each.name == name)
    with pytest.raises(SeqloomError, match=rf"(?m)^  - {re.escape(name)} \(.+\): .*{re.escape(refusal.way_out)}$"):
        attach(model)


@pytest.mark.parametrize(
    ("name", "key", "build"),
    [
        (NUMBERS, "attention_dropout", lambda **k: without_numbers(**k)),
        (OTHER_DROPOUT, "embd_pdrop", lambda **k: on_meta("GPT2LMHeadModel", **GPT2, **{**QUIET, **k})),
        (
            OTHER_DROPOUT,
            "layerdrop",
            lambda **k: on_meta("OPTForCausalLM", **SIZES, ffn_dim=16, **{"dropout": 0.0, **k}),
        ),
        (OTHER_DROPOUT, "dropout", lambda **k: on_meta("OPTForCausalLM", **SIZES, ffn_dim=16, **k)),
        ("LoRA dropout outside of layers", "lora_dropout", lambda **k: lora(**k, target_modules=["q_proj", "lm_head"])),
    ],
)
def test_a_dropout_is_refused_with_its_config_key_and_the_way_out(name, key, build):
    with pytest.raises(SeqloomError) as error:
        check(build(**{key: 0.25}))
    [line] = [line for line in str(error.value).splitlines() if line.startswith(f"  - {name} (")]
    assert f"({key} = 0.25 in the config, " in line, "the key first, then the modules"
    assert line.endswith("use LoraConfig(lora_dropout=0.0)" if "LoRA" in name else "this key of the config set to 0.0")
    try:
        check(build(**{key: 0.0}))  # the way out
    except SeqloomError as left:
        assert "dropout" not in str(left)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_supported_is_not_refused(name):
    check(tiny_model(name))


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_lora_is_not_refused(p):
    check(lora(lora_dropout=p))


def test_a_router_loss_that_is_not_computed_is_not_refused():
    """As published: a coefficient, and nothing that asks for the loss."""
    check(tiny_model("mixtral", router_aux_loss_coef=0.001))
    check(tiny_model("mixtral", output_router_logits=True, router_aux_loss_coef=0.0))


def test_models_with_their_own_dropout_are_refused_in_words():
    """Also those that are no causal models, or do not say what their layers are."""
    for model in (
        on_meta("BertLMHeadModel", **SIZES, is_decoder=True),
        on_meta("GPT2LMHeadModel", **GPT2),
        on_meta("GPTJForCausalLM", **GPT2),
        on_meta("BloomForCausalLM", hidden_size=16, n_layer=1, n_head=2, vocab_size=29, hidden_dropout=0.1),
    ):
        with pytest.raises(SeqloomError, match="is refused:"):
            check(model)


def test_dropout_in_layers_is_not_refused():
    check(on_meta("GPT2LMHeadModel", **GPT2, **{**QUIET, "resid_pdrop": 0.1}))


def test_all_reasons_are_listed_at_once():
    model = without_numbers(tiny_model("mixtral", router_jitter_noise=0.02, attention_dropout=0.1))
    with pytest.raises(SeqloomError) as error:
        check(model)
    found = re.findall(r"^  - (.+?) \(", str(error.value), re.MULTILINE)
    assert found == [NUMBERS, "router noise"]
    assert "attention_dropout = 0.1" in str(error.value) and "jitter_noise = 0.02" in str(error.value)


def test_a_dropout_that_is_off_counts_since_training_turns_it_on():
    with pytest.raises(SeqloomError, match=NUMBERS):
        check(without_numbers(attention_dropout=0.1).eval())


@pytest.mark.parametrize("key", ["attention_dropout", "attn_pdrop"])
def test_dropout_of_attention_weights_is_not_refused(key):
    gpt2 = key == "attn_pdrop"
    check(on_meta("GPT2LMHeadModel", **GPT2, **{**QUIET, key: 0.1}) if gpt2 else tiny_model("llama", **{key: 0.1}))


def test_a_model_of_another_library_is_refused():
    with pytest.raises(SeqloomError, match="Linear is not a model of transformers"):
        check(torch.nn.Linear(2, 2))


def test_a_model_that_does_not_let_itself_be_switched_is_refused():
    class Stubborn(hf.LlamaForCausalLM):
        _can_set_attn_implementation_cached_value = False

    with pytest.raises(SeqloomError, match="Stubborn stays with attention 'sdpa'"):
        attach(Stubborn(hf.LlamaConfig(**SIZES)))
