"""Measuring the constants of a profile on these ranks, for one model, by running it.

1. Attention kernels, matrix products and messages are timed by themselves, on all ranks at once, because ranks share
   memory and clock (`Calibrator._measure_start`).
2. Real training steps of equal groups are timed (`StepTimer`, `trial_plans`), and `cost.calibrate` fits all constants
   to both together. A step is what a trainer does with a plan: bind it, run its rounds, reduce, clip, update; its time
   is that of the slowest rank, all of them having begun together.
3. For pipelines: a rank's work while others wait, the handover to the next stage, and a backward in two halves
   instead of one (`measure_stage_costs`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

import numpy as np
import torch

from seqloom.attention.kernels.dispatch import KernelTimes, TimePoint, default_dispatcher
from seqloom.attention.kernels.interface import AttentionShape
from seqloom.cost import CostModel, GroupShape, MemoryPolicy
from seqloom.cost.calibrate import Calibration, Trial, calibrate, fit_curve
from seqloom.cost.compute import OPTIMISER_TRAFFIC
from seqloom.cost.profile import AnalyticProfile, Curve, LinkRate, Links, require_analytic
from seqloom.cost.shapes import candidate_shapes
from seqloom.describe import ModelSpec
from seqloom.dist import Context, P2PTensor, Transport
from seqloom.engine import RankPlan, StepResult, bind_plan, run_step
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.models import ModelAdapter, Transformer
from seqloom.params.host_adamw import cpu_threads, threads_of_rank
from seqloom.plan import Checkpoint, Method, Plan, Sharding, Stage, StageMicroBatch
from seqloom.planners.pipeline import plan_pipeline
from seqloom.planners.problem import build_plan
from seqloom.profiling.kernels import TimingSettings, synchronize, time_kernels
from seqloom.simulate import predicted_ns, simulate
from seqloom.train.config import Optimiser
from seqloom.train.model import make_sharded_optimiser, prepare_layers, shard_parameters
from seqloom.train.trainer import gather_values

REPEATS, TURNS, QUICK_TURNS = 3, 3, 2
"""How often kernels and messages are timed, and how often all trials are; the first turn of them is the slowest."""
QUICK_S, LEAST_TRIALS = 8.0, 6
"""Seconds after which a quick measurement times no further plan, and how many it times in any case."""
SHORT_STEP_S = 0.25
"""Steps of fewer seconds are repeated, as often as there are turns: a delay of the host weighs more in them."""
KERNEL_LENGTHS = {"cpu": (16, 64, 256, 1_024, 4_096), "cuda": (16, 128, 512, 2_048, 8_192, 32_768, 131_072)}
"""Documents whose kernels are timed; the shortest gives the cost per document, whatever its length."""
MESSAGE_BYTES = (1 << 12, 1 << 22)
"""Messages whose times give a link's latency and bandwidth."""
HOST_COPY_BYTES = 1 << 28
"""Bytes of a copy between a GPU and its host."""
UPDATED_ELEMENTS = 1 << 26
"""Parameters whose update on CPUs is timed."""
MATMUL_TOKENS = 2048
"""Rows of the matrix products."""
START_US = {
    "step_us": 1_000.0,
    "layer_us": 500.0,
    "ring_step_us": 300.0,
    "piece_us": 300.0,
    "prefix_us": 1_000.0,
    "round_us": 0.0,
}
"""Where the fit starts for constants that cannot be measured by themselves."""
START_GATHERED_US = 1_000.0
"""The same for work on gathered keys; on a CPU only, since elsewhere it is a kernel that hides among others."""
UNITS, STAGE_TOKENS, STAGE_REPEATS = 4, 256, 7
"""Documents per stage, tokens of each, and timed steps of the pipeline that is measured."""
MOST_HANDOVER_US = 1 << 17
TINY, SHORT = 64, 256
"""Tokens per rank of a group with next to nothing to do, and of a short document."""
PIECES = 16
"""Pieces of a document on one rank: they separate the cost of a piece from that of the tokens before it."""

Clock = Callable[[], float]
"""Seconds since some moment, on this rank."""
Report = Callable[[str], None]
Send = Callable[[torch.Tensor], None]


class Calibrator:
    """One of the ranks that measure a profile together."""

    def __init__(
        self,
        cost: CostModel,
        transport: Transport,
        device: torch.device,
        dtype: torch.dtype,
        clock: Clock = time.perf_counter,
    ) -> None:
        """Measure for the model, sharding and capacity of `cost`; its profile gives the constants that are no times.

        Layers compute in `dtype`; parameters are float32.
        """
        self.cost, self.given, self.transport = cost, require_analytic(cost.profile), transport
        self.device, self.dtype, self.clock = device, dtype, clock
        self.timer = StepTimer(cost, transport, device, dtype, clock=clock)
        self._links = "network" if cost.cluster.nodes > 1 else "intra"
        self._begin, self._limit_s = 0.0, inf

    def calibrate(
        self,
        longest: int,
        report: Report = lambda text: None,
        *,
        widest: int | None = None,
        stages: int = 1,
        quick: bool = False,
        experts: Sequence[int] = (),
    ) -> Calibration:
        """Measure and fit; all ranks call it and get the same.

        Args:
            longest: tokens of the longest document to try.
            report: called with what comes next.
            widest: ranks of the largest group that is tried; None: all.
            stages: of the pipeline by which handovers are measured; 1: they are not.
            quick: try fewer plans, less often, and no documents in pieces; a tenth of the time, twice the error.
            experts: expert degrees that are tried beside that of the cost model; each takes a model of its own.
        """
        self._begin, self._limit_s = self.clock(), QUICK_S if quick else inf
        report("kernels, matrix products, messages")
        lengths = KERNEL_LENGTHS[self.device.type]
        start = self._measure_start([each for each in lengths if not quick or each <= max(longest, lengths[2])])
        cost = self.cost
        plans = {plan.hash: plan for plan in trial_plans(cost, longest, widest, quick=quick)}  # small ranks: some alike
        turns = QUICK_TURNS if quick else TURNS
        trials = self._time_trials([*plans.values()], report, turns)
        for degree in experts:
            trials += self._time_expert_degree(cost.with_expert(degree), report, turns)
        known = ["matmul", "attention", "tile", "document"]
        if self.device.type == "cpu":  # elsewhere gathers hide behind computing, and only the exposed rest counts
            known.append(f"{self._links}.collective.bytes")
        calibration = calibrate(cost.with_profile(start), trials, dict.fromkeys(known, 1.0))
        if stages == 1:
            return calibration
        report("ranks by themselves")
        profile = self._measure_solo_ratio(calibration.profile, longest)
        report(f"handovers between {stages} stages, backwards in halves")
        profile = measure_stage_costs(cost.with_profile(profile), self.transport, self.device, self.dtype, stages)
        return replace(calibration, profile=profile)

    def _measure_solo_ratio(self, profile: AnalyticProfile, longest: int) -> AnalyticProfile:
        """Add the time of a rank's work while all others wait, as a share of that while all are busy."""
        cost = self.cost
        policy = next(policy for policy in cost.policies if policy.checkpoint == Checkpoint.NONE)
        loads = [GroupLoad(1, min(tokens, cost.capacity(policy))) for tokens in (longest // 2, longest)]
        blocks = [(load, groups) for load in loads for groups in (1, cost.ranks)]
        plans = [equal_groups_plan(cost, GroupShape(1, 1), load, policy, groups) for load, groups in blocks]

        def longest_busy_seconds(plan: Plan) -> float:
            self.timer.seconds(plan)
            return self.timer.slowest(self.timer.busy_seconds)

        turns = [[longest_busy_seconds(plan) for plan in plans] for _ in range(TURNS)]
        fastest = [min(times) for times in zip(*turns, strict=True)]
        source = f"documents of {longest // 2} and {longest} tokens on one rank and on all"
        sources = profile.sources | {"alone": source}
        return replace(profile, solo_time_ratio=min(1.0, sum(fastest[::2]) / sum(fastest[1::2])), sources=sources)

    def _time_expert_degree(self, cost: CostModel, report: Report, turns: int) -> list[Trial]:
        """Time documents on one rank each, from next to nothing to full ranks, with another expert degree."""
        report(f"expert degree {cost.expert}")
        policy = next(policy for policy in cost.policies if policy.checkpoint == Checkpoint.NONE)
        tokens = cost.capacity(policy)
        loads = (GroupLoad(1, TINY), GroupLoad(max(1, tokens // 2 // SHORT), min(SHORT, tokens)), GroupLoad(1, tokens))
        plans = {
            each.hash: each for each in (equal_groups_plan(cost, GroupShape(1, 1), load, policy) for load in loads)
        }
        timer = StepTimer(cost, self.transport, self.device, self.dtype, clock=self.clock)
        return self._time_trials([*plans.values()], report, turns, timer)

    def _time_trials(
        self, plans: Sequence[Plan], report: Report, turns: int, timer: StepTimer | None = None
    ) -> list[Trial]:
        """Time plans in turns, so that a slow minute of the machine meets all of them; the fastest step counts."""
        timer = timer or self.timer
        seconds = [inf] * len(plans)
        for turn in range(turns):
            for number, plan in enumerate(plans):
                if (turn or number >= LEAST_TRIALS) and self._out_of_time():
                    return [Trial(plan, 1e9 * best) for plan, best in zip(plans, seconds, strict=True) if best < inf]
                if turn == 0:
                    report(f"trial {number + 1} of {len(plans)}: {describe_trial(plan)}")
                repeats = turns if turn and seconds[number] <= SHORT_STEP_S else 1
                seconds[number] = min(seconds[number], *(timer.seconds(plan) for _ in range(repeats)))
            if turn + 1 < turns:
                report(f"all trials again, turn {turn + 2} of {turns}")
        return [Trial(plan, 1e9 * fastest) for plan, fastest in zip(plans, seconds, strict=True)]

    def _out_of_time(self) -> bool:
        """Whether a quick measurement has taken its time, on some rank."""
        return self._limit_s < inf and self.timer.slowest(self.clock() - self._begin) > self._limit_s

    def _measure_start(self, lengths: Sequence[int]) -> AnalyticProfile:
        """Return the given profile with the constants that are measured by themselves, kernels with these lengths."""
        spec = self.cost.model
        kernels = self._kernel_times(lengths)
        changes: dict[str, Any] = {
            "matmul_tflops": self._mean(matmul_tflops(spec, self.device, self.dtype, self.clock)),
            "attention": _curve(kernels.causal, spec, 1.0),
            "tile": _curve(kernels.full, spec, 2.0),
            "document_us": max(1, sum(kernels.causal[0][1:])) / 1e3,
            self._links: self._link_rates(),
        }
        ranks = f"{self.transport.ranks} ranks at once"
        sources = dict.fromkeys(changes, f"measured apart, {ranks}, then fitted to steps of {spec.name}")
        fitted = f"fitted to steps of {spec.name}, {ranks}"
        sources |= dict.fromkeys(("memory_efficiency", *START_US), fitted)
        sources |= {"round_us": "in layer_us", "overlap": "0: traffic is fitted as what does not hide"}
        if self.device.type == "cpu":
            changes["gathered_us"], sources["gathered_us"] = START_GATHERED_US, fitted
        else:
            self._mean(0.0)  # all ranks begin together
            changes["host_gb_s"] = self._mean(host_copy_gb_s(self.device))
            sources["host_gb_s"] = f"measured with pinned memory, the slower direction, {ranks}"
            self._mean(0.0)
            with cpu_threads(threads_of_rank(self.cost.node_size)):
                changes["host_memory_gb_s"] = self._mean(host_update_gb_s()) * self.cost.node_size
            sources["host_memory_gb_s"] = f"measured with updates of AdamW on CPUs, {ranks}"
        changes |= {"name": "measured", "overlap": 0.0, "sources": self.given.sources | sources}
        return replace(self.given, **changes, **START_US)

    def _kernel_times(self, lengths: Sequence[int]) -> KernelTimes:
        """Times of the kernel that this device prefers, the mean over ranks that run at the same time."""
        spec = self.cost.model
        shape = AttentionShape(spec.heads, spec.kv_heads, spec.head_dim, self.dtype, self.device, spec.head_dim**-0.5)
        self._mean(0.0)  # all ranks begin together
        settings = TimingSettings(tuple(lengths), max(lengths), repeats=2, clock=self.clock)
        [times] = time_kernels([default_dispatcher(self.device)], shape, settings).times

        def mean(point: TimePoint) -> TimePoint:
            length, *times_ns = point
            return TimePoint(length, *(round(self._mean(ns)) for ns in times_ns))

        return replace(times, causal=tuple(map(mean, times.causal)), full=tuple(map(mean, times.full)))

    def _link_rates(self) -> Links:
        """Time messages to a neighbour and all-gathers.

        The fit starts with an all-to-all as a message per doubling, and a gather as a message to every other rank.
        """
        p2p, collective = self._link(self._send_to_neighbour), self._link(self._all_gather)
        return Links(replace(p2p, hop_us=p2p.call_us), p2p, replace(collective, hop_us=p2p.call_us))

    def _link(self, send: Send) -> LinkRate:
        """Latency and bandwidth of messages that all ranks send at once."""
        link = self.cost.cluster.nic if self._links == "network" else self.cost.cluster.intra
        if self.transport.ranks == 1:
            return LinkRate(1.0, 1.0, 0.0)
        short, long = (self._message_seconds(send, size) for size in MESSAGE_BYTES)
        # noise may make a short message as slow as a long one: at least half of a long one's time is its bytes'
        gb_s = MESSAGE_BYTES[1] / max(long - short, long / 2) / 1e9
        return LinkRate(gb_s / link.gb_s, max(1.0, 1e6 * min(short, long / 2)), 0.0)

    def _message_seconds(self, send: Send, size: int) -> float:
        message = torch.zeros(size // 4, device=self.device)
        send(message)
        times = []
        for _ in range(2 * REPEATS):
            self._mean(0.0)  # all ranks begin together
            begin = self.clock()
            send(message)
            synchronize(self.device)
            times.append(self._mean(self.clock() - begin))
        return statistics.median(times)

    def _all_gather(self, message: torch.Tensor) -> None:
        """All-gather so that a rank ends up with as many bytes as the message has."""
        ranks = range(self.transport.ranks)
        share = message[: len(message) // len(ranks)]
        self.transport.all_gather(message.new_empty(len(share) * len(ranks)), share, ranks)

    def _send_to_neighbour(self, message: torch.Tensor) -> None:
        rank, ranks = self.transport.rank, self.transport.ranks
        received = P2PTensor((rank - 1) % ranks, torch.empty_like(message))
        self.transport.exchange([P2PTensor((rank + 1) % ranks, message)], [received]).wait()

    def _mean(self, value: float) -> float:
        return float(gather_values([value], self.transport, self.device).mean())


def matmul_tflops(spec: ModelSpec, device: torch.device, dtype: torch.dtype, clock: Clock = time.perf_counter) -> float:
    """TFLOP/s of this rank on the matrix products of a layer, forward and backward."""
    flops = seconds = 0.0
    for before, after in [(spec.hidden, spec.heads * spec.head_dim), (spec.hidden, spec.ffn), (spec.ffn, spec.hidden)]:
        sizes = ((MATMUL_TOKENS, before), (after, before), (MATMUL_TOKENS, after))
        x, weight, gradient = (torch.randn(size, device=device).to(dtype) for size in sizes)
        for repeat in range(REPEATS + 1):
            begin = clock()
            _ = x @ weight.T, gradient @ weight, gradient.T @ x
            synchronize(device)
            if repeat:
                seconds += clock() - begin
                flops += 6.0 * MATMUL_TOKENS * before * after
    return flops / seconds / 1e12


def host_copy_gb_s(device: torch.device, size: int = HOST_COPY_BYTES) -> float:
    """GB/s of this rank between a device and pinned host memory, in the slower direction."""
    there = torch.zeros(size, dtype=torch.uint8, device=device)
    here = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    seconds = []
    for target, source in ((here, there), (there, here)):
        times = []
        for _ in range(REPEATS + 1):
            synchronize(device)
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            synchronize(device)
            times.append(time.perf_counter() - begin)
        seconds.append(statistics.median(times[1:]))
    return size / max(seconds) / 1e9


def host_update_gb_s(elements: int = UPDATED_ELEMENTS) -> float:
    """GB/s of memory that this rank's CPUs read and write while AdamW updates float32 parameters on them."""
    parameter = torch.nn.Parameter(torch.zeros(elements))
    parameter.grad = torch.ones(elements)
    optimiser, times = torch.optim.AdamW([parameter], fused=True), []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        optimiser.step()
        times.append(time.perf_counter() - begin)
    return OPTIMISER_TRAFFIC * elements / statistics.median(times[1:]) / 1e9


def _curve(points: Sequence[TimePoint], spec: ModelSpec, area: float) -> Curve:
    """Throughput from times, less the cost per document; ``area``: in causal documents of the same length."""
    shortest, *others = points
    forward, backward = ([max(1, point[k] - shortest[k]) / 1e3 for point in others] for k in (1, 2))
    curve = fit_curve([point.length for point in others], forward, backward, spec.heads, spec.head_dim)
    return Curve(curve.lengths, *(tuple(area * rate for rate in rates) for rates in (curve.forward, curve.backward)))


# ---- Timed steps


class StepTimer:
    """Times real training steps on this rank, on dummy tokens; the trained parameters mean nothing."""

    def __init__(
        self,
        cost: CostModel,
        transport: Transport,
        device: torch.device,
        dtype: torch.dtype,
        stages: Sequence[Stage] = (),
        clock: Clock = time.perf_counter,
    ) -> None:
        """Build the reference model of the cost model's spec, sharded as plans say; all ranks take part.

        `stages` are those of all plans that are timed; none or one: no pipeline. Under free sharding any plan is timed.
        """
        self._vocabulary, self._transport, self._device = cost.model.vocabulary, transport, device
        self._clock = clock
        adapter = ModelAdapter.of(Transformer(cost.model, dtype=torch.float32, device=device))
        adapter = prepare_layers(adapter, split_backward=len(stages) > 1 or cost.sharding == Sharding.FREE)
        compute_dtype = None if dtype == torch.float32 else dtype
        self._parameters = shard_parameters(adapter, transport, stages, cost, compute_dtype)
        self._settings = Optimiser()
        self._optimiser = make_sharded_optimiser(self._parameters, cost, self._settings)
        self.last_result: StepResult | None = None  # of the last step, on this rank

    def bind(self, plan: Plan) -> RankPlan:
        """Bind a plan to this rank."""
        return bind_plan(plan, self._transport, device=self._device, check=False, dropout_seed=0)

    def seconds(self, plan: Plan) -> float:
        """Run one step of a plan and return its seconds, the same on all ranks, which all call it."""
        self.slowest(0.0)  # all ranks begin together
        begin = self._clock()
        self.last_result = self.gradients(self.bind(plan))
        self._optimiser.step()
        self._parameters.zero_grad()
        synchronize(self._device)
        return self.slowest(self._clock() - begin)

    def slowest(self, seconds: float) -> float:
        """Return the most seconds of any rank; ranks wait for each other here."""
        return float(gather_values([seconds], self._transport, self._device).max())

    def gradients(self, rank_plan: RankPlan) -> StepResult:
        """Run a plan up to its gradients."""
        tokens, clip = sum(rank_plan.plan.documents), self._settings.clip
        return run_step(rank_plan, self._parameters, self._rows, tokens, max_norm=clip)

    def _rows(self, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and labels that are the same for a token on whatever rank it is."""
        ids = (context.documents * 7919 + context.positions) % self._vocabulary
        return ids, (ids + 1) % self._vocabulary

    @property
    def busy_seconds(self) -> float:
        """Seconds of this rank in forwards and backwards of the last step."""
        assert self.last_result is not None
        return self.last_result.forward_s + self.last_result.backward_s


class GroupLoad(NamedTuple):
    """What every group of a trial works on: documents of one length, the same in every round."""

    documents: int
    length: int
    rounds: int = 1
    pieces: int = 1  # of every document, one after another in rounds of their own


def trial_plans(cost: CostModel, longest: int, widest: int | None = None, *, quick: bool = False) -> Iterator[Plan]:
    """Yield plans of equal groups side by side: every power of two as degree, from next to nothing to full ranks.

    Full ranks have short documents, middling ones, or the longest (`longest` tokens), and keys that go round a ring or
    are gathered: these differ in the cost of a document and of a token, and plans have all of them. `widest` limits the
    ranks of a group. `quick` leaves out documents in pieces and middling loads.
    """
    policies = [policy for policy in cost.policies if policy.checkpoint == Checkpoint.NONE]
    if not policies:
        raise SeqloomError(
            f"{cost.model.name} holds no token without recomputing; measure a smaller model or more ranks"
        )
    capacity = min(cost.capacity(policy) for policy in policies)
    shapes = candidate_shapes(cost.family, cost.model.heads, cost.model.kv_heads)
    sizes = [size for size in cost.family.sizes if size & (size - 1) == 0 and size <= (widest or cost.ranks)]
    for degree in sizes:
        longest_here = min(degree * capacity, max(longest, capacity))
        loads = [
            GroupLoad(1, TINY * degree),
            GroupLoad(max(1, degree * capacity // 2 // SHORT), min(SHORT, capacity)),
            GroupLoad(2 * degree, capacity // 2),
            GroupLoad(max(1, degree * capacity // longest_here), longest_here),
        ]
        few = (loads[0], loads[3]) if quick else loads
        in_pieces = []
        if degree == 1 and not quick:
            in_pieces = [GroupLoad(1, size, pieces=min(size, PIECES)) for size in (longest_here // 8, longest_here)]
        first, *others = (shape for shape in shapes if shape.degree == degree)
        yield from (equal_groups_plan(cost, first, load, policies[0]) for load in (*loads, *in_pieces))
        for policy in policies if degree == 1 else policies[: not quick]:  # gradients reduced per round, and per step
            yield equal_groups_plan(cost, first, GroupLoad(1, TINY * degree, rounds=3), policy)
        narrow = [shape for shape in others if shape.ulysses == 1 and shape.ring in (2, 4)]
        rings = [shape for shape in narrow if shape.method == Method.RING]
        gathers = [shape._replace(method=Method.GATHER) for shape in (first, *rings) if shape.ring > 1]
        for shape in rings:
            yield from (equal_groups_plan(cost, shape, load, policies[0]) for load in (loads[0], loads[2]))
        for shape in gathers[-1:] if quick else gathers:
            yield from (equal_groups_plan(cost, shape, load, policies[0]) for load in few)


def equal_groups_plan(
    cost: CostModel, shape: GroupShape, load: GroupLoad, policy: MemoryPolicy, groups: int | None = None
) -> Plan:
    """Return the plan in which every block of the shape's degree, or the first `groups` of them, has the same load."""
    blocks = cost.family.blocks(shape.degree)[:groups]
    rounds, per_round = [], load.documents * len(blocks)
    edges = [load.length * piece // load.pieces for piece in range(load.pieces + 1)]
    for first in range(0, load.rounds * per_round, per_round):
        for start, stop in pairwise(edges):
            firsts = range(first, first + per_round, load.documents)
            spans = ([Span(k, start, stop) for k in range(begin, begin + load.documents)] for begin in firsts)
            work = tuple(cost.group(shape, block, tuple(part)) for block, part in zip(blocks, spans, strict=True))
            rounds.append(StageMicroBatch(work, policy.checkpoint))
    plan = build_plan(cost, (load.length,) * (load.rounds * per_round), rounds, policy.reduce, "trial")
    plan.validate()
    return plan


def describe_trial(plan: Plan) -> str:
    """For example: 8 of 2x1, each 16 x 256 tokens, 3 rounds."""
    rounds = plan.pipelines[0].rounds
    groups = rounds[0].by_stage[0].groups
    first, length = groups[0], plan.documents[0]
    unit = "rounds" if first.spans[0].tokens == length else "pieces"
    more = f", {len(rounds)} {unit}" if len(rounds) > 1 else ""
    shape = GroupShape.of(first)._replace(routed=False)
    return f"{len(groups)} of {shape}, each {len(first.spans)} x {length} tokens{more}"


# ---- Costs of pipeline stages
# A message between stages takes its bytes and its link's latency, and a rank must notice that it has come: on a CPU
# that is another thread, which waits for its turn on the core. So handovers are measured in a step whose stages are
# busy. Parameters stay with their stages meanwhile, also for runs under free sharding: in a step that moves them, the
# error of predicting those moves would count as handovers, of which a step has few.


def measure_stage_costs(
    cost: CostModel, transport: Transport, device: torch.device, dtype: torch.dtype, stages: int
) -> AnalyticProfile:
    """Return the profile of `cost` with `handover_us` and `split_us` measured. All ranks call it and get the same.

    A pipeline of `stages` stages is timed; everything else of the profile is measured already.
    """
    profile = require_analytic(cost.profile)
    if cost.sharding == Sharding.FREE:
        cost = cost.with_profile(profile, Sharding.FULL)
    documents = np.full(UNITS * stages, STAGE_TOKENS)
    plans = [plan_pipeline(documents, cost, stages=stages, schedule=name, pieces=1) for name in ("1f1b", "zb-h1")]
    pipeline = plans[0].pipelines[0]
    timer = StepTimer(cost, transport, device, dtype, pipeline.stages)

    def run(plan: Plan) -> tuple[float, float]:
        seconds = timer.seconds(plan)
        return 1e9 * seconds, 1e9 * float(gather_values([timer.busy_seconds], transport, device).mean())

    turns = np.array([[run(plan) for plan in plans] for _ in range(STAGE_REPEATS + 1)])
    (step_ns, busy_ns), (_, split_busy_ns) = turns[1:].min(axis=0).tolist()
    passes = len(pipeline.rounds) * cost.model.layers / stages  # through a layer, on a rank
    costs = {
        "handover_us": solve_handover_us(plans[0], cost, step_ns, busy_ns),
        "split_us": max(0.0, split_busy_ns - busy_ns) / passes / 1e3,
    }
    source = f"a pipeline of {stages} stages with {UNITS * stages} documents of {STAGE_TOKENS} tokens, "
    sources = {"handover_us": source + "1F1B", "split_us": source + "ZB-H1 less 1F1B"}
    return replace(profile, **costs, sources=profile.sources | sources)


def solve_handover_us(plan: Plan, cost: CostModel, step_ns: float, busy_ns: float) -> float:
    """Return the microseconds of a handover at which the prediction equals the measured step; 0 where it was faster.

    `step_ns` is of the slowest rank from beginning to end, `busy_ns` in passes, the mean over ranks. Where
    passes took another time than predicted, the step is scaled by as much: their error is not a handover's. A cost of
    handovers in the profile of `cost` does not count.
    """
    profile = require_analytic(cost.profile)
    expected = simulate(plan, cost)
    wanted = step_ns * float((expected.busy_ns + expected.comm_ns).mean()) / busy_ns
    low, high = 0, MOST_HANDOVER_US
    while low < high:  # the least whole number that is enough
        middle = (low + high) // 2
        enough = predicted_ns(plan, cost.with_profile(replace(profile, handover_us=float(middle)))) >= wanted
        low, high = (low, middle) if enough else (middle + 1, high)
    return float(low)
