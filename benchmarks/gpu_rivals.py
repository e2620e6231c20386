"""What users call today for packed documents on one GPU, and how everything is timed.

Every contestant is a function from q, k, v [tokens, heads, dim] to the output; it is built for a pack of lengths that
the process has not seen, with what does not change from layer to layer (lengths, block mask, index work) made before.
A time is that of the first forward and backward on the pack, on the GPU's clock: the GPU is kept busy while the host
enqueues, so a host that keeps up costs nothing, and one that builds plans first costs it all.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
BUSY_CYCLES = 60_000_000  # about 30 ms


def cumulative(lengths: Sequence[int]) -> torch.Tensor:
    """int32[n + 1] on the GPU."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])).to("cuda", torch.int32)


def varlen(lengths: Sequence[int]) -> Attend:
    """torch's packed flash attention."""
    from torch.nn.attention.varlen import varlen_attn

    ends, longest = cumulative(lengths), max(lengths)
    return lambda q, k, v: varlen_attn(q, k, v, ends, ends, longest, longest, window_size=(-1, 0))


def fa4(lengths: Sequence[int]) -> Attend:
    """FlashAttention-4."""
    from flash_attn.cute import flash_attn_varlen_func

    ends, longest = cumulative(lengths), max(lengths)
    packed = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = flash_attn_varlen_func(q, k, v, causal=True, **packed)
        return out[0] if isinstance(out, tuple) else out

    return attend


class Flex:
    """FlexAttention with a document mask, compiled once; the mask is made outside the timed part."""

    def __init__(self) -> None:
        from torch.nn.attention.flex_attention import flex_attention

        self._attend: Any = torch.compile(flex_attention, dynamic=False)

    def __call__(self, lengths: Sequence[int]) -> Attend:
        from torch.nn.attention.flex_attention import create_block_mask

        tokens = sum(lengths)
        document = torch.repeat_interleave(
            torch.arange(len(lengths), device="cuda"), torch.tensor(list(lengths), device="cuda")
        )

        def sees(batch, head, query, key):
            return (document[query] == document[key]) & (query >= key)

        mask = create_block_mask(sees, None, None, tokens, tokens, device="cuda", _compile=True)

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            batched = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
            out = self._attend(*batched, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
            return out.squeeze(0).transpose(0, 1)

        return attend


def sdpa(lengths: Sequence[int]) -> Attend:
    """scaled_dot_product_attention, document by document."""
    from torch.nn.functional import scaled_dot_product_attention

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        parts = []
        for one in zip(*(tensor.split(list(lengths)) for tensor in (q, k, v)), strict=True):
            batched = (tensor.transpose(0, 1).unsqueeze(0) for tensor in one)
            out = scaled_dot_product_attention(*batched, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
            parts.append(out.squeeze(0).transpose(0, 1))
        return torch.cat(parts)

    return attend


def tensors(tokens: int, heads: int, kv_heads: int, dim: int = 128) -> tuple[torch.Tensor, ...]:
    """q, k, v that want gradients, and dout; bf16."""

    def draw(count: int) -> torch.Tensor:
        return torch.randn(tokens, count, dim, device="cuda", dtype=torch.bfloat16)

    q, k, v = (draw(count).requires_grad_() for count in (heads, kv_heads, kv_heads))
    return q, k, v, draw(heads)


def time_ms(attend: Attend, inputs: tuple[torch.Tensor, ...]) -> float:
    """Milliseconds of one forward and backward."""
    *wanted, dout = inputs
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    begin.record()
    torch.autograd.grad(attend(*wanted), wanted, dout)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def median_ms(attend: Attend, inputs: tuple[torch.Tensor, ...], repeats: int) -> float:
    """Median of several runs after one that does not count: warm."""
    time_ms(attend, inputs)
    return statistics.median(time_ms(attend, inputs) for _ in range(repeats))
