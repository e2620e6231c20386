"""The attention plan of a rank: what it computes for every group of a round, built once and used by all layers.

`plan_attention` checks a call before anything is communicated (value, rule, way out), then does the index work: which
kernel computes which segments, which rows go to whom, and which local documents overlap which messages. The context of
the round keeps the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from operator import index
from typing import NamedTuple

import torch

from seqloom.attention.context_parallel.gather import Gather
from seqloom.attention.context_parallel.kv_cache import KVCache, PrefixAttention
from seqloom.attention.context_parallel.overlap import (
    ContextParallelAttention,
    GroupAttention,
    UnscheduledGroup,
    schedule_overlap,
)
from seqloom.attention.context_parallel.ring import Ring, RingKeys
from seqloom.attention.context_parallel.routed import ProxyRank, RoutedExchanges, gather_moves, ring_moves
from seqloom.attention.context_parallel.ulysses import HeadSplit, UlyssesExchange
from seqloom.attention.dropout import HeadDropout
from seqloom.attention.kernels.interface import (
    DTYPES,
    AttentionShape,
    Kernel,
    KernelBuild,
    KernelUse,
    PreparedAttention,
    SupportsBuilds,
    dtype_name,
)
from seqloom.attention.masks import MaskRule
from seqloom.attention.merge import merge_ops, sum_dtype
from seqloom.attention.tiles import LocalHeads, ZigzagChunks, prepare_documents
from seqloom.dist.rank_tokens import BoundGroup, Context
from seqloom.errors import SeqloomError
from seqloom.plan import Group, Method


class AttentionOptions(NamedTuple):
    """Options of one attention call, see `attention`."""

    causal: bool = True
    window: int | None = None
    scale: float | None = None
    kernels: Kernel | None = None
    dropout: float = 0.0
    softcap: float | None = None
    attention_chunk: int | None = None


class AttentionSpec(NamedTuple):
    """Heads, mask, scale and cap of a layer's attention: what a round's index work depends on; see `attention`."""

    heads: int
    kv_heads: int
    dim: int
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    attention_chunk: int | None = None
    causal: bool = True
    latent: int = 0  # width of a row of latents from which a layer makes keys and values; 0: it makes none


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
    softcap: float | None = None,
    attention_chunk: int | None = None,
    latent: int = 0,
    kernels: Kernel | None = None,
) -> None:
    """Do the index work of a round for attention calls like this one now, instead of in the first of them.

    The context keeps the result. Sizes and dtype are those of the tensors that will come, `dim` the wider of keys and
    values, `latent` the width of a row of latents; for the rest see `attention`.
    """
    options = AttentionOptions(causal, window, scale, kernels, softcap=softcap, attention_chunk=attention_chunk)
    travels = latent if has_latents(context) else 0
    _group_attentions(context, heads, kv_heads, dim, dtype, options, travels)


def has_latents(context: Context) -> bool:
    """Whether latents travel in some group of a round; the answer is the same on all ranks of its work."""
    return any(group.latent for group in context.work.groups)


def attention_builds(
    spec: AttentionSpec,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    longest: int,
    tokens: int | None = None,
    degrees: Iterable[tuple[int, int]] = ((1, 1),),
    kernels: Kernel | None = None,
) -> list[KernelBuild]:
    """Return all that attention over causal documents can compile, to do it before the first step needs it.

    On a GPU a new shape delays a step by 0.1 s or more, and every rank that waits for it; on a CPU there is nothing to
    compile.

    Args:
        spec, dtype, kernels: of the calls, see `attention`.
        longest: tokens of a document.
        tokens: of a rank in a round, at most; None: any number.
        degrees: (ulysses, ring) of groups that will come: they decide heads and masks of a kernel's calls.
    """
    device = torch.device(device)
    kernel = _default_kernel(device) if kernels is None else kernels
    if not isinstance(kernel, SupportsBuilds):
        return []
    scale = spec.dim**-0.5 if spec.scale is None else spec.scale
    longest = min(longest, spec.attention_chunk or longest)
    uses: dict[AttentionShape, KernelUse] = {}
    for ulysses, ring in sorted(set(degrees)):
        split = HeadSplit.of(spec.heads, spec.kv_heads, ulysses)
        for heads, kv_heads in sorted({split.counts(rank) for rank in range(ulysses)}, reverse=True):
            shape = AttentionShape(heads, kv_heads, spec.dim, dtype, device, scale, spec.softcap)
            use = KernelUse(longest, None if tokens is None else tokens * ulysses, spec.window, ring > 1)
            uses[shape] = use if shape not in uses else uses[shape].merged(use)
    return [build for shape, use in uses.items() for build in kernel.builds(shape, use)]


def plan_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    context: Context,
    options: AttentionOptions,
    layer: int | None = None,
    *,
    latent: bool = False,
) -> tuple[GroupAttention, ...]:
    """Return the rank's groups that hold tokens, in the order of the work; checked, and built once per round.

    With `latent`, k has rows of latents [tokens, 1, width], and v no heads.
    """
    _check_tensors(q, q if latent else k, q if latent else v, context)
    _, heads, dim = q.shape
    kv_heads, row = (heads, k.shape[2]) if latent else (k.shape[1], 0)
    if options.dropout:
        options = _keyed_dropout(context, options, layer)
    groups = _group_attentions(context, heads, kv_heads, dim, q.dtype, options, row, layer if options.dropout else None)
    if not context.pieces:
        return groups
    if layer is None:
        raise SeqloomError(
            f"document {min(context.pieces)} is in pieces and attention was called without a layer: keys of earlier "
            "pieces are kept for every layer; call attention(..., layer=number of the layer in the model)"
        )
    return tuple(
        replace(group, inner=replace(group.inner, layer=layer)) if isinstance(group.inner, PrefixAttention) else group
        for group in groups
    )


def _group_attentions(
    context: Context,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    options: AttentionOptions,
    latent: int = 0,
    layer: int | None = None,
) -> tuple[GroupAttention, ...]:
    """Return the rank's groups for tensors of these sizes, from the context or built now.

    With dropout they are built for every layer, since each drops other weights.
    """
    scale = dim**-0.5 if options.scale is None else options.scale  # the default, spelt out or not, is one plan

    def build() -> tuple[GroupAttention, ...]:
        _check_call(context, heads, kv_heads, options)
        kernel = _default_kernel(context.device) if options.kernels is None else options.kernels
        model = AttentionShape(heads, kv_heads, dim, dtype, context.device, scale, options.softcap)
        window, chunk = (None if x is None else index(x) for x in (options.window, options.attention_chunk))
        dropout = None
        if layer is not None and context.dropout_seed is not None:
            dropout = HeadDropout(options.dropout, context.dropout_seed, layer)
        mask = MaskRule(options.causal, window, chunk, context.prefixes)
        builder = _Builder(context, model, kernel, mask, latent, dropout)
        local = LocalHeads(model, dropout=dropout)
        return schedule_overlap(builder.groups(), local, kernel, mask, context.node_size)

    return context.cached((heads, kv_heads, dim, dtype, scale, *options[:2], *options[3:], latent, layer), build)


class _Builder(NamedTuple):
    """Builds the attention of a rank's groups in one round.

    `model` has the heads of the whole model, `latent` is the width of a row of latents, 0 where none come; `dropout` is
    that of all heads.
    """

    context: Context
    model: AttentionShape
    kernel: Kernel
    mask: MaskRule
    latent: int
    dropout: HeadDropout | None

    def groups(self) -> list[UnscheduledGroup]:
        """Return every group that this rank computes or passes messages of, in the order of the work."""
        context, found, bounds = self.context, [], iter(self.context.groups)
        for group in context.work.groups:
            if context.rank in group.ranks:
                bound = next(bounds)
                if group.tokens and (group.ring > 1 or any(bound.counts)):
                    found.append(self._group(bound))
            elif context.rank in group.participants and group.tokens and group.ring > 1:
                routed = self._routed(group)
                if routed is not None:
                    proxy = ProxyRank(routed)
                    found.append(UnscheduledGroup(group, slice(0, 0), None, proxy, proxy.exchange_bytes(0, 0)))
        return found

    def _group(self, bound: BoundGroup) -> UnscheduledGroup:
        group, context = bound.group, self.context
        in_pieces = any(span.document in context.pieces for span in group.spans)
        if group.degree == 1 and not in_pieces:
            return UnscheduledGroup(group, bound.rows)
        split, latent = self._split(group), self._has_latents(group)
        heads, kv_heads = split.counts(bound.ulysses_index)
        shape = replace(self.model, heads=heads, kv_heads=heads if latent else kv_heads)
        dropout = None if self.dropout is None else self.dropout.from_head(split.query[bound.ulysses_index][0])
        local = LocalHeads(shape, None if latent else split.kv_index(bound.ulysses_index), dropout)
        exchange = UlyssesExchange(context.transport, bound, split) if group.ulysses > 1 else None
        inner = (
            PrefixAttention.of(context, bound, local, self.kernel, self.mask)
            if in_pieces
            else self._inner(bound, local)
        )
        if group.ring == 1 or not isinstance(inner, ContextParallelAttention):
            return UnscheduledGroup(group, bound.rows, exchange, inner, latent=latent)
        elements = kv_heads * self._kv_values(group)
        row, wide_row = (elements * dtype.itemsize for dtype in (shape.dtype, sum_dtype(shape.dtype)))
        sizes = inner.exchange_bytes(row, wide_row)
        return UnscheduledGroup(group, bound.rows, exchange, inner, sizes, latent)

    def _has_latents(self, group: Group) -> bool:
        """Whether latents travel in a group, or are what a document in pieces leaves."""
        return group.latent and self.latent > 0

    def _split(self, group: Group) -> HeadSplit:
        """Return who has which heads; latents are one kv head, of every rank."""
        return HeadSplit.of(self.model.heads, 1 if self._has_latents(group) else self.model.kv_heads, group.ulysses)

    def _kv_values(self, group: Group) -> int:
        """Return the values of a token that travel for one kv head."""
        return self.latent if self._has_latents(group) else 2 * self.model.dim

    def _inner(self, bound: BoundGroup, heads: LocalHeads) -> PreparedAttention | ContextParallelAttention:
        context, group, index = self.context, bound.group, bound.ring_index
        if group.ring == 1:
            return prepare_documents(self.kernel, bound.spans, self.mask, heads)
        routed = self._routed(group)
        if self._gathers(group):
            return Gather.of(context.transport, bound, heads, self.kernel, routed, self.mask)
        keys = RingKeys.of_round(group, index, heads, self.kernel, self.mask)
        ops = merge_ops(context.device, heads.shape.dtype)
        return Ring(context.transport, bound.ring_ranks, index, (keys,), ops, routed)

    def _routed(self, group: Group) -> RoutedExchanges | None:
        """Return how a routed group's exchanges cross nodes, for any of its ranks and proxies; None: not routed."""
        context, model = self.context, self.model
        if group.route is None or group.ring == 1 or context.node_size is None:  # `bind` has asked for the last
            return None
        chunks = [ZigzagChunks.of(group, index, self.mask.attention_chunk) for index in range(group.ring)]
        widths = [high - low for low, high in self._split(group).kv]
        wide = sum_dtype(model.dtype).itemsize // model.dtype.itemsize
        if self._gathers(group):
            whole = self._has_prefix(group)  # then the keys of all tokens are gathered
            rule = {"causal": self.mask.causal and not whole, "window": None if whole else self.mask.window}
            moves = gather_moves(group, chunks, widths, wide, **rule)
        else:
            moves = ring_moves(group, max(each.rows for each in chunks), widths, wide)
        unit = self._kv_values(group) * model.dtype.itemsize
        return RoutedExchanges.of(context.transport, group, moves, unit, context.device, context.node_size)

    def _gathers(self, group: Group) -> bool:
        """Return whether a group gathers its keys: because the plan says so, or because tokens see few others.

        A window or an attention chunk within one chunk of the ring reaches into one other of these at most: a ring
        would send mostly keys that nobody sees. The answer is the same on all ranks of the group.
        """
        chunk = max((span.tokens for span in group.spans), default=0) // (2 * group.ring)
        limits = (self.mask.window, self.mask.attention_chunk)
        reach = min((tokens for tokens in limits if tokens is not None), default=chunk + 1)
        return group.method == Method.GATHER or (reach <= chunk and not self._has_prefix(group))

    def _has_prefix(self, group: Group) -> bool:
        """Whether the first tokens of a document of a group see each other."""
        return self.mask.prefixes_of(group.spans) is not None


def _default_kernel(device: torch.device) -> Kernel:
    from seqloom.attention.kernels.dispatch import default_dispatcher  # loads every kernel; only when it is needed

    return default_dispatcher(device)


# -- checks -----------------------------------------------------------------------------------------------------------


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context) -> None:
    """Refuse tensors that do not fit each other or the context. Called by every layer, so it is quick."""
    queries, keys = q.shape, k.shape
    fitting = len(queries) == len(keys) == 3 and keys == v.shape
    if not fitting or queries[2] != keys[2] or queries[0] != keys[0]:
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
        legal = ", ".join(map(dtype_name, DTYPES))
        raise SeqloomError(f"q {q.dtype}, k {k.dtype}, v {v.dtype}: all three must have one dtype of {legal}")
    device = positions.device
    if not q.device == k.device == v.device == device:
        raise SeqloomError(
            f"q on {q.device}, k on {k.device}, v on {v.device}: this context was bound to {device}; "
            f"move them there, or bind with device={str(q.device)!r}"
        )


def _check_call(context: Context, heads: int, kv_heads: int, options: AttentionOptions) -> None:
    """Refuse options and head counts that are not supported; the same on all ranks of the work."""
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        near = [n for n in range(1, heads + 1) if heads % n == 0]
        raise SeqloomError(f"{kv_heads} kv heads for {heads} heads: kv heads must divide the heads; use one of {near}")
    for group in context.work.groups:
        if group.ulysses > heads:
            raise SeqloomError(
                f"ulysses {group.ulysses} on ranks {group.ranks} with {heads} heads: every rank needs a query head; "
                f"plan with ulysses of at most {heads} and a ring for the rest"
            )
        check_pieces(context, group, options)
    if context.prefixes and options.causal and options.attention_chunk is not None:
        raise SeqloomError(
            f"attention_chunk {options.attention_chunk} for document {min(context.prefixes)}, whose first "
            f"{context.prefixes[min(context.prefixes)]} tokens see each other: chunks would hide some of them; leave "
            "one of both out"
        )
    _check_options(options)


def _keyed_dropout(context: Context, options: AttentionOptions, layer: int | None) -> AttentionOptions:
    """Return the options of a call with dropout; without it where nothing is dropped. Refuse what has no keys."""
    if context.dropout_seed is None and torch.is_grad_enabled():
        raise SeqloomError(
            f"dropout {options.dropout} of attention weights in a context without a seed: every step drops others; "
            "bind the step's rounds with a number of its own, bind(..., dropout_seed=step), without tensor "
            "parallelism, or call model.eval()"
        )
    if context.dropout_seed is None:
        return options._replace(dropout=0.0)
    if layer is None:
        raise SeqloomError(
            f"dropout {options.dropout} of attention weights, called without a layer: which are dropped follows from "
            "it; call attention(..., layer=number of the layer in the model), or use 0"
        )
    return options


def check_pieces(context: Context, group: Group, options: AttentionOptions) -> None:
    """Refuse documents whose other pieces cannot be reached."""
    for document in sorted({span.document for span in group.spans} & context.pieces.keys()):
        if not isinstance(context.kv_cache, KVCache):
            raise SeqloomError(
                f"document {document} is in pieces, and the context has {context.kv_cache!r} to keep keys from one to "
                "the next; bind all rounds of a step with kv_cache=one KVCache()"
            )
        if not options.causal:
            raise SeqloomError(
                f"causal={options.causal} for document {document}, which is in pieces: keys of later pieces do not "
                "exist yet; set causal=True, or plan whole documents"
            )
        if group.method != Method.RING or group.route is not None or group.states:
            how = f"method {group.method}" if group.method != Method.RING else "a route"
            how = "states that go from rank to rank" if group.states else how
            raise SeqloomError(
                f"{how} for document {document}, which is in pieces: a document in pieces needs method ring, from "
                "rank to rank, and scans of heads; plan its groups so"
            )


def _check_options(options: AttentionOptions) -> None:
    window, scale, chunk = options.window, options.scale, options.attention_chunk
    if window is not None and (not hasattr(window, "__index__") or window < 1 or not options.causal):
        raise SeqloomError(
            f"window {window} with causal={options.causal}: a window is a whole number of tokens from 1 up, counted "
            "back from a causal query; leave it out, or set causal=True"
        )
    if chunk is not None and (not hasattr(chunk, "__index__") or chunk < 1):
        raise SeqloomError(
            f"attention_chunk {chunk}: tokens see each other in chunks of a whole number of tokens from 1 up; leave it "
            "out for attention over whole documents"
        )
    if scale is not None and not 0 < scale < math.inf:
        raise SeqloomError(f"scale {scale}: logits are multiplied by it; give a positive number or None")
    if not 0 <= options.dropout < 1:
        raise SeqloomError(
            f"dropout {options.dropout} of attention weights: it is the share that is dropped; give a number from 0 to "
            "below 1"
        )
    if options.softcap is not None and not 0 < options.softcap < math.inf:
        raise SeqloomError(
            f"softcap {options.softcap}: logits stay below it; give a positive number, or None for no cap"
        )


def check_sinks(sinks: torch.Tensor, q: torch.Tensor) -> None:
    """Refuse sinks that are not a number for every head."""
    if sinks.shape != q.shape[1:2] or not sinks.is_floating_point() or sinks.device != q.device:
        raise SeqloomError(
            f"sinks {tuple(sinks.shape)} of {sinks.dtype} on {sinks.device}: attention takes a logit for each of the "
            f"{q.shape[1]} heads of q, on {q.device}"
        )
