"""Hypothesis strategies for plans of a batch whose groups share ranks: any ranks, any shapes, with or without remap."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from seqloom.cost import CostModel, GroupShape, MemoryPolicy
from seqloom.cost.plan_cost import columns, round_times
from seqloom.cost.profile import AdditiveProfile
from seqloom.layout import Span, balanced_token_counts, rebalance_layout
from seqloom.plan import Group, Method, Pipeline, Plan, Reduce, Remap, Round, StageMicroBatch, sort_groups


@st.composite
def overlapping_plans(draw: st.DrawFn, cost: CostModel, lengths: Sequence[int]) -> Plan:
    """Draw a plan for these documents, which the largest group of one of the cost model's policies holds.

    Ring groups are on any ranks, as wide as memory asks for or wider; rounds have as many of them as fit. Every round
    may have a linear layout that levels the ranks of each shard group, where their memory allows.
    """
    tokens = cost.padded_lengths(np.asarray(lengths)).tolist()
    fitting = [v for v in cost.policies if max(tokens) <= cost.ranks * cost.capacity(v)]
    reduce: Reduce = draw(st.sampled_from(fitting)).reduce
    policies = [v for v in fitting if v.reduce == reduce]
    random = np.random.default_rng(draw(st.integers(0, 2**20)))
    rounds: list[tuple[MemoryPolicy, np.ndarray, list[Group]]] = []
    for k in random.permutation(len(tokens)).tolist():
        policy = policies[random.integers(len(policies))]
        span = (Span(k, 0, int(lengths[k])),)
        shape, ranks = _place(random, cost, policy, tokens[k])
        each = -(-tokens[k] // shape.degree)
        last = rounds[-1] if rounds else None
        if last is None or (last[1][list(ranks)] + each > cost.capacity(last[0])).any():
            rounds.append((policy, np.zeros(cost.ranks, np.int64), []))
        rounds[-1][1][list(ranks)] += each
        rounds[-1][2].append(cost.group(shape, ranks, span))
    remapped = cost.shard_group_size > 1 and not isinstance(cost.profile, AdditiveProfile) and draw(st.booleans())
    remap = draw(st.sampled_from(Remap))
    works = [_work(cost, policy, groups, remap if remapped else None) for policy, _, groups in rounds]
    rounds_of_plan = [Round((work,)) for work in works]
    pipeline = Pipeline.single(range(cost.ranks), cost.model.layers, rounds_of_plan, reduce, expert=cost.expert)
    return Plan(cost.limits(reduce), cost.sharding, reduce, tuple(map(int, lengths)), (pipeline,), "drawn")


def _place(
    random: np.random.Generator, cost: CostModel, policy: MemoryPolicy, tokens: int
) -> tuple[GroupShape, tuple[int, ...]]:
    """Any shape and ranks that hold so many tokens."""
    least = -(-tokens // cost.capacity(policy))
    if isinstance(cost.profile, AdditiveProfile) or random.random() < 0.3:
        fits = [shape for shape in cost.shapes if shape.degree >= least]
        if fits:
            shape = fits[random.integers(min(2, len(fits)))]
            block = cost.family.blocks(shape.degree)
            return shape, tuple(block[random.integers(len(block))])
    degree = int(min(cost.ranks, least + random.integers(3)))
    method = list(Method)[random.integers(2)] if degree > 1 else Method.RING
    ranks = np.sort(random.permutation(cost.ranks)[:degree])
    if random.random() < 0.5:  # near each other
        first = random.integers(cost.ranks - degree + 1)
        ranks = np.arange(first, first + degree)
    awake = cost.shard_group_size >= cost.node_size  # whoever is near a nic takes part wherever a rank of the node does
    routed, latent = awake and bool(random.integers(2)), cost.model.latent > 0 and bool(random.integers(2))
    return GroupShape(1, degree, method, routed, latent), tuple(ranks.tolist())


def _work(cost: CostModel, policy: MemoryPolicy, groups: list[Group], remap: Remap | None) -> StageMicroBatch:
    """The groups, slow links first; with a remap, the time of ranks is level in every shard group."""
    ordered = sort_groups(groups, cost.node_size)
    plain = StageMicroBatch(ordered, policy.checkpoint)
    if remap is None:
        return plain
    attention = plain.attention_layout()
    times = round_times(cost, plain, policy)
    linear = times.parts[:, columns(("linear", "head", "expert"))].sum(axis=1)
    held = np.bincount(attention.rank, attention.sizes, cost.ranks).astype(np.int64)
    token_ns = max(1, int(linear.sum() // held.sum()))
    shard_groups = [
        range(first, first + cost.shard_group_size) for first in range(0, cost.ranks, cost.shard_group_size)
    ]
    targets = balanced_token_counts(np.where(held > 0, times.rank_ns - linear, 0), token_ns, held, shard_groups)
    if targets.max() > cost.capacity(policy):
        return plain
    return StageMicroBatch(
        ordered,
        policy.checkpoint,
        linear=rebalance_layout(attention, targets, cost.node_size, shard_groups),
        remap=remap,
    )
