"""What attention refuses, before anything is communicated: the value, the rule and the way out."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from seqloom.attention.carry import Carry
from seqloom.attention.kernels.kernel import Kernel
from seqloom.comm.context import Context
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
                    "round; bind every round with pieces= of the plan and carry= of the step, or plan whole documents"
                )
            continue
        if not isinstance(context.carry, Carry):
            raise SeqloomError(
                f"document {document} is in pieces, and the context has {context.carry!r} to carry keys from one to "
                "the next; bind all rounds of a step with carry=one Carry()"
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
