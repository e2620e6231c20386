"""Attention over packed documents on one device: the call that replaces a varlen or a document-masked one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from seqloom.attention.kernels.kernel import Kernel
from seqloom.attention.unified import attention
from seqloom.comm.alone import bind_alone
from seqloom.errors import SeqloomError


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
    context = bind_alone(lengths, device=q.device)
    return attention(q, k, v, context, causal=causal, window=window, scale=scale, kernels=kernels)


def _short(ends: list[int]) -> str:
    """[0, 5, 9, .., 400] for a long list."""
    if len(ends) <= 6:
        return str(ends)
    return f"[{', '.join(map(str, ends[:3]))}, .., {ends[-1]}]"
