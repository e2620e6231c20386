"""Attention over packed documents that are spread over ranks, as one autograd node: Ulysses inside, ring outside.

q, k, v of own tokens, all heads
    -> Ulysses exchange ->  all tokens of the ring index, own heads
    -> ring or gather   ->  output over the keys of all ring indices
    -> Ulysses exchange ->  output of own tokens, all heads

Groups come in the order of the work, the same on all ranks. Documents that lie on this rank alone are computed while
others wait for messages, see `context_parallel/overlap.py`. Where the model's tokens lie in another layout than
attention's, q, k and v are redistributed before, and the output after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import chain, pairwise
from operator import index
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from seqloom.attention.context_parallel.kv_cache import PrefixAttention
from seqloom.attention.context_parallel.overlap import (
    ContextParallelAttention,
    GroupAttention,
    LocalRuns,
    OverlapQueue,
    Tensors,
)
from seqloom.attention.kernels.interface import Gradients, Kernel, PreparedAttention, Saved
from seqloom.attention.latent import Expansion, LatentShape
from seqloom.attention.merge import sum_dtype
from seqloom.attention.plan import AttentionOptions, check_sinks, plan_attention
from seqloom.dist.rank_tokens import Context, TokenRedistribute, bind_single_rank, redistribute_tokens
from seqloom.dist.rows import put, take
from seqloom.errors import SeqloomError

Groups = tuple[GroupAttention, ...]
Pack = Callable[[torch.Tensor], Any]
Unpack = Callable[[Any], torch.Tensor]
"""Of what is kept for a backward, as in `torch.autograd.graph.saved_tensors_hooks`."""


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    context: Context | torch.Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    kernels: Kernel | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    attention_chunk: int | None = None,
    layer: int | None = None,
) -> torch.Tensor:
    """Return the attention of this rank's tokens over their whole documents, wherever these lie.

    All ranks of a group call it, forward and backward, also those without tokens.

    Args:
        q: [tokens, heads, dim], rows as in `context.spans`.
        k, v: [tokens, kv_heads, dim]; query head h reads kv head h // (heads // kv_heads). Values may have another dim.
        context: of the round, from `bind`; in a layer that `compile_layers` has compiled, its opaque handle.
        causal: a token sees itself and the tokens before it, and of a document to which the context gives a prefix
            (`bind(prefixes=)`), those of the prefix each other; otherwise its whole document.
        window: tokens it sees at most, itself included; tokens of a prefix see all of it.
        scale: softmax scale, by which logits are multiplied; None: dim ** -0.5.
        kernels: computes attention; None: the best of this device.
        dropout: share of the attention weights that is dropped: which ones follows from the seed of the context, the
            layer and what a weight is between (`attention.dropout`), under every plan. Needs `layer`, and a kernel that
            drops. A context without a seed drops nothing, and is refused where a backward would follow.
        softcap: c of c * tanh(logits / c), which stands in the place of logits; None: no cap.
        sinks: [heads], learnt logits of a key that every token sees and that has no value; None: none.
        attention_chunk: tokens see each other only inside chunks of so many, counted from the first of their document
            (chunked attention, Llama 4); None: in the whole document.
        layer: number of the layer in the model, another one for every attention of it; needed where a document is in
            pieces, whose keys are cached by layer, and with dropout.

    Returns:
        [tokens, heads, dim of v].
    """
    if sinks is not None:
        check_sinks(sinks, q)
    if q.shape[-1] == k.shape[-1] != v.shape[-1]:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        q, k, v, width = *_of_one_width(q, k, v), v.shape[-1]
        given: dict[str, Any] = {"causal": causal, "window": window, "scale": scale, "kernels": kernels}
        given |= {"dropout": dropout, "softcap": softcap, "sinks": sinks}
        given |= {"attention_chunk": attention_chunk, "layer": layer}
        return attention(q, k, v, context, **given)[..., :width]
    if isinstance(context, torch.Tensor):
        if kernels is not None:
            raise SeqloomError(
                f"kernels={kernels!r} in a compiled layer: a graph cannot hold them; leave them out, or do not compile"
            )
        # `models.compile` has registered the operator: it also makes the handles.
        operator = torch.ops.seqloom.attention
        return operator(q, k, v, context, causal, window, scale, dropout, softcap, sinks, attention_chunk)[0]
    options = AttentionOptions(causal, window, scale, kernels, dropout, softcap, attention_chunk)
    return _Attention.apply(q, k, v, context, plan_attention(q, k, v, context, options, layer), False, sinks)


def latent_attention(
    q: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    shape: LatentShape,
    context: Context,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    kernels: Kernel | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    attention_chunk: int | None = None,
    layer: int | None = None,
) -> torch.Tensor:
    """Return `attention` over keys and values that are products of latents (`attention.latent`).

    Latents travel, and are kept between pieces, in the groups of the plan that say so; elsewhere keys and values made
    from them. The gradient of the weight is what this rank's products give; the sum over all ranks is the gradient.

    Args:
        q: [tokens, heads, unrotated + rotated].
        rows: [tokens, latent + rotated], the latent and the rotated key of every token.
        weight: [heads * (unrotated + values), latent], for every head the rows of its key and of its value.
        shape: these widths.
        context, causal, window, scale, kernels, dropout, softcap, sinks, attention_chunk, layer: see `attention`.

    Returns:
        [tokens, heads, values].
    """
    shape.check(q, rows, weight)
    if sinks is not None:
        check_sinks(sinks, q)
    redistribute, scale = context.attention_redistribute, q.shape[-1] ** -0.5 if scale is None else scale
    options = AttentionOptions(causal, window, scale, kernels, dropout, softcap, attention_chunk)
    q, k = torch.nn.functional.pad(q, (0, shape.head - q.shape[-1])), rows[:, None]
    groups = plan_attention(q, k, k[:, :0], context, options, layer, latent=True)
    if redistribute is not None:
        q, k = redistribute_tokens(redistribute, q, k)
    out = _Attention.apply(q, k, k[:, :0], context, groups, False, sinks, weight, shape)
    if redistribute is not None:
        (out,) = redistribute_tokens(redistribute.reversed(), out)
    return out[..., : shape.values]


def attention_with_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    context: Context,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    kernels: Kernel | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    attention_chunk: int | None = None,
    layer: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `attention`, and the log-sum-exp of the logits, sinks included, [heads, tokens], without gradient.

    Costs one exchange more where there is Ulysses. Values are as wide as keys.
    """
    if sinks is not None:
        check_sinks(sinks, q)
    options = AttentionOptions(causal, window, scale, kernels, dropout, softcap, attention_chunk)
    return _Attention.apply(q, k, v, context, plan_attention(q, k, v, context, options, layer), True, sinks)


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: Sequence[int] | torch.Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    kernels: Kernel | None = None,
    prefixes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return the attention of every packed document over itself, on one device: replaces a varlen call.

    Does the index work of the pack at every call. A model of many layers binds once instead (`bind_single_rank`, or
    `bind` for several ranks) and passes the context to `attention`.

    Args:
        q: [tokens, heads, dim].
        k, v: [tokens, kv_heads, dim].
        cu_seqlens: [documents + 1] where documents begin, from 0 to `tokens`, on the host: reading it from a GPU
            would wait for the GPU.
        causal, window, scale, kernels: see `attention`.
        prefixes: [documents] how many of its first tokens see each other, of every document; None: 0.

    Returns:
        [tokens, heads, dim].
    """
    if isinstance(cu_seqlens, torch.Tensor):
        if cu_seqlens.device.type != "cpu":
            raise SeqloomError(
                f"cu_seqlens on {cu_seqlens.device}: it must be on the host, reading it would wait for the GPU; "
                "keep the list of lengths, or bind once per batch with bind_single_rank"
            )
        cu_seqlens = cu_seqlens.tolist()
    try:
        ends = [index(end) for end in cu_seqlens]
    except TypeError:
        other = next(end for end in cu_seqlens if not hasattr(end, "__index__"))
        raise SeqloomError(f"cu_seqlens holds {other!r}, no whole number of tokens; give integers") from None
    if not ends or ends[0] != 0 or ends[-1] != len(q) or ends != sorted(ends):
        shown = str(ends) if len(ends) <= 6 else f"[{', '.join(map(str, ends[:3]))}, .., {ends[-1]}]"
        raise SeqloomError(f"cu_seqlens {shown} for {len(q)} tokens: it must rise from 0 to {len(q)}")
    if prefixes is not None and len(prefixes) != len(ends) - 1:
        raise SeqloomError(f"{len(prefixes)} prefixes for {len(ends) - 1} documents; give one for each, 0 for none")
    lengths, shown = [stop - start for start, stop in pairwise(ends)], dict(enumerate(prefixes or ()))
    context = bind_single_rank(lengths, device=q.device, prefixes=shown)
    return attention(q, k, v, context, causal=causal, window=window, scale=scale, kernels=kernels)


def _of_one_width(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Fill up the narrower of keys and values with zeros, which change no logit and no other column of the output."""
    width = max(q.shape[-1], v.shape[-1])
    return tuple(torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))


class _Attention(torch.autograd.Function):
    """The autograd node of an attention call."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        context: Context,
        groups: Groups,
        with_lse: bool,
        sinks: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        shape: LatentShape | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        expansion = None if weight is None or shape is None else Expansion(shape, weight, q.shape[1])
        ctx.times = context.times
        with nullcontext() if ctx.times is None else ctx.times.attention():
            out, lse, saved = attention_forward(q, k, v, context, groups, with_lse, sinks, expansion)
        ctx.groups, ctx.kv_heads, ctx.shape, ctx.heads = groups, k.shape[1], shape, q.shape[1]
        ctx.redistribute = context.attention_redistribute if expansion is None else None
        latents = None if expansion is None else k  # groups in which they do not travel save keys and values
        ctx.save_for_backward(*chain.from_iterable(saved), sinks, weight, latents)
        if lse is None:
            return out
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        # Only a backward of the backward needs torch's guard, which costs every layer.
        run = _Attention._once if torch.is_grad_enabled() else _Attention._gradients
        return run(ctx, *grad_outputs)

    @staticmethod
    @once_differentiable
    def _once(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        return _Attention._gradients(ctx, *grad_outputs)

    @staticmethod
    def _gradients(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        *tensors, sinks, weight, latents = ctx.saved_tensors
        width = len(Saved._fields)
        saved = [Saved(*tensors[start : start + width]) for start in range(0, len(tensors), width)]
        expansion = None
        if ctx.shape is not None:
            expansion = Expansion(ctx.shape, weight, ctx.heads, with_gradient=ctx.needs_input_grad[7])
        arguments = (grad_outputs[0], saved, ctx.groups, ctx.redistribute, ctx.kv_heads, sinks, expansion, latents)
        with nullcontext() if ctx.times is None else ctx.times.attention():
            *gradients, dsinks = attention_backward(*arguments)
        dweight = None if expansion is None else expansion.gradient()
        return *gradients, None, None, None, dsinks, dweight, None


def attention_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    context: Context,
    groups: Groups,
    with_lse: bool = False,
    sinks: torch.Tensor | None = None,
    expansion: Expansion | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, list[Saved]]:
    """Run the forward of a planned call, outside of autograd.

    With an expansion k has latents and v no heads, in the layout of attention already.

    Returns out [tokens, heads, dim], lse [heads, tokens] if asked for, and what the backward of every group needs.
    """
    q, k, v = last_contiguous(q), last_contiguous(k), last_contiguous(v)
    redistribute = context.attention_redistribute if expansion is None else None
    saved_attention = cast("SavedAttention", context.saved_attention)
    if saved_attention is not None and saved_attention.replaying:
        return saved_attention.replay(q, k, v, groups, redistribute, expansion)
    if redistribute is not None:
        q, k, v = redistribute.to_target(q, k, v)
    out, lse, saved = _forward_groups(q, k, v, groups, with_lse, sinks, expansion)
    if redistribute is not None:
        (out,) = redistribute.to_source(out)
        lse = None if lse is None else redistribute.to_source(lse.T)[0].T
    if saved_attention is not None:
        saved_attention.record(out, lse, saved)
    return out, lse, saved


def attention_backward(
    dout: torch.Tensor,
    saved: list[Saved],
    groups: Groups,
    redistribute: TokenRedistribute | None,
    kv_heads: int,
    sinks: torch.Tensor | None = None,
    expansion: Expansion | None = None,
    latents: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return dq, dk, dv of all tokens from dout [tokens, heads, dim], the inverse of `attention_forward`; and dsinks.

    The latter is what this rank's part of the softmax adds to the gradient; the sum over all ranks is the gradient.
    With an expansion `latents` are those of the call, and dk is theirs; the expansion has the gradient of the weight.
    """
    dout = last_contiguous(dout)
    if redistribute is not None:
        (dout,) = redistribute.to_target(dout)
    dsinks = None if sinks is None else torch.zeros(sinks.shape, dtype=sum_dtype(dout.dtype), device=dout.device)
    if groups:
        gradients = _backward_groups(dout, saved, groups, sinks, dsinks, expansion, latents)
    elif latents is not None:  # no group of this rank holds a token, nor does the rank
        gradients = torch.zeros_like(dout), torch.zeros_like(latents), torch.zeros_like(latents[:, :0])
    else:
        shape = (len(dout), kv_heads, dout.shape[2])
        gradients = torch.zeros_like(dout), dout.new_zeros(shape), dout.new_zeros(shape)
    if redistribute is not None:
        gradients = redistribute.to_source(*gradients)
    dq, dk, dv = gradients
    return dq, dk, dv, None if sinks is None or dsinks is None else dsinks.to(sinks.dtype)


def last_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with a contiguous last axis, as kernels want it; the other axes may be strided."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


# -- groups -----------------------------------------------------------------------------------------------------------


def _forward_groups(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    groups: Groups,
    with_lse: bool,
    sinks: torch.Tensor | None,
    expansion: Expansion | None,
) -> tuple[torch.Tensor, torch.Tensor | None, list[Saved]]:
    if len(groups) == 1 and groups[0].kernel_only:  # without messages every microsecond of the host counts
        if expansion is not None:
            k, v = expansion.of_heads(slice(None))(k).tensor_split(2, dim=1)
        out, lse = cast("PreparedAttention", groups[0].inner).forward(q, k, v)
        if sinks is not None:
            out, lse = _add_sinks(out, lse, sinks)
        saved = Saved(q, k, v, _as(out, q.dtype), lse)
        return saved.out, lse if with_lse else None, [saved]
    inputs = [_rows_of(group, (q, k, v), alone=len(groups) == 1, expansion=expansion) for group in groups]
    queue = OverlapQueue(lambda task: _runs(groups[task.group]).forward_runs[task.run].forward(*inputs[task.group]))
    if len(groups) == 1:
        out, saved = _forward_group(groups, 0, inputs[0], queue, sinks, expansion)
        return out, _local_lse(groups[0], saved) if with_lse else None, [saved]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[1], len(q)), dtype=sum_dtype(q.dtype), device=q.device) if with_lse else None
    found = []
    for number, group in enumerate(groups):
        part, saved = _forward_group(groups, number, inputs[number], queue, sinks, expansion)
        put(out, group.rows, part)
        if group.ulysses is None and isinstance(group.rows, slice):
            saved = saved._replace(out=out.detach()[group.rows])  # the same numbers, held once
        if lse is not None:
            put(lse.T, group.rows, _local_lse(group, saved).T)
        found.append(saved)
    return out, lse, found


def _rows_of(group: GroupAttention, tensors: Tensors, *, alone: bool, expansion: Expansion | None) -> Tensors:
    """Return q, k, v of a group's rows; latents as they are where these travel, else keys and values made from them."""
    q, k, v = tensors if alone else (take(x, group.rows) for x in tensors)
    if expansion is not None and not group.latent:
        k, v = expansion.of_heads(slice(None))(k).tensor_split(2, dim=1)
    return q, k, v


def _to_heads(group: GroupAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    """Exchange q, k, v of a group with Ulysses."""
    if group.ulysses is None:
        return q, k, v
    if not group.latent:
        return group.ulysses.to_heads(q, k, v)
    q, k = group.ulysses.to_heads(q, k)
    return q, k, k[:, :0]


def _forward_group(
    groups: Groups,
    number: int,
    inputs: Tensors,
    queue: OverlapQueue,
    sinks: torch.Tensor | None,
    expansion: Expansion | None,
) -> tuple[torch.Tensor, Saved]:
    """Return the output [rows, heads, dim] of a group's rows, and what its backward needs."""
    group, inner = groups[number], groups[number].inner
    q, k, v = _to_heads(group, *inputs)
    own = expansion.of_heads(own_heads(group)) if expansion is not None and group.latent else None
    if isinstance(inner, LocalRuns):
        outs, sums = zip(*queue.results(number, len(inner.forward_runs)), strict=True)
        out, lse = _cat(outs), _cat(sums, dim=1)
    elif isinstance(inner, ContextParallelAttention):
        tasks = group.schedule.forward
        out, lse = inner.forward(q, k, v, lambda exchange: queue.run(tasks.get(exchange, ())), own)
    else:
        out, lse = inner.forward(q, *((k, v) if own is None else own(k).tensor_split(2, dim=1)))
    if sinks is not None:
        out, lse = _add_sinks(out, lse, sinks[own_heads(group)])
    saved = _saved_for_backward(group, Saved(q, k, v, _as(out, q.dtype), lse))
    return saved.out if group.ulysses is None else group.ulysses.to_tokens(saved.out), saved


def _saved_for_backward(group: GroupAttention, saved: Saved) -> Saved:
    if isinstance(group.inner, PrefixAttention):
        return group.inner.saved_for_backward(saved, exchanged=group.ulysses is not None)
    return saved


def _backward_groups(
    dout: torch.Tensor,
    saved: list[Saved],
    groups: Groups,
    sinks: torch.Tensor | None,
    dsinks: torch.Tensor | None,
    expansion: Expansion | None,
    latents: torch.Tensor | None,
) -> Gradients:
    """Return dq, dk, dv; adds to `dsinks`."""
    if len(groups) == 1 and groups[0].kernel_only:
        _add_sink_gradients(dsinks, sinks, groups[0], dout, saved[0])
        dq, dk, dv = cast("PreparedAttention", groups[0].inner).backward(dout, saved[0])
        dk, dv = _latent_gradients(groups[0], dk, dv, expansion, latents)
        return _as(dq, dout.dtype), _as(dk, dout.dtype), _as(dv, dout.dtype)
    douts = [dout] if len(groups) == 1 else [take(dout, group.rows) for group in groups]
    queue = OverlapQueue(
        lambda task: _runs(groups[task.group]).backward_runs[task.run].backward(douts[task.group], saved[task.group])
    )
    rows = [None if latents is None else latents if len(groups) == 1 else take(latents, group.rows) for group in groups]
    if len(groups) == 1:
        return _backward_group(groups, 0, dout, saved[0], queue, sinks, dsinks, expansion, rows[0])
    totals: list[torch.Tensor] = []
    for number, group in enumerate(groups):
        own = (douts[number], saved[number], queue, sinks, dsinks, expansion, rows[number])
        parts = _backward_group(groups, number, *own)
        if not totals:
            totals = [part.new_empty((len(dout), *part.shape[1:])) for part in parts]
        for total, part in zip(totals, parts, strict=True):
            put(total, group.rows, part)
    return totals[0], totals[1], totals[2]


def _backward_group(
    groups: Groups,
    number: int,
    dout: torch.Tensor,
    saved: Saved,
    queue: OverlapQueue,
    sinks: torch.Tensor | None,
    dsinks: torch.Tensor | None,
    expansion: Expansion | None,
    latents: torch.Tensor | None,
) -> Gradients:
    """Return dq, dk, dv of a group's rows from dout [rows, heads, dim], in the dtype of q; adds to `dsinks`."""
    group, inner, dtype = groups[number], groups[number].inner, saved.q.dtype
    own = expansion.of_heads(own_heads(group)) if expansion is not None and group.latent else None
    if group.ulysses is not None:
        (dout,) = group.ulysses.to_heads(dout)
    _add_sink_gradients(dsinks, sinks, group, dout, saved)
    if isinstance(inner, LocalRuns):
        dq, dk, dv = (_cat(parts) for parts in zip(*queue.results(number, len(inner.backward_runs)), strict=True))
    elif isinstance(inner, ContextParallelAttention):
        tasks = group.schedule.backward
        dq, dk, dv = inner.backward(dout, saved, lambda exchange: queue.run(tasks.get(exchange, ())), own)
    elif own is not None:
        k, v = own(saved.k).tensor_split(2, dim=1)
        dq, dk, dv = inner.backward(dout, saved._replace(k=k, v=v))
        dk, dv = own.backward(saved.k, dk, dv)
    else:
        dq, dk, dv = inner.backward(dout, saved)
    if group.ulysses is not None:
        dq, dk, dv = group.ulysses.gradients_to_tokens(dq, dk, dv, dtype)
    dk, dv = _latent_gradients(group, dk, dv, expansion, latents)
    return _as(dq, dtype), _as(dk, dtype), _as(dv, dtype)


def _latent_gradients(
    group: GroupAttention,
    dk: torch.Tensor,
    dv: torch.Tensor,
    expansion: Expansion | None,
    latents: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of a group's latents, and nothing, where its keys and values were made before they moved."""
    if expansion is None or latents is None or group.latent:
        return dk, dv
    return expansion.of_heads(slice(None)).backward(latents, dk, dv)


def _runs(group: GroupAttention) -> LocalRuns:
    """Only local groups are in runs, and only runs are overlap tasks."""
    return cast("LocalRuns", group.inner)


def _cat(parts: tuple[torch.Tensor, ...], dim: int = 0) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`Tensor.to`, without asking torch where there is nothing to do: this runs in every layer."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def _local_lse(group: GroupAttention, saved: Saved) -> torch.Tensor:
    """Return the lse [heads, rows] of a group's own rows, all heads."""
    if group.ulysses is None:
        return saved.lse
    return group.ulysses.to_tokens(saved.lse.T.unsqueeze(-1)).squeeze(-1).T


# -- sinks: a key of its own for every head, that all tokens see and that has no value. It only adds to the sum of a
# softmax, so kernels need not know it: results are scaled when all keys have been seen, and a backward that is given
# the scaled output and the larger log-sum-exp computes the right gradients.


def own_heads(group: GroupAttention) -> slice:
    """Return the heads that this rank computes in a group."""
    if group.ulysses is None:
        return slice(None)
    return slice(*group.ulysses.split.query[group.ulysses.bound.ulysses_index])


def _add_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [rows, heads, dim] and lse [heads, rows] of a softmax that has the sinks [heads] too."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    share = torch.exp(lse - total).T[..., None]
    return (out * share).to(out.dtype), total


def _add_sink_gradients(
    dsinks: torch.Tensor | None,
    sinks: torch.Tensor | None,
    group: GroupAttention,
    dout: torch.Tensor,
    saved: Saved,
) -> None:
    """Add what a group's rows, in the layout of its kernels, give to the gradients of sinks."""
    if sinks is None or dsinks is None:
        return
    heads, wide = own_heads(group), dsinks.dtype
    delta = (saved.out.to(wide) * dout.to(wide)).sum(-1)
    share = torch.exp(sinks[heads].to(wide)[:, None] - saved.lse)
    dsinks[heads] -= (share * delta.T).sum(1)


# -- selective activation checkpointing -------------------------------------------------------------------------------


class SavedAttention:
    """Attention results that selective checkpointing keeps of one layer; its recomputation replays them in order.

    The first run of the layer records. A replay runs no kernel, no ring and no gather; q, k and v are recomputed, and
    exchanged once more where there is Ulysses or another layout, as plans are priced.
    """

    def __init__(self, hooks: tuple[Pack, Unpack] | None = None) -> None:
        """Start empty. What is kept is packed and unpacked like tensors that autograd saves; None: kept as it is."""
        self._pack, self._unpack = hooks or (_same, _same)
        # Of every call: out, lse, and (out, lse) of every group.
        self._records: list[tuple[Any, Any, list[tuple[Any, Any]]]] = []
        self._next: int | None = None

    @property
    def replaying(self) -> bool:
        """Whether calls are answered from what was recorded."""
        return self._next is not None

    def begin(self) -> None:
        """Begin a run of the layer: the first one records, others replay."""
        self._next = 0 if self._records else None

    def record(self, out: torch.Tensor, lse: torch.Tensor | None, saved: list[Saved]) -> None:
        """Keep the results of a call, outside of any graph: the tensors given may become outputs of a graph."""
        groups = [(self._pack(tensors.out.detach()), self._pack(tensors.lse.detach())) for tensors in saved]
        self._records.append((self._pack(out.detach()), None if lse is None else self._pack(lse.detach()), groups))

    def replay(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        groups: Groups,
        redistribute: TokenRedistribute | None,
        expansion: Expansion | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, list[Saved]]:
        """Return the results of the next recorded call, given its recomputed inputs; see `attention_forward`."""
        number = cast("int", self._next)
        self._next = number + 1
        out, lse, parts = self._records[number]
        if redistribute is not None:
            q, k, v = redistribute.to_target(q, k, v)
        saved = []
        for group, part in zip(groups, parts, strict=True):
            inputs = _rows_of(group, (q, k, v), alone=len(groups) == 1, expansion=expansion)
            own_q, own_k, own_v = _to_heads(group, *inputs)
            saved.append(_saved_for_backward(group, Saved(own_q, own_k, own_v, *map(self._unpack, part))))
        return self._unpack(out).detach(), None if lse is None else self._unpack(lse).detach(), saved


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
