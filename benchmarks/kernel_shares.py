"""Where the time of a training step goes: the GPU's kernels by what they are for, and the time without any."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

KINDS = {  # by the first that fits
    "attention": r"flash|fmha|flex_attention|_attend|_add_dq|_add_dkdv|_merge_kernel",
    "matrix products": r"nvjet|gemm|xmma|cublas|cutlass|splitk",
    "loss": r"_losses_kernel|cross_entropy",
    "optimiser and norm": r"adam|multi_tensor|vector_norm|norm_kernel|lpnorm",
    "copies": r"memcpy|memset|copy|cat_array|fill|index|gather|scatter",
    "norms, rotary embedding, activation, residuals": r"triton_|rms_norm|rope|rotary|swiglu|silu|elementwise|reduce",
}
OTHERS, IDLE = "others", "no kernel runs"
LONGEST = 12
"""Kernels that are listed by name."""


class Kernel(NamedTuple):
    """A kernel or a copy on the GPU; microseconds."""

    name: str
    start: float
    stop: float


def kind_of(name: str) -> str:
    """Return what a kernel is for."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), OTHERS)


def shares(kernels: Iterable[Kernel]) -> dict[str, Any]:
    """Return milliseconds by kind, between the first start and the last stop, and of the longest kernels by name.

    Kernels that run side by side count each, so kinds may add up to more than the whole.
    """
    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    kinds, names = defaultdict(float, dict.fromkeys((*KINDS, OTHERS), 0.0)), defaultdict(float)
    idle, until = 0.0, ordered[0].start
    for name, start, stop in ordered:
        kinds[kind_of(name)] += (stop - start) / 1e3
        names[name[:100]] += (stop - start) / 1e3
        idle, until = idle + max(0.0, start - until) / 1e3, max(until, stop)
    longest = sorted(names.items(), key=lambda item: -item[1])[:LONGEST]
    whole = (until - ordered[0].start) / 1e3
    return {"ms": dict(kinds) | {IDLE: idle, "whole step": whole}, "longest kernels, ms": dict(longest)}


def profiled(run: Callable[[], Any]) -> list[Kernel]:
    """Run once under torch's profiler; return what ran on the GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    on_gpu = [each for each in found.events() or () if each.device_type == torch.autograd.DeviceType.CUDA]
    return [Kernel(each.name, each.time_range.start, each.time_range.end) for each in on_gpu]
