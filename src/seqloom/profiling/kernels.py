"""Timing attention kernels on this machine: packs of equal documents, forward and backward, medians; and copies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from seqloom import compat
from seqloom.attention.kernels.dispatch import KernelTimes, Measurement, TimePoint, device_name, dtype_name
from seqloom.attention.kernels.interface import AttentionShape, Kernel, Saved, device_rows
from seqloom.attention.masks import Segments
from seqloom.errors import SeqloomError

MOST_NS = 300_000_000
"""Limit of all timed runs of one pack together, unless two take longer."""
SMALLEST = 16
"""Tokens of the document that stands for an empty call."""

Report = Callable[[str, int], None]
"""Called with the kernel's name and the length before each pack."""


class TimingSettings(NamedTuple):
    """How much is measured."""

    lengths: tuple[int, ...]  # of documents, ascending
    tokens: int  # of a pack; documents of one length fill it, at least one
    repeats: int  # timed runs, after two that are not counted; at least 2, fewer where they would take long
    clock: Callable[[], float] = time.perf_counter  # of the host, seconds


def time_kernels(
    kernels: Sequence[Kernel], shape: AttentionShape, settings: TimingSettings, report: Report | None = None
) -> Measurement:
    """Time kernels on tensors of one shape, with a causal mask and without; a kernel that refuses it is an error."""
    for kernel in kernels:
        refusal = kernel.capabilities.unsupported_shape(shape)
        if refusal is not None:
            raise SeqloomError(refusal)
    times = tuple(_time_kernel(kernel, shape, settings, report) for kernel in kernels)
    sizes = (shape.heads, shape.kv_heads, shape.dim)
    names = (device_name(shape.device), torch.__version__, *sizes, dtype_name(shape.dtype))
    return Measurement(*names, times, _time_copies(shape, settings))


def _time_copies(shape: AttentionShape, settings: TimingSettings) -> float:
    """Return the GB/s, read and written, of gathering every second document of a pack."""
    length = settings.lengths[0]
    start = np.arange(0, max(settings.tokens, 2 * length), 2 * length)
    rows, (buffer, _) = device_rows(start, start + length, shape.device), shape.zeros(int(start[-1]) + length)
    copied = 2 * buffer[rows].nbytes
    return copied / _median_ns(lambda: buffer[rows], shape.device, settings)


def _time_kernel(kernel: Kernel, shape: AttentionShape, settings: TimingSettings, report: Report | None) -> KernelTimes:
    empty_calls = {causal: _time_pack(kernel, shape, SMALLEST, 1, causal, settings) for causal in (True, False)}
    curves: dict[bool, list[TimePoint]] = {True: [], False: []}
    for causal, points in curves.items():
        for length in settings.lengths:
            if report is not None:
                report(kernel.capabilities.name, length)
            documents = max(1, settings.tokens // length)
            pack = _time_pack(kernel, shape, length, documents, causal, settings)
            pairs = zip(pack, empty_calls[causal], strict=True)
            points.append(TimePoint(length, *(max(0, round((ns - empty) / documents)) for ns, empty in pairs)))
    return KernelTimes(kernel.capabilities.name, *empty_calls[True], tuple(curves[True]), tuple(curves[False]))


def _time_pack(
    kernel: Kernel, shape: AttentionShape, length: int, documents: int, causal: bool, settings: TimingSettings
) -> tuple[int, int]:
    """Return the nanoseconds, forward and backward, of documents of one length."""
    segments = Segments.packed([length] * documents, causal=causal)
    prepared = kernel.prepare(segments, shape)
    generator = torch.Generator(shape.device).manual_seed(length)

    def draw(heads: int) -> torch.Tensor:
        size = (length * documents, heads, shape.dim)
        return torch.randn(size, generator=generator, dtype=torch.float32, device=shape.device).to(shape.dtype)

    q, k, v, dout = draw(shape.heads), draw(shape.kv_heads), draw(shape.kv_heads), draw(shape.heads)
    out, lse = prepared.forward(q, k, v)
    forward = _median_ns(lambda: prepared.forward(q, k, v), shape.device, settings)
    backward = _median_ns(lambda: prepared.backward(dout, Saved(q, k, v, out, lse)), shape.device, settings)
    return forward, backward


def _median_ns(run: Callable[[], object], device: torch.device, settings: TimingSettings) -> int:
    """Return the median time of a run. The first one, which may compile, and the second, a trial, do not count."""
    run()
    trial = _host_ns(run, device, settings.clock)
    repeats = int(min(settings.repeats, max(2, MOST_NS // max(1, trial))))
    if device.type == "cuda":
        return _median_event_ns(run, device, repeats)
    return round(statistics.median(_host_ns(run, device, settings.clock) for _ in range(repeats)))


def _host_ns(run: Callable[[], object], device: torch.device, clock: Callable[[], float]) -> int:
    """Return the time of one run on a clock of the host, until the device is done."""
    synchronize(device)
    begin = clock()
    run()
    synchronize(device)
    return round(1e9 * (clock() - begin))


def _median_event_ns(run: Callable[[], object], device: torch.device, repeats: int) -> int:
    """Time on the GPU, which is busy until all runs are queued: as in training, launching hides behind running."""
    with torch.cuda.device(device):
        edges = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        compat.occupy_gpu(20_000_000)
        edges[0].record()
        for edge in edges[1:]:
            run()
            edge.record()
        torch.cuda.synchronize()
    return round(statistics.median(1e6 * begin.elapsed_time(end) for begin, end in pairwise(edges)))


def synchronize(device: torch.device) -> None:
    """Wait until a GPU is done; a CPU always is."""
    if device.type == "cuda":
        torch.cuda.synchronize()
