"""Unified attention: Ulysses inside, ring outside, over all groups of a rank, as one autograd node.

q, k, v of own tokens, all heads
    -> Ulysses exchange ->  all tokens of the ring index, own heads
    -> ring or gather   ->  output over the keys of all ring indices
    -> Ulysses exchange ->  output of own tokens, all heads

Groups come in the order of the work, the same on all ranks. Documents that lie on this rank alone are computed while
others wait for messages, see `fillers.py`.

Where the model's tokens lie in another layout than attention's, q, k and v cross over before, and the output after.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from seqloom.attention.context_parallel.kv_cache import PrefixAttention
from seqloom.attention.context_parallel.overlap import (
    ContextParallelAttention,
    GroupCall,
    OverlapQueue,
    Pieces,
    Tensors,
)
from seqloom.attention.kernels.interface import Gradients, Kernel, Prepared, Saved
from seqloom.attention.lse import sum_dtype
from seqloom.attention.plan import Call, bound_calls
from seqloom.dist.rows import put, take
from seqloom.dist.token_layout import Context, bind_single_rank, redistribute_tokens
from seqloom.errors import SeqloomError


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
    layer: int | None = None,
) -> torch.Tensor:
    """Return the attention of this rank's tokens over their whole documents, wherever these lie.

    All ranks of a group call it, forward and backward, also those without tokens.

    Args:
        q: [tokens, heads, dim], rows as `context.spans` says.
        k, v: [tokens, kv_heads, dim]; query head h reads kv head h // (heads // kv_heads).
        context: what `bind` made of the round; in a layer that `compile_layers` has compiled, its ticket.
        causal: a token sees itself and what is before it; otherwise its whole document.
        window: how many tokens it sees at most, itself included.
        scale: logits are multiplied by it; None: dim ** -0.5.
        kernels: what computes; None: the best this device has.
        dropout: only 0: the result must not depend on the plan.
        softcap: only None.
        layer: number of the layer in the model, another one for every attention of it; needed where a document is in
            pieces, whose keys are kept by layer.

    Returns:
        [tokens, heads, dim].
    """
    call = Call(causal, window, scale, kernels, dropout, softcap)
    if isinstance(context, torch.Tensor):
        return _in_graph(q, k, v, context, call)
    calls, crossing = bound_calls(q, k, v, context, call, layer), context.attention_redistribute
    if crossing is None:
        return _Attention.apply(q, k, v, calls, False)
    out = _Attention.apply(*redistribute_tokens(crossing, q, k, v), calls, False)
    return redistribute_tokens(crossing.reversed(), out)[0]


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
    layer: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `attention`, and the log of the sum of exponentials of the logits, [heads, tokens], without gradient.

    Costs one exchange more where there is Ulysses.
    """
    call = Call(causal, window, scale, kernels)
    calls, crossing = bound_calls(q, k, v, context, call, layer), context.attention_redistribute
    if crossing is None:
        return _Attention.apply(q, k, v, calls, True)
    out, lse = _Attention.apply(*redistribute_tokens(crossing, q, k, v), calls, True)
    return redistribute_tokens(crossing.reversed(), out)[0], crossing.to_source(lse.T)[0].T


def _in_graph(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ticket: torch.Tensor, call: Call) -> torch.Tensor:
    """Return `attention` as one operator of a compiled graph, see `operator.py`; who makes a ticket has loaded it."""
    if call.kernels is not None:
        raise SeqloomError(
            f"kernels={call.kernels!r} in a compiled layer: a graph cannot hold them; leave them out, or do not compile"
        )
    options = (call.causal, call.window, call.scale, call.dropout, call.softcap)
    return torch.ops.seqloom.attention(q, k, v, ticket, *options)[0]


def forward_groups(
    calls: tuple[GroupCall, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, with_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None, list[Saved]]:
    """Return out [tokens, heads, dim] of all groups, lse [heads, tokens] if asked for, and what backward needs."""
    if len(calls) == 1 and calls[0].alone:  # without messages every microsecond of the host counts
        inner = cast("Prepared", calls[0].inner)
        out, lse = calls[0].answer(lambda: inner.forward(q, k, v))
        saved = Saved(q, k, v, _as(out, q.dtype), lse)
        return saved.out, lse if with_lse else None, [saved]
    inputs = [(q, k, v)] if len(calls) == 1 else [tuple(take(x, call.rows) for x in (q, k, v)) for call in calls]
    aside = OverlapQueue(lambda filler: _pieces(calls[filler.call]).forward(filler.piece, *inputs[filler.call]))
    if len(calls) == 1:
        out, saved = _forward_group(calls, 0, inputs[0], aside)
        return out, _local_lse(calls[0], saved) if with_lse else None, [saved]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[1], len(q)), dtype=sum_dtype(q.dtype), device=q.device) if with_lse else None
    kept = []
    for number, call in enumerate(calls):
        part, saved = _forward_group(calls, number, inputs[number], aside)
        put(out, call.rows, part)
        if call.exchange is None and isinstance(call.rows, slice):
            saved = saved._replace(out=out.detach()[call.rows])  # the same numbers, held once
        if lse is not None:
            put(lse.T, call.rows, _local_lse(call, saved).T)
        kept.append(saved)
    return out, lse, kept


def _forward_group(
    calls: tuple[GroupCall, ...], number: int, inputs: Tensors, aside: OverlapQueue
) -> tuple[torch.Tensor, Saved]:
    """Return the output [rows, heads, dim] of a group's rows, and what backward needs."""
    call, inner = calls[number], calls[number].inner
    q, k, v = inputs if call.exchange is None else call.exchange.to_heads(*inputs)

    def compute() -> Tensors:
        if isinstance(inner, Pieces):
            outs, sums = zip(*aside.results(number, len(inner.ahead)), strict=True)
            return _joined(outs), _joined(sums, dim=1)
        if isinstance(inner, ContextParallelAttention):
            return inner.forward(q, k, v, lambda exchange: aside.run(call.fillers.ahead.get(exchange, ())))
        return inner.forward(q, k, v)

    out, lse = call.answer(compute)
    saved = Saved(q, k, v, _as(out, q.dtype), lse)
    if isinstance(inner, PrefixAttention):
        saved = inner.saved(saved, delivered=call.exchange is not None)
    return saved.out if call.exchange is None else call.exchange.to_tokens(saved.out), saved


def backward_groups(calls: tuple[GroupCall, ...], dout: torch.Tensor, kept: list[Saved]) -> Gradients:
    """Return dq, dk, dv of all tokens from dout [tokens, heads, dim]."""
    if len(calls) == 1 and calls[0].alone:
        dq, dk, dv = cast("Prepared", calls[0].inner).backward(dout, kept[0])
        return _as(dq, dout.dtype), _as(dk, dout.dtype), _as(dv, dout.dtype)
    given = [dout] if len(calls) == 1 else [take(dout, call.rows) for call in calls]
    aside = OverlapQueue(
        lambda filler: _pieces(calls[filler.call]).backward(filler.piece, given[filler.call], kept[filler.call])
    )
    if len(calls) == 1:
        return _backward_group(calls, 0, dout, kept[0], aside)
    whole: list[torch.Tensor] = []
    for number, (call, saved) in enumerate(zip(calls, kept, strict=True)):
        parts = _backward_group(calls, number, given[number], saved, aside)
        if not whole:
            whole = [part.new_empty((len(dout), *part.shape[1:])) for part in parts]
        for total, part in zip(whole, parts, strict=True):
            put(total, call.rows, part)
    return whole[0], whole[1], whole[2]


def _backward_group(
    calls: tuple[GroupCall, ...], number: int, dout: torch.Tensor, saved: Saved, aside: OverlapQueue
) -> Gradients:
    """Return dq, dk, dv of a group's rows from dout [rows, heads, dim], in the dtype of q."""
    call, inner, dtype = calls[number], calls[number].inner, saved.q.dtype
    if isinstance(inner, Pieces):
        dq, dk, dv = (_joined(parts) for parts in zip(*aside.results(number, len(inner.back)), strict=True))
        return _as(dq, dtype), _as(dk, dtype), _as(dv, dtype)
    if call.exchange is not None:
        (dout,) = call.exchange.to_heads(dout)
    if isinstance(inner, ContextParallelAttention):
        found = inner.backward(dout, saved, lambda exchange: aside.run(call.fillers.back.get(exchange, ())))
    else:
        found = inner.backward(dout, saved)
    if call.exchange is not None:
        return call.exchange.gradients_to_tokens(*found, dtype)
    dq, dk, dv = found
    return _as(dq, dtype), _as(dk, dtype), _as(dv, dtype)


def _pieces(call: GroupCall) -> Pieces:
    """Only local calls are in pieces, and only pieces are fillers."""
    return cast("Pieces", call.inner)


def _joined(parts: tuple[torch.Tensor, ...], dim: int = 0) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class _Attention(torch.autograd.Function):
    """The one node of an attention call."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, calls: tuple[GroupCall, ...], with_lse: bool
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        q, k, v = last_contiguous(q), last_contiguous(k), last_contiguous(v)
        out, lse, kept = forward_groups(calls, q, k, v, with_lse)
        ctx.calls = calls
        ctx.kv_shape = k.shape
        ctx.save_for_backward(*chain.from_iterable(kept))
        if lse is None:
            return out
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        # Only where a graph of the backward is asked for does anybody need torch's guard, which costs every layer.
        run = _Attention._once if torch.is_grad_enabled() else _Attention._gradients
        return run(ctx, *grad_outputs)

    @staticmethod
    @once_differentiable
    def _once(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        return _Attention._gradients(ctx, *grad_outputs)

    @staticmethod
    def _gradients(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        dout, tensors, width = grad_outputs[0], ctx.saved_tensors, len(Saved._fields)
        kept = [Saved(*tensors[start : start + width]) for start in range(0, len(tensors), width)]
        if not kept:  # no group of this rank holds a token, nor does the rank
            return torch.zeros_like(dout), dout.new_zeros(ctx.kv_shape), dout.new_zeros(ctx.kv_shape), None, None
        return *backward_groups(ctx.calls, last_contiguous(dout), kept), None, None


def _as(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`Tensor.to`, without asking torch where there is nothing to do: this runs in every layer."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def _local_lse(call: GroupCall, saved: Saved) -> torch.Tensor:
    """[heads, rows] of a group's own rows, all heads."""
    if call.exchange is None:
        return saved.lse
    return call.exchange.to_tokens(saved.lse.T.unsqueeze(-1)).squeeze(-1).T


def last_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Kernels want the last axis contiguous; the others may be strided."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


# ---- merged: attention.packed
# Attention over packed documents on one device: the call that replaces a varlen or a document-masked one.


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
) -> torch.Tensor:
    """Return the attention of every document over itself.

    Does the index work of the pack at every call. A model of many layers binds once instead (`bind_alone`, or `bind`
    for several ranks) and gives the context to `attention`.

    Args:
        q: [tokens, heads, dim].
        k, v: [tokens, kv_heads, dim].
        cu_seqlens: [documents + 1] where documents begin, from 0 to `tokens`, on the host: reading it from a GPU
            would wait for the GPU.
        causal, window, scale, kernels: see `attention`.

    Returns:
        [tokens, heads, dim].
    """
    if isinstance(cu_seqlens, torch.Tensor):
        if cu_seqlens.device.type != "cpu":
            raise SeqloomError(
                f"cu_seqlens on {cu_seqlens.device}: it must be on the host, reading it would wait for the GPU; "
                "keep the list of lengths, or bind once per batch with bind_alone"
            )
        cu_seqlens = cu_seqlens.tolist()
    ends = [int(end) for end in cu_seqlens]
    if not ends or ends[0] != 0 or ends[-1] != len(q) or ends != sorted(ends):
        raise SeqloomError(f"cu_seqlens {_short(ends)} for {len(q)} tokens: it must rise from 0 to {len(q)}")
    lengths = [stop - start for start, stop in pairwise(ends)]
    context = bind_single_rank(lengths, device=q.device)
    return attention(q, k, v, context, causal=causal, window=window, scale=scale, kernels=kernels)


def _short(ends: list[int]) -> str:
    """[0, 5, 9, .., 400] for a long list."""
    if len(ends) <= 6:
        return str(ends)
    return f"[{', '.join(map(str, ends[:3]))}, .., {ends[-1]}]"
