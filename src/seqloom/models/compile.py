"""How torch.compile sees a layer: attention is one opaque operator, all else is one graph for all layers of a class.

`torch.ops.seqloom.attention` hides communication, kernels and saved tensors from the compiler, which
sees shapes only. Gathering parameters and recomputing a layer happen around its body, not in the graph.

A graph holds tensors only. So the context enters it as an opaque handle, a tensor that stands for a Python object, and
what the backward needs leaves as one. Memory that a graph owns must not stay behind in a handle, since a compiler uses
memory again after its last use in the graph. So q, k, v and the output are saved by the graph; the handle has the
log-sum-exp and what exchanges delivered. A call with a document in pieces also writes into the KV cache of its context.
Torch is not told: doing it twice does no harm, and its output is used, so it is never left out.

Lengths are new in every step. The token axis is marked dynamic, so that no graph depends on how many tokens there are,
not even where another axis is as long by chance. Only 0 and 1 tokens have graphs of their own: torch specialises them.
Inductor would still compile anew for several ranges of sizes, which takes seconds each (`INDUCTOR_OPTIONS`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cache, partial
from itertools import count
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.library import custom_op

from seqloom.attention.api import Groups, attention_backward, attention_forward, last_contiguous
from seqloom.attention.context_parallel.kv_cache import PrefixAttention
from seqloom.attention.kernels.interface import Saved
from seqloom.attention.plan import AttentionOptions, has_latents, plan_attention
from seqloom.compat import inductor_options, mark_dynamic
from seqloom.dist import Context
from seqloom.dist.layer_times import LayerTimes
from seqloom.dist.rank_tokens import TokenRedistribute
from seqloom.dist.rows import take
from seqloom.errors import SeqloomError
from seqloom.models.dropout import check_rows, hide_keys
from seqloom.models.float8 import allow_in_graphs
from seqloom.models.layer_wrapper import DROPOUT, ROUTER_LOSS, LayerWrapper

INDUCTOR_OPTIONS = {"triton.mix_order_reduction_non_strict_mode": True}
"""Inductor decides by the number of tokens whether the two sums in the backward of a norm become one kernel, and guards
the graph with the answer: up to four graphs. With this they always do, as for long packs in any case."""
_REGISTERING = Lock()  # ranks may be threads of one process, and torch takes an operator once


def compile_layers(layers: Iterable[nn.Module], *, backend: str = "inductor") -> None:
    """Make layers run compiled, from their first call on. The result is the same but for rounding.

    Call it before the parameters are sharded. Every layer must be called with the context.
    """
    for layer in layers:
        wrapper = LayerWrapper.of(layer)
        if wrapper.compiled is not None:
            raise SeqloomError(f"{type(layer).__name__} is compiled already; call compile_layers once for a layer")
        if ROUTER_LOSS in wrapper.hooks:
            raise SeqloomError(
                f"{type(layer).__name__} has a router loss, which a compiled layer would leave out; set "
                "model.compile = false, or load the model with output_router_logits=False"
            )
        wrapper.compiled = partial(_run_compiled, _compiled_body(type(layer), backend))


@cache
def _compiled_body(layer_class: type[nn.Module], backend: str) -> Callable[..., Any]:
    """Return the compiled forward of a class of layers: one, since a graph is for one class."""
    with _REGISTERING:
        register_operator()
        allow_in_graphs()
    options = inductor_options(INDUCTOR_OPTIONS) if backend == "inductor" else None
    return torch.compile(layer_class.forward, dynamic=True, backend=backend, options=options)


def _run_compiled(
    body: Callable[..., Any], layer: nn.Module, context: Context, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    number: Any = None
    if context.pieces or context.dropout_seed is not None:  # of the layer in the model, as its attention knows it
        number = next((part.layer_idx for part in layer.modules() if hasattr(part, "layer_idx")), None)
    call = LayerCall(context, number, torch.is_grad_enabled())
    if DROPOUT in LayerWrapper.of(layer).scopes:
        hide_keys(layer, opaque_handle)
    return body(
        layer,
        *(_graph_input(each, call) for each in args),
        **{name: _graph_input(each, call) for name, each in kwargs.items()},
    )


def _graph_input(argument: Any, call: LayerCall) -> Any:
    """Return an argument as the graph takes it: the context as an opaque handle, token axes marked dynamic.

    Where latents travel the handle is there twice, by which a layer has another graph for such rounds.
    """
    tokens = call.context.tokens
    if isinstance(argument, Context):
        handle = opaque_handle(call)
        return handle.expand(2) if has_latents(call.context) else handle
    if isinstance(argument, tuple):
        return tuple(_graph_input(each, call) for each in argument)
    if isinstance(argument, torch.Tensor) and tokens > 1 and tokens in argument.shape:
        mark_dynamic(argument, argument.shape.index(tokens))  # the token axis comes before other axes
    return argument


# -- opaque handles ---------------------------------------------------------------------------------------------------


class LayerCall(NamedTuple):
    """A context as one layer is called with it: a graph serves all layers, so it does not know which one it is."""

    context: Context
    layer: int | None
    with_gradients: bool  # inside an operator torch does not say


class _Handle(bytearray):
    """The memory of an opaque handle, which is its number, and the object."""

    value: object


_numbers = count(1)
_handles: WeakValueDictionary[int, _Handle] = WeakValueDictionary()


def opaque_handle(value: object) -> torch.Tensor:
    """Return a tensor that stands for an object inside a graph, int64[1] on the CPU.

    The memory of the handle owns the object: whoever keeps the handle, or a view of it, keeps the object, and nobody
    else does. So a graph that saves a handle for its backward saves the object, and dropping the one drops the other.
    The object must not hold its handle: nothing would free them.
    """
    number = next(_numbers)
    handle = _Handle(number.to_bytes(torch.int64.itemsize, sys.byteorder))
    handle.value = value
    _handles[number] = handle
    return torch.frombuffer(handle, dtype=torch.int64)  # keeps `handle` as long as its storage lives


def handle_object(handle: torch.Tensor) -> Any:
    """Return the object that a handle stands for."""
    return _handles[int(handle[0])].value


# -- the operator -----------------------------------------------------------------------------------------------------


class _SavedCall(NamedTuple):
    """What an operator call keeps for its backward beside q, k, v and out, which the graph saves.

    Attributes:
        rows: of the call that are tokens.
        groups: of the rank.
        tensors: for each group all that it saved, where exchanges delivered that; else its log-sum-exp.
        redistribute: brought q, k and v into the layout of attention; None: the same layout.
        times: measures the call; None: nobody does.
    """

    rows: int
    groups: Groups
    tensors: list[Saved | torch.Tensor]
    redistribute: TokenRedistribute | None
    times: LayerTimes | None

    @classmethod
    def of(cls, rows: int, groups: Groups, saved: list[Saved], context: Context) -> _SavedCall:
        """Leave out what the graph saves."""
        redistribute = context.attention_redistribute
        exchanged = [redistribute is not None or group.ulysses is not None for group in groups]
        kept = [s if own else s.lse for own, s in zip(exchanged, saved, strict=True)]
        return cls(rows, groups, kept, redistribute, context.times)

    def saved(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> list[Saved]:
        """Return all that the groups saved, given what the graph did."""
        found = []
        for group, tensors in zip(self.groups, self.tensors, strict=True):
            if not isinstance(tensors, Saved):
                rows = group.rows
                tensors = Saved(take(q, rows), take(k, rows), take(v, rows), take(out, rows), tensors)
                if isinstance(group.inner, PrefixAttention):
                    tensors = group.inner.saved_for_backward(tensors, exchanged=False)
            found.append(tensors)
        return found


@cache
def register_operator() -> None:
    """Register `torch.ops.seqloom.attention`, which `attention` calls where it is given a handle, and its backward."""
    schema = (
        "(Tensor q, Tensor k, Tensor v, Tensor context, bool causal, int? window, float? scale, float dropout, "
        "float? softcap, Tensor? sinks=None, int? attention_chunk=None) -> (Tensor out, Tensor saved)"
    )
    forward = custom_op("seqloom::attention", _forward, mutates_args=(), schema=schema)
    forward.register_fake(lambda q, *_: (q.new_empty(q.shape), torch.empty(1, dtype=torch.int64)))
    schema = (
        "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor saved, Tensor? sinks) "
        "-> (Tensor, Tensor, Tensor, Tensor)"
    )
    backward = custom_op("seqloom::attention_backward", _backward, mutates_args=(), schema=schema)

    def fake(dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> Any:
        sinks = rest[2]
        return tuple(x.new_empty(x.shape) for x in (q, k, v, q[:0] if sinks is None else sinks))

    backward.register_fake(fake)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
        ctx.save_for_backward(*inputs[:3], *output, inputs[9])

    def gradients(ctx: Any, dout: torch.Tensor, _: object) -> tuple[torch.Tensor | None, ...]:
        *found, dsinks = backward(dout, *ctx.saved_tensors)
        return *found, *[None] * 6, None if ctx.saved_tensors[5] is None else dsinks, None

    forward.register_autograd(gradients, setup_context=save)
    keys = custom_op("seqloom::token_keys", _token_keys, mutates_args=(), schema="(Tensor x, Tensor keys) -> Tensor")
    keys.register_fake(lambda x, _: x.new_empty(math.prod(x.shape[:-1]), dtype=torch.int64))


def _token_keys(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the keys that a handle stands for, int64[rows of x]; see `models.dropout`."""
    found = handle_object(keys)
    check_rows(x, found)
    return found.clone()


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    context: torch.Tensor,
    causal: bool,
    window: int | None,
    scale: float | None,
    dropout: float,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
    attention_chunk: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `attention`; `context` and `saved` are opaque handles.

    On a rank without tokens one row may come nevertheless, for models that cannot be called with none; nobody sees it.
    """
    held, given = handle_object(context), len(q)
    bound, layer, with_gradients = held if isinstance(held, LayerCall) else (held, None, True)
    rows = given if given != 1 else min(bound.tokens, 1)
    q, k, v = (x[:rows] for x in (q, k, v))
    options = AttentionOptions(causal, window, scale, None, dropout, softcap, attention_chunk)
    with torch.set_grad_enabled(with_gradients):
        groups = plan_attention(q, k, v, bound, options, layer)
    with nullcontext() if bound.times is None else bound.times.attention():
        out, _, saved = attention_forward(q, k, v, bound, groups, sinks=sinks)
    return _own_memory(out, given), opaque_handle(_SavedCall.of(rows, groups, saved, bound))


def _backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    saved: torch.Tensor,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Return dq, dk, dv and dsinks, an empty tensor without sinks; `saved` is the forward's."""
    call: _SavedCall = handle_object(saved)
    given = len(q)
    dout, q, k, v, out = (last_contiguous(x[: call.rows]) for x in (dout, q, k, v, out))
    tensors = call.saved(q, k, v, out)
    with nullcontext() if call.times is None else call.times.attention():
        dq, dk, dv, dsinks = attention_backward(dout, tensors, call.groups, call.redistribute, k.shape[1], sinks)
    owned = (_own_memory(each, given) for each in (dq, dk, dv))
    return *owned, q.new_empty((0, *q.shape[1:])) if dsinks is None else dsinks


def _own_memory(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a tensor in memory of its own, as the operator promises, with rows of zeros added where some lack."""
    if len(tensor) < rows:
        return tensor.new_zeros((rows, *tensor.shape[1:]))
    owned = tensor.is_contiguous() and tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes() > 0
    return tensor if owned else tensor.clone(memory_format=torch.contiguous_format)
