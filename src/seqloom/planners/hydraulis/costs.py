"""The schemes that a cluster and a model allow, with prices fitted to the cost model.

A scheme's stages run its documents in groups as wide as the stage. Each document is priced under the choice of what is
kept that is fastest for it: what keeps more runs faster, but a micro-batch holds less, so its constant counts for
fewer tokens. Two numbers, for the squared and the plain length, are fitted to these prices over all lengths that fit.

Where memory makes a scheme recompute, or leaves no room for the longest document, the same scheme with parameters
gathered for every pass is looked at too. It holds more, and every micro-batch pays for the messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from seqloom.cost import CostModel, GroupShape, MemoryPolicy
from seqloom.cost.resharding import microbatch_tokens, reshard_times, unshard_times
from seqloom.cost.stages import StageMemory, pipeline_checkpoints, pp_rank_bytes
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.plan import (
    Action,
    ActionKind,
    Checkpoint,
    Group,
    Limits,
    Pipeline,
    Plan,
    Reduce,
    Round,
    Stage,
    StageMicroBatch,
)
from seqloom.plan.pipeline import gathered_for_passes
from seqloom.planners.hydraulis.config import (
    ConfigCost,
    ParallelConfig,
    PipelineConfig,
    Strategy,
    check_placement,
    fits_nodes,
)
from seqloom.planners.loops import estimate_pipeline_ns
from seqloom.planners.pipeline.stage_layout import line_of, shard_group_of
from seqloom.schedules import schedule_of

STAGES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Numbers of stages that are looked at."""
SHORTEST = 128
"""Tokens of the shortest document that prices are fitted to."""
PROBES = 12
"""Lengths that prices are fitted to."""
LOADS = (1, 2**14, 2**18)
"""Tokens of the loads by which schemes are compared, at least one document each."""
NEAR_PERCENT = 103

_known: WeakKeyDictionary[CostModel, dict[ParallelConfig, ConfigCost | None]] = WeakKeyDictionary()
_held: WeakKeyDictionary[CostModel, dict[tuple[int, bool], dict[MemoryPolicy, int]]] = WeakKeyDictionary()


class Keeping(NamedTuple):
    """One choice of what is kept of a micro-batch: tokens that fit on all ranks of a stage, and the price."""

    tokens: int
    fixed: int
    """ns before any document."""
    policy: MemoryPolicy


def scheme_costs(cost: CostModel, longest: int) -> dict[ParallelConfig, ConfigCost]:
    """Prices of the schemes worth considering for documents up to `longest` tokens. Times are those of a stage.

    SeqloomError if no scheme holds a token.
    """
    fitted = {}
    for scheme in legal_schemes(cost):
        sharing = [scheme._replace(gathered=True)] if may_gather(cost, scheme, longest) else []
        for each in (scheme, *sharing):
            if (priced := fit(cost, each)) is not None:
                fitted[each] = priced
    if not fitted:
        raise SeqloomError(
            f"no pipeline on {cost.ranks} ranks holds the state of {cost.model.name} and one token in "
            f"{cost.budget_bytes / 1024**3:.1f} GiB per GPU; raise the memory budget or use more GPUs"
        )
    return useful_schemes(fitted, longest)


def legal_schemes(cost: CostModel) -> Iterator[ParallelConfig]:
    """Every scheme that the model's heads, widths and layers and the cluster's nodes allow.

    Tensor ranks stay inside a node. Beyond them a stage spreads documents over heads as far as these reach, in its
    node where it can, and over positions from there on.
    """
    node = cost.node_size
    for tensor in cost.model.tensor_degrees:
        if tensor > node or node % tensor:
            continue
        for stages in (count for count in STAGES if count <= cost.model.layers):
            for width in cost.family.sizes:
                if width % tensor == 0 and fits_nodes(
                    ParallelConfig(stages, tensor, width // tensor), cost.ranks, node
                ):
                    inside = cost.for_submesh(stages * width, tensor)
                    shapes = [s for s in inside.engine.shapes if s.degree == width and not s.routed]
                    for ulysses, ring in dict.fromkeys((shape.ulysses, shape.ring) for shape in shapes):
                        yield ParallelConfig(stages, tensor, ulysses // tensor, ring)


def fit(cost: CostModel, scheme: ParallelConfig) -> ConfigCost | None:
    """Prices of one scheme, None if it holds no token; made once per cost model."""
    known = _known.setdefault(cost, {})
    if scheme not in known:
        known[scheme] = _fitted(cost.for_submesh(scheme.ranks, scheme.tensor), scheme)
    return known[scheme]


def _fitted(inside: CostModel, scheme: ParallelConfig) -> ConfigCost | None:
    ulysses = scheme.tensor * scheme.ulysses
    shapes = [s for s in inside.engine.shapes if (s.ulysses, s.ring, s.routed) == (ulysses, scheme.ring, False)]
    if not shapes:
        legal = dict.fromkeys(f"{s.ulysses} x {s.ring}" for s in inside.engine.shapes if s.degree == scheme.width)
        raise SeqloomError(
            f"pipeline {scheme}: no groups of Ulysses {ulysses} (tensor included) x ring {scheme.ring} here; of "
            f"{scheme.width} ranks there are {', '.join(legal) or 'none'}"
        )
    kept = list(keepings(inside, scheme, shapes))
    longest = max((keeping.tokens for keeping in kept), default=0)
    if longest < 1:
        return None
    lengths = np.unique(np.geomspace(min(SHORTEST, longest), longest, PROBES).astype(np.int64))
    fixed = min(keeping.fixed for keeping in kept)
    prices = np.full(len(lengths), np.inf)
    for keeping in kept:
        tables = inside.tables(lengths, keeping.policy, shapes)
        own = tables.cost.max(axis=0).min(axis=0) / scheme.stages
        own = own + fixed * lengths * (1.0 / keeping.tokens - 1.0 / longest)
        prices = np.where(lengths <= keeping.tokens, np.minimum(prices, own), prices)
    square, linear = relative_fit(lengths.astype(np.float64), prices)
    return ConfigCost(square, linear, fixed, longest)


def may_gather(cost: CostModel, scheme: ParallelConfig, longest: int) -> bool:
    """Whether memory binds a scheme, for documents up to `longest` tokens, and gathering for every pass leaves more."""
    if scheme.width == scheme.tensor:
        return False
    inside = cost.for_submesh(scheme.ranks, scheme.tensor)
    stays, shared = (
        {policy.checkpoint: tokens for policy, tokens in holdings(inside, scheme._replace(gathered=each)).items()}
        for each in (False, True)
    )
    everything = stays.get(Checkpoint.NONE, 0) * scheme.width
    return everything < longest and any(tokens > stays.get(checkpoint, 0) for checkpoint, tokens in shared.items())


def keepings(inside: CostModel, scheme: ParallelConfig, shapes: list[GroupShape]) -> Iterator[Keeping]:
    """The choices of what is kept that hold a token of a micro-batch, as many in flight as 1F1B has."""
    moved = unit_passes_ns(inside, scheme)
    for policy, capacity in holdings(inside, scheme).items():
        if capacity > 0:
            fixed = inside.tables([1], policy, shapes).fixed.max(axis=0).min() // scheme.stages
            yield Keeping(capacity * scheme.width, int(fixed) + moved, policy)


def holdings(inside: CostModel, scheme: ParallelConfig) -> dict[MemoryPolicy, int]:
    """Tokens of a micro-batch that a rank can hold under every choice of what is kept; made once per cost model."""
    known, key = _held.setdefault(inside, {}), (scheme.stages, scheme.gathered)
    if key not in known:
        known[key] = (gathered_holdings if scheme.gathered else _holdings)(inside, scheme.stages)
    return known[key]


def _holdings(inside: CostModel, stages: int) -> dict[MemoryPolicy, int]:
    """The same of parameters that stay for the step."""
    holding: dict[MemoryPolicy, int] = {}
    if stages == 1:
        with suppress(SeqloomError):  # none holds a token
            holding = {policy: inside.capacity(policy) for policy in inside.policies}
    else:
        line = line_of(inside, stages)
        for checkpoint in pipeline_checkpoints(inside):
            least = []
            for host, shares in enumerate(line.of_hosts):
                room = inside.budget_bytes - pp_rank_bytes(inside, shares, shard_group_of(inside, line))
                own = [StageMemory(inside, share).activation_bytes(checkpoint, offload=False) for share in shares]
                held = (stages - host) * sum(each.held for each in own)
                least.append(int(room // (held + max(max(each.forward, each.backward) for each in own))))
            if checkpoint != Checkpoint.STAGE:  # no faster than running its layers again
                holding[MemoryPolicy(checkpoint, Reduce.STEP, resident=True)] = min(least)
    return holding


def relative_fit(lengths: np.ndarray, prices: np.ndarray) -> tuple[float, float]:
    """(a, b), none negative, such that ``a s^2 + b s`` is near the prices in proportion, float64[n] each."""
    rows = np.stack([lengths * lengths, lengths], axis=1) / prices[:, None]
    (a, b), *_ = np.linalg.lstsq(rows, np.ones(len(prices)), rcond=None)
    if a < 0 or len(lengths) < 2:
        return 0.0, float(rows[:, 1].sum() / (rows[:, 1] ** 2).sum())
    if b < 0:
        return float(rows[:, 0].sum() / (rows[:, 0] ** 2).sum()), 0.0
    return float(a), float(b)


def useful_schemes(costs: dict[ParallelConfig, ConfigCost], longest: int) -> dict[ParallelConfig, ConfigCost]:
    """Of every number of ranks as few schemes as possible, such that one is near the fastest at any load.

    Loads are one to many micro-batches of documents of one length, for lengths up to `longest` tokens. Schemes that are
    gathered for every pass are taken for loads at which no other is near them.
    """
    kept: list[ParallelConfig] = []
    for ranks in sorted({scheme.ranks for scheme in costs}):
        reached: np.ndarray | float = np.inf
        for gathered in (False, True):
            own = sorted(scheme for scheme in costs if scheme.ranks == ranks and scheme.gathered == gathered)
            if not own:
                continue
            times = np.stack([_loads_ns(scheme, costs[scheme], longest) for scheme in own])
            best = times.min(axis=0)
            near = (times * 100 <= best * NEAR_PERCENT) & np.isfinite(best)
            open_ = np.isfinite(best) & (best * NEAR_PERCENT < np.multiply(reached, 100))
            while open_.any():
                pick = int((near & open_).sum(axis=1).argmax())
                kept.append(own[pick])
                open_ = open_ & ~near[pick]
            reached = best
    return {scheme: costs[scheme] for scheme in sorted(kept)}


def _loads_ns(scheme: ParallelConfig, cost: ConfigCost, most: int) -> np.ndarray:
    """float64[loads] ns per document of several amounts of several lengths; infinite where one is too long."""
    times = []
    lengths = [*(2**k for k in range(7, 40) if 2**k < most), most]
    for length, own in zip(lengths, cost.documents_ns(np.array(lengths)).tolist(), strict=True):
        for tokens in LOADS:
            count = max(1, tokens // length)
            done = estimate_pipeline_ns(
                own * count, length * count, own, count, cost.fixed, cost.longest, scheme.stages, False
            )
            times.append(done / count if length <= cost.longest else np.inf)
    return np.array(times)


# ---- merged: planners.strategies.check
# Are given strategies legal here? And what do their schemes cost?


def check_strategies(strategies: Sequence[Strategy], cost: CostModel) -> None:
    """Refuse strategies that the cluster or the model does not allow, with the reason and the nearest way out."""
    if not strategies:
        raise SeqloomError("no strategies to choose from; propose some (seqloom propose), or leave them out")
    model = cost.model
    for strategy in strategies:
        check_placement(strategy, cost.ranks, cost.node_size)
        for scheme in dict.fromkeys(pipe.scheme for pipe in strategy.pipelines):
            if scheme.stages > model.layers:
                raise SeqloomError(
                    f"pipeline {scheme} of strategy {strategy} has {scheme.stages} stages for the {model.layers} "
                    f"layers of {model.name}: every stage needs a layer; use at most {model.layers} stages"
                )
            model.check_tensor(scheme.tensor)
            if scheme.tensor * scheme.ulysses > model.heads:
                raise SeqloomError(
                    f"pipeline {scheme} of strategy {strategy} spreads the {model.heads} heads of {model.name} over "
                    f"{scheme.tensor * scheme.ulysses} ranks: each needs one; use a ring for the rest"
                )


def costs_of(strategies: Sequence[Strategy], cost: CostModel) -> dict[ParallelConfig, ConfigCost]:
    """Prices of every scheme in these strategies; SeqloomError for one whose state does not fit in memory."""
    costs = {}
    for scheme in dict.fromkeys(pipe.scheme for strategy in strategies for pipe in strategy.pipelines):
        priced = fit(cost, scheme)
        if priced is None:
            raise SeqloomError(
                f"pipeline {scheme} has no room for a token of {cost.model.name} beside its parameters and gradients "
                f"in {cost.budget_bytes / 1024**3:.1f} GiB per GPU; raise the memory budget, or propose strategies anew"
            )
        costs[scheme] = priced
    return costs


# ---- merged: planners.strategies.gathered
# A pipeline whose parameters are gathered for every pass: what it holds, what that costs, and its plan.
#
# All ranks of a stage meet in every pass, so every round is one group as wide as the stage: the micro-batches of
# the
# assignment, in 1F1B order where there are several stages.
#
#     0UNSHARD0 0F0 0RESHARD0   0UNSHARD0 0B0 0RESHARD0   0UNSHARD1 0F1 0RESHARD1 ..


def gathered_holdings(inside: CostModel, stages: int) -> dict[MemoryPolicy, int]:
    """Tokens of a micro-batch that a rank can hold, by what is kept; as many are in flight as 1F1B has."""
    line = line_of(inside, stages)
    column = line.width // line.tensor
    holding = {}
    for checkpoint in pipeline_checkpoints(inside):
        if checkpoint != Checkpoint.STAGE:  # no faster than running its layers again
            rooms = [
                microbatch_tokens(inside, part, column, checkpoint, stages - host)
                for host, part in enumerate(line.shares)
            ]
            holding[MemoryPolicy(checkpoint, Reduce.STEP, resident=True)] = min(rooms)
    return holding


def unit_passes_ns(inside: CostModel, scheme: ParallelConfig) -> int:
    """ns that gathering for every pass adds to a micro-batch on the slowest stage; nothing where parameters stay."""
    if not scheme.gathered:
        return 0
    line = line_of(inside, scheme.stages)
    times = [unshard_times(inside, *each) for each in zip(line.stages, line.shares, strict=True)]
    return max(2 * each.gather + each.sum for each in times)


def plan_gathered(
    lengths: np.ndarray, batches: Sequence[Sequence[int]], cost: CostModel, scheme: ParallelConfig
) -> Plan:
    """Plan micro-batches of documents for a pipeline that is gathered for every pass.

    Args:
        lengths: int64[n] tokens.
        batches: documents of every micro-batch, in running order.
        cost: prices of the pipeline's ranks.
        scheme: of the pipeline.
    """
    holding = {policy: tokens for policy, tokens in gathered_holdings(cost, scheme.stages).items() if tokens > 0}
    needs = [-(-int(cost.padded_lengths(lengths[list(batch)]).sum()) // scheme.width) for batch in batches]
    if scheme.stages > 1:  # several are in flight, and each may have as much of the memory as the largest
        needs = [max(needs)] * len(needs)
    stages = line_of(cost, scheme.stages).stages
    rounds = []
    for batch, need in zip(batches, needs, strict=True):
        fitting = [policy for policy, tokens in holding.items() if tokens >= need]
        if not fitting:
            raise SeqloomError(
                f"a micro-batch of {need * scheme.width} tokens for pipeline {scheme}, which holds "
                f"{max(holding.values(), default=0) * scheme.width}; raise the memory budget or use more GPUs"
            )
        shape = _fastest(lengths[list(batch)], cost, scheme, fitting[0])
        spans = tuple(Span(document, 0, int(lengths[document])) for document in batch)
        rounds.append(Round(tuple(_work(stage, shape, spans, fitting[0].checkpoint) for stage in stages)))
    rows = schedule_of("1f1b", scheme.stages, len(batches)).rows_of_plan()
    capacity = tuple((policy.checkpoint, tokens) for policy, tokens in holding.items())
    return Plan(
        limits=Limits(cost.ranks, cost.node_size, cost.model.heads, capacity, cost.pad_multiple),
        sharding=cost.sharding,
        reduce=Reduce.STEP,
        documents=tuple(lengths.tolist()),
        pipelines=(gathered_for_passes(Pipeline(stages, tuple(rounds), rows)),),
        planner="hydraulis",
    )


def _fastest(lengths: np.ndarray, cost: CostModel, scheme: ParallelConfig, policy: MemoryPolicy) -> GroupShape:
    """The scheme's groups, with the way of sharing keys and values that is fastest for these documents."""
    wanted = (scheme.tensor * scheme.ulysses, scheme.ring, False)
    shapes = [shape for shape in cost.engine.shapes if (shape.ulysses, shape.ring, shape.routed) == wanted]
    tables = cost.tables(lengths, policy, shapes)
    everything = np.arange(len(lengths))
    return min(shapes, key=lambda shape: tables.group_ns(shapes.index(shape), everything))


def _work(stage: Stage, shape: GroupShape, spans: tuple[Span, ...], checkpoint: Checkpoint) -> StageMicroBatch:
    return StageMicroBatch((Group(stage.ranks, shape.ulysses, shape.ring, spans, shape.method),), checkpoint)


# ---- merged: planners.strategies.switch
# What it costs to bring parameters where a strategy computes, and gradients back, whatever the documents are.
#
# Most of it hides behind the step's own work, which depends on the plan. What never hides is known beforehand:
# embedding
# and first layer, there and back. Strategies are chosen with that; full plans are compared with all of it.


def switch_ns(strategy: Strategy, cost: CostModel) -> int:
    """ns of a step under free sharding that moving parameters and gradients adds at least."""
    relay = reshard_times(cost, [_outline(pipe, cost) for pipe in strategy.pipelines])
    return int(np.rint(relay.first + relay.last))


def _outline(pipe: PipelineConfig, cost: CostModel) -> Pipeline:
    """The stages of a pipeline, without anything to do but to say whether they are gathered for every pass."""
    line = line_of(cost.for_submesh(len(pipe.ranks), pipe.scheme.tensor), pipe.scheme.stages)
    stages = (replace(stage, ranks=tuple(pipe.ranks[rank] for rank in stage.ranks)) for stage in line.stages)
    gathers = tuple((Action(stage, ActionKind.UNSHARD, 0),) for stage in range(pipe.scheme.stages))
    return Pipeline(tuple(stages), (), gathers if pipe.scheme.gathered else ())
