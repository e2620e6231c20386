"""Layers of transformers in teams: each member runs its slices of a layer's weights on the tokens of all.

Attention and MLP are not told of teams, their layer is: by its context. So a layer puts hooks on them while it runs and
takes them away after:

    x -> [gathered -> attention or MLP -> last projection -> summed] -> x

What comes into a part is gathered, what its last projection returns is summed (a bias, if it has one, is added after),
and attention gets the context of its column. Tables of positions are of the team's tokens from the beginning: a decoder
is called with the positions of these, which nothing but those tables may depend on, see `parts.check_positions`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from seqloom.comm import Context, attention_context, gathered, summed
from seqloom.errors import SeqloomError
from seqloom.integrations.interface import only_rows
from seqloom.integrations.plans import Region
from seqloom.models.slices import check_slice


def team_layers(layers: Sequence[nn.Module], regions: Sequence[tuple[Region, ...]]) -> None:
    """Make decoder layers run in the team that the context of each call has. Names and classes of layers stay.

    Call it before `compile_layers` and `recompute_layers`; doing it again changes nothing.

    Args:
        layers: of a decoder.
        regions: of each layer, see `plans`.
    """
    for layer, own in zip(layers, regions, strict=True):
        if not isinstance(layer, _Teamed):
            layer.__class__ = _teamed(type(layer), own)


class _Teamed:
    """Put before the class of a layer: the same layer, with hooks on its regions in rounds that it runs in a team."""

    regions: tuple[Region, ...]

    def forward(self, *args: Any, **options: Any) -> Any:
        """Run the layer's own forward."""
        own = super().forward  # pyrefly: ignore[missing-attribute]
        context = next((each for each in (*args, *options.values()) if isinstance(each, Context)), None)
        if context is None or context.team is None:
            return own(*args, **options)
        with ExitStack() as standing:
            for region in self.regions:
                hooks = _Hooks(region, context)
                part: nn.Module = self.get_submodule(region.name)  # pyrefly: ignore[missing-attribute]
                standing.callback(part.register_forward_pre_hook(hooks.before, with_kwargs=True).remove)
                for path in region.ways_out:
                    last: nn.Module = self.get_submodule(path)  # pyrefly: ignore[missing-attribute]
                    bias = standing.enter_context(_without_bias(last))
                    standing.callback(last.register_forward_hook(partial(hooks.after, bias=bias)).remove)
            return own(*args, **options)


@cache
def _teamed(kind: type[nn.Module], regions: tuple[Region, ...]) -> type[nn.Module]:
    """Return the class of layers of a kind with these regions; one for all, so that one graph serves all."""
    return type(kind.__name__, (_Teamed, kind), {"regions": regions})


class _Hooks:
    """The hooks of one region for one call of its layer."""

    def __init__(self, region: Region, context: Context) -> None:
        self._region, self._context, self._inside = region, context, attention_context(context)

    def before(self, part: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
        """Gather the hidden states among the arguments; hand on the context of the column."""
        first: Any = part.get_submodule(self._region.ways_in[0].removeprefix(self._region.name + "."))
        check_slice(first.weight, first.out_features, self._context)
        given = [each for each in (*args, *options.values()) if _is_hidden(each, first.in_features)]
        if len(given) != 1:
            raise SeqloomError(
                f"{type(part).__name__} is called with {len(given)} tensors of hidden states in a team: it is not "
                "known which of them its weights are for; plan with tensor = 1"
            )
        moved = _padded(gathered(_rows(given[0], self._context), self._context))

        def replaced(each: Any) -> Any:
            if each is given[0]:
                return moved[None] if each.ndim == 3 else moved
            return self._inside if each is self._context else each

        return tuple(map(replaced, args)), {name: replaced(each) for name, each in options.items()}

    def after(self, _: nn.Module, __: Any, output: torch.Tensor, *, bias: nn.Parameter | None) -> torch.Tensor:
        """Add up what the members' last projections returned, and the bias of these, once."""
        own = _padded(summed(_rows(output, self._inside), self._context))
        own = own if bias is None else own + bias
        return own[None] if output.ndim == 3 else own


@contextmanager
def _without_bias(last: nn.Module) -> Generator[nn.Parameter | None]:
    """Let a linear layer run without its bias, which is yielded."""
    bias = last._parameters["bias"]
    last._parameters["bias"] = None
    try:
        yield bias
    finally:
        last._parameters["bias"] = bias


def _is_hidden(given: Any, width: int) -> bool:
    """Whether an argument of a part of a layer is hidden states [.., width]."""
    return isinstance(given, torch.Tensor) and given.is_floating_point() and given.shape[-1] == width


def _rows(x: torch.Tensor, context: Context) -> torch.Tensor:
    """Return x [1, tokens, width] or [tokens, width] as [tokens, width], without the row that stands in for none."""
    flat = x.flatten(0, -2)
    if len(flat) != max(context.tokens, 1):
        raise SeqloomError(
            f"{list(x.shape)} in or out of a part of a layer, where {context.tokens} tokens are: it does not treat "
            "every token by itself; plan with tensor = 1"
        )
    return only_rows(flat, context.tokens)


def _padded(rows: torch.Tensor) -> torch.Tensor:
    """Return rows; where there are none, one that is nobody's: models of transformers cannot be called with none."""
    return rows if len(rows) else torch.cat([rows, rows.new_zeros((1, *rows.shape[1:]))])
