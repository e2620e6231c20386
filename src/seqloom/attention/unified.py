"""Unified attention: Ulysses inside, ring outside, over all groups of a rank, as one autograd node.

q, k, v of own tokens, all heads
    -> Ulysses exchange ->  all tokens of the ring index, own heads
    -> ring or gather   ->  output over the keys of all ring indices
    -> Ulysses exchange ->  output of own tokens, all heads

Where the model's tokens lie in another layout than attention's, q, k and v cross over before, and the output after.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from seqloom.attention.bound import GroupCall, bound_calls
from seqloom.attention.checks import Call
from seqloom.attention.kernels.kernel import Gradients, Kernel, Saved
from seqloom.attention.merge import sum_dtype
from seqloom.attention.rows import put, take
from seqloom.comm.context import Context
from seqloom.comm.remap import cross
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

    Returns:
        [tokens, heads, dim].
    """
    call = Call(causal, window, scale, kernels, dropout, softcap)
    if isinstance(context, torch.Tensor):
        return _in_graph(q, k, v, context, call)
    calls, crossing = bound_calls(q, k, v, context, call), context.around_attention
    if crossing is None:
        return _Attention.apply(q, k, v, calls, False)[0]
    out, _ = _Attention.apply(*cross(crossing, q, k, v), calls, False)
    return cross(crossing.reversed(), out)[0]


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `attention`, and the log of the sum of exponentials of the logits, [heads, tokens], without gradient.

    Costs one exchange more where there is Ulysses.
    """
    calls, crossing = bound_calls(q, k, v, context, Call(causal, window, scale, kernels)), context.around_attention
    if crossing is None:
        return _Attention.apply(q, k, v, calls, True)
    out, lse = _Attention.apply(*cross(crossing, q, k, v), calls, True)
    return cross(crossing.reversed(), out)[0], crossing.back(lse.T)[0].T


def _in_graph(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ticket: torch.Tensor, call: Call) -> torch.Tensor:
    """Return `attention` as one operator of a compiled graph, see `operator.py`; who makes a ticket has loaded it."""
    if call.kernels is not None:
        raise SeqloomError(
            f"kernels={call.kernels!r} in a compiled layer: a graph cannot hold them; leave them out, or do not compile"
        )
    options = (call.causal, call.window, call.scale, call.dropout, call.softcap)
    return torch.ops.seqloom.attention(q, k, v, ticket, *options)[0]


def forward_group(call: GroupCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, Saved]:
    """Return the output [rows, heads, dim] of a group's rows, and what backward needs."""
    if call.exchange is not None:
        q, k, v = call.exchange.to_heads(q, k, v)
    out, lse = call.inner.forward(q, k, v)
    saved = Saved(q, k, v, out.to(q.dtype), lse)
    return saved.out if call.exchange is None else call.exchange.to_tokens(saved.out), saved


def backward_group(call: GroupCall, dout: torch.Tensor, saved: Saved) -> Gradients:
    """Return dq, dk, dv of a group's rows from dout [rows, heads, dim], in the dtype of q."""
    dtype = saved.q.dtype
    if call.exchange is None:
        dq, dk, dv = call.inner.backward(dout, saved)
        return dq.to(dtype), dk.to(dtype), dv.to(dtype)
    (dout,) = call.exchange.to_heads(dout)
    return call.exchange.gradients_to_tokens(*call.inner.backward(dout, saved), dtype)


def forward_groups(
    calls: tuple[GroupCall, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, with_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None, list[Saved]]:
    """Return out [tokens, heads, dim] of all groups, lse [heads, tokens] if asked for, and what backward needs."""
    if len(calls) == 1:
        out, saved = forward_group(calls[0], q, k, v)
        return out, _local_lse(calls[0], saved) if with_lse else None, [saved]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[1], len(q)), dtype=sum_dtype(q.dtype), device=q.device) if with_lse else None
    kept = []
    for call in calls:
        part, saved = forward_group(call, *(take(x, call.rows) for x in (q, k, v)))
        put(out, call.rows, part)
        if call.exchange is None and isinstance(call.rows, slice):
            saved = saved._replace(out=out.detach()[call.rows])  # the same numbers, held once
        if lse is not None:
            put(lse.T, call.rows, _local_lse(call, saved).T)
        kept.append(saved)
    return out, lse, kept


def backward_groups(calls: tuple[GroupCall, ...], dout: torch.Tensor, kept: list[Saved]) -> Gradients:
    """Return dq, dk, dv of all tokens from dout [tokens, heads, dim]."""
    if len(calls) == 1:
        return backward_group(calls[0], dout, kept[0])
    whole: list[torch.Tensor] = []
    for call, saved in zip(calls, kept, strict=True):
        parts = backward_group(call, take(dout, call.rows), saved)
        if not whole:
            whole = [part.new_empty((len(dout), *part.shape[1:])) for part in parts]
        for total, part in zip(whole, parts, strict=True):
            put(total, call.rows, part)
    return whole[0], whole[1], whole[2]


class _Attention(torch.autograd.Function):
    """The one node of an attention call."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, calls: tuple[GroupCall, ...], with_lse: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        q, k, v = (last_contiguous(x) for x in (q, k, v))
        out, lse, kept = forward_groups(calls, q, k, v, with_lse)
        ctx.calls = calls
        ctx.kv_shape = k.shape
        ctx.save_for_backward(*(tensor for saved in kept for tensor in saved))
        if lse is not None:
            ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        dout, tensors, width = grad_outputs[0], ctx.saved_tensors, len(Saved._fields)
        kept = [Saved(*tensors[start : start + width]) for start in range(0, len(tensors), width)]
        if not kept:  # no group of this rank holds a token, nor does the rank
            return torch.zeros_like(dout), dout.new_zeros(ctx.kv_shape), dout.new_zeros(ctx.kv_shape), None, None
        return *backward_groups(ctx.calls, last_contiguous(dout), kept), None, None


def _local_lse(call: GroupCall, saved: Saved) -> torch.Tensor:
    """[heads, rows] of a group's own rows, all heads."""
    if call.exchange is None:
        return saved.lse
    return call.exchange.to_tokens(saved.lse.T.unsqueeze(-1)).squeeze(-1).T


def last_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Kernels want the last axis contiguous; the others may be strided."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()
