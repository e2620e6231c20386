"""From a bound context to what every group computes: index work and prepared kernels, built once per round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from seqloom.attention.calls import GroupCall, Shared
from seqloom.attention.carried import Carried
from seqloom.attention.checks import Call, check_call, check_tensors, known_layer
from seqloom.attention.fillers import Draft, filled
from seqloom.attention.gather import Gather
from seqloom.attention.kernels.kernel import Kernel, Prepared, Shape, Warmable
from seqloom.attention.merge import joins_on, sum_dtype
from seqloom.attention.ring import Ring
from seqloom.attention.roads import Relay, Roads, gather_moves, ring_moves
from seqloom.attention.schedule import Chunks, gather_schedule, ring_tiles
from seqloom.attention.segments import Segments
from seqloom.attention.tiles import Heads, prepare, prepare_tiles
from seqloom.attention.ulysses import Exchange, HeadSplit
from seqloom.comm.context import BoundGroup, Context
from seqloom.plan import Group, Method


class ModelCall(NamedTuple):
    """An attention call that a model makes, as far as its index work depends on it.

    Attributes:
        heads, kv_heads, dim: of the layer.
        window: how many tokens it sees, itself included; None: all.
        scale: logits are multiplied by it; None: dim ** -0.5.
    """

    heads: int
    kv_heads: int
    dim: int
    window: int | None = None
    scale: float | None = None


def prepare_attention(
    context: Context,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    kernels: Kernel | None = None,
) -> None:
    """Do the index work of a round for attention calls like this one now, instead of in the first of them.

    Args:
        context: what `bind` made of the round; it keeps the result.
        heads, kv_heads, dim, dtype: of the tensors that will come.
        causal, window, scale, kernels: see `attention`.
    """
    calls_of(context, heads, kv_heads, dim, dtype, Call(causal, window, scale, kernels))


def warm_up_attention(
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    longest: int,
    tokens: int | None = None,
    scale: float | None = None,
    ulysses: Sequence[int] = (1,),
    kernels: Kernel | None = None,
    report: Callable[[int, int], None] | None = None,
) -> int:
    """Build and load all that attention over causal documents can need, before the first step needs it.

    On a GPU a shape that was never met holds up a step by about 0.1 s; on a CPU there is nothing to build.

    Args:
        heads, kv_heads, dim, dtype, scale, kernels: see `attention`.
        device: where it will run.
        longest: tokens of a document.
        tokens: of a rank in a round, at most; None: any number.
        ulysses: degrees that rounds will have; each leaves a rank with other heads.
        report: called as report(done, total) for every degree.

    Returns:
        Number of shapes.
    """
    device = torch.device(device)
    kernel = _default_kernels(device) if kernels is None else kernels
    if not isinstance(kernel, Warmable):
        return 0
    scale = dim**-0.5 if scale is None else scale
    splits = [HeadSplit.of(heads, kv_heads, degree) for degree in ulysses]
    counts = {
        (high - low, kv_high - kv_low)
        for split in splits
        for (low, high), (kv_low, kv_high) in zip(split.query, split.kv, strict=True)
    }
    shapes = [Shape(*some, dim, dtype, device, scale) for some in sorted(counts, reverse=True)]
    return sum(kernel.warm_up(shape, longest, tokens=tokens, report=report) for shape in shapes)


def bound_calls(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context, call: Call, layer: int | None = None
) -> tuple[GroupCall, ...]:
    """Return the calls of the rank's groups that hold tokens, in the order of the work; checked, and built once."""
    check_tensors(q, k, v, context)
    _, heads, dim = q.shape
    calls = calls_of(context, heads, k.shape[1], dim, q.dtype, call)
    return in_layer(calls, context, layer) if context.pieces else calls


def in_layer(calls: tuple[GroupCall, ...], context: Context, layer: int | None) -> tuple[GroupCall, ...]:
    """Return the calls of a round with documents in pieces as one layer makes them."""
    known = known_layer(context, layer)
    inner = [replace(each.inner, layer=known) if isinstance(each.inner, Carried) else each.inner for each in calls]
    return tuple(replace(call, inner=own) for call, own in zip(calls, inner, strict=True))


def calls_of(
    context: Context, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, call: Call
) -> tuple[GroupCall, ...]:
    """Return the calls for tensors of these sizes."""
    causal, window, scale, kernels, dropout, softcap = call
    if scale is None:
        scale = dim**-0.5  # the default, spelt out or not, is one call

    def build() -> tuple[GroupCall, ...]:
        check_call(context, heads, kv_heads, call)
        model = Shape(heads, kv_heads, dim, dtype, context.device, scale)
        kernel = _default_kernels(context.device) if kernels is None else kernels
        drafts = _drafts(context, model, call, kernel)
        mask = {"causal": causal, "window": window}
        return filled(drafts, Heads(model), kernel, mask, context.node_size)

    return context.cached((heads, kv_heads, dim, dtype, causal, window, scale, kernels, dropout, softcap), build)


def _drafts(context: Context, model: Shape, call: Call, kernel: Kernel) -> list[Draft]:
    """Return a draft for every group that this rank computes or passes messages of, in the order of the work."""
    drafts, bounds = [], iter(context.groups)
    for group in context.work.groups:
        if context.rank in group.ranks:
            bound = next(bounds)
            if group.tokens and (group.ring > 1 or any(bound.counts)):
                drafts.append(_draft(context, bound, model, call, kernel))
        elif context.rank in group.party and group.tokens and group.ring > 1:
            roads = _roads(context, group, HeadSplit.of(model.heads, model.kv_heads, group.ulysses), model, call)
            if roads is not None:
                relay = Relay(roads)
                drafts.append(Draft(group, slice(0, 0), None, relay, relay.waits(0, 0)))
    return drafts


def _draft(context: Context, bound: BoundGroup, model: Shape, call: Call, kernel: Kernel) -> Draft:
    carries = any(span.document in context.pieces for span in bound.group.spans)
    if bound.group.degree == 1 and not carries:
        return Draft(bound.group, bound.rows)
    split = HeadSplit.of(model.heads, model.kv_heads, bound.group.ulysses)
    (low, high), (kv_low, kv_high) = split.query[bound.ulysses_index], split.kv[bound.ulysses_index]
    shape = Shape(high - low, kv_high - kv_low, model.dim, model.dtype, model.device, model.scale)
    heads = Heads(shape, split.readers(bound.ulysses_index))
    exchange = None
    if bound.group.ulysses > 1:
        exchange = Exchange(
            context.transport, bound.block, bound.ulysses_index, bound.counts, split, bound.order, bound.places
        )
    if carries:
        inner = Carried.of(context, bound, heads, kernel, call.window)
    else:
        inner = _inner(context, bound, heads, _roads(context, bound.group, split, model, call), call, kernel)
    elements, dtype = 2 * shape.kv_heads * shape.dim, shape.dtype
    row, wide_row = elements * dtype.itemsize, elements * sum_dtype(dtype).itemsize
    waits = inner.waits(row, wide_row) if isinstance(inner, Shared) and bound.group.ring > 1 else None
    return Draft(bound.group, bound.rows, exchange, inner, waits)


def _inner(
    context: Context, bound: BoundGroup, heads: Heads, roads: Roads | None, call: Call, kernel: Kernel
) -> Prepared | Shared:
    group, index = bound.group, bound.ring_index
    mask = {"causal": call.causal, "window": call.window}
    if group.ring == 1:
        return prepare(kernel, Segments.packed([span.tokens for span in bound.spans], **mask), heads)
    chunks = [Chunks.of(group, k) for k in range(group.ring)]
    ranks, joins = bound.ring_ranks, joins_on(context.device, heads.shape.dtype)
    if _gathers(group, call.window):
        schedule = gather_schedule(chunks, index, **mask)
        tiles = prepare_tiles(kernel, schedule.tiles, heads)
        return Gather.of(context.transport, ranks, index, schedule, tiles, joins, context.device, roads)
    own = chunks[index]
    steps = tuple(
        prepare_tiles(kernel, ring_tiles(own, chunks[(index - step) % group.ring], **mask), heads)
        for step in range(group.ring)
    )
    return Ring(context.transport, ranks, index, tuple(each.rows for each in chunks), steps, joins, roads)


def _roads(context: Context, group: Group, split: HeadSplit, model: Shape, call: Call) -> Roads | None:
    """Return how a routed group's exchanges cross nodes, for any rank of its party; None: there is nothing to route."""
    if group.route is None or group.ring == 1 or context.node_size is None:  # `bind` has asked for the last
        return None
    chunks = [Chunks.of(group, index) for index in range(group.ring)]
    widths = [high - low for low, high in split.kv]
    wide = sum_dtype(model.dtype).itemsize // model.dtype.itemsize
    if _gathers(group, call.window):
        moves = gather_moves(group, chunks, widths, wide, causal=call.causal, window=call.window)
    else:
        moves = ring_moves(group, max(each.rows for each in chunks), widths, wide)
    unit = 2 * model.dim * model.dtype.itemsize
    return Roads.of(context.transport, group, moves, unit, context.device, context.node_size)


def _gathers(group: Group, window: int | None) -> bool:
    """Say whether a group gathers its keys: because the plan says so, or since a window sees neighbours only."""
    return group.method == Method.GATHER or _sees_neighbours_only(group, window)


def _sees_neighbours_only(group: Group, window: int | None) -> bool:
    """Say whether a window is so short that a ring would carry mostly keys that nobody sees.

    A window within one chunk reaches into one other chunk at most. The answer is the same on all ranks of the group.
    """
    chunk = max((span.tokens for span in group.spans), default=0) // (2 * group.ring)
    return window is not None and window <= chunk


def _default_kernels(device: torch.device) -> Kernel:
    from seqloom.attention.kernels.registry import default  # loads every kernel there is; only when it is needed

    return default(device)
