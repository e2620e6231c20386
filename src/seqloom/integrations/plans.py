"""How a team cuts the weights of a model of transformers: read from the tensor-parallel plan that it publishes.

    model.layers.*.self_attn.q_proj: colwise      rows of [out, in] are cut        -> 0
    model.layers.*.self_attn.o_proj: rowwise      columns are cut, results add up  -> 1
    model.layers.*.self_attn.q_norm: replicated.. whole; gradients of all ranks are summed in any case

What a plan says outside of layers (table of tokens, head) is left alone: those stay whole here. A plan that says
anything else of a layer is not followed: `Uncuttable` says why, and nothing is guessed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

from torch import nn

from seqloom.attention import ModelCall
from seqloom.runtime.cuts import COLUMNS, ROWS

AXES = {"colwise": ROWS, "rowwise": COLUMNS}
WHOLE = "replicated_with_grad_allreduce"


class Uncuttable(Exception):  # noqa: N818 - a reason
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
        cuts: name of a parameter in the model -> axis.
        divided: what a tensor degree must divide -> how many there are.
    """

    regions: tuple[tuple[Region, ...], ...]
    cuts: dict[str, int]
    divided: dict[str, int]


def tensor_plan(model: nn.Module, causal: Any, layers: Sequence[nn.Module], calls: Sequence[ModelCall]) -> TensorPlan:
    """Read the plan of a model.

    Args:
        model: has the parameters under the names that checkpoints use.
        causal: the model of transformers in it.
        layers: all of them, in order.
        calls: the attention calls of the layers.

    Raises:
        Uncuttable: it has no plan, or one that cannot be followed here.
    """
    names = {module: name for name, module in causal.named_modules()}
    plan: dict[str, str] = getattr(causal, "_tp_plan", None) or {}
    kinds = tuple(_pattern(names[layer]) + "." for layer in layers)
    _check_styles({key: style for key, style in plan.items() if key.startswith(kinds)})
    own = {parameter: name for name, parameter in model.named_parameters()}
    regions, cuts = [], {}
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
                    cuts[own[parameter]] = axis
    return TensorPlan(tuple(regions), cuts, _divided(layers, regions, calls))


def _pattern(name: str) -> str:
    """Return a module's name as plans write it: any number is a star."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _check_styles(plan: dict[str, str]) -> None:
    if not plan:
        raise Uncuttable("it publishes no tensor-parallel plan for its layers (_tp_plan)")
    for key, style in plan.items():
        if style not in AXES and style != WHOLE:
            raise Uncuttable(f"its tensor-parallel plan says {style!r} of {key}; followed are {', '.join(AXES)} only")


def _checked(path: str, module: nn.Module) -> bool:
    if not isinstance(module, nn.Linear) or not module.weight.is_floating_point():  # adapters, quantised weights
        raise Uncuttable(
            f"{path} is a {type(module).__module__}.{type(module).__name__}, and only plain linear layers are cut"
        )
    return True


def _regions(axes: dict[str, int]) -> Iterator[Region]:
    for name in dict.fromkeys(path.rpartition(".")[0] for path in axes):
        inside = {path: axis for path, axis in axes.items() if path.rpartition(".")[0] == name}
        ways_in, ways_out = (tuple(p for p, axis in inside.items() if axis == wanted) for wanted in (ROWS, COLUMNS))
        if not name or not ways_in or not ways_out:
            raise Uncuttable(f"of {', '.join(inside)} its tensor-parallel plan does not cut both rows and columns")
        yield Region(name, ways_in, ways_out)


def _check_rest(layer: nn.Module, regions: Sequence[Region], plan: dict[str, str], name: str, dims: set[int]) -> None:
    """Refuse a region's parameter of which the plan is silent, if it may be of all heads or of the whole width."""
    for region in regions:
        for path, parameter in layer.get_submodule(region.name).named_parameters(region.name):
            listed = any(_pattern(f"{name}.{each}") in plan for each in (path, path.rpartition(".")[0]))
            if not listed and parameter.numel() > 1 and tuple(parameter.shape) not in {(dim,) for dim in dims}:
                shape = list(parameter.shape)
                raise Uncuttable(f"its tensor-parallel plan is silent of {path} {shape}, which is in {region.name}")


def _divided(
    layers: Sequence[nn.Module], regions: Sequence[Sequence[Region]], calls: Sequence[ModelCall]
) -> dict[str, int]:
    """Return what a degree must divide: heads, and the width of every region that is not made of heads."""
    if not calls:
        raise Uncuttable("it is not known how many heads its layers have")
    found = {"heads": [call.heads for call in calls], "kv heads": [call.kv_heads for call in calls]}
    of_heads = {call.heads * call.dim for call in calls}
    for layer, own in zip(layers, regions, strict=True):
        for region in own:
            widths = [cast("nn.Linear", layer.get_submodule(path)).in_features for path in region.ways_out]
            attends = any(hasattr(part, "scaling") for part in layer.get_submodule(region.name).modules())
            if attends and not of_heads.issuperset(widths):
                raise Uncuttable(
                    f"{region.ways_out[0]} takes {widths[0]} columns, which are not {calls[0].heads} heads"
                )
            if not attends:
                found.setdefault(f"{region.name} width", []).extend(widths)
    return {what: math.gcd(*counts) for what, counts in found.items()}
