"""The lower bound: its dual feasible functions, and how it follows the batch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.cost import CostModel, GroupShape
from seqloom.cost.plan_cost import round_times
from seqloom.describe import Cluster
from seqloom.layout import Span
from seqloom.plan import Method, Remap, StageMicroBatch
from seqloom.planners import make_plan
from seqloom.planners.bounds import lower_bound, plan_bound, policies_bound
from seqloom.planners.bounds.prices import ROUNDED, price_documents, remap_transfer_ns, shared_ns
from seqloom.planners.bounds.step import ROUNDINGS
from seqloom.planners.problem import fitting_problems
from seqloom.planners.recompute import with_layer_choices
from seqloom.simulate import simulate
from support.overlapping import shortest_overlapping_step
from support.strategies import MIXTURE, batches, cost_models, roomy_cost_model
from support.strategies_overlap import overlapping_plans

roundings = pytest.mark.parametrize("rounding", ROUNDINGS, ids=range(len(ROUNDINGS)))
parts = st.lists(st.integers(1, 60), min_size=1, max_size=20)


@roundings
@given(parts, st.integers(0, 30))
def test_parts_of_one_still_sum_to_one(rounding, weights, unused):
    shares = np.array(weights) / (sum(weights) + unused)
    assert rounding(shares).sum() <= 1 + 1e-9


@roundings
@given(st.integers(0, 5_040), st.integers(0, 5_040))
def test_parts_together_count_no_less(rounding, one, other):
    if one + other <= 5_040:
        first, second, both = rounding(np.array([one, other, one + other]) / 5_040)
        assert first + second <= both + 1e-9


@roundings
@given(st.lists(st.integers(0, 5_040), min_size=1, max_size=10))
def test_a_mean_part_counts_no_more_than_said(rounding, counts):
    parts = np.array(counts) / 5_040
    assert rounding(parts).mean() <= rounding.mean_limit(parts.mean()) + 1e-6


@roundings
@given(st.lists(st.integers(0, 5_040), min_size=2, max_size=30))
def test_larger_parts_never_count_less(rounding, counts):
    rounded = rounding(np.sort(counts) / 5_040)
    assert (np.diff(rounded) >= 0).all() and (rounded >= 0).all() and (rounded <= 1).all()


@roundings
def test_nothing_counts_nothing_and_the_whole_counts_one(rounding):
    assert rounding(np.array([0.0, 1.0])).tolist() == [0.0, 1.0]


def test_parts_just_below_a_multiple_do_not_count_as_one():
    tiny = 2e-8
    shares = np.array([0.25 - tiny, 0.25 - tiny, 0.5 + 2 * tiny])
    assert shares.sum() <= 1
    for rounding in ROUNDINGS:
        assert rounding(shares).sum() <= 1 + 1e-9


@settings(max_examples=40)
@given(cost_models(max_ranks=16), batches(max_documents=25), st.integers(1, 60_000))
def test_a_further_document_never_lowers_the_bound(cost, lengths, further):
    longer = np.append(lengths, min(further, int(lengths.max())))
    room = max(shape.degree for shape in cost.shapes) * max(cost.capacity(policy) for policy in cost.policies)
    if int(cost.padded_lengths(lengths).max()) > room:
        return
    for reduce in {problem.policy.reduce for problem in fitting_problems(lengths, cost)}:
        policies = [v for v in cost.policies if v.reduce == reduce]
        before, after = (policies_bound(batch, cost, policies) for batch in (lengths, longer))
        assert after >= before * (1 - 2e-3)  # bisections stop at one part in a thousand


@settings(max_examples=30)
@given(cost_models(max_ranks=16), batches(max_documents=25), st.randoms(use_true_random=False))
def test_the_order_of_documents_does_not_matter(cost, lengths, random):
    room = max(shape.degree for shape in cost.shapes) * max(cost.capacity(policy) for policy in cost.policies)
    if int(cost.padded_lengths(lengths).max()) > room:
        return
    shuffled = lengths.tolist()
    random.shuffle(shuffled)
    for reduce in {problem.policy.reduce for problem in fitting_problems(lengths, cost)}:
        policies = [v for v in cost.policies if v.reduce == reduce]
        first, second = (policies_bound(np.array(b), cost, policies) for b in (lengths, shuffled))
        assert abs(first - second) <= 2e-3 * first


MODELS = ("qwen3-0.6b", "llama3-8b", "minicpm3-4b")
TINY = ("1x2xH200", "2x1xH200", "1x3xH100", "2x2xH200", "1x4xA100-40G", "1x2xA100-40G")


def tiny_case(seed):
    """Seeded case for the oracle: lengths, cost model, one policy, ns per token that changes its rank."""
    random, cluster = np.random.default_rng(seed), TINY[seed % len(TINY)]
    sharding = ("full", "hybrid", "none")[seed // len(TINY) % 3]
    named = ("gpt-7b", "flexsp-a100") if "A100" in cluster else (MODELS[seed % len(MODELS)], None)
    cost = roomy_cost_model(cluster, *named, sharding, int(random.integers(3)))
    policy = cost.policies[random.integers(len(cost.policies))]
    lengths = random.lognormal(0, random.uniform(0.3, 1.8), int(random.integers(1, 4 if cost.ranks == 4 else 5)))
    room = cost.ranks * cost.capacity(policy)
    lengths = np.clip(lengths * random.uniform(0.02, 2.2) * room / lengths.sum(), 64, 0.95 * room).astype(np.int64)
    stays = cost.shard_group_size == 1 or named[1] is not None
    journey = None if stays else min(remap_transfer_ns(cost, cost.engine.links, policy, remap) for remap in Remap)
    return lengths, cost, policy, journey


def test_no_plan_of_a_tiny_batch_is_below_the_bound_and_the_best_is_near_it():
    shares = []
    for seed in range(24):
        lengths, cost, policy, journey = tiny_case(seed)
        optimum = shortest_overlapping_step(lengths, cost, policy, journey)
        shares.append((policies_bound(lengths, cost, [policy]) - cost.step_overhead_ns(policy)) / optimum)
    assert max(shares) <= 1 and min(shares) > 0.8
    assert np.mean(shares) > 0.97


@settings(max_examples=40)
@given(st.data(), cost_models(max_ranks=8), batches(max_documents=25))
def test_no_drawn_plan_is_below_the_bound(data, cost, lengths):
    lengths = np.minimum(
        lengths, cost.ranks * max(map(cost.capacity, cost.policies)) // cost.pad_multiple * cost.pad_multiple
    )
    if max(cost.padded_lengths(lengths)) > max(s.degree for s in cost.shapes) * max(map(cost.capacity, cost.policies)):
        return
    plan = data.draw(overlapping_plans(cost, lengths))
    plan.validate()
    lighter = with_layer_choices(plan, cost)
    lighter.validate()
    assert lower_bound(lengths, cost) <= cost.plan_ns(lighter) <= cost.plan_ns(plan)


@settings(max_examples=40)
@given(st.data(), cost_models(max_ranks=8, published=False), batches(max_documents=12), st.floats(0.3, 1.0))
def test_no_offloaded_plan_is_below_the_bound_and_all_fit(data, cost, lengths, share):
    """Batches whose longest document fills so much of the largest group, most of them only with offloaded layers."""
    own = cost.with_offload()
    most = max(map(own.capacity, own.policies)) * max(shape.degree for shape in own.shapes)
    lengths = np.maximum(1, (lengths * (share * most / lengths.max())).astype(np.int64))
    drawn = data.draw(overlapping_plans(own, lengths))
    plan = with_layer_choices(drawn, own)
    plan.validate()
    assert simulate(plan, own).peak_memory.max() <= own.budget_bytes
    assert lower_bound(lengths, own) <= own.plan_ns(plan)
    assert with_layer_choices(plan, own) == plan


@settings(max_examples=40)
@given(st.data(), cost_models(max_ranks=8, published=False), st.integers(1, 100_000))
def test_no_group_is_cheaper_than_the_best_place_of_its_degree(data, cost, length):
    ulysses = data.draw(st.sampled_from([size for size in cost.family.sizes if size <= cost.model.heads]))
    blocks = data.draw(st.lists(st.sampled_from(cost.family.blocks(ulysses)), min_size=1, max_size=8, unique=True))
    method = data.draw(st.sampled_from(Method)) if len(blocks) > 1 else Method.RING
    ranks = tuple(rank for block in blocks for rank in block)
    latent = cost.model.latent > 0 and data.draw(st.booleans())
    shape = GroupShape(ulysses, len(blocks), method, data.draw(st.booleans()), latent)
    policy = data.draw(st.sampled_from(cost.policies))
    parts = cost.group_cost(cost.group(shape, ranks, (Span(0, 0, length),)), policy)
    prices = price_documents(np.array([float(length)]), cost, policy)
    row = prices.degree.tolist().index(shape.degree)
    least = prices.round_fixed + prices.group_fixed[:, row] + prices.cost[:, row, 0]
    assert least[0] <= parts.stream_ns[0] and least[2] <= parts.stream_ns[2] and least[1] <= max(parts.stream_ns[:2])


@st.composite
def mixtures(draw):
    """Draw a cost model whose ranks divide experts, of any sharding."""
    cluster = Cluster.parse(draw(st.sampled_from(("1x2xH200", "1x4xH100", "2x2xH200", "2x4xA800"))))
    sharding = draw(st.sampled_from(("full", "hybrid", "none")))
    cost = CostModel(cluster, MIXTURE, sharding=sharding)
    return cost.with_expert(draw(st.sampled_from(cost.expert_degrees[1:])) if len(cost.expert_degrees) > 1 else 1)


@settings(max_examples=40)
@given(st.data(), mixtures(), batches(max_documents=20))
def test_no_plan_that_divides_experts_is_below_the_bound(data, cost, lengths):
    """EP groups whose ranks have unequal tokens, or none at all; layouts of their own in linear layers."""
    lengths = np.minimum(lengths, max(map(cost.capacity, cost.policies)))
    plan = data.draw(overlapping_plans(cost, lengths))
    assert lower_bound(lengths, cost) <= cost.plan_ns(plan) == simulate(plan, cost).step_ns


@settings(max_examples=12)
@given(mixtures(), batches(max_documents=12, longest=20_000))
def test_no_pipeline_that_divides_experts_is_below_its_bound(cost, lengths):
    """With few documents some ranks of an EP group have none, and compute those of the others."""
    if cost.sharding == "hybrid" or cost.ranks // 2 % cost.expert:
        return
    plan = make_plan("pipeline", lengths, cost, stages=2)
    assert 0 < plan_bound(plan, cost) <= simulate(plan, cost).step_ns


@given(mixtures(), st.integers(1, 60_000), st.data())
def test_an_ep_group_takes_no_more_off_a_rank_than_the_bound_allows(cost, length, data):
    """One document on one rank: its peers have none, and take over as much as they ever do."""
    policy = data.draw(st.sampled_from(cost.policies))
    group = cost.group(GroupShape(1, 1), (0,), (Span(0, 0, length),))
    own, shared = cost.group_cost(group, policy).total_ns, shared_ns(cost, policy) * length
    alone = round_times(cost, StageMicroBatch((group,), policy.checkpoint), policy).rank_ns[0]
    assert own - shared - ROUNDED <= alone
    many = expert_reads_less(cost, policy, length)
    assert not many or own - shared < alone < own + ROUNDED


def expert_reads_less(cost, policy, length):
    """Whether so many tokens on one rank of an EP group are enough for products to take longer than reading weights."""
    times = cost.engine.expert_times(policy)
    return cost.expert > 1 and times.products * times.token_ns * length / cost.expert > times.weights_ns
