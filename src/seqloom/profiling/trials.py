"""Real training steps on made-up tokens, timed: what a machine's profile is fitted to, and what benchmarks compare.

A step is what a trainer does with a plan: bind it, run its rounds, reduce, clip, update. The time is that of the
slowest rank, all of them having begun together.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from seqloom.cost import CostModel, GroupShape, MemoryPolicy
from seqloom.cost.shapes import candidate_shapes
from seqloom.dist import Context, Transport
from seqloom.engine import RankPlan, StepResult, bind_plan, run_step
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.models import ModelAdapter, Transformer
from seqloom.params import scale_gradients
from seqloom.plan import Checkpoint, Method, Pipeline, Plan, Round, Sharding, Stage, StageMicroBatch
from seqloom.train.config import Optimiser
from seqloom.train.model import made_ready, place
from seqloom.train.optim import clip_factor, make_optimiser

TINY, SHORT = 64, 256
"""Tokens per rank of a group with next to nothing to do, and of a short document."""
PIECES = 16
"""Of a short and of a long document on one rank: what a piece costs is told from what the tokens before it cost."""


class StepTimer:
    """A model under training on this rank, whose parameters are worth nothing."""

    def __init__(
        self,
        cost: CostModel,
        transport: Transport,
        device: torch.device,
        dtype: torch.dtype,
        stages: Sequence[Stage] = (),
    ) -> None:
        """Build the reference model of the cost model's spec, sharded as plans say; all ranks take part.

        Args:
            stages: of all plans that are timed; none or one: no pipeline. Under free sharding any plan is timed.
        """
        self._vocabulary, self._transport, self._device = cost.model.vocabulary, transport, device
        adapter = ModelAdapter.of(Transformer(cost.model, dtype=torch.float32, device=device))
        compute = None if dtype == torch.float32 else dtype
        ready = made_ready(adapter, split=len(stages) > 1 or cost.sharding == Sharding.FREE)
        self._parameters = place(ready, transport, stages, cost, compute)
        self._settings = Optimiser()
        self._optimiser = make_optimiser(self._parameters.master_weights(), self._settings)
        self.last: StepResult | None = None

    def bind(self, plan: Plan) -> RankPlan:
        """Bind a plan."""
        return bind_plan(plan, self._transport, device=self._device, check=False)

    def seconds(self, plan: Plan) -> float:
        """Run one step of a plan and return its seconds, the same on all ranks, which all call it."""
        self.slowest(0.0)  # all ranks begin together
        begin = time.perf_counter()
        self.last = result = self.gradients(self.bind(plan))
        factor = clip_factor(result.gradient_norm, self._settings.clip)
        if factor < 1:
            scale_gradients(self._parameters, factor)
        self._optimiser.step()
        self._parameters.zero_grad()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return self.slowest(time.perf_counter() - begin)

    def gradients(self, bound: RankPlan) -> StepResult:
        """Run a plan as far as its gradients."""
        return run_step(bound, self._parameters, self._rows, sum(bound.plan.documents))

    def _rows(self, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and labels that are the same for a token wherever it lies."""
        ids = (context.documents * 7919 + context.positions) % self._vocabulary
        return ids, (ids + 1) % self._vocabulary

    def mean_busy(self) -> float:
        """Seconds that ranks spent in forwards and backwards of the last step, their mean; all ranks call it."""
        assert self.last is not None
        total = torch.tensor([self.last.forward_s + self.last.backward_s], dtype=torch.float64, device=self._device)
        self._transport.all_reduce(total, range(self._transport.ranks))
        return float(total) / self._transport.ranks

    def slowest(self, seconds: float) -> float:
        """The longest time of all ranks, which wait for each other here."""
        mine = torch.tensor([seconds], dtype=torch.float64, device=self._device)
        every = torch.empty(self._transport.ranks, dtype=torch.float64, device=self._device)
        self._transport.all_gather(every, mine, range(self._transport.ranks))
        return float(every.max())


class Load(NamedTuple):
    """What every group of a trial works on: documents of one length, the same in every round."""

    documents: int
    length: int
    rounds: int = 1
    pieces: int = 1
    """Of every document, one after another in rounds of their own."""


def trial_plans(cost: CostModel, longest: int, widest: int | None = None) -> Iterator[Plan]:
    """Plans of equal groups side by side: every power of two as degree, from next to nothing to full ranks.

    Full ranks have short documents, middling ones, or the longest, and keys that go round a ring or are gathered:
    what a document costs and what a token costs differs between these, and plans have all of them.

    Args:
        cost: of the machine; its capacity bounds the loads.
        longest: tokens of the longest document that is tried.
        widest: ranks of the largest group that is tried; None: all.
    """
    kept = [policy for policy in cost.policies if policy.checkpoint == Checkpoint.NONE]
    if not kept:
        raise SeqloomError(
            f"{cost.model.name} holds no token without recomputing; measure a smaller model or more ranks"
        )
    capacity = min(cost.capacity(policy) for policy in kept)
    shapes = candidate_shapes(cost.family, cost.model.heads, cost.model.kv_heads)
    sizes = [size for size in cost.family.sizes if size & (size - 1) == 0 and size <= (widest or cost.ranks)]
    for degree in sizes:
        room = min(degree * capacity, max(longest, capacity))
        most = [
            Load(1, TINY * degree),
            Load(max(1, degree * capacity // 2 // SHORT), min(SHORT, capacity)),
            Load(2 * degree, capacity // 2),
            Load(max(1, degree * capacity // room), room),
        ]
        first, *others = (shape for shape in shapes if shape.degree == degree)
        cut = [Load(1, size, pieces=min(size, PIECES)) for size in (room // 8, room)] if degree == 1 else []
        yield from (equal_groups(cost, first, load, kept[0]) for load in (*most, *cut))
        for policy in kept if degree == 1 else kept[:1]:  # gradients reduced per round, and per step
            yield equal_groups(cost, first, Load(1, TINY * degree, rounds=3), policy)
        narrow = [shape for shape in others if shape.ulysses == 1 and shape.ring in (2, 4)]
        rings = [shape for shape in narrow if shape.method == Method.RING]
        gathers = [shape._replace(method=Method.GATHER) for shape in (first, *rings) if shape.ring > 1]
        yield from (equal_groups(cost, shape, load, kept[0]) for shape in rings for load in (most[0], most[2]))
        yield from (equal_groups(cost, shape, load, kept[0]) for shape in gathers for load in most)


def one_and_all(cost: CostModel, tokens: int) -> tuple[Plan, Plan]:
    """A document of at most so many tokens on the first rank alone, and one on every rank."""
    policy = next(policy for policy in cost.policies if policy.checkpoint == Checkpoint.NONE)
    load = Load(1, min(tokens, cost.capacity(policy)))
    one, every = (equal_groups(cost, GroupShape(1, 1), load, policy, most) for most in (1, cost.ranks))
    return one, every


def equal_groups(cost: CostModel, shape: GroupShape, load: Load, policy: MemoryPolicy, most: int | None = None) -> Plan:
    """The plan in which every block of the shape's degree, or the first `most` of them, has the same load."""
    blocks = cost.family.blocks(shape.degree)[:most]
    rounds, own = [], load.documents * len(blocks)  # documents of a round
    edges = [load.length * piece // load.pieces for piece in range(load.pieces + 1)]
    for first in range(0, load.rounds * own, own):
        for start, stop in pairwise(edges):
            starts = range(first, first + own, load.documents)
            spans = ([Span(k, start, stop) for k in range(begin, begin + load.documents)] for begin in starts)
            groups = [cost.group(shape, block, tuple(some)) for block, some in zip(blocks, spans, strict=True)]
            rounds.append(Round((StageMicroBatch(tuple(groups), policy.checkpoint),)))
    pipeline = Pipeline.single(range(cost.ranks), cost.model.layers, rounds, policy.reduce)
    plan = Plan(
        limits=cost.limits(policy.reduce),
        sharding=cost.sharding,
        reduce=policy.reduce,
        documents=(load.length,) * (load.rounds * own),
        pipelines=(pipeline,),
        planner="trial",
    )
    plan.validate()
    return plan


def described(plan: Plan) -> str:
    """For example: 8 of 2x1, each 16 x 256 tokens, 3 rounds."""
    rounds = plan.pipelines[0].rounds
    groups = rounds[0].work[0].groups
    first, length = groups[0], plan.documents[0]
    what = "rounds" if first.spans[0].tokens == length else "pieces"
    more = f", {len(rounds)} {what}" if len(rounds) > 1 else ""
    load = f"{len(first.spans)} x {length} tokens"
    shape = GroupShape(first.ulysses, first.ring, first.method)
    return f"{len(groups)} of {shape}, each {load}{more}"
