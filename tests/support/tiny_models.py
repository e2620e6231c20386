"""Tiny Hugging Face models with random weights, and what plain transformers makes of documents, one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

VOCABULARY = 29
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": (
        "Llama",
        {"tie_word_embeddings": True, "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16}},
    ),
    "qwen2": ("Qwen2", {}),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 6, "tie_word_embeddings": True, "rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": 4}),
    "granite": ("Granite", {"attention_multiplier": 0.7, "residual_multiplier": 0.5, "logits_scaling": 3.0}),
    "phi": ("Phi", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
"""Name -> family of classes in transformers, and what its config has beside `SIZES`."""
HYBRIDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "qwen3-next": (
        "Qwen3Next",
        {
            **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 6, "head_dim": 8},
            **{"linear_value_head_dim": 4, "num_experts": 0, "layer_types": ["linear_attention", "full_attention"]},
        },
    ),
    "bamba": (
        "Bamba",
        {
            **{"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 6, "mamba_chunk_size": 8},
            "attn_layer_indices": [1],
        },
    ),
    "falcon-h1": (
        "FalconH1",
        {
            **{"mamba_n_heads": 3, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 6, "mamba_chunk_size": 8},
            **{"mamba_d_ssm": 24, "lm_head_multiplier": 0.7, "embedding_multiplier": 1.3},
        },
    ),
}
"""Models with layers that scan: convolution, gated delta rule, Mamba-2 in the place of attention and beside it."""
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
MIXTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "qwen2-moe": ("Qwen2Moe", {**ROUTED, "shared_expert_intermediate_size": 20, "mlp_only_layers": [0]}),
    "qwen3-moe": ("Qwen3Moe", {**ROUTED, "norm_topk_prob": True, "head_dim": 4}),
    "gpt-oss": (
        "GptOss",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4, "sliding_window": 8},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
}
"""Models with experts: beside a gated shared one, with biases and transposed weights."""
LATENT: Mapping[str, Any] = {
    **{"kv_lora_rank": 6, "q_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7},
    "num_key_value_heads": 4,
}
FEW_EXPERTS: Mapping[str, Any] = {
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 1},
    **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
}
LATENTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "deepseek-v3": ("DeepseekV3", {**LATENT, **FEW_EXPERTS}),
    "deepseek-v2": ("DeepseekV2", {**LATENT, **FEW_EXPERTS, "q_lora_rank": None, "v_head_dim": 10}),
    "glm4-moe-lite": ("Glm4MoeLite", {**LATENT, **FEW_EXPERTS, "v_head_dim": 11, "n_group": 1}),
    "minicpm3": ("MiniCPM3", LATENT),
    "youtu": ("Youtu", LATENT),
    "axk1": ("AXK1", {**LATENT, **FEW_EXPERTS}),
    "longcat-flash": (
        "LongcatFlash",
        {
            **{**LATENT, "num_layers": 1, "ffn_hidden_size": 24, "expert_ffn_hidden_size": 8, "zero_expert_num": 1},
            **{"n_routed_experts": 4, "moe_topk": 2, "head_dim": 4},
        },
    ),
}
"""Models with latent attention, with values narrower than keys, as wide, and wider."""


def tiny_model(name: str, *, dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> Any:
    """Return a causal model of `MODELS` in training mode; `changes` are keys of its config."""
    import transformers

    family, extra = {**MODELS, **HYBRIDS, **MIXTURES, **LATENTS}[name]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **extra, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the default one has no float64
    return randomised(model, seed).to(dtype).train()


@torch.no_grad()
def randomised(model: nn.Module, seed: int) -> nn.Module:
    """Draw all parameters so wide that attention is far from uniform, and biases and norms matter.

    Decays of states are drawn around exp(-1): most fresh ones forget everything with the next token.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        narrow = parameter.ndim > 1 or name.endswith("A_log")
        fresh = parameter.flatten()[:1] * (parameter == parameter.flatten()[0]).all()  # of norms; no random ones
        parameter.copy_(0.3 * drawn if narrow else fresh + 0.1 * drawn)
    return model


def documents(lengths: Sequence[int], seed: int = 0) -> list[torch.Tensor]:
    """Draw the ids of documents, int64[length] each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]


def targets(document: torch.Tensor) -> torch.Tensor:
    """Return the labels of a document: the next token, -100 at the end."""
    return torch.cat([document[1:], torch.tensor([-100])])


def one_by_one(
    model: Any,
    ids: Sequence[torch.Tensor],
    *,
    eager: bool = False,
    keywords: Sequence[Mapping[str, Any]] | None = None,
) -> list[torch.Tensor]:
    """Run plain transformers on every document alone; return their logits, and leave gradients in the model.

    The loss is the sum of the token losses. `eager`: without torch's own attention, which caps no logits. `keywords`:
    of the call, for every document.
    """
    model.set_attn_implementation("sdpa" if model._supports_sdpa and not eager else "eager")
    found = []
    for document, more in zip(ids, keywords or [{}] * len(ids), strict=True):
        logits = model(input_ids=document[None], use_cache=False, **more).logits[0]
        cross_entropy(logits, targets(document), reduction="sum", ignore_index=-100).backward()
        found.append(logits.detach())
    return found


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradient of every parameter that is trained; zero where none arrived, as in experts that rest."""
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in model.named_parameters()
        if p.requires_grad
    }
