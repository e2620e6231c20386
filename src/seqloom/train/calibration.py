"""Measuring a machine: a profile of these ranks for one model, by running the real thing.

Kernels, matrix products and collectives are timed by themselves, on all ranks at once, because they share memory and
clock. Then real steps of equal groups are timed, and all constants fitted to them together.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from seqloom.attention.kernels.kernel import Shape
from seqloom.attention.kernels.measure import Effort, measure
from seqloom.attention.kernels.registry import default
from seqloom.attention.kernels.tables import Point, Times
from seqloom.comm import Parcel, Transport
from seqloom.cost import CostModel
from seqloom.cost.calibrate import Calibration, Trial, calibrate
from seqloom.cost.fit import LinkFit, fit_curve, fit_link
from seqloom.cost.profile import AnalyticProfile, Curve, LinkRate, Links
from seqloom.describe import ModelSpec
from seqloom.train.trials import StepTimer, trial_plans

REPEATS = 3
KERNEL_LENGTHS = (16, 64, 256, 1024, 4096)
"""Documents whose kernels are timed; what the shortest costs is what any document costs, however short."""
MESSAGES = (1 << 12, 1 << 16, 1 << 19, 1 << 22)
"""Bytes of the messages whose times give a link's latency and bandwidth."""
START_US = {"step_us": 1_000.0, "layer_us": 500.0, "ring_step_us": 300.0, "round_us": 0.0}
"""Where the fit of constants begins that are not measured apart."""
KNOWN = {"matmul": 1.0, "attention": 1.0, "document": 1.0, "collective.bytes": 1.0, "p2p.bytes": 1.0}
"""Constants that are measured apart, and how many trials it takes to outvote each."""

Report = Callable[[str], None]


class Measuring:
    """One rank that measures together with the others."""

    def __init__(self, cost: CostModel, transport: Transport, device: torch.device, dtype: torch.dtype) -> None:
        """Measure for the model, the sharding and the capacity of `cost`, whose own constants do not matter."""
        self.cost, self.transport, self.device, self.dtype = cost, transport, device, dtype

    def calibrate(self, timer: StepTimer, longest: int, report: Report = lambda _: None) -> Calibration:
        """Measure and fit; all ranks call it and find the same.

        Args:
            timer: runs the trials.
            longest: tokens of the longest document to try.
            report: told what comes next.
        """
        report("kernels")
        start = self._start(self._kernel_times())
        trials = []
        for plan in trial_plans(self.cost, longest):
            report(f"trial {len(trials) + 1}: {plan}")
            timer.seconds(plan)
            trials.append(Trial(plan, 1e9 * statistics.median(timer.seconds(plan) for _ in range(REPEATS))))
        cost = CostModel(
            self.cost.cluster, self.cost.model, start, self.cost.sharding, max_length=self.cost.max_length
        )
        return calibrate(cost, trials, KNOWN)

    def _start(self, kernels: Times) -> AnalyticProfile:
        """What is measured apart, in the place of the given profile's."""
        given, cluster = self.cost.profile, self.cost.cluster
        assert isinstance(given, AnalyticProfile)
        everyone = range(self.transport.ranks)
        collective = self._link(self._gather, everyone)
        p2p = self._link(self._pass_on, everyone)
        both = lambda fit: LinkRate(fit.gb_s / cluster.intra.gb_s, max(1.0, fit.latency_us), 0.0)  # noqa: E731
        rate = both(p2p)
        links = Links(replace(rate, hop_us=rate.call_us), rate, both(collective))
        return replace(
            given,
            name="measured",
            matmul_tflops=self._mean(matmul_tflops(self.cost.model, self.device, self.dtype)),
            attention=_curve(kernels.causal, self.cost.model, 1.0),
            tile=_curve(kernels.full, self.cost.model, 2.0),
            intra=links,
            network=links,
            document_us=max(1, sum(kernels.causal[0][1:])) / 1e3,
            overlap=1.0 if self.device.type == "cuda" else 0.0,
            **START_US,
        )

    def _kernel_times(self) -> Times:
        spec = self.cost.model
        shape = Shape(spec.heads, spec.kv_heads, spec.head_dim, self.dtype, self.device, spec.head_dim**-0.5)
        kernel = default(self.device)
        self._mean(0.0)
        times = measure([kernel], shape, Effort(KERNEL_LENGTHS, max(KERNEL_LENGTHS), 2)).times[0]
        causal, full = (
            tuple(Point(p.length, round(self._mean(p.forward_ns)), round(self._mean(p.backward_ns))) for p in points)
            for points in (times.causal, times.full)
        )
        return replace(times, causal=causal, full=full)

    def _link(self, send: Callable[[torch.Tensor, Sequence[int]], None], ranks: Sequence[int]) -> LinkFit:
        """Latency and bandwidth of messages that all ranks send at once."""
        if self.transport.ranks == 1:
            return LinkFit(1.0, self.cost.cluster.intra.gb_s, 0.0)
        times = []
        for size in MESSAGES:
            message = torch.zeros(size // 4, device=self.device)
            send(message, ranks)
            times.append(statistics.median(self._timed(lambda m=message: send(m, ranks)) for _ in range(2 * REPEATS)))
        return fit_link(MESSAGES, [1e6 * seconds for seconds in times])

    def _gather(self, message: torch.Tensor, ranks: Sequence[int]) -> None:
        """An all-gather in which a rank receives as many bytes as the message has."""
        share = message[: len(message) // len(ranks)]
        self.transport.all_gather(message.new_empty(len(share) * len(ranks)), share, ranks)

    def _pass_on(self, message: torch.Tensor, ranks: Sequence[int]) -> None:
        rank, size = self.transport.rank, len(ranks)
        sends, receives = Parcel((rank + 1) % size, message), Parcel((rank - 1) % size, torch.empty_like(message))
        self.transport.exchange([sends], [receives]).wait()

    def _timed(self, run: Callable[[], None]) -> float:
        self._mean(0.0)
        begin = time.perf_counter()
        run()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return self._mean(time.perf_counter() - begin)

    def _mean(self, value: float) -> float:
        """The mean over ranks, which wait for each other here."""
        total = torch.tensor([value], dtype=torch.float64, device=self.device)
        self.transport.all_reduce(total, range(self.transport.ranks))
        return float(total) / self.transport.ranks


def matmul_tflops(spec: ModelSpec, device: torch.device, dtype: torch.dtype, tokens: int = 2048) -> float:
    """TFLOP/s of this rank on the matrix products of a layer, forward and backward."""
    widths = [(spec.hidden, spec.heads * spec.head_dim), (spec.hidden, spec.ffn), (spec.ffn, spec.hidden)]
    flops = seconds = 0.0
    for before, after in widths:
        x, weight = (torch.randn(size, device=device).to(dtype) for size in ((tokens, before), (after, before)))
        slope = torch.randn(tokens, after, device=device).to(dtype)
        for repeat in range(REPEATS + 1):
            begin = time.perf_counter()
            _ = x @ weight.T, slope @ weight, slope.T @ x
            if device.type == "cuda":
                torch.cuda.synchronize()
            if repeat:
                seconds += time.perf_counter() - begin
                flops += 6.0 * tokens * before * after
    return flops / seconds / 1e12


def _curve(points: Sequence[Point], spec: ModelSpec, area: float) -> Curve:
    """Throughput from times; ``area``: of the tile in squares of causal documents."""
    shortest, *others = points
    forward, backward = ([max(1, point[k] - shortest[k]) / 1e3 for point in others] for k in (1, 2))
    curve = fit_curve([point.length for point in others], forward, backward, spec.heads, spec.head_dim)
    faster = (tuple(area * rate for rate in rates) for rates in (curve.forward, curve.backward))
    return Curve(curve.lengths, *faster)
