"""What transformers calls instead of its own attention: one function for attention, one for its mask.

Both are looked up by name in transformers' registries. The context of the round comes as a keyword of the model call,
which transformers hands on to every attention layer, also when a layer is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from seqloom.attention import AttentionSpec, attention
from seqloom.dist import Context
from seqloom.errors import SeqloomError
from transformers import AttentionInterface, AttentionMaskInterface

NAME = "seqloom"
"""Under which our functions are registered."""
CALL = "model(**seqloom.integrations.transformers.attach.inputs(ids, context.positions, context))"

NOT_COMPUTED = {
    "s_aux": "attention sinks",
    "position_bias": "a bias on logits",
    "indices": "a choice of keys (sparse attention)",
    "block_indices": "a choice of key blocks (sparse attention)",
}
"""Keywords with which some models ask for what the engine does not compute."""


def register() -> None:
    """Make the name known to transformers. Doing it again changes nothing; other names are left alone."""
    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, mask_function)


def mask_function(*, attention_mask: torch.Tensor | None = None, use_vmap: bool = False, **_: Any) -> None:
    """Make no mask: who sees whom is in the context. Padding and masks of a model's own are refused."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise SeqloomError(
            f"an attention_mask of shape {list(attention_mask.shape)} with padding: documents are packed without "
            f"padding, and the context knows where they end; leave attention_mask out: {CALL}"
        )
    if use_vmap:  # transformers sets it for masks that are more than causal, windowed and packed
        raise SeqloomError(
            "this model adds a mask of its own to the causal one: the engine computes causal attention, full or with "
            "a sliding window; use a model without it"
        )


def attention_function(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    is_causal: bool | None = None,
    seqloom_context: Context | torch.Tensor | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of one layer for this rank's tokens.

    Args:
        module: the layer's attention.
        query: [1, heads, tokens, dim].
        key, value: [1, kv_heads, tokens, dim], one per kv head.
        attention_mask: None, which is what `mask_function` gives.
        scaling: logits are multiplied by it.
        dropout, softcap: refused by the engine unless 0 and None.
        is_causal: only True, when a model says it.
        seqloom_context: what `bind` made of the round; in a compiled layer its ticket.
        keywords: whatever else the model and its caller pass; `sliding_window` is how many tokens a token of this
            layer sees, itself included.

    Returns:
        Output [1, tokens, heads, dim], and None for the weights, which never exist.
    """
    if seqloom_context is None:
        raise SeqloomError(
            f"{type(module).__name__} was called without a context: attention {NAME!r} needs the round that its tokens "
            f"belong to; call {CALL}, or go back with model.set_attn_implementation('sdpa'). If the call had one, this "
            "model does not hand keywords on to attention and cannot be used"
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    _check(module, query, key, value, attention_mask, causal, keywords)
    _check_window(module, keywords, compiled=isinstance(seqloom_context, torch.Tensor))
    options = {"window": keywords.get("sliding_window"), "scale": scaling, "dropout": dropout, "softcap": softcap}
    if isinstance(seqloom_context, torch.Tensor):  # the operator counts the rows
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        return attention(q, k, v, seqloom_context, **options)[None], None
    rows = seqloom_context.tokens
    if query.shape[2] != max(rows, 1):
        raise SeqloomError(
            f"{query.shape[2]} tokens in the model call: rank {seqloom_context.rank} holds {rows} tokens in this "
            f"round; pass the ids of context.spans: {CALL}"
        )
    _check_positions(keywords.get("position_ids"), seqloom_context)
    q, k, v = (only_rows(x.squeeze(0).transpose(0, 1), rows) for x in (query, key, value))
    out = attention(q, k, v, seqloom_context, **options, layer=getattr(module, "layer_idx", None))
    if not rows:  # the row that `inputs` adds to an empty rank: nobody's token, so it sees nothing
        out = torch.cat([out, out.new_zeros((1, *out.shape[1:]))])
    return out[None], None


def calls(layers: Iterable[torch.nn.Module]) -> tuple[AttentionSpec, ...]:
    """Return the distinct attention calls that layers will make, from their configs and what their attention keeps.

    A model that says it in other words is left out: its index work is done in the first layer of a round.
    """
    found = []
    for module in (module for layer in layers for module in layer.modules()):
        config: Any = getattr(module, "config", None)
        heads, scale = getattr(config, "num_attention_heads", None), getattr(module, "scaling", None)
        dim = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
        if isinstance(heads, int) and isinstance(dim, int) and isinstance(scale, float):
            kv_heads = getattr(config, "num_key_value_heads", None) or heads
            found.append(
                AttentionSpec(heads, kv_heads, dim, _window(module, getattr(module, "layer_idx", None)), scale)
            )
    return tuple(dict.fromkeys(found))


def only_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the first rows. All of them are the tensor itself: behind an index, gradients are copied into zeros."""
    return tensor if len(tensor) == rows else tensor[:rows]


def _check(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    causal: bool,
    keywords: dict[str, Any],
) -> None:
    """Refuse a call that means something else than the engine computes."""
    name = type(module).__name__
    if query.shape[0] != 1:
        raise SeqloomError(
            f"a batch of {query.shape[0]}: documents are packed into one row without padding, and the context tells "
            f"them apart; call {CALL}"
        )
    if keywords.get("use_cache") or key.shape[2] != query.shape[2]:
        raise SeqloomError(
            f"{name}: {key.shape[2]} keys for {query.shape[2]} queries, use_cache={keywords.get('use_cache')}: keys "
            "come from the round's ranks, not from a cache; pass use_cache=False"
        )
    if attention_mask is not None:
        raise SeqloomError(
            f"{name} was given a mask of shape {list(attention_mask.shape)}: who sees whom is in the context; "
            "leave attention_mask out, or use a model without a mask of its own"
        )
    if not causal:
        raise SeqloomError(f"{name} asks for attention that is not causal; use a causal language model")
    if value.shape[-1] != query.shape[-1]:
        raise SeqloomError(
            f"{name}: values of width {value.shape[-1]}, keys of width {key.shape[-1]}: the engine takes equal widths "
            "only; use a model without latent attention (MLA)"
        )
    for keyword, what in NOT_COMPUTED.items():
        if keywords.get(keyword) is not None:
            raise SeqloomError(f"{name} passes {keyword}: {what} is not computed here; use a model without it")


def _check_window(module: torch.nn.Module, keywords: dict[str, Any], *, compiled: bool) -> None:
    """Refuse a layer with a window that it does not pass on.

    A compiled graph serves many layers and must not look at a layer's number. There the window of any layer counts,
    and a layer that passes none by name is believed.
    """
    if keywords.get("sliding_window") is not None or (compiled and "sliding_window" in keywords):
        return
    wanted = _window(module, None if compiled else getattr(module, "layer_idx", None))
    if wanted is not None:
        where = "" if compiled else f", layer {getattr(module, 'layer_idx', '?')}"
        raise SeqloomError(
            f"{type(module).__name__}{where}: the config says a sliding window of {wanted}, but the layer does not "
            "pass it to attention; set config.sliding_window = None if full attention is meant"
        )


def _window(module: torch.nn.Module, layer: int | None) -> int | None:
    """The window that the config gives to a layer, or to any."""
    config: Any = getattr(module, "config", None)
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not types:
        return window
    return window if "sliding_attention" in (types if layer is None else types[layer : layer + 1]) else None


def _check_positions(positions: torch.Tensor | None, context: Context) -> None:
    """Refuse positions that are not the context's: a model that is given none counts its rows instead.

    Those of `inputs` are the context's own memory, which is seen without reading it.
    """
    if positions is None or not context.tokens or torch.compiler.is_compiling():
        return
    own = context.positions
    if positions.data_ptr() == own.data_ptr() and positions.numel() == own.numel():
        return
    if positions.numel() != own.numel() or not torch.equal(positions.reshape(-1), own):
        raise SeqloomError(
            f"position_ids of shape {list(positions.shape)} are not the positions of this rank's tokens in their "
            f"documents; pass position_ids=context.positions[None]: {CALL}"
        )
