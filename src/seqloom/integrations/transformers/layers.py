"""Layers of transformers in rounds that move their tokens: to other ranks for the MLP, or within a TP group.

Attention and MLP are not given the context of a round, their layer is. So a layer puts hooks on them while it runs and
removes them after (`models.layer_wrapper.LayerWrapper`): nothing is left behind for a call with another context.

    remap MLP          x -> [to the linear layout -> MLP -> back] -> x
    tensor parallel    x -> [all-gather rows -> attention or MLP -> last projection -> reduce-scatter rows] -> x

In a TP group attention gets the context of its context-parallel group, and a bias of the last projection is added once,
after the sum. Tables of positions are of the group's tokens from the beginning, see `parts.check_positions`.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from seqloom.dist import Context, all_gather_rows, attention_context, reduce_scatter_rows
from seqloom.dist.rank_tokens import TokenRedistribute, redistribute_tokens
from seqloom.dist.tensor_parallel import TPGroup, all_gather_columns, split_parts
from seqloom.errors import SeqloomError
from seqloom.integrations.transformers.parts import drop_padding, pad_empty
from seqloom.integrations.transformers.tensor_parallel import Region
from seqloom.models.layer_wrapper import ROUTER_LOSS, LayerWrapper
from seqloom.models.router_loss import RouterLoss, add_loss
from seqloom.models.transformer import check_weight_shard
from seqloom.plan import Remap

MLP_NAMES = ("mlp", "feed_forward", "block_sparse_moe", "shared_mlp", "moe", "ffn")
"""Names that layers of transformers give their MLPs."""
REMAP_ATTENTION = "plan with remap 'attention', which moves tokens around attention instead"
NO_TENSOR = "plan with tensor = 1"


def remap_layers(layers: Iterable[nn.Module]) -> None:
    """Make decoder layers run their MLPs where the context of each call says; doing it again changes nothing."""
    for layer in layers:
        LayerWrapper.of(layer).hooks["mlp_redistribute"] = _remap_hooks


def tp_layers(layers: Sequence[nn.Module], regions: Sequence[tuple[Region, ...]]) -> None:
    """Make decoder layers run their regions in the TP group of each call; doing it again changes nothing."""
    for layer, own in zip(layers, regions, strict=True):
        LayerWrapper.of(layer).hooks["tensor_parallel"] = partial(_tp_hooks, own)


def context_layers(layers: Iterable[nn.Module]) -> None:
    """Make decoder layers that do not hand keywords on give their attention the context of each call."""
    for layer in layers:
        if not _hands_keywords_on(layer):
            LayerWrapper.of(layer).hooks["context"] = _context_hooks


def router_layers(layers: Iterable[nn.Module], loss: RouterLoss, kind: type[nn.Module], index: int) -> None:
    """Make decoder layers report to a router loss: modules of class `kind`, which return logits at `index`."""
    for layer in layers:
        LayerWrapper.of(layer).hooks[ROUTER_LOSS] = RouterHooks(loss, kind, index)


@dataclass(frozen=True, slots=True, eq=False)
class RouterHooks:
    """Puts hooks on the routers of a layer, and on the parts they are in, whose output the loss is added to."""

    loss: RouterLoss
    kind: type[nn.Module]
    index: int

    def __call__(self, layer: nn.Module, context: Context) -> ExitStack | None:
        """See `LayerHooks`."""
        routers = [name for name, part in layer.named_modules() if type(part) is self.kind]
        if not routers:
            return None
        moved, hooks = context.mlp_redistribute, ExitStack()
        rows = context.tokens if moved is None else sum(moved.to_target.receives)
        for name in routers:
            found: list[torch.Tensor | None] = []
            part = layer.get_submodule(name.rpartition(".")[0])
            hooks.callback(layer.get_submodule(name).register_forward_hook(partial(self._report, found, rows)).remove)
            hooks.callback(part.register_forward_hook(partial(_add_router_loss, found)).remove)
        return hooks

    def _report(self, found: list[torch.Tensor | None], rows: int, _: nn.Module, __: Any, output: Any) -> None:
        """Count the tokens of a router call, or find their part of the loss; a row for no token is left out."""
        logits = output[self.index]
        found.append(self.loss.of_tokens(logits.reshape(-1, logits.shape[-1])[:rows]))


def _add_router_loss(found: list[torch.Tensor | None], _: nn.Module, __: Any, output: Any) -> Any:
    """Add the loss of the router in a part to the backward of the part's output."""
    first, *others = output if isinstance(output, tuple) else (output,)
    for loss in found:
        first = first if loss is None else add_loss(first, loss)
    found.clear()
    return (first, *others) if isinstance(output, tuple) else first


def _hands_keywords_on(layer: nn.Module) -> bool:
    """Whether the forward of a layer reads its keywords (`**kwargs`)."""
    code = inspect.unwrap(type(layer).forward).__code__
    place = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    names = {*code.co_varnames[place : place + bool(code.co_flags & inspect.CO_VARKEYWORDS)]}
    read = [each.argval for each in dis.get_instructions(code) if each.opname.startswith("LOAD_FAST")]
    return any(names & {*(each if isinstance(each, tuple) else (each,))} for each in read)


def _context_hooks(layer: nn.Module, context: Context) -> ExitStack:
    """Put hooks on the attention of a layer that add the context to its keywords."""

    def give(_: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
        return args, {"seqloom_context": context, **options}

    hooks = ExitStack()
    for part in layer.modules():
        if type(part).__name__.endswith("Attention"):
            hooks.callback(part.register_forward_pre_hook(give, with_kwargs=True).remove)
    return hooks


def _remap_hooks(layer: nn.Module, context: Context) -> ExitStack | None:
    """Put hooks on the MLPs of a layer for a round that redistributes tokens around them."""
    if context.work.linear is None or context.work.remap != Remap.MLP:
        return None
    mlps = [part for name, part in layer.named_children() if name in MLP_NAMES]
    if not mlps:
        raise SeqloomError(
            f"{type(layer).__name__} in a round that remaps around the MLP: none of its parts is called "
            f"{', '.join(MLP_NAMES)}, so its MLP is not known; {REMAP_ATTENTION}"
        )
    redistribute, hooks = context.mlp_redistribute, ExitStack()
    if redistribute is None:  # nothing of this rank's shard group moves
        return None
    for part in mlps:
        before = partial(_move_to_linear, redistribute, context.tokens)
        hooks.callback(part.register_forward_pre_hook(before, with_kwargs=True).remove)
        hooks.callback(part.register_forward_hook(partial(_move_back, redistribute)).remove)
    return hooks


def _move_to_linear(
    redistribute: TokenRedistribute, tokens: int, part: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, Any]:
    """Move the one tensor among the arguments of an MLP to the linear layout."""
    tensors = [value for value in (*args, *options.values()) if isinstance(value, torch.Tensor)]
    if len(tensors) != 1:
        raise SeqloomError(
            f"{type(part).__name__} is called with {len(tensors)} tensors in a round that remaps around it: what they "
            f"are to each other is not known here; {REMAP_ATTENTION}"
        )
    moved = _redistribute(redistribute, tensors[0], tokens)
    return _replace(args, options, lambda value: moved if value is tensors[0] else value)


def _move_back(redistribute: TokenRedistribute, _: nn.Module, __: Any, output: Any) -> Any:
    """Move the output of an MLP back: a tensor, or the first of several, of which others are not per token."""
    first, *others = output if isinstance(output, tuple) else (output,)
    moved = _redistribute(redistribute.reversed(), first, sum(redistribute.to_target.receives))
    return (moved, *others) if isinstance(output, tuple) else moved


def _redistribute(redistribute: TokenRedistribute, x: torch.Tensor, tokens: int) -> torch.Tensor:
    (moved,) = redistribute_tokens(redistribute, _token_rows(x, tokens, "an MLP", REMAP_ATTENTION))
    return _shaped_like(x, moved)


def _tp_hooks(regions: tuple[Region, ...], layer: nn.Module, context: Context) -> ExitStack | None:
    """Put hooks on the regions of a layer for a round that it runs in a TP group."""
    if context.tp_group is None:
        return None
    hooks, inside = ExitStack(), attention_context(context)
    for region in regions:
        part = layer.get_submodule(region.name)
        if region.experts:
            hooks.callback(part.register_forward_pre_hook(partial(_gather_tokens, context), with_kwargs=True).remove)
            hooks.callback(part.register_forward_hook(partial(_sum_output, context, inside, None)).remove)
            continue
        before = partial(_gather_input, region, context, inside)
        hooks.callback(part.register_forward_pre_hook(before, with_kwargs=True).remove)
        for path in region.rowwise:
            last = layer.get_submodule(path)
            bias, last._parameters["bias"] = last._parameters["bias"], None
            hooks.callback(last._parameters.__setitem__, "bias", bias)
            after = partial(_sum_output, context, inside, bias)
            hooks.callback(last.register_forward_hook(after).remove)
        for path, widths in region.fused:
            after = partial(_split_parts, context.tp_group, inside, widths)
            hooks.callback(layer.get_submodule(path).register_forward_hook(after).remove)
        if region.counts_heads:
            hooks.enter_context(_own_heads(part, len(context.tp_group.ranks)))
        for path in region.norms:
            norm = layer.get_submodule(path)
            hooks.callback(norm.register_forward_pre_hook(partial(_gather_columns, context.tp_group, inside)).remove)
            hooks.callback(norm.register_forward_hook(partial(_own_columns, context.tp_group)).remove)
    return hooks


def _gather_input(
    region: Region, context: Context, inside: Context, part: nn.Module, args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, Any]:
    """Gather the hidden states among the arguments over the TP group; replace the context by that of attention."""
    first: Any = part.get_submodule(region.colwise[0].removeprefix(region.name + "."))
    check_weight_shard(first.weight, first.out_features, context)
    tensors = [value for value in (*args, *options.values()) if isinstance(value, torch.Tensor)]
    hidden = [x for x in tensors if x.is_floating_point() and x.shape[-1] == first.in_features]
    if len(hidden) != 1:
        raise SeqloomError(
            f"{type(part).__name__} is called with {len(hidden)} tensors of hidden states in a TP group: it is not "
            f"known which of them its weights are for; {NO_TENSOR}"
        )
    rows = _token_rows(hidden[0], context.tokens, "a part of a layer", NO_TENSOR)
    gathered = _shaped_like(hidden[0], all_gather_rows(rows, context))
    return _replace(
        args, options, lambda value: gathered if value is hidden[0] else inside if value is context else value
    )


def _gather_tokens(context: Context, _: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, Any]:
    """Gather what experts are given of every token over the TP group: hidden state, experts chosen, and weights."""

    def gathered(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        rows = _token_rows(value, context.tokens, "experts", NO_TENSOR)
        return _shaped_like(value, all_gather_rows(rows, context))

    return _replace(args, options, gathered)


def _sum_output(
    context: Context, inside: Context, bias: nn.Parameter | None, _: nn.Module, __: Any, output: torch.Tensor
) -> torch.Tensor:
    """Sum the outputs of a last projection over the TP group, keep this rank's rows, and add the bias once."""
    rows = _token_rows(output, inside.tokens, "a part of a layer", NO_TENSOR)
    own = _shaped_like(output, reduce_scatter_rows(rows, context))
    return own if bias is None else own + bias


def _split_parts(
    tp_group: TPGroup, inside: Context, widths: tuple[int, ...], _: nn.Module, __: Any, output: torch.Tensor
) -> torch.Tensor:
    """Exchange the columns of a fused projection for this rank's of every part."""
    rows = _token_rows(output, inside.tokens, "a fused projection", NO_TENSOR)
    return _shaped_like(output, split_parts(rows, widths, tp_group))


@contextmanager
def _own_heads(attention: Any, degree: int) -> Iterator[None]:
    """Make attention that counts its heads, to tell queries, keys and values apart, count this rank's."""
    whole = attention.config, attention.num_key_value_heads
    attention.config = copy(attention.config)
    attention.config.num_attention_heads //= degree
    attention.num_key_value_heads //= degree
    try:
        yield
    finally:
        attention.config, attention.num_key_value_heads = whole


def _gather_columns(
    tp_group: TPGroup, inside: Context, norm: nn.Module, args: tuple[torch.Tensor]
) -> tuple[torch.Tensor]:
    """Gather the columns of all heads in front of a norm over them."""
    (columns,), (weight,) = args, norm.parameters()
    if columns.shape[-1] * len(tp_group.ranks) != len(weight):
        raise SeqloomError(
            f"{type(norm).__name__} of {len(weight)} columns is given {columns.shape[-1]} in a TP group of "
            f"{len(tp_group.ranks)}; {NO_TENSOR}"
        )
    rows = _token_rows(columns, inside.tokens, "a norm", NO_TENSOR)
    return (_shaped_like(columns, all_gather_columns(rows, tp_group)),)


def _own_columns(tp_group: TPGroup, _: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
    """Keep this rank's columns of what a norm over all of them returns."""
    return output.chunk(len(tp_group.ranks), dim=-1)[tp_group.index]


def _replace(args: tuple[Any, ...], options: dict[str, Any], new: Callable[[Any], Any]) -> tuple[Any, Any]:
    return tuple(map(new, args)), {name: new(value) for name, value in options.items()}


def _token_rows(x: torch.Tensor, tokens: int, what: str, way_out: str) -> torch.Tensor:
    """Return x [1, tokens, width] or [tokens, width] as [tokens, width], without the row of `pad_empty`."""
    rows = x.flatten(0, -2)
    if len(rows) != max(tokens, 1):
        raise SeqloomError(
            f"{list(x.shape)} in or out of {what}, where {tokens} tokens are: it does not treat every token by "
            f"itself; {way_out}"
        )
    return drop_padding(rows, tokens)


def _shaped_like(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return rows [tokens, width] with as many axes as x, and the row of `pad_empty`."""
    return pad_empty(rows)[None] if x.ndim == 3 else pad_empty(rows)
