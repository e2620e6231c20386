"""Model specs from Hugging Face configs, with the shapes of published models."""

from __future__ import annotations

import json

import pytest

from seqloom.describe import MODELS, ModelSpec, model_from_config
from seqloom.errors import SeqloomError


def config(kind, layers, hidden, heads, kv, ffn, vocabulary, **more):
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": ffn,
        "vocab_size": vocabulary,
        **more,
    }


LLAMA = config("llama", 32, 4096, 32, 8, 14336, 128256, tie_word_embeddings=False, sliding_window=None)
MISTRAL = config("mistral", 32, 4096, 32, 8, 14336, 32000)
MIXTRAL = config("mixtral", 32, 4096, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2)
QWEN3_MOE = config(
    "qwen3_moe", 48, 2048, 32, 4, 6144, 151936, head_dim=128, num_experts=128, num_experts_per_tok=8,
    moe_intermediate_size=768, decoder_sparse_step=1, mlp_only_layers=[], use_sliding_window=False,
)  # fmt: skip
DEEPSEEK = config(
    "deepseek", 28, 2048, 16, 16, 10944, 102400, n_routed_experts=64, n_shared_experts=2,
    num_experts_per_tok=6, moe_intermediate_size=1408, first_k_dense_replace=1, moe_layer_freq=1,
)  # fmt: skip
DEEPSEEK3 = config(
    "deepseek_v3", 61, 7168, 128, 128, 18432, 129280, n_routed_experts=256, n_shared_experts=1,
    num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=3, moe_layer_freq=1,
    kv_lora_rank=512, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
)  # fmt: skip
DEEPSEEK2_LITE = DEEPSEEK3 | config(
    "deepseek_v2", 27, 2048, 16, 16, 10944, 102400, n_routed_experts=64, n_shared_experts=2,
    num_experts_per_tok=6, moe_intermediate_size=1408, first_k_dense_replace=1, q_lora_rank=None,
)  # fmt: skip
KIMI = DEEPSEEK3 | {
    "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840,
    "n_routed_experts": 384, "first_k_dense_replace": 1,
}  # fmt: skip
MINICPM3 = config(
    "minicpm3", 62, 2560, 40, 40, 6400, 73448, kv_lora_rank=256, q_lora_rank=768, qk_nope_head_dim=64,
    qk_rope_head_dim=32,
)  # fmt: skip
GEMMA2 = config("gemma2", 26, 2304, 8, 4, 9216, 256000, head_dim=256, sliding_window=4096)
GEMMA3 = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2",
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "n_inner": None,
    "vocab_size": 50257,
}
NEOX = config("gpt_neox", 44, 6144, 64, None, 24576, 50432)


@pytest.mark.parametrize(
    ("content", "billions", "active"),
    [
        (LLAMA, 8.03, 8.03),
        (MISTRAL, 7.24, 7.24),
        (MIXTRAL, 46.70, 12.88),
        (QWEN3_MOE, 30.53, 3.35),
        (DEEPSEEK, 16.38, 2.83),
        (DEEPSEEK2_LITE, 15.7, 2.66),
        (DEEPSEEK3, 671, 37.5),
        (KIMI, 1026, 32.9),
        (MINICPM3, 4.07, 4.07),
        (GEMMA2, 2.614, 2.614),
        (GEMMA3, 3.88, 3.88),
        (NEOX, 20.55, 20.55),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_published_totals(content, billions, active):
    model = model_from_config(content)
    assert model.parameters(0) == pytest.approx(billions * 1e9, rel=0.01)
    assert model.active_parameters == pytest.approx(active * 1e9, rel=0.01)


def test_gpt2_has_positions_of_its_own():
    model = model_from_config(GPT2)
    assert model.learned_positions and model.ffn == 4 * 768 and not model.gated
    assert model.parameters(1024) == 124_439_808


def test_presets_equal_their_configs():
    assert model_from_config(LLAMA, name="llama3-8b") == MODELS["llama3-8b"]
    assert model_from_config(QWEN3_MOE, name="qwen3-30b-a3b") == MODELS["qwen3-30b-a3b"]
    assert model_from_config(DEEPSEEK2_LITE, name="deepseek-v2-lite") == MODELS["deepseek-v2-lite"]
    assert model_from_config(MINICPM3, name="minicpm3-4b") == MODELS["minicpm3-4b"]


def test_latent_attention():
    model = model_from_config(DEEPSEEK3)
    assert (model.heads, model.kv_heads, model.head_dim, model.value_dim) == (128, 128, 192, 128)
    assert (model.latent, model.rotated, model.query_latent, model.latent_values) == (512, 64, 1536, 576)
    assert model.expansion_parameters == 512 * 128 * (128 + 128)
    types = {"mlp_layer_types": ["dense", "sparse", "dense"] + ["sparse"] * 44}
    lite = DEEPSEEK3 | {"model_type": "glm4_moe_lite", "num_hidden_layers": 47, "v_head_dim": 256}
    lite |= {"qk_nope_head_dim": 192, "first_k_dense_replace": None}
    assert model_from_config(lite | types).moe_layers == (1, *range(3, 47))
    assert model_from_config(lite).moe_layers == tuple(range(47))
    assert model_from_config(lite).head_dim == 256


def test_sliding_windows():
    assert set(model_from_config(MISTRAL).windows) == {4096}
    assert set(model_from_config(MISTRAL | {"sliding_window": None}).windows) == {None}
    qwen = config("qwen2", 6, 64, 4, 2, 128, 100, sliding_window=512, max_window_layers=4)
    assert set(model_from_config(qwen).windows) == {None}
    assert model_from_config(qwen | {"use_sliding_window": True}).windows == (None,) * 4 + (512,) * 2
    types = ["sliding_attention", "full_attention"] * 3
    assert model_from_config(qwen | {"layer_types": types}).windows == (512, None) * 3
    assert model_from_config(GEMMA2).windows == (4096, None) * 13
    gemma = model_from_config(GEMMA3)
    assert gemma.windows[:6] == (1024,) * 5 + (None,) and gemma.windows[-1] == 1024
    assert (gemma.heads, gemma.kv_heads, gemma.head_dim, gemma.tied) == (8, 4, 256, True)


def test_sparse_layers():
    model = model_from_config(DEEPSEEK)
    assert model.moe_layers == tuple(range(1, 28)) and model.shared_ffn == 2 * 1408
    qwen = QWEN3_MOE | {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert model_from_config(qwen).moe_layers == (1, *range(5, 48, 2))
    shared = QWEN3_MOE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 5632}
    assert model_from_config(shared).shared_ffn == 5632
    assert model_from_config(QWEN3_MOE | {"mlp_only_layers": list(range(48))}).experts == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            DEEPSEEK | {"model_type": "deepseek_v32", "kv_lora_rank": 512},
            r"latent attention \(MLA\).* not supported",
        ),
        (
            {"model_type": "mamba", "state_size": 16},
            "state-space layers is not supported; describe the model",
        ),
        (LLAMA | {"kv_lora_rank": 512}, r"latent attention \(MLA\).* not supported"),
        (DEEPSEEK3 | {"qk_rope_head_dim": "wide"}, "qk_rope_head_dim = 'wide'; it must be a whole number"),
        (LLAMA | {"model_type": "falcon_h1", "mamba_d_state": 256}, "state-space"),
        (LLAMA | {"layer_types": ["linear_attention"] * 32}, "'linear_attention'; only full and sliding"),
        (LLAMA | {"layer_types": ["sliding_attention"] * 32}, "sliding_window is missing"),
        (LLAMA | {"layer_types": ["full_attention"]}, "needs one entry for each of 32 layers"),
        (LLAMA | {"is_encoder_decoder": True}, "encoder-decoder"),
        (
            LLAMA | {"model_type": "no_such"},
            "model_type 'no_such': its shapes do not follow .* describe the model in a .* call .*describe_model",
        ),
        (LLAMA | {"num_attention_heads": 33}, "not a multiple of 33 heads; add head_dim"),
        (LLAMA | {"num_key_value_heads": 5}, "kv_heads = 5; it must divide the 32 query heads"),
        (LLAMA | {"vocab_size": None}, "key 'vocab_size' is missing"),
        (LLAMA | {"hidden_size": "big"}, "hidden_size = 'big'; it must be a whole number"),
        (QWEN3_MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        (MIXTRAL | {"num_experts_per_tok": None}, "key 'num_experts_per_tok' is missing"),
        ({"hidden_size": 3}, "not a Hugging Face config"),
    ],
)
def test_what_cannot_be_described_is_refused(content, message):
    with pytest.raises(SeqloomError, match=message):
        model_from_config(content)


def test_load_from_file_and_folder(tmp_path):
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    model = ModelSpec.load(str(folder))
    assert model.name == "my-llama" and model == ModelSpec.load(str(folder / "config.json"))
    (folder / "other.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(SeqloomError, match=r"other\.json: model_type 'mamba': its shapes do not follow"):
        ModelSpec.load(str(folder / "other.json"))
