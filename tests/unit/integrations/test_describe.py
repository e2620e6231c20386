"""Shapes that are read from a model's modules: of published sizes, on "meta", they have the model's parameters."""

import json

import pytest
import torch
import transformers as hf

from seqloom.cli.shared import load_model
from seqloom.describe import model_from_config
from seqloom.integrations.transformers import attach
from seqloom.integrations.transformers.describe import describe_model

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of defaults
GEMMA4 = {
    "small, with keys shared and a table of inputs of each layer": {
        **{"hidden_size": 1536, "intermediate_size": 6144, "num_hidden_layers": 35, "num_key_value_heads": 1},
        **{"num_kv_shared_layers": 20, "use_double_wide_mlp": True},
    },
    "dense": {
        **{"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 12, "num_attention_heads": 32},
        **{"num_key_value_heads": 16, "num_global_key_value_heads": 4, "hidden_size_per_layer_input": 0},
        **{"attention_k_eq_v": True, "max_position_embeddings": 262_144},
    },
    "with experts": {
        **{"hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 6, "num_attention_heads": 16},
        **{"num_key_value_heads": 8, "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 0},
        **{"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704},
    },
}
DBRX = {
    "attn_config": {"kv_n_heads": 8, "rope_theta": 1e4},
    "ffn_config": {"moe_num_experts": 16, "moe_top_k": 4, "ffn_hidden_size": 3584},
}


def described(config):
    """The shapes of a model, and how many parameters it has."""
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return describe_model(attach(model), "m"), sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize("kind", GEMMA4)
def test_gemma_4(kind):
    config = hf.Gemma4TextConfig(**GEMMA4[kind])
    spec, parameters = described(config)
    assert spec.parameters(8192) == pytest.approx(parameters, rel=0.005) and not spec.learned_positions
    wide = [layer for layer, kind in enumerate(config.layer_types) if kind == "full_attention"]
    assert [layer for layer, (_, dim) in enumerate(spec.head_shapes) if dim == 512] == wide
    assert bool(spec.other_tables) == ("table" in kind) and spec.active_experts == (8 if "experts" in kind else 0)


def test_experts_below_each_other():
    spec, parameters = described(hf.DbrxConfig(n_layers=4, **DBRX))
    assert spec.parameters() == pytest.approx(parameters, rel=0.001)
    assert (spec.experts, spec.active_experts, spec.expert_ffn) == (16, 4, 3584)


def test_a_table_of_positions():
    quiet = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    spec, parameters = described(hf.GPT2Config(**quiet))
    assert spec.learned_positions and not spec.other_tables
    assert spec.parameters(1024) == pytest.approx(parameters, rel=0.001)


@pytest.mark.parametrize("causal", [True, False])
def test_masks_and_the_forward_that_counts_routing(causal):
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    llama = hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_hidden_layers=2, is_causal=causal))
    spec = describe_model(attach(llama))
    assert spec.causal == causal and spec.name == "LlamaForCausalLM" and not spec.counts_routing
    mixtral = hf.MixtralConfig(**sizes, num_hidden_layers=2, num_local_experts=4, num_key_value_heads=2)
    mixtral.output_router_logits = causal
    by_modules = describe_model(attach(hf.MixtralForCausalLM(mixtral)))
    assert by_modules.counts_routing == model_from_config(mixtral.to_dict()).counts_routing == causal


def test_folders_are_described_by_transformers_where_it_has_their_type(tmp_path):
    """DeepSeek 1 is for plans alone: its shapes follow from the config."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    hf.GlmConfig(**sizes, num_hidden_layers=2, num_key_value_heads=2, head_dim=8, pad_token_id=0).save_pretrained(
        tmp_path / "glm"
    )
    assert (load_model(tmp_path / "glm").name, load_model(tmp_path / "glm").kv_heads) == ("glm", 2)
    old = {**sizes, "model_type": "deepseek", "num_hidden_layers": 2, "n_routed_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(old | {"moe_intermediate_size": 16}))
    assert load_model(tmp_path).experts == 8
