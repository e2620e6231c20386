"""Run Hugging Face models on the engine, unmodified.

    model = attach(AutoModelForCausalLM.from_pretrained(...))
    hidden = hidden_states(model, ids, context.positions, context)
    weight, tied, logits, bias = head(model)
    adapter = model_adapter(model)      # for plans with pipeline stages, tensor parallelism, sharded parameters

Transformers looks attention and its mask up by name in registries; `attach` registers ours there and switches the
model to that name. The context of the round comes as a keyword of the model call, which transformers hands on to every
attention layer, also when a layer is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

from seqloom.attention import AttentionSpec, attention, latent_attention
from seqloom.attention.plan import has_latents
from seqloom.dist import Context, attention_context
from seqloom.errors import SeqloomError
from seqloom.integrations.transformers.checks import (
    CHUNKED,
    Routers,
    attention_dropouts,
    check,
    decoder_layers,
    decoder_of,
    dynamic_ropes,
    has_router_loss,
    logits_of,
    output_head,
    planned_dropouts,
    routers_of,
    unwrap,
)
from seqloom.integrations.transformers.experts import attach_experts, attached_experts, expert_biases, expert_load
from seqloom.integrations.transformers.latents import (
    attach_latents,
    expand,
    hands_on_latents,
    is_latent,
    latent_shape,
)
from seqloom.integrations.transformers.layers import (
    MLP_NAMES,
    RouterHooks,
    context_layers,
    remap_layers,
    router_layers,
    tp_layers,
)
from seqloom.integrations.transformers.mixers import attach_mixers, is_mixer
from seqloom.integrations.transformers.parts import (
    StageSplitError,
    check_positions,
    drop_padding,
    pad_empty,
    split_decoder,
)
from seqloom.integrations.transformers.plain_calls import (
    Padding,
    derive_contexts,
    lost_context,
    masked_attention,
    one_run_each,
    rows_attention,
    shows_blocks,
)
from seqloom.integrations.transformers.tensor_parallel import NoTensorParallel, tensor_plan
from seqloom.models.adapter import ModelAdapter
from seqloom.models.compile import handle_object
from seqloom.models.dropout import plan_dropout
from seqloom.models.layer_wrapper import ROUTER_LOSS, LayerWrapper
from seqloom.models.loss import PRODUCTS, Logits
from seqloom.models.router_loss import RouterLoss

BIDIRECTIONAL = "bidirectional"
"""What the mask function gives to layers whose tokens see their whole document."""
NAME = "seqloom"
"""Under which our functions are registered in transformers."""
CALL = "model(**seqloom.integrations.transformers.attach.inputs(ids, context.positions, context))"
FIXED = "fixed"
"""A kind of RoPE that transformers does not update in a call."""
NOT_COMPUTED = {
    "position_bias": "a bias on logits",
    "indices": "a choice of keys (sparse attention)",
    "block_indices": "a choice of key blocks (sparse attention)",
}
"""Keywords with which some models ask for what is not handed on to the engine."""

Model = TypeVar("Model", bound=nn.Module)


class Head(NamedTuple):
    """The output projection."""

    weight: nn.Parameter  # [vocabulary, hidden], the parameter itself
    tied: bool  # whether it is the embedding's parameter too
    logits: Logits = PRODUCTS  # what the model makes of its products with hidden states
    bias: nn.Parameter | None = None  # [vocabulary], added to the products


def attach(model: Model, *, longest: int | None = None) -> Model:
    """Make a language model compute its attention with the engine, and return it.

    The model, of transformers or wrapped by peft, is switched by name (`set_attn_implementation`); nothing in it is
    replaced but the `forward` of dropout modules and their layers, of mixers that scan, of layers that do not hand
    keywords on, and what makes keys and values from latents; switching to another name undoes the rest. Calls with a
    context (`inputs`) run on the engine's ranks; calls without one are whole documents of this rank alone: see
    `plain_calls`. What `check` refuses is refused here.

    Args:
        longest: tokens of the longest document of the run, for a model whose rotary embedding follows the longest
            sequence (longrope, dynamic): it has the frequencies for that length from now on, for all documents.
    """
    if longest is not None:
        fix_ropes(unwrap(model), longest)
    check(model)
    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, mask_function)
    causal = unwrap(model)
    causal.set_attn_implementation(NAME)
    chosen = causal.config._attn_implementation
    if chosen != NAME:
        raise SeqloomError(
            f"{type(causal).__name__} stays with attention {chosen!r} when {NAME!r} is chosen: its code does not look "
            "attention up by name; use a model that does"
        )
    derive_contexts(decoder_of(causal), NAME)
    attach_mixers(causal, NAME)
    attach_experts(causal, NAME)
    context_layers(decoder_layers(causal))
    attach_latents(causal, NAME)
    if planned_dropouts(causal):
        plan_dropout(decoder_layers(causal), MLP_NAMES)
    if has_router_loss(causal) and router_loss_of(causal) is None:
        routers = cast("Routers", routers_of(causal))  # `check` has found them
        loss = RouterLoss(causal.router_aux_loss_coef, causal.num_experts, causal.num_experts_per_tok)
        router_layers(decoder_layers(causal), loss, *routers)
    return model


def router_loss_of(causal: Any) -> RouterLoss | None:
    """Return the router loss that the layers of a model report to; None: none."""
    hooks = (LayerWrapper.of(layer).hooks.get(ROUTER_LOSS) for layer in decoder_layers(causal))
    return next((each.loss for each in hooks if isinstance(each, RouterHooks)), None)


@torch.no_grad()
def fix_ropes(causal: nn.Module, longest: int) -> None:
    """Give rotary embeddings that follow the longest sequence the frequencies of so many tokens, for good."""
    for module in causal.modules():
        for layer, _ in dynamic_ropes(module):
            rotary: Any = module
            table = next(rotary.buffers(), None)
            if table is None:  # no module of RoPE that is known here; `check` refuses it
                continue
            if not table.is_meta:  # transformers' own code chooses
                positions = torch.tensor([[longest - 1]], device=table.device)
                rotary(table.new_zeros(1, 1, 1), positions, **({} if layer is None else {"layer_type": layer}))
            rotary.rope_type = FIXED if layer is None else {**rotary.rope_type, layer: FIXED}


def inputs(ids: torch.Tensor, positions: torch.Tensor, context: Context) -> dict[str, Any]:
    """Return the arguments of a model call for this rank's tokens: `model(**inputs(...)).logits[0, : context.tokens]`.

    Models of transformers cannot be called with no tokens. A rank that holds none in a round, but takes part in it,
    computes one padding row: cut the result to `context.tokens` rows and its gradients are zero.

    Args:
        ids: int64[tokens], in the order of `context.spans`; may be empty.
        positions: int64[tokens], the place of each in its document: `context.positions`.
        context: what `bind` made of the round.
    """
    if ids.ndim != 1 or ids.shape != positions.shape or len(ids) != context.tokens:
        raise SeqloomError(
            f"ids {list(ids.shape)} and positions {list(positions.shape)}: both are [tokens], and rank {context.rank} "
            f"holds {context.tokens} tokens in this round; pass the tokens of context.spans and context.positions"
        )
    if context.tp_group is not None:  # position tables are for attention, which has the tokens of the whole TP group
        positions = attention_context(context).positions
    return {
        "input_ids": pad_empty(ids)[None],
        "position_ids": pad_empty(positions)[None],
        "use_cache": False,
        "seqloom_context": context,
    }


def hidden_states(model: nn.Module, ids: torch.Tensor, positions: torch.Tensor, context: Context) -> torch.Tensor:
    """Return the input of an attached model's head, [tokens, hidden]: the logits are this @ head(model).weight.T.

    Where a model adds a bias, scales or caps them, `head(model)` says so, for `summed_loss`. For ids, positions and
    context see `inputs`.
    """
    decoder = decoder_of(unwrap(model))
    return drop_padding(decoder(**inputs(ids, positions, context)).last_hidden_state.squeeze(0), context.tokens)


def head(model: nn.Module) -> Head:
    """Return the output projection of an attached model. Call it in every step: sharding may exchange parameters."""
    causal = unwrap(model)
    projection = output_head(causal)
    tied = projection.weight is causal.get_input_embeddings().weight
    return Head(projection.weight, tied, logits_of(causal), projection.bias)


def model_adapter(model: nn.Module) -> ModelAdapter:
    """Describe an attached model to the engine, which shards it, recomputes its layers and runs plans on it.

    From now on its layers follow plans that remap around the MLP. Where the decoder can be traced (`parts`), the
    adapter cuts it into stages; where it publishes a tensor-parallel plan (`tensor_parallel`), its layers run in TP
    groups.
    """
    causal = unwrap(model)
    decoder, embedding, layers = decoder_of(causal), causal.get_input_embeddings(), decoder_layers(causal)
    remap_layers(layers)

    def hidden(ids: torch.Tensor, context: Context) -> torch.Tensor:
        return hidden_states(model, ids, context.positions, context)

    options: dict[str, Any]
    try:
        parts = split_decoder(decoder, embedding, layers)
        options = {"embed": parts.embed, "body": parts.body, "norm": parts.norm, "embedding": parts.embedding}
    except StageSplitError as reason:
        options = {"single_stage_reason": str(reason)}
    specs = attention_specs(layers)
    try:
        if planned_dropouts(causal) or attention_dropouts(causal):
            raise NoTensorParallel("its layers have dropout, of which tensor ranks would have to know their part")
        if any(is_mixer(module) for module in causal.modules()):
            raise NoTensorParallel("its layers have mixers that scan, whose weights are not cut")
        experts = dict(attached_experts(causal, NAME))
        regions, tp_axes, tp_divisors = tensor_plan(model, causal, layers, specs, experts)
        check_positions(decoder, embedding, layers)
        tp_layers(layers, regions)
        options |= {"tp_axes": tp_axes, "tp_divisors": tp_divisors, "no_tp_reason": ""}
        tables = (embedding, output_head(causal))
        if isinstance(embedding, nn.Embedding) and isinstance(tables[1], nn.Linear):  # and neither wrapped by peft
            options["tables"] = tables
    except (NoTensorParallel, StageSplitError) as reason:
        options |= {"no_tp_reason": str(reason)}
    options |= {"logits": logits_of(causal), "router_loss": router_loss_of(causal)}
    options |= {"experts": attached_experts(causal, NAME), "expert_load": expert_load(causal)}
    options |= {"expert_biases": expert_biases(model, causal, NAME)}
    return ModelAdapter(model, layers, hidden, output_head(causal), specs, **options)


def attention_specs(layers: Iterable[nn.Module]) -> tuple[AttentionSpec, ...]:
    """Return the distinct attention calls that layers will make, from their configs and their attention modules.

    Leaves out a model that uses other names: its index work is done in the first layer of a round.
    """
    specs = [attention_spec(module) for layer in layers for module in layer.modules()]
    return tuple(dict.fromkeys(spec for spec in specs if spec is not None))


def attention_spec(module: nn.Module) -> AttentionSpec | None:
    """Return the attention call that a module will make; None: it makes none, or uses other names."""
    config = layer_config(module)
    heads, scale = getattr(config, "num_attention_heads", None), getattr(module, "scaling", None)
    names = ("qk_head_dim", "head_dim", "head_size")
    dim = next((value for name in names if (value := getattr(module, name, None))), None)
    if not (isinstance(heads, int) and isinstance(dim, int) and isinstance(scale, float)):
        return None
    kv_heads, latent = getattr(config, "num_key_value_heads", None) or heads, 0
    if is_latent(module):
        kv_heads, latent = heads, latent_shape(module).row
    layer = getattr(module, "layer_idx", None)
    wider = max(dim, getattr(module, "v_head_dim", None) or dim)
    softcap = getattr(module, "attn_logit_softcapping", None)
    window, chunk = _config_window(module, layer), _config_chunk(module, layer)
    causal = all(getattr(each, "is_causal", True) is not False for each in (config, module))
    return AttentionSpec(heads, kv_heads, wider, window, scale, softcap, chunk, causal, latent)


def layer_config(module: nn.Module) -> Any:
    """Return the config of a module's layer, which may differ from others' (`per_layer_config`); None: it has none."""
    config: Any = getattr(module, "config", None)
    layer = getattr(module, "layer_idx", None)
    return (
        config.per_layer_config[layer] if layer is not None and getattr(config, "is_heterogeneous", False) else config
    )


# What transformers calls instead of its own attention.


def mask_function(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    attention_mask: torch.Tensor | Padding | None = None,
    use_vmap: bool = False,
    local_size: int | None = None,
    config: Any = None,
    mask_function: Any = None,
    **options: Any,
) -> torch.Tensor | Padding | int | str | None:
    """Say what a call of whole documents is; make a mask only for tokens after those of a cache, and for blocks.

    Transformers hands on to layers what this returns: None is a causal mask, with a window or without, a number the
    size of a chunk of chunked attention, `BIDIRECTIONAL` no mask at all. In a call with a context, that says which
    token sees which, and padding and masks are refused.
    """
    if use_vmap:  # transformers sets it for masks that are more than causal, windowed and packed
        raise SeqloomError(
            "this model adds a mask of its own to the causal one: the engine computes causal attention, full or with "
            "a sliding window; use a model without it"
        )
    if isinstance(attention_mask, Padding):  # `generate()` has asked for it before
        return attention_mask
    padded = attention_mask is not None and not bool(attention_mask.all())
    static = isinstance(q_offset, torch.Tensor)  # a cache of fixed size, of which only the mask knows what is in use
    masked = static or shows_blocks(mask_function) or q_length != kv_length
    if masked or (padded and not one_run_each(cast("torch.Tensor", attention_mask))):
        options |= {"q_offset": q_offset, "attention_mask": attention_mask, "mask_function": mask_function}
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return sdpa_mask(q_length=q_length, kv_length=kv_length, **options)
    bidirectional = mask_function is bidirectional_mask_function or getattr(config, "is_causal", True) is False
    chunked = CHUNKED in (getattr(config, "layer_types", None) or ())
    chunk = local_size if chunked and local_size != getattr(config, "sliding_window", None) else None
    if padded:
        return Padding(cast("torch.Tensor", attention_mask), BIDIRECTIONAL if bidirectional else chunk)
    return BIDIRECTIONAL if bidirectional else chunk


def attention_function(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | Padding | int | str | None,
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
        query: [1, heads, tokens, dim]; without a context a batch of them.
        key, value: [1, kv_heads, tokens, dim], one per kv head; of a module that hands on latents, these [1, 1, tokens,
            width], and its rotated keys.
        attention_mask: what `mask_function` gives.
        scaling: logits are multiplied by it.
        dropout: share of the weights that is dropped, the same ones under every plan; 0 in evaluation.
        softcap: of the logits.
        is_causal: what the mask says already.
        seqloom_context: what `bind` made of the round; in a compiled layer its opaque handle, twice if latents travel;
            None: every row is a document, or goes on after those of a cache (`plain_calls`).
        keywords: whatever else the model and its caller pass; `sliding_window` is how many tokens a token of this
            layer sees, itself included, `s_aux` are sinks, a logit for every head.

    Returns:
        Output [1, tokens, heads, dim of values], and None for the attention weights, which never exist.
    """
    if seqloom_context is None and lost_context(module):
        raise SeqloomError(
            f"{type(module).__name__} was called without the context of the model's call: the model does not hand "
            "keywords on to attention; set model.compile = false, or use another"
        )
    compiled = isinstance(seqloom_context, torch.Tensor)
    kind = attention_mask.kind if isinstance(attention_mask, Padding) else attention_mask
    causal = not isinstance(kind, str)  # `BIDIRECTIONAL`
    chunk = kind if isinstance(kind, int) else None
    said = getattr(module, "is_causal", True) if is_causal is None else is_causal
    _check_keywords(module, keywords)
    if seqloom_context is not None:
        _check_call(module, query, key, attention_mask, keywords)
    if not isinstance(attention_mask, torch.Tensor):
        _check_causal(module, causal, said)
        _check_window(module, keywords, compiled=compiled)
        _check_chunk(module, chunk, compiled=compiled)
    if query.is_meta:  # of a trial call, which computes nothing
        return value.new_empty((*query.shape[:1], *query.shape[2:0:-1], value.shape[-1])), None
    options: dict[str, Any] = {"window": keywords.get("sliding_window"), "scale": scaling, "dropout": dropout}
    options |= {"softcap": softcap, "sinks": keywords.get("s_aux"), "attention_chunk": chunk, "causal": causal}
    if seqloom_context is None:
        return _attend_rows(module, query, key, value, attention_mask, options), None
    if isinstance(seqloom_context, torch.Tensor):
        if hands_on_latents(module):
            if len(seqloom_context) > 1:
                return _outside_graph(module, query, key, value, seqloom_context, options)[None], None
            key, value = expand(module, key, value)
        q, k, v = map(_token_rows, (query, key, value))
        return attention(q, k, v, seqloom_context, **options)[None], None  # the operator counts the rows
    _check_rows(query, seqloom_context)
    _check_position_ids(keywords.get("position_ids"), seqloom_context)
    return _attend(module, query, key, value, seqloom_context, options)[None], None


def _token_rows(x: torch.Tensor) -> torch.Tensor:
    """[1, heads, tokens, dim] -> [tokens, heads, dim]."""
    return x.squeeze(0).transpose(0, 1)


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: Context, options: dict[str, Any]
) -> torch.Tensor:
    """Return the attention of this rank's tokens, with the row of `pad_empty`; its latents may travel."""
    latent = hands_on_latents(module)
    travels = latent and has_latents(context)
    if latent and not travels:
        key, value = expand(module, key, value)
    q, k, v = (drop_padding(_token_rows(x), context.tokens) for x in (query, key, value))
    if _counts_rows(module):
        q = _at_positions(module, q, context.positions)
    options = options | {"layer": getattr(module, "layer_idx", None)}
    if not travels:
        return pad_empty(attention(q, k, v, context, **options))
    rows, weight = torch.cat((k, v), dim=-1).squeeze(1).to(q.dtype), module.kv_b_proj.weight.to(q.dtype)
    return pad_empty(latent_attention(q, rows, weight, latent_shape(module), context, **options))


def _attend_rows(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, options: dict[str, Any]
) -> torch.Tensor:
    """Return the attention of a call without a context, [batch, tokens, heads, dim]."""
    if hands_on_latents(module):
        key, value = expand(module, key, value)
    if isinstance(mask, torch.Tensor):
        softmax = {name: options[name] for name in ("scale", "softcap", "sinks", "dropout")}
        return masked_attention(query, key, value, mask, **softmax)
    if key.shape[2] != query.shape[2]:
        raise SeqloomError(
            f"{type(module).__name__}: {key.shape[2]} keys for {query.shape[2]} queries, and no mask that says which "
            "sees which; let the model make it: pass past_key_values and an attention_mask of all tokens, or of none"
        )
    return rows_attention(query, key, value, mask if isinstance(mask, Padding) else None, options)


@torch.compiler.disable
def _outside_graph(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, handle: torch.Tensor, options: Any
) -> torch.Tensor:
    """Attend in a compiled layer, which is cut here, where latents travel: the operator of attention knows none."""
    context = handle_object(handle).context
    _check_rows(query, context)
    return _attend(module, query, key, value, context, options)


def _check_rows(query: torch.Tensor, context: Context) -> None:
    """Refuse another number of tokens than this rank's."""
    if query.shape[2] != max(context.tokens, 1):
        raise SeqloomError(
            f"{query.shape[2]} tokens in the model call: rank {context.rank} holds {context.tokens} tokens in this "
            f"round; pass the ids of context.spans: {CALL}"
        )


def _check_call(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | Padding | int | str | None,
    keywords: dict[str, Any],
) -> None:
    """Refuse a call with a context that means something else than the context says."""
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
    if isinstance(attention_mask, Padding):
        raise SeqloomError(
            f"an attention_mask of shape {list(attention_mask.mask.shape)} with padding: documents are packed without "
            f"padding, and the context knows where they end; leave attention_mask out: {CALL}"
        )
    if isinstance(attention_mask, torch.Tensor):
        raise SeqloomError(
            f"{name} was given a mask of shape {list(attention_mask.shape)}: who sees whom is in the context; leave "
            "attention_mask and token_type_ids out, give prompts that see themselves to bind(prefixes=), or use a "
            "model without a mask of its own"
        )


def _check_keywords(module: nn.Module, keywords: dict[str, Any]) -> None:
    """Refuse what a layer asks for that is not computed."""
    for keyword, what in NOT_COMPUTED.items():
        if keywords.get(keyword) is not None:
            raise SeqloomError(
                f"{type(module).__name__} passes {keyword}: {what} is not computed here; use a model without it"
            )


def _check_causal(module: nn.Module, causal: bool, said: bool) -> None:
    """Refuse a layer that says it is not causal, and yet is given the mask of one that is."""
    if causal and not said:
        raise SeqloomError(
            f"{type(module).__name__} says is_causal = False, and the mask it asks for is causal, or has a window on "
            "both sides: what it would compute depends on the attention chosen; use a model whose mask agrees"
        )


def _check_window(module: nn.Module, keywords: dict[str, Any], *, compiled: bool) -> None:
    """Refuse a layer with a window that it does not pass on.

    A compiled graph serves many layers and must not look at a layer's number. There the window of any layer counts,
    and a layer that passes none by name is believed.
    """
    if keywords.get("sliding_window") is not None or (compiled and "sliding_window" in keywords):
        return
    window = _config_window(module, None if compiled else getattr(module, "layer_idx", None))
    if window is not None:
        where = "" if compiled else f", layer {getattr(module, 'layer_idx', '?')}"
        raise SeqloomError(
            f"{type(module).__name__}{where}: the config says a sliding window of {window}, but the layer does not "
            "pass it to attention; set config.sliding_window = None if full attention is meant"
        )


def _config_window(module: nn.Module, layer: int | None) -> int | None:
    """Return the window that the config gives to a layer; None asks for any layer."""
    config: Any = getattr(module, "config", None)
    window, types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if not types:
        return window
    return window if "sliding_attention" in (types if layer is None else types[layer : layer + 1]) else None


def _check_chunk(module: nn.Module, chunk: int | None, *, compiled: bool) -> None:
    """Refuse a layer that does not get the chunks that its config gives it.

    A compiled graph must not look at a layer's number, so there what a layer gets is believed; but there positions are
    not known either, by which some layers scale their queries.
    """
    if compiled and _counts_rows(module):
        raise SeqloomError(
            f"{type(module).__name__} scales queries by their rows (attn_temperature_tuning), and a compiled layer "
            "does not know the positions to correct them; set model.compile = false"
        )
    wanted = None if compiled else _config_chunk(module, getattr(module, "layer_idx", None))
    if wanted is not None and chunk != wanted:
        raise SeqloomError(
            f"{type(module).__name__}, layer {getattr(module, 'layer_idx', '?')}: the config says attention in chunks "
            f"of {wanted} tokens, and the layer got {chunk}; call {CALL}, without an attention_mask"
        )


def _config_chunk(module: nn.Module, layer: int | None) -> int | None:
    """Return the tokens of a chunk of a layer with chunked attention; None: it has none."""
    config: Any = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    if not types or layer is None or types[layer] != CHUNKED:
        return None
    return config.attention_chunk_size


def _counts_rows(module: nn.Module) -> bool:
    """Whether a layer has multiplied its queries by a factor that grows with the row in the call (Llama 4)."""
    tuned = getattr(module, "attn_temperature_tuning", False)
    return bool(tuned) and not getattr(module, "use_rope", True)


def _at_positions(module: Any, q: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Replace the factors of the rows, by which the layer multiplied q [tokens, heads, dim], by those of positions."""

    def factors(places: torch.Tensor) -> torch.Tensor:
        return torch.log1p(torch.floor((places.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0

    wide = torch.promote_types(q.dtype, torch.float32)
    rows = torch.arange(len(q), device=q.device)
    return (q * (factors(positions).to(wide) / factors(rows).to(wide))[:, None, None]).to(q.dtype)


def _check_position_ids(positions: torch.Tensor | None, context: Context) -> None:
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
