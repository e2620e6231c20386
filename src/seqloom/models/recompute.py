"""Activation checkpointing: what a layer forgets until its backward, chosen by the plan for every round.

none        everything is kept (profile: the same; plans of published constants say no more)
full        the layer's input; backward runs the layer forward again, exchanges included
stage       no layer keeps less: the whole stage is run forward without a graph, and once more before its backward
selective   the layer's input, attention outputs and log-sum-exp; backward runs the layer forward again, but attention
            answers from what was kept: no kernel runs and no key or value goes round a second time

A layer is told by the context that it is called with. Recomputing needs q, k and v where the kernels work. Without
Ulysses these are the layer's own, recomputed here. With Ulysses they are exchanged once more, which is what plans are
priced with, unless `keep_exchanged` spends the memory to keep them too; then nothing at all is sent twice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from seqloom.attention.context_parallel.overlap import GroupCall
from seqloom.attention.context_parallel.ulysses import Exchange
from seqloom.dist import Context
from seqloom.dist.token_layout import TokenRedistribute
from seqloom.errors import SeqloomError
from seqloom.plan import Checkpoint

T = TypeVar("T")
Tensors = tuple[torch.Tensor, ...]
KEEP_ALL = (Checkpoint.NONE, Checkpoint.STAGE, Checkpoint.PROFILE)


def recompute_layers(layers: Iterable[nn.Module], *, keep_exchanged: bool = False) -> None:
    """Make layers recompute as the context of each call says. Names of parameters and classes of layers stay.

    Call it before the parameters are sharded. Every layer must be called with the context, by place or by name.

    Args:
        layers: of the reference model, or decoder layers of transformers.
        keep_exchanged: under selective checkpointing, keep q, k and v as the Ulysses exchange delivered them.
    """
    for layer in layers:
        if isinstance(layer, Recomputing):
            raise SeqloomError(f"{type(layer).__name__} recomputes already; call recompute_layers once for a layer")
        layer.__class__ = _recomputing(type(layer), keep_exchanged)


def run_layer(
    body: Callable[..., T], args: tuple[Any, ...], options: dict[str, Any], *, keep_exchanged: bool = False
) -> T:
    """Call `body(*args, **options)` under the checkpointing of the context among its arguments."""
    chosen = context_among(args, options).work.checkpoint
    if chosen in KEEP_ALL or not torch.is_grad_enabled():
        return body(*args, **options)
    if chosen == Checkpoint.SELECTIVE:
        body = _Remembering(body, Tape(keep_exchanged))
    # Nothing random happens in a layer, so there is no state of generators to restore.
    return cast("T", checkpoint(body, *args, use_reentrant=False, preserve_rng_state=False, **options))


def context_among(args: tuple[Any, ...], options: dict[str, Any]) -> Context:
    """Return the context among a layer's arguments."""
    found = [each for each in (*args, *options.values()) if isinstance(each, Context)]
    if len(found) != 1:
        raise SeqloomError(
            f"a layer was called with {len(found)} contexts, it needs one to know what to keep; pass the context of "
            "the round to every layer, as the model's call does"
        )
    return found[0]


class Recomputing:
    """Put before the class of a layer: the same layer, run by `run_layer`."""

    keep_exchanged: bool

    def forward(self, *args: Any, **options: Any) -> Any:
        """Run the layer's own forward."""
        own = super().forward  # pyrefly: ignore[missing-attribute]
        return run_layer(own, args, options, keep_exchanged=self.keep_exchanged)


@cache
def _recomputing(kind: type[nn.Module], keep_exchanged: bool) -> type[nn.Module]:
    """Return the class of recomputing layers of a kind; one for all, so that what is compiled for one serves all."""
    return type(kind.__name__, (Recomputing, kind), {"keep_exchanged": keep_exchanged})


class Tape:
    """Results of attention in the order in which a layer asks for them; the first run fills it, the next reads."""

    def __init__(self, keep_exchanged: bool) -> None:
        """Start empty."""
        self.keep_exchanged = keep_exchanged
        self._kept: list[Tensors] = []
        self._next: int | None = None

    def rewind(self) -> None:
        """Answer from here on with what was kept, from the first."""
        self._next = 0

    def answer(self, compute: Callable[[], Tensors]) -> Tensors:
        """Return what `compute` returns, or returned in the first run.

        Kept are tensors outside of any graph: the ones returned may become outputs of the graph that holds the tape.
        """
        if self._next is None:
            found = compute()
            self._kept.append(tuple(each.detach() for each in found))
            return found
        self._next += 1
        return tuple(each.detach() for each in self._kept[self._next - 1])


class _Remembering:
    """A layer's forward that is run twice, the second time from the tape of the first."""

    def __init__(self, body: Callable[..., Any], tape: Tape) -> None:
        self._body, self._tape, self._again = body, tape, False

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self._again:
            self._tape.rewind()
        self._again = True
        given = [_with_tape(each, self._tape) for each in args]
        return self._body(*given, **{name: _with_tape(each, self._tape) for name, each in options.items()})


def _with_tape(argument: Any, tape: Tape) -> Any:
    if not isinstance(argument, Context):
        return argument
    return _TapedContext(argument, tape)


class _TapedContext(Context):
    """A context whose attention calls go through a tape."""

    __slots__ = ("tape",)

    def __init__(self, own: Context, tape: Tape) -> None:
        rows = (own.spans, own.positions, own.documents, own.groups)
        more = {"cache": own._cache, "pieces": own.pieces, "kv_cache": own.kv_cache}
        super().__init__(own.work, own.transport, *rows, own.node_size, **more)
        self.tape, self.mlp_redistribute = tape, own.mlp_redistribute
        if own.tp_group is not None:
            self.tp_group = replace(own.tp_group, cp_context=_TapedContext(own.tp_group.cp_context, tape))
        if own.attention_redistribute is not None:
            self.attention_redistribute = _TapedCrossing(
                own.attention_redistribute.to_target, own.attention_redistribute.to_source, tape
            )

    def cached(self, key: Hashable, build: Callable[[], T]) -> T:
        """See `Context.cached`; what attention is bound to is handed out with the tape in between."""
        found = Context.cached(self, key, build)
        if isinstance(found, tuple) and found and all(isinstance(each, GroupCall) for each in found):
            return cast("T", tuple(_taped(cast("GroupCall", each), self.tape) for each in found))
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _TapedCrossing(TokenRedistribute):
    """The way into attention. Inputs come from the tape if that keeps them, outputs do; gradients never."""

    tape: Tape

    def reversed(self) -> TokenRedistribute:
        """See `Crossing.reversed`: the way of outputs, which is on the tape in any case."""
        return _TapedWayOut(self.to_source, self.to_target, self.tape)

    def forward(self, *tensors: torch.Tensor) -> Tensors:
        """See `Crossing.forward`."""
        return (
            self.tape.answer(lambda: self.to_target(*tensors)) if self.tape.keep_exchanged else self.to_target(*tensors)
        )


@dataclass(frozen=True, slots=True, eq=False)
class _TapedWayOut(_TapedCrossing):
    """The way out of attention."""

    def forward(self, *tensors: torch.Tensor) -> Tensors:
        """See `Crossing.forward`."""
        return self.tape.answer(lambda: self.to_target(*tensors))


def _taped(call: GroupCall, tape: Tape) -> GroupCall:
    exchange = None
    if call.exchange is not None:
        parts = {each.name: getattr(call.exchange, each.name) for each in fields(call.exchange)}
        exchange = _TapedExchange(**parts, tape=tape)
    return replace(call, exchange=exchange, answer=tape.answer)


@dataclass(frozen=True, slots=True, eq=False)
class _TapedExchange(Exchange):
    """The Ulysses exchange. Outputs come from the tape, and inputs if that keeps them; gradients never."""

    tape: Tape = field(kw_only=True)

    def to_heads(self, *tensors: torch.Tensor) -> Tensors:
        """See `Exchange.to_heads`; q, k and v come together, a gradient alone."""
        if len(tensors) == 1 or not self.tape.keep_exchanged:
            return Exchange.to_heads(self, *tensors)
        return self.tape.answer(lambda: Exchange.to_heads(self, *tensors))

    def to_tokens(self, out: torch.Tensor) -> torch.Tensor:
        """See `Exchange.to_tokens`."""
        return self.tape.answer(lambda: (Exchange.to_tokens(self, out),))[0]
