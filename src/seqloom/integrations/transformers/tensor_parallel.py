"""How a team cuts the weights of a model of transformers: read from the tensor-parallel plan that it publishes.

    model.layers.*.self_attn.q_proj: colwise      rows of [out, in] are cut        -> 0
    model.layers.*.self_attn.o_proj: rowwise      columns are cut, results add up  -> 1
    model.layers.*.self_attn.q_norm: replicated.. whole; gradients of all ranks are summed in any case

What a plan says outside of layers (table of tokens, head) is left alone: those stay whole here. A plan that says
anything else of a layer is not followed: `NoTensorParallel` says why, and nothing is guessed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from seqloom.attention import AttentionSpec
from seqloom.dist import Context, all_gather_rows, attention_context, reduce_scatter_rows
from seqloom.errors import SeqloomError
from seqloom.integrations.transformers.parts import drop_padding, pad_empty
from seqloom.models.recompute import LayerWrapper
from seqloom.models.transformer import check_weight_shard
from seqloom.plan.parameter_layout import COLUMNS, ROWS

AXES = {"colwise": ROWS, "rowwise": COLUMNS}
WHOLE = "replicated_with_grad_allreduce"


class NoTensorParallel(Exception):  # noqa: N818 - a reason
    """Why a team cannot cut a model's weights."""


class Region(NamedTuple):
    """A part of a layer that a team computes together.

    Attributes:
        name: of the part in its layer, such as "self_attn": it is given the tokens of the whole team.
        ways_in: its linear layers whose rows are cut.
        ways_out: those whose columns are cut: what they return is added up over the team.
    """

    name: str
    ways_in: tuple[str, ...]
    ways_out: tuple[str, ...]


class TensorPlan(NamedTuple):
    """A model's plan.

    Attributes:
        regions: of every layer.
        tp_axes: name of a parameter in the model -> axis.
        tp_divisors: what a tensor degree must divide -> how many there are.
    """

    regions: tuple[tuple[Region, ...], ...]
    tp_axes: dict[str, int]
    tp_divisors: dict[str, int]


def tensor_plan(
    model: nn.Module, causal: Any, layers: Sequence[nn.Module], calls: Sequence[AttentionSpec]
) -> TensorPlan:
    """Read the plan of a model.

    Args:
        model: has the parameters under the names that checkpoints use.
        causal: the model of transformers in it.
        layers: all of them, in order.
        calls: the attention calls of the layers.

    Raises:
        NoTensorParallel: it has no plan, or one that cannot be followed here.
    """
    names = {module: name for name, module in causal.named_modules()}
    plan: dict[str, str] = getattr(causal, "_tp_plan", None) or {}
    kinds = tuple(_pattern(names[layer]) + "." for layer in layers)
    _check_styles({key: style for key, style in plan.items() if key.startswith(kinds)})
    own = {parameter: name for name, parameter in model.named_parameters()}
    regions, tp_axes = [], {}
    for layer in layers:
        axes = {
            path: AXES[style]
            for path, module in layer.named_modules()
            if path and (style := plan.get(_pattern(f"{names[layer]}.{path}"))) in AXES and _checked(path, module)
        }
        regions.append(tuple(_regions(axes)))
        _check_rest(layer, regions[-1], plan, names[layer], {call.dim for call in calls})
        for path, axis in axes.items():
            for name, parameter in layer.get_submodule(path).named_parameters():
                if name == "weight" or axis == ROWS:  # a bias that is added to a sum is whole
                    tp_axes[own[parameter]] = axis
    return TensorPlan(tuple(regions), tp_axes, _divided(layers, regions, calls))


def _pattern(name: str) -> str:
    """Return a module's name as plans write it: any number is a star."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _check_styles(plan: dict[str, str]) -> None:
    if not plan:
        raise NoTensorParallel("it publishes no tensor-parallel plan for its layers (_tp_plan)")
    for key, style in plan.items():
        if style not in AXES and style != WHOLE:
            raise NoTensorParallel(
                f"its tensor-parallel plan says {style!r} of {key}; followed are {', '.join(AXES)} only"
            )


def _checked(path: str, module: nn.Module) -> bool:
    if not isinstance(module, nn.Linear) or not module.weight.is_floating_point():  # adapters, quantised weights
        raise NoTensorParallel(
            f"{path} is a {type(module).__module__}.{type(module).__name__}, and only plain linear layers are cut"
        )
    return True


def _regions(axes: dict[str, int]) -> Iterator[Region]:
    for name in dict.fromkeys(path.rpartition(".")[0] for path in axes):
        inside = {path: axis for path, axis in axes.items() if path.rpartition(".")[0] == name}
        ways_in, ways_out = (tuple(p for p, axis in inside.items() if axis == wanted) for wanted in (ROWS, COLUMNS))
        if not name or not ways_in or not ways_out:
            raise NoTensorParallel(
                f"of {', '.join(inside)} its tensor-parallel plan does not cut both rows and columns"
            )
        yield Region(name, ways_in, ways_out)


def _check_rest(layer: nn.Module, regions: Sequence[Region], plan: dict[str, str], name: str, dims: set[int]) -> None:
    """Refuse a region's parameter of which the plan is silent, if it may be of all heads or of the whole width."""
    for region in regions:
        for path, parameter in layer.get_submodule(region.name).named_parameters(region.name):
            listed = any(_pattern(f"{name}.{each}") in plan for each in (path, path.rpartition(".")[0]))
            if not listed and parameter.numel() > 1 and tuple(parameter.shape) not in {(dim,) for dim in dims}:
                shape = list(parameter.shape)
                raise NoTensorParallel(
                    f"its tensor-parallel plan is silent of {path} {shape}, which is in {region.name}"
                )


def _divided(
    layers: Sequence[nn.Module], regions: Sequence[Sequence[Region]], calls: Sequence[AttentionSpec]
) -> dict[str, int]:
    """Return what a degree must divide: heads, and the width of every region that is not made of heads."""
    if not calls:
        raise NoTensorParallel("it is not known how many heads its layers have")
    found = {"heads": [call.heads for call in calls], "kv heads": [call.kv_heads for call in calls]}
    of_heads = {call.heads * call.dim for call in calls}
    for layer, own in zip(layers, regions, strict=True):
        for region in own:
            widths = [cast("nn.Linear", layer.get_submodule(path)).in_features for path in region.ways_out]
            attends = any(hasattr(part, "scaling") for part in layer.get_submodule(region.name).modules())
            if attends and not of_heads.issuperset(widths):
                raise NoTensorParallel(
                    f"{region.ways_out[0]} takes {widths[0]} columns, which are not {calls[0].heads} heads"
                )
            if not attends:
                found.setdefault(f"{region.name} width", []).extend(widths)
    return {what: math.gcd(*counts) for what, counts in found.items()}


# ---- merged: integrations.teams
# Layers of transformers in teams: each member runs its slices of a layer's weights on the tokens of all.
#
# Attention and MLP are not told of teams, their layer is: by its context. So a layer puts hooks on them while it
# runs and
# takes them away after:
#
#     x -> [gathered -> attention or MLP -> last projection -> summed] -> x
#
# What comes into a part is gathered, what its last projection returns is summed (a bias, if it has one, is added
# after),
# and attention gets the context of its column. Tables of positions are of the team's tokens from the beginning: a
# decoder
# is called with the positions of these, which nothing but those tables may depend on, see `parts.check_positions`.


def tp_layers(layers: Sequence[nn.Module], regions: Sequence[tuple[Region, ...]]) -> None:
    """Make decoder layers run in the TP group that the context of each call has; doing it again changes nothing.

    Args:
        layers: of a decoder.
        regions: of each layer, see `tensor_plan`.
    """
    for layer, own in zip(layers, regions, strict=True):
        LayerWrapper.of(layer).hooks["tensor_parallel"] = partial(_tp_hooks, own)


def _tp_hooks(regions: tuple[Region, ...], layer: nn.Module, context: Context) -> ExitStack | None:
    """Put hooks on the regions of a layer for a round that it runs in a TP group."""
    if context.tp_group is None:
        return None
    standing = ExitStack()
    for region in regions:
        hooks = _Hooks(region, context)
        part = layer.get_submodule(region.name)
        standing.callback(part.register_forward_pre_hook(hooks.before, with_kwargs=True).remove)
        for path in region.ways_out:
            last = layer.get_submodule(path)
            bias = standing.enter_context(_without_bias(last))
            standing.callback(last.register_forward_hook(partial(hooks.after, bias=bias)).remove)
    return standing


class _Hooks:
    """The hooks of one region for one call of its layer."""

    def __init__(self, region: Region, context: Context) -> None:
        self._region, self._context, self._inside = region, context, attention_context(context)

    def before(self, part: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
        """Gather the hidden states among the arguments; hand on the context of the column."""
        first: Any = part.get_submodule(self._region.ways_in[0].removeprefix(self._region.name + "."))
        check_weight_shard(first.weight, first.out_features, self._context)
        given = [each for each in (*args, *options.values()) if _is_hidden(each, first.in_features)]
        if len(given) != 1:
            raise SeqloomError(
                f"{type(part).__name__} is called with {len(given)} tensors of hidden states in a team: it is not "
                "known which of them its weights are for; plan with tensor = 1"
            )
        moved = pad_empty(all_gather_rows(_rows(given[0], self._context), self._context))

        def replaced(each: Any) -> Any:
            if each is given[0]:
                return moved[None] if each.ndim == 3 else moved
            return self._inside if each is self._context else each

        return tuple(map(replaced, args)), {name: replaced(each) for name, each in options.items()}

    def after(self, _: nn.Module, __: Any, output: torch.Tensor, *, bias: nn.Parameter | None) -> torch.Tensor:
        """Add up what the members' last projections returned, and the bias of these, once."""
        own = pad_empty(reduce_scatter_rows(_rows(output, self._inside), self._context))
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
    return drop_padding(flat, context.tokens)
