"""Speeds of ranks, learned from their busy times: found where they differ, and untouched by noise where they do not."""

import json
import math

import numpy as np
import pytest
from bench_slow_rank import busy_times, trained, won_back
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.cost import CostModel
from seqloom.cost.feedback import NO_CHANGE, FactorCosts, Factors, Feedback
from seqloom.cost.speeds import MOST_CHANGE, BusyTime, RankSpeeds, SpeedFeedback
from seqloom.describe import MODELS, Cluster
from seqloom.errors import SeqloomError
from seqloom.planners import make_plan


@given(st.integers(2, 12), st.integers(0, 1_000), st.floats(0, 0.03), st.floats(0.3, 30))
def test_noise_of_equal_ranks_changes_nothing(ranks, seed, noise, common):
    random, feedback = np.random.default_rng(seed), SpeedFeedback(RankSpeeds(), ranks)
    for _ in range(40):
        assert feedback.observe(busy_times([common] * ranks, random, noise)) == ""
    assert feedback.values == ()


def lost_cores(random: np.random.Generator, ranks: int) -> np.ndarray:
    """Ranks that share cores: in some of the steps others have them."""
    return np.where(random.random(ranks) < 0.2, 5.0, 1.0) * np.exp(0.02 * random.normal(size=ranks))


NOISES = {
    "log-normal, 10 %": lambda random, ranks: np.exp(0.1 * random.normal(size=ranks)),
    "log-normal, 50 %": lambda random, ranks: np.exp(0.5 * random.normal(size=ranks)),
    "heavy tails": lambda random, ranks: np.exp(0.1 * random.standard_t(2, size=ranks)),
    "very heavy tails": lambda random, ranks: np.exp(np.clip(0.2 * random.standard_t(1, size=ranks), -9, 9)),
    "lost cores": lost_cores,
}


@pytest.mark.parametrize("noise", NOISES)
@settings(max_examples=25)
@given(ranks=st.integers(2, 12), seed=st.integers(0, 1_000_000), held_up=st.integers(0, 39))
def test_noise_of_a_shared_machine_moves_no_speed_far(noise, ranks, seed, held_up):
    random, feedback = np.random.default_rng(seed), SpeedFeedback(RankSpeeds(), ranks)
    for step in range(40):
        slowness = NOISES[noise](random, ranks)
        slowness[0] *= 10.0 if step == held_up else 1.0
        feedback.observe(busy_times(slowness, random, 0.0))
        assert all(0.9 <= speed <= 1.1 for speed in feedback.values)


@given(st.integers(2, 12), st.integers(0, 1_000), st.integers(1, 30), st.floats(2.0, 100.0))
def test_a_single_slow_step_changes_nothing(ranks, seed, held_up, slower):
    random, feedback = np.random.default_rng(seed), SpeedFeedback(RankSpeeds(), ranks)
    for step in range(40):
        slowness = [slower if step == held_up and rank == 1 else 1.0 for rank in range(ranks)]
        assert feedback.observe(busy_times(slowness, random, 0.02)) == ""


@given(st.integers(4, 12), st.integers(0, 1_000), st.floats(0.4, 0.85), st.data())
def test_a_slow_rank_is_found_and_its_recovery_too(ranks, seed, speed, data):
    """A speed changes by a ratio of `MOST_CHANGE` at most, each time by steps that have not changed it before."""
    random, feedback, slow = np.random.default_rng(seed), SpeedFeedback(RankSpeeds(), ranks), ranks // 2
    refits = math.ceil(math.log(1 / speed) / math.log(MOST_CHANGE))
    slowness = [1.0] * ranks
    slowness[slow] = 1 / speed
    said = [feedback.observe(busy_times(slowness, random, 0.005)) for _ in range(8 * refits)]
    assert 1 <= sum(map(bool, said)) <= refits and f"rank {slow} 1 -> " in "".join(said)
    assert feedback.values[slow] == pytest.approx(speed, abs=0.03)
    assert set(feedback.values[:slow] + feedback.values[slow + 1 :]) == {1.0}
    resumed = SpeedFeedback(RankSpeeds(), ranks, json.loads(json.dumps(feedback.state_dict())))
    for _ in range(16 * refits):
        times = busy_times([1.0] * ranks, random, 0.005)
        assert feedback.observe(times) == resumed.observe(times)
    assert feedback.values == resumed.values == ()


@given(st.integers(0, 1_000), st.integers(1, 200))
def test_a_rank_that_turns_slow_late_is_found_as_soon(seed, before):
    random, feedback = np.random.default_rng(seed), SpeedFeedback(RankSpeeds(), 8)
    for _ in range(before):
        assert feedback.observe(busy_times([1.0] * 8, random, 0.01)) == ""
    for _ in range(12):
        feedback.observe(busy_times([1.0] * 7 + [1 / 0.7], random, 0.01))
    assert feedback.values == pytest.approx([1.0] * 7 + [0.7], abs=0.02)


def test_the_more_times_scatter_the_more_steps_it_takes():
    found = []
    for noise in (0.002, 0.03, 0.1):
        random, feedback, step = np.random.default_rng(0), SpeedFeedback(RankSpeeds(), 8), 0
        while not feedback.values:
            feedback.observe(busy_times([1.0] * 7 + [1 / 0.7], random, noise))
            step += 1
        found.append(step)
    assert found == sorted(found) and found[0] == 6 and 12 <= found[-1] <= 24


def test_speeds_that_the_cluster_tells_are_not_learned_again():
    random, described = np.random.default_rng(0), RankSpeeds.of(4, (1, 1, 0.5, 0.5))
    feedback = SpeedFeedback(described, 4)
    for _ in range(12):
        assert feedback.observe(busy_times(described.slowness, random, 0.005)) == ""


def test_ranks_with_few_tokens_or_none_do_not_count():
    feedback = SpeedFeedback(RankSpeeds(), 4)
    for _ in range(12):
        rows = [BusyTime(1.0, 1000), BusyTime(1.0, 1000), BusyTime(0.9, 100), BusyTime(0.0, 0)]
        assert feedback.observe(rows) == ""
    with pytest.raises(SeqloomError, match="busy times of 3 ranks, the run has 4"):
        feedback.observe([BusyTime(1.0, 1)] * 3)


@pytest.mark.parametrize("sharding", ["full", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_what_a_slow_rank_costs_is_won_back_within_twenty_steps(sharding):
    """The target: a rank of eight slower by 30 %, steps measured by the simulator with true speeds: 80 % is won."""
    cost = CostModel(Cluster.parse("8xH200"), MODELS.lookup("qwen3-4b"), sharding=sharding)
    true = cost.with_speeds([1, 1, 1, 1, 1, 0.7, 1, 1])
    feedback = Feedback(cost)
    found = trained(cost, true, 24, 0, feedback)
    assert feedback.speeds.values == pytest.approx([1, 1, 1, 1, 1, 0.7, 1, 1], abs=0.02)
    assert found["unaware_ns"][20:].sum() > 1.18 * found["even_ns"][20:].sum()
    assert won_back(found, 20) > 0.8


@settings(max_examples=6)
@given(st.sampled_from([(1, 1, 0.5, 0.5), (0.7, 1, 1, 1)]), st.floats(0.5, 2.0))
def test_factors_and_speeds_price_a_plan_together(speeds, linear):
    cost = CostModel(Cluster.parse("4xH200"), MODELS.lookup("qwen3-0.6b"))
    costs = FactorCosts(cost).with_factors(Factors(linear=linear), speeds)
    assert costs.cost.speeds.values == speeds and costs.with_factors(costs.factors, speeds) is costs
    plan = make_plan("static", np.array([5_000, 3_000, 2_000]), costs.cost)
    assert costs.derivatives(plan, lambda p, c: c.plan_ns(p)).linear > 0
    assert costs.with_factors(NO_CHANGE).cost is cost
    assert costs.factors.digest_with(()) == costs.factors.digest != costs.factors.digest_with(speeds)
