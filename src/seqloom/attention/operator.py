"""Tickets: tensors that stand for Python objects where only tensors can go, inside a compiled graph.

The memory of a ticket belongs to the object: whoever keeps the ticket, or a view of it, keeps the object, and nobody
else does. So a graph that saves a ticket for its backward saves the object, and what drops the one drops the other.
"""

from __future__ import annotations

import sys
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch.library import custom_op

from seqloom.attention.api import backward_groups, forward_groups, last_contiguous
from seqloom.attention.context_parallel.kv_cache import PrefixAttention
from seqloom.attention.context_parallel.overlap import GroupCall
from seqloom.attention.kernels.interface import Gradients, Saved
from seqloom.attention.plan import Call, bound_calls
from seqloom.dist import Context
from seqloom.dist.rows import take
from seqloom.dist.token_layout import TokenRedistribute

_WIDTH = torch.int64.itemsize


class _Held(bytearray):
    """The memory of a ticket, which is its number, and the object."""

    value: object


class LayerVisit(NamedTuple):
    """A context as one layer is called with it: a graph serves all layers, so it cannot tell which one it is."""

    context: Context
    layer: int | None


_numbers = count(1)
_held: WeakValueDictionary[int, _Held] = WeakValueDictionary()


def opaque_handle(value: object) -> torch.Tensor:
    """Return a new ticket for an object, int64[1] on the CPU. The object must not hold it: nothing would free them."""
    number = next(_numbers)
    held = _Held(number.to_bytes(_WIDTH, sys.byteorder))
    held.value = value
    _held[number] = held
    return torch.frombuffer(held, dtype=torch.int64)  # keeps `held` as long as its storage lives


def handle_object(given: torch.Tensor) -> Any:
    """Return the object that a ticket stands for."""
    return _held[int(given)].value


# ---- merged: attention.operator
# Attention as an operator of torch: opaque to torch.compile, which sees shapes and nothing of what happens inside.
#
# A compiled graph holds tensors only, so the context comes as a ticket, and what backward needs leaves as one. What
# a
# graph owns must not stay behind in a ticket, since a compiler uses memory again after its last use in the graph.
# So q,
# k, v and the output are saved by the graph; the ticket has the log-sum-exp and what exchanges delivered.
#
# A call with a document in pieces also writes into the carry of its context. Torch is not told: doing it twice does
# no
# harm, and its output is used, so it is never left out.
#
# Importing this file makes `torch.ops.seqloom.attention` known; `attention` calls it where it is given a ticket.


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
    crossing: TokenRedistribute | None

    @classmethod
    def of(
        cls, rows: int, calls: tuple[GroupCall, ...], saved: list[Saved], crossing: TokenRedistribute | None
    ) -> _Kept:
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
            found.append(
                call.inner.saved(of_graph, delivered=False) if isinstance(call.inner, PrefixAttention) else of_graph
            )
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
    held, given = handle_object(context), len(q)
    bound, layer = held if isinstance(held, LayerVisit) else (held, None)
    rows = given if given != 1 else min(bound.tokens, 1)
    q, k, v = (last_contiguous(x[:rows]) for x in (q, k, v))
    calls = bound_calls(q, k, v, bound, Call(causal, window, scale, None, dropout, softcap), layer)
    crossing = bound.attention_redistribute
    if crossing is not None:
        q, k, v = crossing.forward(q, k, v)
    out, _, saved = forward_groups(calls, q, k, v, False)
    if crossing is not None:
        (out,) = crossing.reversed().forward(out)
    return _of_rows(out, given), opaque_handle(_Kept.of(rows, calls, saved, crossing))


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
    found: _Kept = handle_object(kept)
    given, crossing = len(q), found.crossing
    dout, q, k, v, out = (last_contiguous(x[: found.rows]) for x in (dout, q, k, v, out))
    if crossing is not None:
        (dout,) = crossing.to_target(dout)
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
