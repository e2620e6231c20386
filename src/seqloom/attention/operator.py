"""Attention as an operator of torch: opaque to torch.compile, which sees shapes and nothing of what happens inside.

A compiled graph holds tensors only, so the context comes as a ticket, and what backward needs leaves as one. What a
graph owns must not stay behind in a ticket, since a compiler uses memory again after its last use in the graph. So q,
k, v and the output are saved by the graph; the ticket has the log-sum-exp and what exchanges delivered.

A call with a document in pieces also writes into the carry of its context. Torch is not told: doing it twice does no
harm, and its output is used, so it is never left out.

Importing this file makes `torch.ops.seqloom.attention` known; `attention` calls it where it is given a ticket.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.library import custom_op

from seqloom.attention.bound import bound_calls
from seqloom.attention.calls import GroupCall
from seqloom.attention.carried import Carried
from seqloom.attention.checks import Call
from seqloom.attention.kernels.kernel import Gradients, Saved
from seqloom.attention.rows import take
from seqloom.attention.tickets import Visit, holder, ticket
from seqloom.attention.unified import backward_groups, forward_groups, last_contiguous
from seqloom.comm.remap import Crossing


class _Kept(NamedTuple):
    """What a call keeps for its backward beside q, k, v and out.

    Attributes:
        rows: of the call that are tokens.
        calls: the groups.
        of_groups: for each of them all that it saved, where exchanges delivered that; else its log-sum-exp.
        crossing: which brought q, k and v into the layout of attention, if that is another.
    """

    rows: int
    calls: tuple[GroupCall, ...]
    of_groups: list[Saved | torch.Tensor]
    crossing: Crossing | None

    @classmethod
    def of(cls, rows: int, calls: tuple[GroupCall, ...], saved: list[Saved], crossing: Crossing | None) -> _Kept:
        """Leave out what the graph saves."""
        delivered = [crossing is not None or call.exchange is not None for call in calls]
        return cls(rows, calls, [s if own else s.lse for own, s in zip(delivered, saved, strict=True)], crossing)

    def saved(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> list[Saved]:
        """Return all that the groups saved, given what the graph did."""
        found = []
        for call, kept in zip(self.calls, self.of_groups, strict=True):
            rows = call.rows
            if isinstance(kept, Saved):
                found.append(kept)
                continue
            of_graph = Saved(take(q, rows), take(k, rows), take(v, rows), take(out, rows), kept)
            found.append(call.inner.saved(of_graph, delivered=False) if isinstance(call.inner, Carried) else of_graph)
        return found


@custom_op(
    "seqloom::attention",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor context, bool causal, int? window, float? scale, float dropout, "
    "float? softcap) -> (Tensor out, Tensor kept)",
)
def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    context: torch.Tensor,
    causal: bool,
    window: int | None,
    scale: float | None,
    dropout: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `attention`; `context` is a ticket, and so is what is kept.

    On a rank without tokens one row may come nevertheless, for models that cannot be called with none; nobody sees it.
    """
    held, given = holder(context), len(q)
    bound, layer = held if isinstance(held, Visit) else (held, None)
    rows = given if given != 1 else min(bound.tokens, 1)
    q, k, v = (last_contiguous(x[:rows]) for x in (q, k, v))
    calls = bound_calls(q, k, v, bound, Call(causal, window, scale, None, dropout, softcap), layer)
    crossing = bound.around_attention
    if crossing is not None:
        q, k, v = crossing.forward(q, k, v)
    out, _, saved = forward_groups(calls, q, k, v, False)
    if crossing is not None:
        (out,) = crossing.reversed().forward(out)
    return _of_rows(out, given), ticket(_Kept.of(rows, calls, saved, crossing))


@_forward.register_fake
def _(q: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), torch.empty(1, dtype=torch.int64)


@custom_op(
    "seqloom::attention_backward",
    mutates_args=(),
    schema="(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor kept) -> (Tensor, Tensor, Tensor)",
)
def _backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, kept: torch.Tensor
) -> Gradients:
    """Return dq, dk, dv; `kept` is the forward's."""
    found: _Kept = holder(kept)
    given, crossing = len(q), found.crossing
    dout, q, k, v, out = (last_contiguous(x[: found.rows]) for x in (dout, q, k, v, out))
    if crossing is not None:
        (dout,) = crossing.there(dout)
    if found.calls:
        gradients = backward_groups(found.calls, dout, found.saved(q, k, v, out))
    else:  # no group of this rank holds a token
        gradients = tuple(x.new_zeros((len(dout), *x.shape[1:])) for x in (q, k, v))
    if crossing is not None:
        gradients = crossing.backward(*gradients)
    dq, dk, dv = (_of_rows(each, given) for each in gradients)
    return dq, dk, dv


@_backward.register_fake
def _(_dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object) -> Gradients:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)


def _gradients(ctx: Any, dout: torch.Tensor, _: object) -> tuple[torch.Tensor | None, ...]:
    return *_backward(dout, *ctx.saved_tensors), *[None] * 6


_forward.register_autograd(_gradients, setup_context=_save)


def _of_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a tensor in memory of its own, as the operator promises, with rows of zeros added where some lack."""
    if len(tensor) < rows:
        return tensor.new_zeros((rows, *tensor.shape[1:]))
    alone = tensor.is_contiguous() and tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes() > 0
    return tensor if alone else tensor.clone(memory_format=torch.contiguous_format)
