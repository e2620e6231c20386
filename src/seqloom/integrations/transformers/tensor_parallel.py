"""Which weights of a model of transformers a TP group cuts, read from the tensor-parallel plan that it publishes.

    model.layers.*.self_attn.q_proj: colwise      cut rows of [out, in]                      -> axis 0
    model.layers.*.self_attn.o_proj: rowwise      cut columns; the group sums the results    -> axis 1
    model.layers.*.self_attn.sinks: colwise       cut the numbers of heads                   -> axis 0
    model.layers.*.self_attn.q_norm: replicated.. whole; the group sums gradients in any case
    model.layers.*.mlp.gate_up_proj: colwise_gather_output   cut rows, whose results are exchanged for a part of each
                                                             half, or of queries, keys and values in one projection;
                                                             or columns of which a norm over all heads comes next
    model.layers.*.mlp.down_proj: rowwise_split_input        cut columns, of what the former leave
    model.layers.*.mlp.experts: whatever                     whole experts, whose results the group sums

Experts are known by how they compute (`experts`), not by what a plan says of them; a router, and a shared expert of
which a plan is silent, are whole and see the tokens of their rank.

Outside of layers (embedding, head) weights stay whole, whatever the plan says. A plan that says anything else of a
layer is not followed: `NoTensorParallel` says why, and nothing is guessed. `layers` runs what is cut.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import nn

from seqloom.attention import AttentionSpec
from seqloom.plan.parameter_layout import COLUMNS, ROWS

GATHERED = "colwise_gather_output"
AXES = {"colwise": ROWS, "rowwise": COLUMNS, GATHERED: ROWS, "rowwise_split_input": COLUMNS}
GATE_UP, QKV = "gate_up_proj", "qkv_proj"
"""Linear layers of several parts in a row, as transformers' models name them: a gate and what it is multiplied with;
queries, keys and values."""
WHOLE = "replicated_with_grad_allreduce"


class NoTensorParallel(Exception):  # noqa: N818 - a reason
    """Why a TP group cannot cut a model's weights."""


class Region(NamedTuple):
    """A part of a layer, such as "self_attn", that a TP group computes together on the tokens of all its ranks."""

    name: str
    colwise: tuple[str, ...]  # its linear layers whose rows are cut
    rowwise: tuple[str, ...]  # those whose columns are cut: the group sums what they return
    fused: tuple[tuple[str, tuple[int, ...]], ...] = ()  # linear layers whose rows are cut, and widths of their parts
    norms: tuple[str, ...] = ()  # that are over all columns of a linear layer whose rows are cut
    experts: bool = False  # a module of experts: ranks have whole ones, and no linear layer is cut

    @property
    def counts_heads(self) -> bool:
        """Whether its code tells queries, keys and values apart by numbers of heads."""
        return any(path.endswith(QKV) for path, _ in self.fused)


def tensor_plan(
    model: nn.Module,
    causal: Any,
    layers: Sequence[nn.Module],
    specs: Sequence[AttentionSpec],
    experts: Mapping[nn.Module, int],
) -> tuple[tuple[tuple[Region, ...], ...], dict[str, int], dict[str, int]]:
    """Read the plan of a model; `NoTensorParallel` where it has none, or one that cannot be followed here.

    Returns the regions of every layer, the axis of every parameter that is cut by its name in `model`, and the numbers
    that a tensor degree must divide. `causal` is the model of transformers in `model`, `experts` its modules of experts
    that compute with ours, and how many each has.
    """
    names = {module: name for name, module in causal.named_modules()}
    if any(hasattr(module, "kv_lora_rank") for module in causal.modules()):
        raise NoTensorParallel("its attention is latent (MLA), and a latent that all heads share is not cut")
    plan: dict[str, str] = getattr(causal, "_tp_plan", None) or {}
    parts = (*causal.named_modules(), *causal.named_parameters())
    of_layers = tuple(_pattern(names[layer]) + "." for layer in layers)
    of_experts = tuple(_pattern(names[module]) for module in experts)
    there = {pattern for name, _ in parts if (pattern := _pattern(name)).startswith(of_layers)}
    plan = {key: style for key, style in plan.items() if key in there}  # others are of layers of another kind
    if not plan:
        raise NoTensorParallel("it publishes no tensor-parallel plan for its layers (_tp_plan)")
    followed = {key: style for key, style in plan.items() if not key.startswith(of_experts)}
    _check_styles(followed)
    parameter_names = {parameter: name for name, parameter in model.named_parameters()}
    regions, tp_axes = [], {}
    for layer in layers:
        axes = {}
        for path, module in layer.named_modules():
            style = followed.get(_pattern(f"{names[layer]}.{path}")) if path else None
            if style not in AXES:
                continue
            if not isinstance(module, nn.Linear) or not module.weight.is_floating_point():  # an adapter, or quantised
                kind = f"{type(module).__module__}.{type(module).__name__}"
                raise NoTensorParallel(f"{path} is a {kind}, and only plain linear layers are cut")
            axes[path] = AXES[style]
        gathered = [path for path in axes if followed[_pattern(f"{names[layer]}.{path}")] == GATHERED]
        own = tuple(_with_gathered(layer, each, gathered, specs) for each in _regions(axes))
        _check_unlisted(layer, own, followed, names[layer], {spec.dim for spec in specs})
        _check_attention(layer, own)
        for path, parameter in layer.named_parameters():
            if path.endswith(".sinks") and followed.get(_pattern(f"{names[layer]}.{path}")) == "colwise":
                tp_axes[parameter_names[parameter]] = ROWS
        for path, axis in axes.items():
            for name, parameter in layer.get_submodule(path).named_parameters():
                if name == "weight" or axis == ROWS:  # a bias that is added to a sum is whole
                    tp_axes[parameter_names[parameter]] = axis
        of_layer = {path: module for path, module in layer.named_modules() if module in experts}
        for path, module in of_layer.items():
            weights = _expert_weights(path, module, experts[module])
            tp_axes |= dict.fromkeys((parameter_names[each] for each in weights), ROWS)
        regions.append((*own, *(Region(path, (), (), experts=True) for path in of_layer)))
    divisors = _divisors(layers, regions, specs)
    return tuple(regions), tp_axes, divisors | ({"experts": math.gcd(*experts.values())} if experts else {})


def _expert_weights(path: str, module: nn.Module, count: int) -> list[nn.Parameter]:
    """Return the parameters of a module of experts that have a row for each of them."""
    found = [each for each in module.parameters() if each.ndim > 1 and len(each) == count]
    if "base_layer" in path.split(".") or not all(each.is_floating_point() for each in found):
        raise NoTensorParallel(f"{path} has adapters, or is quantised, and only plain experts are divided")
    return found


def _pattern(name: str) -> str:
    """Return a module's name as plans write it: any number is a star."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _check_styles(plan: dict[str, str]) -> None:
    for key, style in plan.items():
        if style not in AXES and style != WHOLE:
            raise NoTensorParallel(
                f"its tensor-parallel plan says {style!r} of {key}; followed are {', '.join(AXES)} only"
            )


def _regions(axes: dict[str, int]) -> Iterator[Region]:
    """Group the linear layers that are cut, path -> axis, by the part of the layer they are in."""
    for name in dict.fromkeys(path.rpartition(".")[0] for path in axes):
        inside = {path: axis for path, axis in axes.items() if path.rpartition(".")[0] == name}
        colwise, rowwise = (tuple(p for p, axis in inside.items() if axis == wanted) for wanted in (ROWS, COLUMNS))
        if not name or not colwise or not rowwise:
            raise NoTensorParallel(
                f"of {', '.join(inside)} its tensor-parallel plan does not cut both rows and columns"
            )
        yield Region(name, colwise, rowwise)


def _with_gathered(layer: nn.Module, region: Region, gathered: Sequence[str], specs: Sequence[AttentionSpec]) -> Region:
    """Find the parts and the norms of a region for which its plan gathers the results of linear layers.

    Projections of queries, keys or values alone are cut by heads, and gathered only for their norms.
    """
    own = [path for path in region.colwise if path in gathered]
    heads = {count * spec.dim for spec in specs for count in (spec.heads, spec.kv_heads)}
    widths = {path: cast("nn.Linear", layer.get_submodule(path)).out_features for path in own}
    inner = {cast("nn.Linear", layer.get_submodule(path)).in_features for path in region.rowwise}
    qkv = [(spec.heads * spec.dim, *[spec.kv_heads * spec.dim] * 2) for spec in specs]
    kinds = {GATE_UP: [(width, width) for width in inner], QKV: qkv}
    fused = {
        path: parts for path in own for parts in kinds.get(path.rpartition(".")[2], ()) if sum(parts) == widths[path]
    }
    unknown = [path for path in own if path not in fused and widths[path] not in heads]
    if unknown:
        raise NoTensorParallel(
            f"its tensor-parallel plan says {GATHERED!r} of {unknown[0]}, which is neither a projection to heads nor "
            f"a {GATE_UP} of two halves or a {QKV} of queries, keys and values"
        )
    whole = {width for path, width in widths.items() if path not in fused}
    norms = (
        f"{region.name}.{name}"
        for name, part in layer.get_submodule(region.name).named_modules()
        if name.endswith("norm") and [tuple(each.shape) for each in part.parameters()] in [[(each,)] for each in whole]
    )
    return region._replace(fused=tuple(fused.items()), norms=tuple(norms))


def _check_unlisted(
    layer: nn.Module, regions: Sequence[Region], plan: dict[str, str], name: str, dims: set[int]
) -> None:
    """Refuse a region's parameter of which the plan is silent, if it may be of all heads or of the whole width."""
    for region in regions:
        for path, parameter in layer.get_submodule(region.name).named_parameters(region.name):
            inside = path.rpartition(".")[0]
            listed = any(_pattern(f"{name}.{each}") in plan for each in (path, inside)) or inside in region.norms
            if not listed and parameter.numel() > 1 and tuple(parameter.shape) not in {(dim,) for dim in dims}:
                raise NoTensorParallel(
                    f"its tensor-parallel plan is silent of {path} {list(parameter.shape)}, which is in {region.name}"
                )


def _check_attention(layer: nn.Module, regions: Sequence[Region]) -> None:
    """Refuse attention that is in no region: it would see the tokens of its rank, and positions of all."""
    for path, module in layer.named_modules():
        if hasattr(module, "scaling") and not any(f"{path}.".startswith(f"{each.name}.") for each in regions):
            raise NoTensorParallel(f"its tensor-parallel plan is silent of attention, {path}")


def _divisors(
    layers: Sequence[nn.Module], regions: Sequence[Sequence[Region]], specs: Sequence[AttentionSpec]
) -> dict[str, int]:
    """Return what a degree must divide: heads, and the width of every region that is not made of heads."""
    if not specs:
        raise NoTensorParallel("it is not known how many heads its layers have")
    counts = {"heads": [spec.heads for spec in specs], "kv heads": [spec.kv_heads for spec in specs]}
    of_heads = {spec.heads * spec.dim for spec in specs}
    for layer, own in zip(layers, regions, strict=True):
        for region in (each for each in own if not each.experts):
            widths = [cast("nn.Linear", layer.get_submodule(path)).in_features for path in region.rowwise]
            attends = any(hasattr(part, "scaling") for part in layer.get_submodule(region.name).modules())
            if attends and not of_heads.issuperset(widths):
                raise NoTensorParallel(
                    f"{region.rowwise[0]} takes {widths[0]} columns, which are not {specs[0].heads} heads"
                )
            if not attends:
                counts.setdefault(f"{region.name} width", []).extend(widths)
    return {what: math.gcd(*values) for what, values in counts.items()}
