"""What stages cost beside their work: a handover to the next one, and a backward in two halves instead of one.

A message has its bytes and its link's latency, and somebody must notice that it has come. On a CPU that is another
thread, which waits for its turn on the core. So it is measured where it matters: in a step whose stages are busy. The
same units with split backwards tell what splitting costs.

Parameters stay with their stages meanwhile, also for runs under free sharding: in a step that moves them, whatever the
prediction misses of that would be taken for handovers, of which a step has few.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

import numpy as np
import torch

from seqloom.attention.kernels.dispatch import KernelTimes, TimePoint, default_dispatcher
from seqloom.attention.kernels.interface import AttentionShape
from seqloom.cost import CostModel
from seqloom.cost.calibrate import Calibration, Trial, calibrate, fit_curve, with_profile
from seqloom.cost.profile import AnalyticProfile, Curve, LinkRate, Links
from seqloom.describe import ModelSpec
from seqloom.dist import P2PTensor, Transport
from seqloom.errors import SeqloomError
from seqloom.plan import Plan, Sharding
from seqloom.planners.pipeline import plan_pipeline
from seqloom.profiling.kernels import Effort, measure
from seqloom.profiling.trials import StepTimer, described, one_and_all, trial_plans
from seqloom.simulate import predicted_ns, simulate

UNITS, STAGE_TOKENS, STAGE_REPEATS = 4, 256, 7
"""Units per stage, tokens of each, steps that are timed."""
MOST_US = 1 << 17
"""No handover takes longer."""


class Taken(NamedTuple):
    """What a step took: the fastest of several."""

    step_ns: float
    """The slowest rank, from beginning to end."""
    busy_ns: float
    """In forwards and backwards, the mean over ranks."""


def with_stage_costs(
    cost: CostModel, transport: Transport, device: torch.device, dtype: torch.dtype, stages: int
) -> AnalyticProfile:
    """Return the profile of `cost` with `handover_us` and `split_us` measured. All ranks call it and find the same.

    Args:
        cost: of the machine; everything else of its profile is measured already.
        transport: this rank's, over torch.distributed.
        device: where the model runs.
        dtype: that its layers compute in.
        stages: of the pipeline that is timed.
    """
    profile = cost.profile
    assert isinstance(profile, AnalyticProfile)
    if cost.sharding == Sharding.FREE:
        cost = with_profile(cost, profile, Sharding.FULL)
    documents = np.full(UNITS * stages, STAGE_TOKENS)
    whole, split = (
        plan_pipeline(documents, cost, stages=stages, schedule=name, pieces=1) for name in ("1f1b", "zb-h1")
    )
    timer = StepTimer(cost, transport, device, dtype, whole.pipelines[0].stages)
    taken = [[_taken(timer, plan) for plan in (whole, split)] for _ in range(STAGE_REPEATS + 1)][1:]
    at_once, in_halves = (Taken(*map(min, zip(*turns, strict=True))) for turns in zip(*taken, strict=True))
    passes = len(whole.pipelines[0].rounds) * cost.model.layers / stages  # of a layer by a unit, on a rank
    found = {
        "handover_us": solved(whole, cost, *at_once),
        "split_us": max(0.0, in_halves.busy_ns - at_once.busy_ns) / passes / 1e3,
    }
    source = f"a pipeline of {stages} stages with {UNITS * stages} documents of {STAGE_TOKENS} tokens, "
    sources = {"handover_us": source + "1F1B", "split_us": source + "ZB-H1 less 1F1B"}
    return replace(profile, **found, sources=profile.sources | sources)


def solved(plan: Plan, cost: CostModel, step_ns: float, busy_ns: float) -> float:
    """Return the microseconds of a handover at which a plan takes as long as it did, to one; 0 where it was faster.

    Where forwards and backwards themselves took another time than predicted, the step is scaled by as much: their
    error is not a handover's.

    Args:
        plan: of one pipeline.
        cost: its handovers may cost something already, which does not count.
        step_ns: that the step took.
        busy_ns: that a rank spent in forwards and backwards, the mean over ranks.
    """
    profile = cost.profile
    assert isinstance(profile, AnalyticProfile)

    def predicted(us: float) -> int:
        return predicted_ns(plan, with_profile(cost, replace(profile, handover_us=us)))

    expected = simulate(plan, cost)
    wanted = step_ns * float((expected.busy_ns + expected.comm_ns).mean()) / busy_ns
    low, high = 0, MOST_US
    while low < high:  # the least whole number that is enough
        middle = (low + high) // 2
        low, high = (low, middle) if predicted(middle) >= wanted else (middle + 1, high)
    return float(low)


def _taken(timer: StepTimer, plan: Plan) -> Taken:
    """Run a step."""
    seconds = timer.seconds(plan)
    return Taken(1e9 * seconds, 1e9 * timer.mean_busy())


# ---- merged: train.calibration
# Measuring a machine: a profile of these ranks for one model, by running the real thing.
#
# Kernels, matrix products and messages are timed by themselves, on all ranks at once, because ranks share memory
# and
# clock. Then real steps of equal groups are timed, and all constants are fitted to both together.


REPEATS, TURNS = 3, 3
"""How often what is measured apart is timed, and how often all trials are; the first turn of them is the slowest."""
BRIEF_S, OFTENER = 0.25, 3
"""Steps of fewer seconds are repeated that many times as often: a delay of the host weighs more in them."""
KERNEL_LENGTHS = {"cpu": (16, 64, 256, 1_024, 4_096), "cuda": (16, 128, 512, 2_048, 8_192, 32_768, 131_072)}
"""Documents whose kernels are timed; what the shortest costs is what any document costs, however short."""
MESSAGES = (1 << 12, 1 << 22)
"""Bytes of the messages whose times give a link's latency and bandwidth."""
TOKENS = 2048
"""Rows of the matrix products."""
START_US = {
    "step_us": 1_000.0,
    "layer_us": 500.0,
    "ring_step_us": 300.0,
    "piece_us": 300.0,
    "prefix_us": 1_000.0,
    "round_us": 0.0,
}
"""Where the fit of constants begins that cannot be measured apart."""
GATHERED_US = 1_000.0
"""The same for work on gathered keys; on a CPU alone, since elsewhere it is a kernel that hides among others."""

Report = Callable[[str], None]
Send = Callable[[torch.Tensor], None]


class Machine:
    """One of the ranks that measure together."""

    def __init__(self, cost: CostModel, transport: Transport, device: torch.device, dtype: torch.dtype) -> None:
        """Measure for the model, the sharding and the capacity of `cost`; its profile gives what takes no time.

        Args:
            transport: this rank's, over torch.distributed.
            device: where the model runs.
            dtype: that its layers compute in; parameters are float32.
        """
        if not isinstance(cost.profile, AnalyticProfile):
            raise SeqloomError(f"profile {cost.profile.name} holds published constants; measure from an analytic one")
        self.cost, self.given, self.transport, self.device, self.dtype = cost, cost.profile, transport, device, dtype
        self.timer = StepTimer(cost, transport, device, dtype)
        self._links = "network" if cost.cluster.nodes > 1 else "intra"

    def calibrate(
        self, longest: int, report: Report = lambda text: None, *, widest: int | None = None, stages: int = 1
    ) -> Calibration:
        """Measure and fit; all ranks call it and find the same.

        Args:
            longest: tokens of the longest document to try.
            report: told what comes next.
            widest: ranks of the largest group that is tried; None: all.
            stages: of the pipeline by which handovers are measured; 1: they are not.
        """
        report("kernels, matrix products, messages")
        start, cost = self._start(), self.cost
        trials = self._trials(list(trial_plans(cost, longest, widest)), report)
        apart = ["matmul", "attention", "tile", "document"]
        if self.device.type == "cpu":  # elsewhere gathers hide behind computing, and only what is left counts
            apart.append(f"{self._links}.collective.bytes")
        found = calibrate(with_profile(cost, start), trials, dict.fromkeys(apart, 1.0))
        if stages == 1:
            return found
        report("ranks by themselves")
        found = replace(found, profile=self._alone(found.profile, longest))
        report(f"handovers between {stages} stages, backwards in halves")
        own = with_profile(cost, found.profile)
        return replace(found, profile=with_stage_costs(own, self.transport, self.device, self.dtype, stages))

    def _alone(self, profile: AnalyticProfile, longest: int) -> AnalyticProfile:
        """The profile with what a rank's work takes while all others wait, as a share of that while all are busy."""
        plans = [pair for tokens in (longest // 2, longest) for pair in one_and_all(self.cost, tokens)]
        turns = [[self._busy(plan) for plan in plans] for _ in range(TURNS)]
        fastest = [min(times) for times in zip(*turns, strict=True)]
        source = f"documents of {longest // 2} and {longest} tokens on one rank and on all"
        sources = profile.sources | {"alone": source}
        return replace(profile, alone=min(1.0, sum(fastest[::2]) / sum(fastest[1::2])), sources=sources)

    def _busy(self, plan: Plan) -> float:
        """Seconds in forwards and backwards of the rank that works longest."""
        self.timer.seconds(plan)
        assert self.timer.last is not None
        return self.timer.slowest(self.timer.last.forward_s + self.timer.last.backward_s)

    def _trials(self, plans: Sequence[Plan], report: Report) -> list[Trial]:
        """Time plans in turns, so that a slow minute of the machine meets all of them; the fastest step counts."""
        seconds = [inf] * len(plans)
        for turn in range(TURNS):
            for number, plan in enumerate(plans):
                if turn:
                    repeats = 1 if seconds[number] > BRIEF_S else OFTENER
                    seconds[number] = min(seconds[number], *(self.timer.seconds(plan) for _ in range(repeats)))
                else:
                    report(f"trial {number + 1} of {len(plans)}: {described(plan)}")
                    seconds[number] = self.timer.seconds(plan)
            if turn + 1 < TURNS:
                report(f"all trials again, turn {turn + 2} of {TURNS}")
        return [Trial(plan, 1e9 * each) for plan, each in zip(plans, seconds, strict=True)]

    def _start(self) -> AnalyticProfile:
        """What is measured apart, in the place of the given profile's."""
        spec = self.cost.model
        kernels = self._kernel_times()
        changes: dict[str, Any] = {
            "matmul_tflops": self._mean(matmul_tflops(spec, self.device, self.dtype)),
            "attention": _curve(kernels.causal, spec, 1.0),
            "tile": _curve(kernels.full, spec, 2.0),
            "document_us": max(1, sum(kernels.causal[0][1:])) / 1e3,
            self._links: self._link_rates(),
        }
        ranks = f"{self.transport.ranks} ranks at once"
        apart = dict.fromkeys(changes, f"measured apart, {ranks}, then fitted to steps of {spec.name}")
        fitted = dict.fromkeys(("memory_efficiency", *START_US), f"fitted to steps of {spec.name}, {ranks}")
        fitted |= {"round_us": "in layer_us", "overlap": "0: traffic is fitted as what does not hide"}
        if self.device.type == "cpu":
            changes["gathered_us"], fitted["gathered_us"] = GATHERED_US, fitted["layer_us"]
        changes |= {"name": "measured", "overlap": 0.0, "sources": self.given.sources | apart | fitted}
        return replace(self.given, **changes, **START_US)

    def _kernel_times(self) -> KernelTimes:
        """Times of the kernel that this device prefers, the mean over ranks that run at the same time."""
        spec = self.cost.model
        shape = AttentionShape(spec.heads, spec.kv_heads, spec.head_dim, self.dtype, self.device, spec.head_dim**-0.5)
        self._mean(0.0)  # all ranks begin together
        lengths = KERNEL_LENGTHS[self.device.type]
        times = measure([default_dispatcher(self.device)], shape, Effort(lengths, max(lengths), 2)).times[0]
        causal, full = (
            tuple(
                TimePoint(p.length, round(self._mean(p.forward_ns)), round(self._mean(p.backward_ns))) for p in points
            )
            for points in (times.causal, times.full)
        )
        return replace(times, causal=causal, full=full)

    def _link_rates(self) -> Links:
        """Messages to a neighbour and all-gathers, timed.

        The fit begins with an all-to-all as a message per doubling, and a gather as a message to every other rank.
        """
        p2p, collective = self._link(self._pass_on), self._link(self._gather)
        hop = p2p.call_us
        return Links(replace(p2p, hop_us=hop), p2p, replace(collective, hop_us=hop))

    def _link(self, send: Send) -> LinkRate:
        """Latency and bandwidth of messages that all ranks send at once.

        Noise may make a short message as slow as a long one; at least half of a long one's time is taken as its bytes'.
        """
        link = self.cost.cluster.nic if self._links == "network" else self.cost.cluster.intra
        if self.transport.ranks == 1:
            return LinkRate(1.0, 1.0, 0.0)
        short, long = (self._message_seconds(send, size) for size in MESSAGES)
        gb_s = MESSAGES[1] / max(long - short, long / 2) / 1e9
        return LinkRate(gb_s / link.gb_s, max(1.0, 1e6 * min(short, long / 2)), 0.0)

    def _message_seconds(self, send: Send, size: int) -> float:
        message = torch.zeros(size // 4, device=self.device)
        send(message)
        return statistics.median(self._timed(send, message) for _ in range(2 * REPEATS))

    def _gather(self, message: torch.Tensor) -> None:
        """An all-gather in which a rank ends up with as many bytes as the message has."""
        ranks = range(self.transport.ranks)
        share = message[: len(message) // len(ranks)]
        self.transport.all_gather(message.new_empty(len(share) * len(ranks)), share, ranks)

    def _pass_on(self, message: torch.Tensor) -> None:
        rank, ranks = self.transport.rank, self.transport.ranks
        sent, received = (
            P2PTensor((rank + 1) % ranks, message),
            P2PTensor((rank - 1) % ranks, torch.empty_like(message)),
        )
        self.transport.exchange([sent], [received]).wait()

    def _timed(self, send: Send, message: torch.Tensor) -> float:
        self._mean(0.0)
        begin = time.perf_counter()
        send(message)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return self._mean(time.perf_counter() - begin)

    def _mean(self, value: float) -> float:
        """The mean over ranks, which wait for each other here."""
        total = torch.tensor([value], dtype=torch.float64, device=self.device)
        self.transport.all_reduce(total, range(self.transport.ranks))
        return float(total) / self.transport.ranks


def matmul_tflops(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> float:
    """TFLOP/s of this rank on matrix products of a layer, forward and backward."""
    flops = seconds = 0.0
    for before, after in [(spec.hidden, spec.heads * spec.head_dim), (spec.hidden, spec.ffn), (spec.ffn, spec.hidden)]:
        sizes = ((TOKENS, before), (after, before), (TOKENS, after))
        x, weight, slope = (torch.randn(size, device=device).to(dtype) for size in sizes)
        for repeat in range(REPEATS + 1):
            begin = time.perf_counter()
            _ = x @ weight.T, slope @ weight, slope.T @ x
            if device.type == "cuda":
                torch.cuda.synchronize()
            if repeat:
                seconds += time.perf_counter() - begin
                flops += 6.0 * TOKENS * before * after
    return flops / seconds / 1e12


def _curve(points: Sequence[TimePoint], spec: ModelSpec, area: float) -> Curve:
    """Throughput from times, without what any document costs; ``area``: in causal documents of the same length."""
    shortest, *others = points
    forward, backward = ([max(1, point[k] - shortest[k]) / 1e3 for point in others] for k in (1, 2))
    curve = fit_curve([point.length for point in others], forward, backward, spec.heads, spec.head_dim)
    faster = (tuple(area * rate for rate in rates) for rates in (curve.forward, curve.backward))
    return Curve(curve.lengths, *faster)
