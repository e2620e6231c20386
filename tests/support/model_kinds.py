"""Tiny Hugging Face models of one kind of attention, positions or dropout each, in float64 and in training mode.

`changes` are keys of their configs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from support.tiny_models import SIZES, VOCABULARY, randomised, tiny_model

ROPE = {"rope_theta": 1e4, "original_max_position_embeddings": 12}
WINDOWED = {"head_dim": 4, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}


def llama4(**changes: Any) -> Any:
    """Chunked attention with RoPE, and a layer without either, whose queries grow with their position."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    sizes = {**SIZES, "head_dim": 4, "attention_chunk_size": 6, "floor_scale": 3, "no_rope_layers": [1, 0]}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 24, "moe_layers": [1]}
    config = Llama4TextConfig(**{**sizes, **experts, "attn_scale": 0.7, "pad_token_id": 0, **changes})
    return randomised(Llama4ForCausalLM(config), 0).double().train()


def gemma2(**changes: Any) -> Any:
    """Logits capped in attention, in a window and without, and after the head."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    caps = {"attn_logit_softcapping": 0.8, "final_logit_softcapping": 1.5, "query_pre_attn_scalar": 4}
    config = Gemma2Config(**{**SIZES, **WINDOWED, **caps, "pad_token_id": 0, **changes})
    return randomised(Gemma2ForCausalLM(config), 0).double().train()


def longrope_factors(dim: int) -> dict[str, list[float]]:
    """Short and long factors of a head."""
    return {
        "short_factor": np.linspace(1.0, 1.2, dim // 2).tolist(),
        "long_factor": np.linspace(2, 9, dim // 2).tolist(),
    }


def phi3_longrope(dim: int = 4, pretrained: int = 12, **changes: Any) -> Any:
    """RoPE with other factors above the length of pre-training, in heads of width `dim`."""
    from transformers import Phi3Config, Phi3ForCausalLM

    rope = {**ROPE, "rope_type": "longrope", "original_max_position_embeddings": pretrained, **longrope_factors(dim)}
    own = {"pad_token_id": 0, "original_max_position_embeddings": pretrained, "rope_parameters": rope}
    return randomised(Phi3ForCausalLM(Phi3Config(**{**SIZES, **own, **changes})), 0).double().train()


def llama_dynamic(pretrained: int = 12, **changes: Any) -> Any:
    """RoPE whose base grows with what is beyond the length of pre-training."""
    rope = {**ROPE, "rope_type": "dynamic", "factor": 3.0, "original_max_position_embeddings": pretrained}
    return tiny_model("llama", max_position_embeddings=pretrained, rope_parameters=rope, **changes)


def longrope_frequencies(longest: int, dim: int = 4, pretrained: int = 12) -> np.ndarray:
    """The published rule: long factors above the length of pre-training."""
    factors = np.array(longrope_factors(dim)["long_factor" if longest > pretrained else "short_factor"])
    return 1 / (factors * 1e4 ** (np.arange(0, dim, 2) / dim))


def dynamic_frequencies(longest: int, dim: int = 4, pretrained: int = 12) -> np.ndarray:
    """NTK: the base grows with what is beyond the length of pre-training."""
    stretched = max(3.0 * longest / pretrained - 2.0, 1.0)
    return 1 / ((1e4 * stretched ** (dim / (dim - 2))) ** (np.arange(0, dim, 2) / dim))


def with_frequencies(model: Any, frequencies: np.ndarray) -> Any:
    """Give a model of plain transformers these frequencies for good, and return it."""
    rotary = model.model.rotary_emb
    rotary.inv_freq, rotary.rope_type = torch.from_numpy(frequencies).float().to(rotary.inv_freq.device), "default"
    return model


def gpt2_with_dropout(attn_pdrop: float = 0.0, resid_pdrop: float = 0.4, **changes: Any) -> Any:
    """Dropout of attention weights, and of what layers add to hidden states; learned positions."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 4}
    config = GPT2Config(**{**sizes, "attn_pdrop": attn_pdrop, "embd_pdrop": 0.0, "resid_pdrop": resid_pdrop, **changes})
    return randomised(GPT2LMHeadModel(config), 0).double().train()


def hrm() -> Any:
    """Return a prefix language model: tokens of a prompt (`token_type_ids`) see the whole prompt."""
    import transformers

    sizes = {name: size for name, size in SIZES.items() if name not in ("num_hidden_layers", "num_key_value_heads")}
    cycles = {"num_layers_per_stack": 1, "H_cycles": 1, "L_cycles": 1, "prefix_lm": True, "head_dim": 4}
    model = transformers.HrmTextForCausalLM(transformers.HrmTextConfig(**sizes, **cycles, pad_token_id=0))
    return randomised(model, 0).double()


def eurobert(**changes: Any) -> Any:
    """Encoder, whose tokens see their whole document."""
    from transformers import EuroBertConfig, EuroBertForMaskedLM

    ends = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "mask_token_id"), 0)
    config = EuroBertConfig(**{**SIZES, **ends, "mlp_bias": True, **changes})
    return randomised(EuroBertForMaskedLM(config), 0).double().train()
