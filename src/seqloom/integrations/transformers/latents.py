"""Latent attention of transformers (MLA: DeepSeek, Kimi, GLM-Lite, MiniCPM3): its latents go to the engine.

A module of this kind makes keys and values in a method of its own, `expand_kv(latent, rotated key)`, right before it
calls attention. `attach_latents` gives it, on the instance, one that hands both on; attention then makes keys and
values where the plan wants them (`attention.latent`), with the weight of the model's projection. Where that is more
than a plain matrix, as with an adapter, the model's own method stays, and keys and values travel.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn

from seqloom.attention.latent import LatentShape
from seqloom.models.float8 import keep_dtype

METHOD = "expand_kv"


def is_latent(module: nn.Module) -> bool:
    """Whether a module makes keys and values from latents by one matrix, in a method of its own."""
    projection: Any = getattr(module, "kv_b_proj", None)
    return hasattr(type(module), METHOD) and type(projection) is nn.Linear and projection.bias is None


def hands_on_latents(module: nn.Module) -> bool:
    """Whether an attached module calls attention with its latents in the place of keys and values."""
    return METHOD in module.__dict__ and is_latent(module)


def latent_shape(module: Any) -> LatentShape:
    """Return the widths of such a module."""
    return LatentShape(module.kv_lora_rank, module.qk_rope_head_dim, module.qk_nope_head_dim, module.v_head_dim)


def attach_latents(causal: nn.Module, name: str) -> None:
    """Have a model's modules hand on their latents; doing it again changes nothing. Under another `name` they do not.

    The projection multiplies in the dtype of the model also where others are in float8: which rank multiplies what
    depends on the plan, and the result must not.
    """

    def expand_kv(module: Any, latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if module.config._attn_implementation == name and is_latent(module):
            return latent, rotated
        return expand(module, latent, rotated)

    for module in causal.modules():
        if is_latent(module):
            setattr(module, METHOD, MethodType(expand_kv, module))
            keep_dtype(module.get_submodule("kv_b_proj"))


def expand(module: Any, latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values [1, heads, tokens, dim] by the model's own method."""
    return getattr(type(module), METHOD)(module, latent, rotated)
