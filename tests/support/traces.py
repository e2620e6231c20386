"""What torch.profiler records of a rank: which kernels ran beside which, and where the host waited for the GPU."""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from seqloom.params import Parameters

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
"""Calls that return only when the GPU has done something."""


class Interval(NamedTuple):
    """Microseconds on the clock of the trace."""

    start: float
    stop: float


class Kernel(NamedTuple):
    """A kernel or a copy on the GPU."""

    name: str
    stream: int
    interval: Interval

    @property
    def verb(self) -> str | None:
        """Verb of NCCL, such as AllGather or SendRecv; None: it computes."""
        found = re.match(r"nccl\w*?_(AllGather|ReduceScatter|AllReduce|SendRecv|Broadcast)", self.name)
        return found[1] if found else None


@dataclass(frozen=True, slots=True)
class Trace:
    """A profiled run.

    Attributes:
        kernels: in the order of their starts.
        waits: when the host called something that waits for the GPU, by name.
        ranges: of `torch.profiler.record_function`, by name.
    """

    kernels: tuple[Kernel, ...]
    waits: tuple[tuple[str, Interval], ...]
    ranges: tuple[tuple[str, Interval], ...]

    @classmethod
    def of(cls, events: Iterable[dict[str, Any]]) -> Trace:
        """Read the events of a Chrome trace."""
        kernels, waits, ranges = [], [], []
        for event in events:
            if event.get("ph") != "X":
                continue
            name, interval = event["name"], Interval(event["ts"], event["ts"] + event["dur"])
            if event.get("cat") in ("kernel", "gpu_memcpy"):
                kernels.append(Kernel(name, event["args"]["stream"], interval))
            elif event.get("cat") == "cuda_runtime" and name in WAITS:
                waits.append((name, interval))
            elif event.get("cat") == "user_annotation":
                ranges.append((name, interval))
        return cls(tuple(sorted(kernels, key=lambda each: each.interval)), tuple(waits), tuple(ranges))

    def of_verb(self, verb: str) -> list[Kernel]:
        """Return the kernels of a verb of NCCL."""
        return [kernel for kernel in self.kernels if kernel.verb == verb]

    def compute(self) -> list[Kernel]:
        """Return the kernels of the layers: those that compute on the stream with the most of them."""
        found = [kernel for kernel in self.kernels if kernel.verb is None and not kernel.name.startswith("Mem")]
        layers, _ = Counter(kernel.stream for kernel in found).most_common(1)[0]
        return [kernel for kernel in found if kernel.stream == layers]

    def beside(self, verb: str) -> float:
        """Return the share of the verb's messages on streams of their own that run while the layers compute.

        How long they run counts for nothing: between ranks of one GPU that depends on what other ranks do with it.
        """
        compute = self.compute()
        busy = union([kernel.interval for kernel in compute])
        own = [kernel for kernel in self.of_verb(verb) if kernel.stream != compute[0].stream]
        return sum(bool(intersection([kernel.interval], busy)) for kernel in own) / len(own) if own else 0.0

    def alone(self, verb: str) -> float:
        """Return the share of such messages that run while the layers do not compute and no other message is under way.

        Where another one is, the layers wait for that.
        """
        compute, messages = self.compute(), [kernel for kernel in self.kernels if kernel.verb is not None]
        own = [kernel for kernel in self.of_verb(verb) if kernel.stream != compute[0].stream]

        def others(message: Kernel) -> list[Interval]:
            return [each.interval for each in (*compute, *messages) if each.stream != message.stream]

        return sum(not intersection([each.interval], others(each)) for each in own) / len(own) if own else 0.0

    def waits_in(self, name: str) -> list[str]:
        """Return what waits for the GPU inside the ranges of this name."""
        inside = [interval for each, interval in self.ranges if each == name]
        return [call for call, at in self.waits if any(low <= at.start < high for low, high in inside)]


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """Join intervals that overlap."""
    joined: list[Interval] = []
    for start, stop in sorted(intervals):
        if joined and start <= joined[-1].stop:
            joined[-1] = Interval(joined[-1].start, max(stop, joined[-1].stop))
        else:
            joined.append(Interval(start, stop))
    return joined


def intersection(ours: Sequence[Interval], theirs: Sequence[Interval]) -> list[Interval]:
    """Return where intervals of both lists overlap."""
    return [
        Interval(max(a.start, b.start), min(a.stop, b.stop))
        for a in ours
        for b in theirs
        if max(a.start, b.start) < min(a.stop, b.stop)
    ]


def total(intervals: Iterable[Interval]) -> float:
    """Return the microseconds of intervals that do not overlap."""
    return sum(stop - start for start, stop in intervals)


def traced(body: Callable[[], object]) -> Trace:
    """Run a body under torch.profiler."""
    # there is one cycle; without `acc_events` torch warns of what others would lose
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        body()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return Trace.of(json.loads(path.read_text())["traceEvents"])


def name_passes(parameters: Parameters) -> None:
    """Have traces show the forwards and backwards of parameters under these names."""
    for name in ("forward", "backward"):
        setattr(parameters, name, partial(_call_named, name, getattr(parameters, name)))


def _call_named(name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with record_function(name):
        return call(*args, **kwargs)
