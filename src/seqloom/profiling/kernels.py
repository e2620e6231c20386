"""Times of kernels on this machine: packs of equal documents, forward and backward, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from seqloom import compat
from seqloom.attention.kernels.dispatch import KernelTimes, Measurement, TimePoint, device_name, dtype_name
from seqloom.attention.kernels.interface import AttentionShape, Kernel, Saved
from seqloom.attention.masks import Segments
from seqloom.errors import SeqloomError

LONG_NS = 300_000_000
"""What all timed runs of one pack may take together, unless two take longer."""
SMALLEST = 16
"""Tokens of the document that stands for an empty call."""


class Effort(NamedTuple):
    """How much is measured.

    Attributes:
        lengths: ascending.
        tokens: of a pack; documents of one length fill it, at least one.
        repeats: timed runs, after two that are not counted; at least 2, fewer where they would take long.
    """

    lengths: tuple[int, ...]
    tokens: int
    repeats: int


def measure(
    kernels: Sequence[Kernel], shape: AttentionShape, effort: Effort, report: Callable[[str, int], None] | None = None
) -> Measurement:
    """Measure kernels for tensors of one shape, with a causal mask and without.

    Args:
        report: called with the kernel's name and the length before each of
            `len(kernels) * 2 * len(effort.lengths)` packs.

    Raises:
        SeqloomError: when a kernel refuses the shape.
    """
    for kernel in kernels:
        refusal = kernel.capabilities.unsupported_shape(shape)
        if refusal is not None:
            raise SeqloomError(refusal)
    times = tuple(_times(kernel, shape, effort, report) for kernel in kernels)
    sizes = (shape.heads, shape.kv_heads, shape.dim)
    return Measurement(device_name(shape.device), torch.__version__, *sizes, dtype_name(shape.dtype), times)


def _times(
    kernel: Kernel, shape: AttentionShape, effort: Effort, report: Callable[[str, int], None] | None
) -> KernelTimes:
    """Measure one kernel."""
    calls = {causal: _pack(kernel, shape, SMALLEST, 1, causal, effort.repeats) for causal in (True, False)}
    curves: dict[bool, list[TimePoint]] = {True: [], False: []}
    for causal, points in curves.items():
        for length in effort.lengths:
            if report is not None:
                report(kernel.capabilities.name, length)
            documents = max(1, effort.tokens // length)
            whole = _pack(kernel, shape, length, documents, causal, effort.repeats)
            share = [max(0, round((ns - empty) / documents)) for ns, empty in zip(whole, calls[causal], strict=True)]
            points.append(TimePoint(length, *share))
    return KernelTimes(kernel.capabilities.name, *calls[True], tuple(curves[True]), tuple(curves[False]))


def _pack(
    kernel: Kernel, shape: AttentionShape, length: int, documents: int, causal: bool, repeats: int
) -> tuple[int, int]:
    """Return the nanoseconds, forward and backward, of documents of one length."""
    segments = Segments.packed([length] * documents, causal=causal)
    prepared = kernel.prepare(segments, shape)
    make = torch.Generator(shape.device).manual_seed(length)

    def draw(heads: int) -> torch.Tensor:
        size = (length * documents, heads, shape.dim)
        return torch.randn(size, generator=make, dtype=torch.float32, device=shape.device).to(shape.dtype)

    q, k, v, dout = draw(shape.heads), draw(shape.kv_heads), draw(shape.kv_heads), draw(shape.heads)
    out, lse = prepared.forward(q, k, v)
    forward = _median_ns(lambda: prepared.forward(q, k, v), shape.device, repeats)
    backward = _median_ns(lambda: prepared.backward(dout, Saved(q, k, v, out, lse)), shape.device, repeats)
    return forward, backward


def _median_ns(run: Callable[[], object], device: torch.device, repeats: int) -> int:
    """Return the median time of a run. The first one, which may compile, and the second, a trial, do not count."""
    run()
    trial = _trial_ns(run, device)
    repeats = int(min(repeats, max(2, LONG_NS // max(1, trial))))
    if device.type == "cuda":
        return _median_of_events(run, device, repeats)
    return round(statistics.median(_trial_ns(run, device) for _ in range(repeats)))


def _trial_ns(run: Callable[[], object], device: torch.device) -> int:
    """Return the time of one run on the host's clock, the GPU waited for."""
    wait = torch.cuda.synchronize if device.type == "cuda" else _nothing
    wait()
    begin = time.perf_counter_ns()
    run()
    wait()
    return time.perf_counter_ns() - begin


def _nothing() -> None:
    """A CPU has nothing to wait for."""


def _median_of_events(run: Callable[[], object], device: torch.device, repeats: int) -> int:
    """Time on the GPU, which is kept busy until all runs are queued: as in training, launching hides behind running."""
    with torch.cuda.device(device):
        edges = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        compat.occupy_gpu(20_000_000)
        edges[0].record()
        for edge in edges[1:]:
            run()
            edge.record()
        torch.cuda.synchronize()
    return round(statistics.median(1e6 * begin.elapsed_time(end) for begin, end in pairwise(edges)))
