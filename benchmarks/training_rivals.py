"""Plain transformers as a good user runs it: the ways to attend and the kinds of layers that rivals are made of.

flex         flex attention on whole packs: positions that begin anew tell it where documents begin
fa4          FlashAttention-4 on whole packs, called from transformers with the lengths of the documents
documents    SDPA, a call for every document

plain        layers as they are
compiled     each layer with torch.compile
liger        norms, rotary embedding and SwiGLU by Liger's kernels
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

FA4 = "fa4_packed"
ROTARY = "apply_rotary_pos_emb"


class Rival(NamedTuple):
    """A way to attend, and a kind of layers."""

    attention: str
    layers: str

    def __str__(self) -> str:
        """As results name it."""
        return f"{self.attention}, {self.layers}"


PACKED = [Rival(a, k) for a in ("flex", "fa4") for k in ("plain", "compiled", "liger")]
"""All that take whole packs."""


def missing(rival: Rival, device: torch.device) -> str | None:
    """Return what a rival lacks here; None: nothing."""
    if rival.attention != "documents" and device.type != "cuda":
        return f"{rival.attention} needs a GPU"
    for wanted, package in (("fa4", "flash_attn"), ("liger", "liger_kernel")):
        if wanted in rival and find_spec(package) is None:
            return f"package {package} is not installed"
    return None


def make_layers(model: nn.Module, kind: str) -> nn.Module:
    """Change the layers of a model to this kind, in place."""
    if kind == "compiled":
        for layer in model.get_decoder().layers:  # type: ignore[operator]
            layer.compile()
    elif kind == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama, apply_liger_kernel_to_qwen3

        source = sys.modules[type(model).__module__]
        before = dict(vars(source))
        apply = {"qwen3": apply_liger_kernel_to_qwen3, "llama": apply_liger_kernel_to_llama}[model.config.model_type]  # type: ignore
        apply(rope=False, cross_entropy=False, fused_linear_cross_entropy=False, model=model)
        vars(source).update(before)  # it changes classes for models to come as well
    return model


@contextmanager
def rotary_of(model: nn.Module, kind: str) -> Iterator[None]:
    """Give the model's module the rotary embedding of this kind of layers, for a step."""
    source = sys.modules[type(model).__module__]
    before = getattr(source, ROTARY)
    if kind == "liger":
        from liger_kernel.transformers.rope import liger_rotary_pos_emb

        setattr(source, ROTARY, liger_rotary_pos_emb)
    try:
        yield
    finally:
        setattr(source, ROTARY, before)


def set_attention(model: Any, way: str) -> None:
    """Have a model attend in this way."""
    if way == "fa4":
        AttentionInterface.register(FA4, fa4_attention)
        AttentionMaskInterface.register(FA4, lambda *_, **__: None)
    model.set_attn_implementation({"flex": "flex_attention", "fa4": FA4, "documents": "sdpa"}[way])


@torch.compiler.disable
def fa4_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    max_length_q: int,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """FlashAttention-4 behind transformers' interface: q, k, v [1, heads, tokens, dim] of a pack."""
    from flash_attn.cute import flash_attn_varlen_func

    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    lengths = {"cu_seqlens_q": cu_seq_lens_q, "cu_seqlens_k": cu_seq_lens_q}
    longest = {"max_seqlen_q": max_length_q, "max_seqlen_k": max_length_q}
    out = flash_attn_varlen_func(q, k, v, **lengths, **longest, softmax_scale=scaling, causal=True)
    return (out[0] if isinstance(out, tuple) else out)[None], None


def pack_arguments(way: str, lengths: list[int], device: torch.device) -> dict[str, Any]:
    """Return what a model is called with beside the ids of a pack."""
    if way == "documents":
        return {}
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    found: dict[str, Any] = {"position_ids": positions.to(device, non_blocking=True)}
    if way == "fa4":
        ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device, non_blocking=True)
        found |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
        found |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    return found
