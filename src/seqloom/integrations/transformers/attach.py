"""MLPs of transformers on the tokens of the linear layout, in rounds that remap around them.

An MLP is not told the context, its layer is. So a layer puts hooks on its MLP while it runs and takes them away after:
one moves what comes in, one moves back what comes out. Nothing is left behind for a call with another context.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from seqloom.dist import Context, attention_context
from seqloom.dist.token_layout import TokenRedistribute, redistribute_tokens
from seqloom.errors import SeqloomError
from seqloom.integrations.transformers.attention import NAME, calls, only_rows, register
from seqloom.integrations.transformers.checks import check, unwrapped
from seqloom.integrations.transformers.parts import Whole, check_positions, parts_of
from seqloom.integrations.transformers.tensor_parallel import NoTensorParallel, tensor_plan, tp_layers
from seqloom.models.adapter import ModelAdapter
from seqloom.models.recompute import LayerWrapper
from seqloom.plan import Remap

NAMES = ("mlp", "feed_forward", "block_sparse_moe", "shared_mlp", "moe", "ffn")
"""What the layers of transformers call their MLPs."""
WAY_OUT = "plan with remap 'attention', which moves tokens around attention instead"


def remap_layers(layers: Iterable[nn.Module]) -> None:
    """Make decoder layers run their MLPs where the context of each call says; doing it again changes nothing."""
    for layer in layers:
        LayerWrapper.of(layer).hooks["mlp_redistribute"] = _mlp_hooks


def _mlp_hooks(layer: nn.Module, context: Context) -> ExitStack | None:
    """Put hooks on the MLPs of a layer for a round that redistributes tokens around them."""
    if context.work.linear is None or context.work.remap != Remap.MLP:
        return None
    found = [part for name, part in layer.named_children() if name in NAMES]
    if not found:
        raise SeqloomError(
            f"{type(layer).__name__} in a round that remaps around the MLP: none of its parts is called "
            f"{', '.join(NAMES)}, so its MLP is not known; {WAY_OUT}"
        )
    if context.mlp_redistribute is None:  # nothing of this rank's shard group moves
        return None
    hooks = ExitStack()
    for part in found:
        around = _Around(part, context.mlp_redistribute, context.tokens)
        hooks.callback(part.register_forward_pre_hook(around.before, with_kwargs=True).remove)
        hooks.callback(part.register_forward_hook(around.after).remove)
    return hooks


class _Around:
    """The hooks of one MLP for one call of its layer."""

    def __init__(self, part: nn.Module, crossing: TokenRedistribute, tokens: int) -> None:
        self._name, self._crossing, self._tokens = type(part).__name__, crossing, tokens

    def before(self, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
        """Move the one tensor among the arguments to the linear layout."""
        tensors = [each for each in (*args, *options.values()) if isinstance(each, torch.Tensor)]
        if len(tensors) != 1:
            raise SeqloomError(
                f"{self._name} is called with {len(tensors)} tensors in a round that remaps around it: what they are "
                f"to each other is not known here; {WAY_OUT}"
            )
        moved = _moved(self._crossing, tensors[0], self._tokens)

        def given(each: Any) -> Any:
            return moved if each is tensors[0] else each

        return tuple(map(given, args)), {name: given(each) for name, each in options.items()}

    def after(self, _: nn.Module, __: Any, output: Any) -> Any:
        """Move what came out back: a tensor, or the first of several, of which others are not per token."""
        first = output[0] if isinstance(output, tuple) else output
        moved = _moved(self._crossing.reversed(), first, sum(self._crossing.to_target.receives))
        return (moved, *output[1:]) if isinstance(output, tuple) else moved


def _moved(crossing: TokenRedistribute, x: torch.Tensor, rows: int) -> torch.Tensor:
    """Move the rows of x [1, rows, hidden] or [rows, hidden]; where there are none, one that is nobody's stands in.

    Models of transformers cannot be called with no tokens; see `inputs`.
    """
    flat = x.flatten(0, -2)
    if len(flat) != max(rows, 1):
        raise SeqloomError(
            f"{list(x.shape)} in or out of an MLP, where {rows} tokens are: it does not treat every token by itself; "
            f"{WAY_OUT}"
        )
    (moved,) = redistribute_tokens(crossing, only_rows(flat, rows))
    if not len(moved):
        moved = torch.cat([moved, moved.new_zeros((1, *moved.shape[1:]))])
    return moved[None] if x.ndim == 3 else moved


# ---- merged: integrations.transformers
# Hugging Face models on the engine, unmodified: attach, call, and what the loss needs instead of logits.
#
# model = attach(AutoModelForCausalLM.from_pretrained(...))
# hidden = hidden_states(model, ids, context.positions, context)
# weight, tied = head(model)


Model = TypeVar("Model", bound=nn.Module)


class Head(NamedTuple):
    """The output projection.

    Attributes:
        weight: [vocabulary, hidden], the parameter itself.
        tied: whether it is the embedding's parameter too.
    """

    weight: nn.Parameter
    tied: bool


def attach(model: Model) -> Model:
    """Make a causal model compute its attention with the engine, and return it.

    The model is switched by name (`set_attn_implementation`); nothing in it is replaced, and switching to another name
    undoes it. From now on every call needs a context: see `inputs`.

    Args:
        model: of transformers, or one that peft wraps.

    Raises:
        SeqloomError: what `check` refuses.
    """
    check(model)
    register()
    causal = unwrapped(model)
    causal.set_attn_implementation(NAME)
    chosen = causal.config._attn_implementation
    if chosen != NAME:
        raise SeqloomError(
            f"{type(causal).__name__} stays with attention {chosen!r} when {NAME!r} is chosen: its code does not look "
            "attention up by name; use a model that does"
        )
    return model


def inputs(ids: torch.Tensor, positions: torch.Tensor, context: Context) -> dict[str, Any]:
    """Return the arguments of a model call for this rank's tokens: `model(**inputs(...)).logits[0, : context.tokens]`.

    Models of transformers cannot be called with no tokens. A rank that holds none in a round, but takes part in it,
    computes one row that nobody sees: cut the result to `context.tokens` rows and its gradients are zero.

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
    if context.tp_group is not None:  # tables of positions are for attention, which has the tokens of the whole team
        positions = attention_context(context).positions
    ids, positions = (each if len(each) else each.new_zeros(1) for each in (ids, positions))
    return {"input_ids": ids[None], "position_ids": positions[None], "use_cache": False, "seqloom_context": context}


def hidden_states(model: nn.Module, ids: torch.Tensor, positions: torch.Tensor, context: Context) -> torch.Tensor:
    """Return what the head of the model is given, [tokens, hidden]: the logits are this @ head(model).weight.T.

    Args:
        model: an attached model.
        ids, positions, context: see `inputs`.
    """
    decoder = unwrapped(model).get_decoder()
    return only_rows(decoder(**inputs(ids, positions, context)).last_hidden_state.squeeze(0), context.tokens)


def head(model: nn.Module) -> Head:
    """Return the output projection of an attached model. Call it in every step: sharding may exchange parameters."""
    causal = unwrapped(model)
    weight = causal.get_output_embeddings().weight
    return Head(weight, weight is causal.get_input_embeddings().weight)


def model_adapter(model: nn.Module) -> ModelAdapter:
    """Describe an attached model to the runtime, which shards it, recomputes its layers and runs plans on it.

    From now on its layers follow plans that remap around the MLP, see `integrations.remap`. Where its parts can be
    told apart, see `integrations.parts`, it can be cut into stages, and where it publishes a tensor-parallel plan, see
    `integrations.plans`, its layers run in teams.
    """
    causal = unwrapped(model)
    kinds = causal._no_split_modules or ()  # the names of the classes of layers
    layers = tuple(module for module in causal.get_decoder().modules() if type(module).__name__ in kinds)
    if not layers:
        raise SeqloomError(
            f"{type(causal).__name__} does not say what its layers are (_no_split_modules = {list(kinds)}); "
            "say it yourself: seqloom.models.adapter.ModelAdapter(module, layers, hidden, head)"
        )

    remap_layers(layers)

    def hidden(ids: torch.Tensor, context: Context) -> torch.Tensor:
        return hidden_states(model, ids, context.positions, context)

    known: dict[str, Any]
    try:
        parts = parts_of(causal.get_decoder(), causal.get_input_embeddings(), layers)
        known = {"embed": parts.embed, "body": parts.body, "norm": parts.norm, "embedding": parts.embedding}
    except Whole as reason:
        known = {"single_stage_reason": str(reason)}
    found = calls(layers)
    try:
        plan = tensor_plan(model, causal, layers, found)
        check_positions(causal.get_decoder(), causal.get_input_embeddings(), layers)
        tp_layers(layers, plan.regions)
        known |= {"tp_axes": plan.tp_axes, "tp_divisors": plan.tp_divisors, "no_tp_reason": ""}
    except (NoTensorParallel, Whole) as reason:
        known |= {"no_tp_reason": str(reason)}
    return ModelAdapter(model, layers, hidden, causal.get_output_embeddings(), found, **known)
