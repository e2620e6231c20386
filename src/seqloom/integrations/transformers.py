"""Hugging Face models on the engine, unmodified: attach, call, and what the loss needs instead of logits.

model = attach(AutoModelForCausalLM.from_pretrained(...))
hidden = hidden_states(model, ids, context.positions, context)
weight, tied = head(model)
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from seqloom.comm import Context, attention_context
from seqloom.errors import SeqloomError
from seqloom.integrations.interface import NAME, calls, only_rows, register
from seqloom.integrations.parts import Whole, check_positions, parts_of
from seqloom.integrations.plans import Uncuttable, tensor_plan
from seqloom.integrations.refusals import check, unwrapped
from seqloom.integrations.remap import remap_layers
from seqloom.integrations.teams import team_layers
from seqloom.runtime.network import Network

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
    if context.team is not None:  # tables of positions are for attention, which has the tokens of the whole team
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


def network(model: nn.Module) -> Network:
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
            "say it yourself: seqloom.runtime.network.Network(module, layers, hidden, head)"
        )

    remap_layers(layers)

    def hidden(ids: torch.Tensor, context: Context) -> torch.Tensor:
        return hidden_states(model, ids, context.positions, context)

    known: dict[str, Any]
    try:
        parts = parts_of(causal.get_decoder(), causal.get_input_embeddings(), layers)
        known = {"embed": parts.embed, "body": parts.body, "norm": parts.norm, "embedding": parts.embedding}
    except Whole as reason:
        known = {"whole": str(reason)}
    found = calls(layers)
    try:
        plan = tensor_plan(model, causal, layers, found)
        check_positions(causal.get_decoder(), causal.get_input_embeddings(), layers)
        team_layers(layers, plan.regions)
        known |= {"cuts": plan.cuts, "divided": plan.divided, "uncuttable": ""}
    except (Uncuttable, Whole) as reason:
        known |= {"uncuttable": str(reason)}
    return Network(model, layers, hidden, causal.get_output_embeddings(), found, **known)
