"""MLPs of transformers on the tokens of the linear layout, in rounds that remap around them.

An MLP is not told the context, its layer is. So a layer puts hooks on its MLP while it runs and takes them away after:
one moves what comes in, one moves back what comes out. Nothing is left behind for a call with another context.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import nn

from seqloom.comm import Context
from seqloom.comm.remap import Crossing, cross
from seqloom.errors import SeqloomError
from seqloom.integrations.interface import only_rows
from seqloom.plan import Remap

NAMES = ("mlp", "feed_forward", "block_sparse_moe", "shared_mlp", "moe", "ffn")
"""What the layers of transformers call their MLPs."""
WAY_OUT = "plan with remap 'attention', which moves tokens around attention instead"


def remap_layers(layers: Iterable[nn.Module]) -> None:
    """Make decoder layers run their MLPs where the context of each call says. Names and classes of layers stay.

    Call it before `compile_layers` and `recompute_layers`; doing it again changes nothing.
    """
    for layer in layers:
        if not isinstance(layer, _Remapping):
            layer.__class__ = _remapping(type(layer))


class _Remapping:
    """Put before the class of a layer: the same layer, with hooks on its MLP in rounds that remap around it."""

    def forward(self, *args: Any, **options: Any) -> Any:
        """Run the layer's own forward."""
        own = super().forward  # pyrefly: ignore[missing-attribute]
        context = next((each for each in (*args, *options.values()) if isinstance(each, Context)), None)
        if context is None or context.work.linear is None or context.work.remap != Remap.MLP:
            return own(*args, **options)
        found = [part for name, part in self.named_children() if name in NAMES]  # pyrefly: ignore[missing-attribute]
        if not found:
            raise SeqloomError(
                f"{type(self).__name__} in a round that remaps around the MLP: none of its parts is called "
                f"{', '.join(NAMES)}, so its MLP is not known; {WAY_OUT}"
            )
        if context.around_mlp is None:  # nothing of this rank's island moves
            return own(*args, **options)
        with ExitStack() as standing:
            for part in found:
                around = _Around(part, context.around_mlp, context.tokens)
                standing.callback(part.register_forward_pre_hook(around.before, with_kwargs=True).remove)
                standing.callback(part.register_forward_hook(around.after).remove)
            return own(*args, **options)


@cache
def _remapping(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of remapping layers of a kind; one for all, so that what is compiled for one serves all."""
    return type(kind.__name__, (_Remapping, kind), {})


class _Around:
    """The hooks of one MLP for one call of its layer."""

    def __init__(self, part: nn.Module, crossing: Crossing, tokens: int) -> None:
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
        moved = _moved(self._crossing.reversed(), first, sum(self._crossing.there.receives))
        return (moved, *output[1:]) if isinstance(output, tuple) else moved


def _moved(crossing: Crossing, x: torch.Tensor, rows: int) -> torch.Tensor:
    """Move the rows of x [1, rows, hidden] or [rows, hidden]; where there are none, one that is nobody's stands in.

    Models of transformers cannot be called with no tokens; see `inputs`.
    """
    flat = x.flatten(0, -2)
    if len(flat) != max(rows, 1):
        raise SeqloomError(
            f"{list(x.shape)} in or out of an MLP, where {rows} tokens are: it does not treat every token by itself; "
            f"{WAY_OUT}"
        )
    (moved,) = cross(crossing, only_rows(flat, rows))
    if not len(moved):
        moved = torch.cat([moved, moved.new_zeros((1, *moved.shape[1:]))])
    return moved[None] if x.ndim == 3 else moved
