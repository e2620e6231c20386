"""The truth about attention: one process, float64, a dense mask per document, a plain softmax, autograd.

Shares nothing with `seqloom.attention`. Packs are a few thousand tokens at most: memory is quadratic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Truth(NamedTuple):
    """What attention and its backward should return, float64 (documents one after the other).

    out, dq are [tokens, heads, dim]; dk, dv [tokens, kv_heads, dim]; lse [heads, tokens].
    """

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def attention_truth(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    lengths: Sequence[int],
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    attention_chunk: int | None = None,
    keep: Sequence[torch.Tensor] | None = None,
    prefixes: Sequence[int] = (),
) -> Truth:
    """Return output, log-sum-exp and gradients for documents of these lengths, packed one after the other.

    Args:
        q, dout: [tokens, heads, dim].
        k, v: [tokens, kv_heads, dim].
        lengths: of the documents; they add up to the tokens.
        causal: a token sees itself and what is before it.
        window: how many tokens it sees at most.
        scale: logits are multiplied by it; None: dim ** -0.5.
        softcap: logits are c * tanh(logits / c).
        sinks: [heads], logits of a key without a value; a leaf of these gets its gradient in `grad`.
        attention_chunk: tokens see each other in chunks of so many.
        keep: of every document, what its weights are multiplied with (dropout), [heads, queries, keys].
        prefixes: of every document, how many of its first tokens see each other; none: 0.
    """
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    sink = None if sinks is None else sinks.double()
    shared = q.shape[1] // k.shape[1]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    outs, sums = [], []
    kept = [1.0] * len(lengths) if keep is None else keep
    shown = prefixes or (0,) * len(lengths)
    parts = (x.split(list(lengths)) for x in (q, k, v))
    for queries, keys, values, factor, prefix in zip(*parts, kept, shown, strict=True):
        keys, values = (x.repeat_interleave(shared, dim=1) for x in (keys, values))
        logits = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        mask = visible(len(queries), causal, window, attention_chunk, prefix)
        logits = logits.masked_fill(~mask, -torch.inf)
        if sink is not None:  # a last key for every query, whose weight goes nowhere
            logits = torch.cat([logits, sink[:, None, None].expand(-1, len(queries), 1)], dim=-1)
        weights = torch.softmax(logits, dim=-1)[..., : len(queries)] * factor
        outs.append(torch.einsum("hqk,khd->qhd", weights, values))
        sums.append(torch.logsumexp(logits, dim=-1))
    out, lse = torch.cat(outs), torch.cat(sums, dim=1)
    out.backward(dout.double())
    return Truth(out.detach(), lse.detach(), *(x.grad for x in (q, k, v)))


def visible(
    length: int, causal: bool, window: int | None, attention_chunk: int | None = None, prefix: int = 0
) -> torch.Tensor:
    """Say which query (row) sees which key (column) of a document, bool[length, length]."""
    position = torch.arange(length)
    behind = position[:, None] - position
    mask = torch.ones(length, length, dtype=torch.bool)
    if causal:
        mask &= behind >= 0
    if window is not None:
        mask &= behind < window
    if attention_chunk is not None:
        mask &= position[:, None] // attention_chunk == position // attention_chunk
    mask[:prefix, :prefix] = True
    return mask


def difference(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Return norm(found - truth) / norm(truth); of two zeros, 0."""
    norm = truth.double().norm().item()
    away = (found.double() - truth.double()).norm().item()
    return away / norm if norm else away
