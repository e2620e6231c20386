"""What attention benchmarks on a GPU share: packs, tensors, a clock, and torch's varlen flash attention."""

from __future__ import annotations

import inspect
import statistics

import numpy as np
import torch

from seqloom.attention.kernels.triton_attention import Rows
from seqloom.attention.masks import Segments

DIM = 128


def make_packs(tokens: int) -> dict[str, Segments]:
    packs = {
        str(size): Segments.packed([size] * (tokens // size)) for size in (32, 64, 128, 256, 512, 1024, 2048, 8192)
    }
    draws = np.clip(np.random.default_rng(0).lognormal(6.0, 1.2, tokens), 8, tokens // 4).astype(int)
    packs["wiki"] = Segments.packed(draws[: np.searchsorted(np.cumsum(draws), tokens)])
    packs["full 8192x4096"] = Segments.of([(0, 8192, 0, 4096, 0)], causal=False)
    return packs


def pairs_of(segments: Segments) -> int:
    """Pairs of query and key that see each other."""
    rows = Rows.queries(segments)
    which = np.repeat(np.arange(len(segments)), rows.lengths)
    low, high = rows.ends(which, np.concatenate([np.arange(*span) for span in zip(rows.start, rows.stop, strict=True)]))
    return int((high - low).sum())


def tensors_for(segments: Segments, heads: tuple[int, int]) -> dict[str, torch.Tensor]:
    rows, columns = int(segments.q_stop.max()), int(segments.k_stop.max())
    sizes = {"q": (rows, heads[0]), "k": (columns, heads[1]), "v": (columns, heads[1]), "dout": (rows, heads[0])}
    return {name: torch.randn(*size, DIM, device="cuda", dtype=torch.bfloat16) for name, size in sizes.items()}


def median_ms(call, repeats: int = 10) -> float:
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def varlen_ms(segments: Segments, tensors) -> tuple[float, float]:
    """Forward and backward of torch's varlen flash attention."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    options = {"window_size": (-1, 0 if segments.causal else -1)} if "window_size" in known else {}
    options |= {"is_causal": segments.causal} if "is_causal" in known else {}
    options |= {"enable_gqa": True} if "enable_gqa" in known else {}
    ends = [np.append(0, column).astype(np.int32) for column in (segments.q_stop, segments.k_stop)]
    cumulative = [torch.from_numpy(column).cuda() for column in ends]
    q, k, v = (tensors[name].detach().requires_grad_() for name in ("q", "k", "v"))

    def forward():
        return varlen_attn(q, k, v, *cumulative, *(int(np.diff(column).max()) for column in ends), **options)

    out = forward()
    backward = median_ms(lambda: torch.autograd.grad(out, (q, k, v), tensors["dout"], retain_graph=True))
    with torch.no_grad():
        return median_ms(forward), backward
