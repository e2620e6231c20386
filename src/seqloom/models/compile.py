"""Layers whose bodies torch.compile has compiled: one graph for all layers of a kind, and for all lengths.

Attention is one opaque operator in the graph (see `attention.operator`), so communication, kernels and what they save
stay as they are. Gathering parameters and recomputing a layer happen around its body, not in the graph.

Lengths are new in every step. The rows of tokens are marked, so that no graph depends on how many there are, not even
where another axis is as long by chance. Only none and one have graphs of their own: torch makes these two special.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import nn

from seqloom.attention.operator import LayerVisit, opaque_handle
from seqloom.compat import mark_rows
from seqloom.dist import Context
from seqloom.errors import SeqloomError
from seqloom.models.recompute import Recomputing, context_among


def compile_layers(layers: Iterable[nn.Module], *, backend: str = "inductor") -> None:
    """Make layers run compiled, from their first call on. Names of parameters and classes of layers stay.

    Call it before `recompute_layers`, and before the parameters are sharded. The result is the same but for rounding.

    Args:
        layers: of the reference model, or decoder layers of transformers. Each must be called with the context.
        backend: of torch.compile.
    """
    for layer in layers:
        if isinstance(layer, _Compiled | Recomputing):
            raise SeqloomError(
                f"{type(layer).__name__} is compiled or recomputes already; call compile_layers once for a layer, and "
                "before recompute_layers"
            )
        layer.__class__ = _compiled(type(layer), backend)


class _Compiled:
    """Put before the class of a layer: the same layer, its forward compiled."""

    run_body: Callable[..., Any]

    def forward(self, *args: Any, **options: Any) -> Any:
        """Run the compiled body, with a ticket in place of the context.

        In a round that remaps around the MLP, and in a team, the layer runs as it stands: a graph cannot change the
        number of rows.
        """
        context = context_among(args, options)
        if context.mlp_redistribute is not None or context.tp_group is not None:
            return super().forward(*args, **options)  # pyrefly: ignore[missing-attribute]
        tokens, layer = context.tokens, _number_of(self) if context.pieces else None
        given = [_into_graph(each, tokens, layer) for each in args]
        return self.run_body(*given, **{name: _into_graph(each, tokens, layer) for name, each in options.items()})


@cache
def _compiled(kind: type[nn.Module], backend: str) -> type[nn.Module]:
    """Return the class of compiled layers of a kind: one, since a graph is for one class."""
    from seqloom.attention import operator  # noqa: F401 - makes it known to torch; only when it is needed

    body = torch.compile(kind.forward, dynamic=True, backend=backend)
    return type(kind.__name__, (_Compiled, kind), {"run_body": body})


def _number_of(layer: Any) -> int | None:
    """Return the number of a layer in the model, as its attention knows it."""
    return next((part.layer_idx for part in layer.modules() if hasattr(part, "layer_idx")), None)


def _into_graph(argument: Any, tokens: int, layer: int | None) -> Any:
    """Return an argument as the graph takes it: contexts as tickets, rows of tensors marked."""
    if isinstance(argument, Context):
        return opaque_handle(LayerVisit(argument, layer))
    if isinstance(argument, tuple):
        return tuple(_into_graph(each, tokens, layer) for each in argument)
    if isinstance(argument, torch.Tensor) and tokens > 1 and tokens in argument.shape:
        mark_rows(argument, argument.shape.index(tokens))  # rows come before other axes
    return argument
