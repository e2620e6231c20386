"""What attention refuses, before anything is communicated: the value, the rule and the way out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from seqloom.attention.context_parallel.gather import Gather
from seqloom.attention.context_parallel.kv_cache import KVCache, PrefixAttention
from seqloom.attention.context_parallel.overlap import ContextParallelAttention, Draft, GroupCall, filled
from seqloom.attention.context_parallel.ring import Ring
from seqloom.attention.context_parallel.routed import ProxyRank, RoutedExchanges, gather_moves, ring_moves
from seqloom.attention.context_parallel.ulysses import Exchange, HeadSplit
from seqloom.attention.kernels.interface import AttentionShape, Kernel, Prepared, Warmable
from seqloom.attention.lse import joins_on, sum_dtype
from seqloom.attention.masks import Segments
from seqloom.attention.tiles import Chunks, Heads, gather_schedule, prepare, prepare_tiles, ring_tiles
from seqloom.dist.token_layout import BoundGroup, Context
from seqloom.errors import SeqloomError
from seqloom.plan import Group, Method

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Call(NamedTuple):
    """The options of one attention call, see `attention`."""

    causal: bool = True
    window: int | None = None
    scale: float | None = None
    kernels: Kernel | None = None
    dropout: float = 0.0
    softcap: float | None = None


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context) -> None:
    """Refuse tensors that do not fit each other or the context. Called by every layer, so it is quick."""
    queries, keys = q.shape, k.shape
    alike = len(queries) == len(keys) == 3 and keys == v.shape
    if not alike or queries[2] != keys[2] or queries[0] != keys[0]:
        raise SeqloomError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: attention takes q [tokens, heads, dim] and "
            "k, v [tokens, kv_heads, dim] with the same tokens and dim"
        )
    positions = context.positions
    if queries[0] != positions.shape[0]:
        raise SeqloomError(
            f"{queries[0]} rows of q, k, v: rank {context.rank} holds {context.tokens} tokens in this round; "
            "pass the rows of context.spans, or bind the round these rows belong to"
        )
    if not q.dtype == k.dtype == v.dtype or q.dtype not in DTYPES:
        legal = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise SeqloomError(f"q {q.dtype}, k {k.dtype}, v {v.dtype}: all three must have one dtype of {legal}")
    device = positions.device
    if not q.device == k.device == v.device == device:
        raise SeqloomError(
            f"q on {q.device}, k on {k.device}, v on {v.device}: this context was bound to {device}; "
            f"move them there, or bind with device={str(q.device)!r}"
        )


def check_call(context: Context, heads: int, kv_heads: int, call: Call) -> None:
    """Refuse options and head counts that cannot be served; the same on all ranks of the work."""
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        near = [n for n in range(1, heads + 1) if heads % n == 0]
        raise SeqloomError(f"{kv_heads} kv heads for {heads} heads: kv heads must divide the heads; use one of {near}")
    for group in context.work.groups:
        if group.ulysses > heads:
            raise SeqloomError(
                f"ulysses {group.ulysses} on ranks {group.ranks} with {heads} heads: every rank needs a query head; "
                f"plan with ulysses of at most {heads} and a ring for the rest"
            )
        _check_pieces(context, group, call)
    _check_options(call)


def known_layer(context: Context, layer: int | None) -> int:
    """Return the layer of a call in a round with a document in pieces; refuse one that does not say it."""
    if layer is None:
        raise SeqloomError(
            f"document {min(context.pieces)} is in pieces and attention was called without a layer: keys of earlier "
            "pieces are kept for every layer; call attention(..., layer=number of the layer in the model)"
        )
    return layer


def _check_pieces(context: Context, group: Group, call: Call) -> None:
    """Refuse documents whose other pieces cannot be reached."""
    for document, start, _ in group.spans:
        if document not in context.pieces:
            if start > 0:
                raise SeqloomError(
                    f"document {document} begins at token {start} in this round: the keys before it are in another "
                    "round; bind with pieces= of the plan and kv_cache= of the step, or plan whole documents"
                )
            continue
        if not isinstance(context.kv_cache, KVCache):
            raise SeqloomError(
                f"document {document} is in pieces, and the context has {context.kv_cache!r} to carry keys from one to "
                "the next; bind all rounds of a step with kv_cache=one KVCache()"
            )
        if not call.causal:
            raise SeqloomError(
                f"causal={call.causal} for document {document}, which is in pieces: keys of later pieces do not exist "
                "yet; set causal=True, or plan whole documents"
            )
        if group.method != Method.RING or group.route is not None:
            how = f"method {group.method}" if group.method != Method.RING else "a route"
            raise SeqloomError(
                f"{how} for document {document}, which is in pieces: a document in pieces needs method ring, from "
                "rank to rank; plan its groups so"
            )


def _check_options(call: Call) -> None:
    if call.window is not None and (not isinstance(call.window, int) or call.window < 1 or not call.causal):
        raise SeqloomError(
            f"window {call.window} with causal={call.causal}: a window is a whole number of tokens from 1 up, counted "
            "back from a causal query; leave it out, or set causal=True"
        )
    if call.scale is not None and not math.isfinite(call.scale):
        raise SeqloomError(f"scale {call.scale}: logits are multiplied by it; give a finite number or None")
    if call.dropout:
        raise SeqloomError(
            f"dropout {call.dropout} in attention: which weights are dropped would depend on the plan; use 0, "
            "or dropout outside attention"
        )
    if call.softcap is not None:
        raise SeqloomError(f"softcap {call.softcap}: no kernel here caps logits; use None, or QK norm in the model")


# ---- merged: attention.bound
# From a bound context to what every group computes: index work and prepared kernels, built once per round.


class AttentionSpec(NamedTuple):
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
    shapes = [AttentionShape(*some, dim, dtype, device, scale) for some in sorted(counts, reverse=True)]
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
    inner = [
        replace(each.inner, layer=known) if isinstance(each.inner, PrefixAttention) else each.inner for each in calls
    ]
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
        model = AttentionShape(heads, kv_heads, dim, dtype, context.device, scale)
        kernel = _default_kernels(context.device) if kernels is None else kernels
        drafts = _drafts(context, model, call, kernel)
        mask = {"causal": causal, "window": window}
        return filled(drafts, Heads(model), kernel, mask, context.node_size)

    return context.cached((heads, kv_heads, dim, dtype, causal, window, scale, kernels, dropout, softcap), build)


def _drafts(context: Context, model: AttentionShape, call: Call, kernel: Kernel) -> list[Draft]:
    """Return a draft for every group that this rank computes or passes messages of, in the order of the work."""
    drafts, bounds = [], iter(context.groups)
    for group in context.work.groups:
        if context.rank in group.ranks:
            bound = next(bounds)
            if group.tokens and (group.ring > 1 or any(bound.counts)):
                drafts.append(_draft(context, bound, model, call, kernel))
        elif context.rank in group.participants and group.tokens and group.ring > 1:
            roads = _roads(context, group, HeadSplit.of(model.heads, model.kv_heads, group.ulysses), model, call)
            if roads is not None:
                relay = ProxyRank(roads)
                drafts.append(Draft(group, slice(0, 0), None, relay, relay.waits(0, 0)))
    return drafts


def _draft(context: Context, bound: BoundGroup, model: AttentionShape, call: Call, kernel: Kernel) -> Draft:
    carries = any(span.document in context.pieces for span in bound.group.spans)
    if bound.group.degree == 1 and not carries:
        return Draft(bound.group, bound.rows)
    split = HeadSplit.of(model.heads, model.kv_heads, bound.group.ulysses)
    (low, high), (kv_low, kv_high) = split.query[bound.ulysses_index], split.kv[bound.ulysses_index]
    shape = AttentionShape(high - low, kv_high - kv_low, model.dim, model.dtype, model.device, model.scale)
    heads = Heads(shape, split.readers(bound.ulysses_index))
    exchange = None
    if bound.group.ulysses > 1:
        exchange = Exchange(
            context.transport, bound.block, bound.ulysses_index, bound.counts, split, bound.order, bound.inverse_order
        )
    if carries:
        inner = PrefixAttention.of(context, bound, heads, kernel, call.window)
    else:
        inner = _inner(context, bound, heads, _roads(context, bound.group, split, model, call), call, kernel)
    elements, dtype = 2 * shape.kv_heads * shape.dim, shape.dtype
    row, wide_row = elements * dtype.itemsize, elements * sum_dtype(dtype).itemsize
    waits = inner.waits(row, wide_row) if isinstance(inner, ContextParallelAttention) and bound.group.ring > 1 else None
    return Draft(bound.group, bound.rows, exchange, inner, waits)


def _inner(
    context: Context, bound: BoundGroup, heads: Heads, roads: RoutedExchanges | None, call: Call, kernel: Kernel
) -> Prepared | ContextParallelAttention:
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


def _roads(
    context: Context, group: Group, split: HeadSplit, model: AttentionShape, call: Call
) -> RoutedExchanges | None:
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
    return RoutedExchanges.of(context.transport, group, moves, unit, context.device, context.node_size)


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
    from seqloom.attention.kernels.dispatch import default  # loads every kernel there is; only when it is needed

    return default(device)
