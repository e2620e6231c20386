"""What runs around a layer's forward, in one wrapper; and activation checkpointing, chosen by the plan for every round.

`LayerWrapper` replaces the `forward` of a layer, on the instance: the layer keeps its class, its parameters and their
names. Whatever order behaviours are added in, they run in this one, outermost first:

    1. offload     what is saved goes to host memory until the backward           `models.offload`
    2. recompute   activation checkpointing, as the context of the call says      `recompute_layers`
    3. scopes      what the context says to parts of the layer: whose tokens      `models.dropout.plan_dropout`
                   drop what, which experts are this rank's                       `models.experts.divide_experts`
    4. compile     the body as one graph for all layers of a class                `models.compile.compile_layers`
    5. hooks       on parts of the layer, for one call: tensor parallelism,       `integrations.transformers`
                   redistribution around the MLP, router losses

Which activations a layer drops until its backward; the last layers of a stage may drop less (`lighter_layers`):

    none        none (profile: the same; plans of published constants say no more)
    full        all but the layer's input; backward runs the layer forward again, exchanges included
    stage       none: the whole stage is run forward without a graph, and once more before its backward
    selective   all but the layer's input, attention outputs and log-sum-exp; backward runs the layer forward again, but
                attention replays its results: no kernel runs and no key or value goes round a second time

Recomputing needs q, k and v where the kernels work. Without Ulysses these are the layer's own, recomputed. With Ulysses
they are exchanged once more, which is what plans are priced with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from seqloom.attention.api import SavedAttention
from seqloom.dist import Context
from seqloom.errors import SeqloomError
from seqloom.models.offload import Offload, OffloadedLayer
from seqloom.plan import Checkpoint

T = TypeVar("T")
ROUTER_LOSS = "router_loss"
"""Name of the hooks by which a layer reports to `models.router_loss`."""
DROPOUT, EXPERTS = "dropout", "experts"
"""Names of scopes."""
KEEP_ALL = (Checkpoint.NONE, Checkpoint.STAGE, Checkpoint.PROFILE)
LayerHooks = Callable[[nn.Module, Context], AbstractContextManager[object] | None]
"""Puts hooks on parts of a layer for one call with a context, removed at the exit; None: this call needs none."""


@dataclass(slots=True, eq=False)
class LayerWrapper:
    """What runs around the forward of one layer, see the order above.

    Attributes:
        layer: its number among the layers that recompute; None: it does not apply activation checkpointing.
        scopes: by name, entered with the context of a call; also around a compiled body.
        compiled: compiled(layer, context, args, kwargs) runs the compiled body; None: not compiled.
        hooks: by name.
    """

    layer: int | None = None
    scopes: dict[str, Callable[[Context], AbstractContextManager[object]]] = field(default_factory=dict)
    compiled: Callable[[nn.Module, Context, tuple[Any, ...], dict[str, Any]], Any] | None = None
    hooks: dict[str, LayerHooks] = field(default_factory=dict)

    @classmethod
    def of(cls, layer: nn.Module) -> LayerWrapper:
        """Return the wrapper of a layer; the first call wraps its forward."""
        wrapper = layer.__dict__.get("layer_wrapper")
        if wrapper is None:
            wrapper = cls()
            layer.layer_wrapper = wrapper  # pyrefly: ignore[bad-argument-type]
            layer.forward = MethodType(_wrapped_forward, layer)
        return wrapper


def _wrapped_forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    wrapper = cast("LayerWrapper", layer.layer_wrapper)
    body = partial(_wrapped_body, layer, wrapper)
    if wrapper.layer is None or not torch.is_grad_enabled():  # without gradients nothing is kept, context or not
        return body(*args, **kwargs)
    context = context_among(args, kwargs)
    if not context.offloads(wrapper.layer):
        return run_checkpointed(body, args, kwargs, wrapper.layer)
    shared = (each for each in _tensors((*args, *kwargs.values())) if not each.requires_grad)  # by all layers
    with cast("Offload", context.offload).layer(shared, layer) as offloaded:
        return run_checkpointed(body, args, kwargs, wrapper.layer, offloaded)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def _wrapped_body(layer: nn.Module, wrapper: LayerWrapper, *args: Any, **kwargs: Any) -> Any:
    context = next((each for each in (*args, *kwargs.values()) if isinstance(each, Context)), None)
    with ExitStack() as stack:
        if context is not None:
            for scope in wrapper.scopes.values():
                stack.enter_context(scope(context))
        if wrapper.compiled is not None:
            context = context_among(args, kwargs)
            # A graph cannot change the number of rows: in such a round the layer runs as it stands.
            if context.mlp_redistribute is None and context.tp_group is None:
                return wrapper.compiled(layer, context, args, kwargs)
        for hooks in wrapper.hooks.values():
            manager = None if context is None else hooks(layer, context)
            if manager is not None:
                stack.enter_context(manager)
        return type(layer).forward(layer, *args, **kwargs)


def context_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Context:
    """Return the context among a layer's arguments."""
    found = [each for each in (*args, *kwargs.values()) if isinstance(each, Context)]
    if len(found) != 1:
        raise SeqloomError(
            f"a layer was called with {len(found)} contexts, it needs one to know what to keep; pass the context of "
            "the round to every layer, as the model's call does"
        )
    return found[0]


def recompute_layers(layers: Iterable[nn.Module]) -> None:
    """Make the layers of a model, all in order, recompute as the context of each call says.

    Call it before the parameters are sharded. Every layer must be called with the context, by place or by name.
    """
    for number, layer in enumerate(layers):
        wrapper = LayerWrapper.of(layer)
        if wrapper.layer is not None:
            raise SeqloomError(f"{type(layer).__name__} recomputes already; call recompute_layers once for a layer")
        wrapper.layer = number


def run_checkpointed(
    body: Callable[..., T],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    layer: int,
    offloaded: OffloadedLayer | None = None,
) -> T:
    """Call `body(*args, **kwargs)` under the layer's activation checkpointing by the context among its arguments.

    `offloaded` takes what attention keeps; None: it stays.
    """
    policy = context_among(args, kwargs).checkpoint(layer)
    if policy in KEEP_ALL or not torch.is_grad_enabled():
        return body(*args, **kwargs)
    if policy == Checkpoint.SELECTIVE:
        hooks = None if offloaded is None else (offloaded.pack, offloaded.unpack)
        body = partial(_run_selective, body, SavedAttention(hooks))
    # Nothing random happens in a layer, so there is no state of generators to restore.
    return cast("T", checkpoint(body, *args, use_reentrant=False, preserve_rng_state=False, **kwargs))


def _run_selective(body: Callable[..., T], saved_attention: SavedAttention, *args: Any, **kwargs: Any) -> T:
    """Run a layer, forward or again, with attention that records or replays."""
    saved_attention.begin()
    given = [_with_saved_attention(each, saved_attention) for each in args]
    return body(*given, **{name: _with_saved_attention(each, saved_attention) for name, each in kwargs.items()})


def _with_saved_attention(argument: Any, saved_attention: SavedAttention) -> Any:
    if not isinstance(argument, Context):
        return argument
    context = copy(argument)
    context.saved_attention = saved_attention
    if context.tp_group is not None:
        inner = _with_saved_attention(context.tp_group.cp_context, saved_attention)
        context.tp_group = replace(context.tp_group, cp_context=inner)
    return context
