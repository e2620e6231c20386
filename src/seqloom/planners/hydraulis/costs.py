"""Parallel configs that a cluster and a model allow, their costs fitted to the cost model, and the cost of a switch.

The stages of a config run documents in groups as wide as the stage. Every document is priced under the checkpointing
that is fastest for it: one that stores more runs faster, but its micro-batches hold fewer tokens to share the constant.
Two coefficients, of the squared and of the plain length, are fitted to these prices over all lengths that fit.

Where memory makes a config recompute, or does not hold the longest document, the same config with
`reshard_after_forward` is considered too. It holds more tokens, and every micro-batch pays for unsharding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache

import numpy as np

from seqloom.cost import CostModel, GroupShape, MemoryPolicy
from seqloom.cost.memory import pipeline_checkpoints, pp_rank_bytes
from seqloom.cost.resharding import microbatch_tokens, reshard_times, unshard_times
from seqloom.errors import MemoryBudgetError, SeqloomError
from seqloom.plan import Action, ActionKind, Checkpoint, Pipeline, Reduce
from seqloom.planners.hydraulis.strategy import (
    ConfigCost,
    ParallelConfig,
    PipelineConfig,
    Strategy,
    check_placement,
    fits_nodes,
)
from seqloom.planners.loops import estimate_pipeline_ns
from seqloom.planners.pipeline.stage_layout import StageLayout

STAGES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Numbers of stages to consider."""
SHORTEST = 128
"""Tokens of the shortest document that costs are fitted to."""
PROBES = 12
"""Lengths that costs are fitted to."""
LOADS = (1, 2**14, 2**18)
"""Tokens of the loads that configs are compared on, at least one document each."""
NEAR_PERCENT = 103
"""A config this near to the fastest replaces it."""


def config_costs(cost: CostModel, longest: int, most_tensor: int | None = None) -> dict[ParallelConfig, ConfigCost]:
    """Fit the costs of the configs worth considering for documents up to `longest` tokens.

    SeqloomError if no config holds a token. `most_tensor` is the largest tensor degree to consider; None: any.
    """
    fitted = {}
    for config in legal_configs(cost):
        if most_tensor is not None and config.tensor > most_tensor:
            continue
        resharding = [config._replace(reshard_after_forward=True)] if gains_memory(cost, config, longest) else []
        for each in (config, *resharding):
            if (priced := fit_config(cost, each)) is not None:
                fitted[each] = priced
    if not fitted:
        raise MemoryBudgetError(
            f"no pipeline on {cost.ranks} ranks holds the state of {cost.model.name} and one token in "
            f"{cost.budget_bytes / 1024**3:.1f} GiB per GPU; raise the memory budget or use more GPUs"
        )
    return prune_configs(fitted, longest)


def legal_configs(cost: CostModel) -> Iterator[ParallelConfig]:
    """Yield every config that the model's heads, widths and layers and the cluster's nodes allow.

    Tensor ranks stay inside a node; with float8 there are none. Beyond them a stage spreads documents over heads as far
    as these reach, in its node where it can, and over positions from there on.
    """
    node = cost.node_size
    degrees = (1,) if cost.float8 else cost.model.tensor_degrees
    for tensor in (degree for degree in degrees if degree <= node and node % degree == 0):
        for stages in (count for count in STAGES if count <= cost.model.layers):
            for width in (size for size in cost.family.sizes if size % tensor == 0):
                if fits_nodes(ParallelConfig(stages, tensor, width // tensor), cost.ranks, node):
                    shapes = cost.for_submesh(stages * width, tensor).engine.shapes
                    own = dict.fromkeys((s.ulysses, s.ring) for s in shapes if s.degree == width and not s.routed)
                    for ulysses, ring in own:
                        yield ParallelConfig(stages, tensor, ulysses // tensor, ring)


@lru_cache(maxsize=4096)
def fit_config(cost: CostModel, config: ParallelConfig) -> ConfigCost | None:
    """Fit the costs of one config; None if it holds no token."""
    inside = cost.for_submesh(config.ranks, config.tensor)
    shapes = group_shapes(inside, config)
    if not shapes:
        width = config.ranks_per_stage
        legal = dict.fromkeys(f"{s.ulysses} x {s.ring}" for s in inside.engine.shapes if s.degree == width)
        raise SeqloomError(
            f"pipeline {config}: no groups of Ulysses {config.tensor * config.ulysses} (tensor included) x ring "
            f"{config.ring} here; of {width} ranks there are {', '.join(legal) or 'none'}"
        )
    per_rank = token_capacity(inside, config.stages, config.reshard_after_forward)
    capacity = {policy: config.ranks_per_stage * tokens for policy, tokens in per_rank.items() if tokens > 0}
    if not capacity:
        return None
    longest = max(capacity.values())
    constants = [inside.tables([1], policy, shapes).fixed.max(axis=0).min() // config.stages for policy in capacity]
    fixed = int(min(constants)) + unshard_ns(inside, config)
    lengths = np.unique(np.geomspace(min(SHORTEST, longest), longest, PROBES).astype(np.int64))
    prices = np.full(len(lengths), np.inf)
    for policy, tokens in capacity.items():
        own = inside.tables(lengths, policy, shapes).cost.max(axis=0).min(axis=0) / config.stages
        own = own + fixed * lengths * (1.0 / tokens - 1.0 / longest)
        prices = np.where(lengths <= tokens, np.minimum(prices, own), prices)
    square, linear = relative_fit(lengths.astype(np.float64), prices)
    return ConfigCost(square, linear, fixed, longest)


def group_shapes(inside: CostModel, config: ParallelConfig) -> list[GroupShape]:
    """Group shapes of a config's stages: one per method of sharing keys and values under its degrees."""
    wanted = (config.tensor * config.ulysses, config.ring, False)
    return [shape for shape in inside.engine.shapes if (shape.ulysses, shape.ring, shape.routed) == wanted]


def relative_fit(lengths: np.ndarray, prices: np.ndarray) -> tuple[float, float]:
    """Fit ``a s^2 + b s`` with a, b >= 0 to float64[n] prices of float64[n] lengths by least relative squares."""
    rows = np.stack([lengths * lengths, lengths], axis=1) / prices[:, None]
    (a, b), *_ = np.linalg.lstsq(rows, np.ones(len(prices)), rcond=None)
    if a < 0 or len(lengths) < 2:
        return 0.0, float(rows[:, 1].sum() / (rows[:, 1] ** 2).sum())
    if b < 0:
        return float(rows[:, 0].sum() / (rows[:, 0] ** 2).sum()), 0.0
    return float(a), float(b)


def gains_memory(cost: CostModel, config: ParallelConfig, longest: int) -> bool:
    """Whether memory limits a config for documents up to `longest` tokens, and resharding after forward helps."""
    if config.ranks_per_stage == config.tensor:
        return False
    inside = cost.for_submesh(config.ranks, config.tensor)
    resident, resharded = (
        {policy.checkpoint: tokens for policy, tokens in token_capacity(inside, config.stages, reshard).items()}
        for reshard in (False, True)
    )
    if resident.get(Checkpoint.NONE, 0) * config.ranks_per_stage >= longest:
        return False
    return any(tokens > resident.get(checkpoint, 0) for checkpoint, tokens in resharded.items())


@lru_cache(maxsize=4096)
def token_capacity(inside: CostModel, stages: int, reshard_after_forward: bool) -> dict[MemoryPolicy, int]:
    """Tokens of a micro-batch that a rank holds under every policy, with as many in flight as 1F1B has."""
    capacity: dict[MemoryPolicy, int] = {}
    if stages == 1 and not reshard_after_forward:
        with suppress(SeqloomError):  # no policy holds a token
            capacity = {policy: inside.capacity(policy) for policy in inside.policies}
        return capacity
    layout = StageLayout.of(inside, stages)
    replicas = layout.ranks_per_stage // layout.tensor
    for checkpoint in pipeline_checkpoints(inside):
        if checkpoint == Checkpoint.STAGE:  # no faster than running its layers again
            continue
        tokens = []
        for pp_rank, layers in enumerate(layout.layer_ranges):
            in_flight = stages - pp_rank
            if reshard_after_forward:
                tokens.append(microbatch_tokens(inside, layers, replicas, checkpoint, in_flight))
            else:
                free = inside.budget_bytes - pp_rank_bytes(inside, (layers,), layout.shard_group_size(inside))
                own = inside.memory.activation_bytes(layers, checkpoint)
                tokens.append(int(free // (in_flight * own.held + max(own.forward, own.backward))))
        capacity[MemoryPolicy(checkpoint, Reduce.STEP, resident=True)] = min(tokens)
    return capacity


def unshard_ns(inside: CostModel, config: ParallelConfig) -> int:
    """ns of unsharding, per micro-batch on the slowest stage; 0 without `reshard_after_forward`."""
    if not config.reshard_after_forward:
        return 0
    layout = StageLayout.of(inside, config.stages)
    times = [unshard_times(inside, *each) for each in zip(layout.stages, layout.layer_ranges, strict=True)]
    return max(2 * each.gather + each.sum for each in times)


def prune_configs(costs: dict[ParallelConfig, ConfigCost], longest: int) -> dict[ParallelConfig, ConfigCost]:
    """Pick few configs of every number of ranks, greedily, such that one is near the fastest at any load.

    Loads are one to many micro-batches of documents of one length, for lengths up to `longest` tokens. Configs that
    reshard after forward are picked for loads at which no other is near them.
    """
    picked: list[ParallelConfig] = []
    for ranks in sorted({config.ranks for config in costs}):
        reached: np.ndarray | float = np.inf
        for reshard in (False, True):
            own = sorted(each for each in costs if (each.ranks, each.reshard_after_forward) == (ranks, reshard))
            if not own:
                continue
            times = np.stack([_load_times(config, costs[config], longest) for config in own])
            best = times.min(axis=0)
            near = (times * 100 <= best * NEAR_PERCENT) & np.isfinite(best)
            uncovered = np.isfinite(best) & (best * NEAR_PERCENT < np.multiply(reached, 100))
            while uncovered.any():
                pick = int((near & uncovered).sum(axis=1).argmax())
                picked.append(own[pick])
                uncovered = uncovered & ~near[pick]
            reached = best
    return {config: costs[config] for config in sorted(picked)}


def _load_times(config: ParallelConfig, cost: ConfigCost, longest: int) -> np.ndarray:
    """float64[loads] ns per document, for several lengths and numbers of documents; infinite if one is too long."""
    times = []
    lengths = [*(2**k for k in range(7, 40) if 2**k < longest), longest]
    for length, own in zip(lengths, cost.documents_ns(np.array(lengths)).tolist(), strict=True):
        for tokens in LOADS:
            count = max(1, tokens // length)
            documents = own * count, length * count, own, count
            ns = estimate_pipeline_ns(*documents, cost.fixed, cost.max_tokens, config.stages, False)
            times.append(ns / count if length <= cost.max_tokens else np.inf)
    return np.array(times)


def check_strategies(strategies: Sequence[Strategy], cost: CostModel) -> None:
    """Refuse strategies that the cluster or the model does not allow, with the reason and the nearest way out."""
    if not strategies:
        raise SeqloomError("no strategies to choose from; propose some (seqloom propose), or leave them out")
    model = cost.model
    for strategy in strategies:
        check_placement(strategy, cost.ranks, cost.node_size)
        for config in dict.fromkeys(pipe.parallel for pipe in strategy.pipelines):
            if config.stages > model.layers:
                raise SeqloomError(
                    f"pipeline {config} of strategy {strategy} has {config.stages} stages for the {model.layers} "
                    f"layers of {model.name}: every stage needs a layer; use at most {model.layers} stages"
                )
            model.check_tensor(config.tensor)
            if config.tensor * config.ulysses > model.heads:
                raise SeqloomError(
                    f"pipeline {config} of strategy {strategy} spreads the {model.heads} heads of {model.name} over "
                    f"{config.tensor * config.ulysses} ranks: each needs one; use a ring for the rest"
                )


def costs_of(strategies: Sequence[Strategy], cost: CostModel) -> dict[ParallelConfig, ConfigCost]:
    """Fit the costs of every config in these strategies; SeqloomError for one whose state does not fit in memory."""
    costs = {}
    for config in dict.fromkeys(pipe.parallel for strategy in strategies for pipe in strategy.pipelines):
        fitted = fit_config(cost, config)
        if fitted is None:
            raise SeqloomError(
                f"pipeline {config} holds no token of {cost.model.name} beside its parameters and gradients "
                f"in {cost.budget_bytes / 1024**3:.1f} GiB per GPU; raise the memory budget, or propose strategies anew"
            )
        costs[config] = fitted
    return costs


def switch_ns(strategy: Strategy, cost: CostModel) -> int:
    """Least exposed ns of resharding parameters and gradients between steps, under free sharding.

    The step's work hides most of the resharding, depending on the plan. It never hides the embedding and the first
    layer, there and back. Strategies are ranked by that; full plans are compared with all of it.
    """
    times = reshard_times(cost, [_empty_pipeline(pipe, cost) for pipe in strategy.pipelines])
    return int(np.rint(times.first + times.last))


def _empty_pipeline(pipe: PipelineConfig, cost: CostModel) -> Pipeline:
    """A pipeline without rounds; its actions tell whether its stages reshard after forward."""
    layout = StageLayout.of(cost.for_submesh(len(pipe.ranks), pipe.parallel.tensor), pipe.parallel.stages)
    stages = (replace(stage, ranks=tuple(pipe.ranks[rank] for rank in stage.ranks)) for stage in layout.stages)
    unshards = tuple((Action(stage, ActionKind.UNSHARD, 0),) for stage in range(pipe.parallel.stages))
    return Pipeline(tuple(stages), (), unshards if pipe.parallel.reshard_after_forward else ())
