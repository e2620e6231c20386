"""The refit finds factors that are known, whatever a few steps say."""

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.api import cost_model
from seqloom.cost import CostModel
from seqloom.cost.feedback import (
    CONSTANTS,
    FACTOR_OF,
    LEAST_STEPS,
    NO_CHANGE,
    WINDOW,
    FactorCosts,
    Factors,
    Feedback,
    Measurement,
    refit,
)
from seqloom.plan import Plan
from seqloom.planners import make_plan
from seqloom.simulate import predicted_ns, simulate
from seqloom.simulate.events import EventKind
from seqloom.simulate.microbatch import computing_by_rank

COST = cost_model("1x4xCPU", "qwen3-0.6b")
factors_drawn = st.builds(Factors, *[st.floats(0.3, 4.0)] * 5, imbalance=st.just(0.0))


def steps_of(factors: Factors, seed: int, count: int = WINDOW, noise: float = 0.0) -> list[Measurement]:
    """Steps of different mixes that take as long as these factors say, but for the noise."""
    random = np.random.default_rng(seed)
    derivatives, rest = random.uniform(1e6, 1e8, (count, 5)), random.uniform(0, 1e7, count)
    return [
        Measurement(Factors(*row), float(fixed), float(row @ factors[:5] + fixed) * (1 + noise * random.normal()))
        for row, fixed in zip(derivatives, rest, strict=True)
    ]


@given(factors_drawn, st.integers(0, 1_000), st.integers(0, WINDOW // 4), st.floats(1.3, 20.0))
def test_refit_recovers_known_factors_beside_slow_steps(factors, seed, outliers, slower):
    steps = steps_of(factors, seed, noise=0.002)
    held_up = [step._replace(measured_ns=slower * step.measured_ns) for step in steps[:outliers]]
    found = refit([*held_up, *steps[outliers:]])
    assert max(abs(step.relative_error(found)) for step in steps) < 0.03
    np.testing.assert_allclose(found, factors, rtol=0.15, atol=0.1)
    assert found == refit([*held_up, *steps[outliers:]])


@given(st.floats(0.3, 4.0), st.integers(0, 1_000))
def test_steps_that_are_all_alike_move_all_factors_by_as_much(slower, seed):
    step = steps_of(NO_CHANGE, seed, 1)[0]._replace(rest_ns=0.0)
    found = refit([step._replace(measured_ns=slower * sum(step.derivatives))] * LEAST_STEPS)
    np.testing.assert_allclose(found[:5], slower, rtol=0.01)


@given(factors_drawn, st.integers(0, 1_000), st.integers(1, WINDOW - 1))
def test_feedback_goes_on_from_its_state_as_if_it_had_never_stopped(factors, seed, stop):
    steps = steps_of(factors, seed, noise=0.01)
    through, before = Feedback(COST), Feedback(COST)
    for step in steps:
        through.observe(step)
    for step in steps[:stop]:
        before.observe(step)
    after = Feedback(COST, before.state_dict())
    for step in steps[stop:]:
        after.observe(step)
    assert after.state_dict() == through.state_dict()
    assert through.error is not None and through.error < 0.05


def test_factors_of_another_profile_or_cluster_are_not_used():
    state = Feedback(COST).state_dict() | {"factors": [2.0] * 5}
    assert Feedback(COST, state).factors == Factors(*[2.0] * 5)
    for other in (cost_model("1x8xCPU", "qwen3-0.6b"), FactorCosts(COST, Factors(linear=1.5)).cost):
        assert Feedback(other, state).factors == NO_CHANGE


@settings(max_examples=8)
@given(factors_drawn, factors_drawn, st.lists(st.integers(16, 2_000), min_size=4, max_size=12))
def test_derivatives_price_a_plan_under_other_factors(own, other, lengths):
    """A step of equal ranks is linear in its factors; where ranks wait for each other it is above its tangent."""
    plan = make_plan("static:4", np.array(lengths), COST)
    costs = FactorCosts(COST, own)
    derivatives = costs.derivatives(plan, predicted_ns)
    step = Measurement.of(own, derivatives, predicted_ns(plan, costs.cost), predicted_ns(plan, COST))
    assert abs(step.relative_error(own) * step.measured_ns + step.measured_ns - predicted_ns(plan, costs.cost)) < 2
    there = predicted_ns(plan, costs.with_factors(other).cost)
    assert step._replace(measured_ns=there).relative_error(other) < 0.01


def test_every_constant_has_a_factor_and_every_factor_a_constant():
    assert set(FACTOR_OF) == set(CONSTANTS) and set(FACTOR_OF.values()) == set(Factors._fields[:5])


def phases_of(step: Measurement, true: Factors, seed: int, noise: float) -> tuple[Measurement, ...]:
    """Attention of a step, and all computing of two stages whose mixes differ, as these factors say but for noise."""
    random = np.random.default_rng(seed)
    attention, linear, _, _, overhead, _ = step.derivatives
    found = []
    for mix in (
        (attention, 0, 0),
        (attention / 2, linear / 4, overhead / 2),
        (attention / 2, linear * 3 / 4, overhead / 2),
    ):
        derivatives = Factors(mix[0], mix[1], 0.0, 0.0, mix[2], 0.0)
        took = float(np.dot(derivatives[:5], true[:5])) * (1 + noise * random.normal())
        found.append(Measurement(derivatives, 0.0, took))
    return tuple(found)


@given(factors_drawn, st.integers(0, 1_000), st.floats(0, 0.02))
def test_phases_tell_factors_apart_that_steps_do_not(true, seed, noise):
    """Steps that are all alike say one thing; their phases say which of the factors it is."""
    alike = steps_of(true, seed, 1)[0]
    steps = [alike._replace(phases=phases_of(alike, true, seed + number, noise)) for number in range(LEAST_STEPS)]
    found = refit(steps)
    assert max(abs(each.relative_error(found)) for each in steps) < 0.02
    assert found.attention == pytest.approx(true.attention, rel=0.1)
    computing = [phase for phase in steps[0].phases if phase.derivatives.linear]
    assert all(abs(phase.relative_error(found)) < 0.1 for phase in computing)


@given(st.integers(0, 1_000), st.integers(0, WINDOW // 4), st.floats(2.0, 20.0))
def test_phases_that_something_held_up_do_not_count(seed, outliers, slower):
    steps = [each._replace(phases=phases_of(each, NO_CHANGE, seed, 0.01)) for each in steps_of(NO_CHANGE, seed)]
    for number in range(outliers):
        late = tuple(phase._replace(measured_ns=slower * phase.measured_ns) for phase in steps[number].phases)
        steps[number] = steps[number]._replace(phases=late)
    np.testing.assert_allclose(refit(steps)[:5], 1.0, atol=0.1)


def test_factors_are_used_that_predict_phases_better_and_steps_as_well():
    true, feedback = Factors(2.0, 0.5), Feedback(COST)
    alike = Measurement(Factors(1e7, 2e7, 0.0, 0.0, 0.0, 0.0), 0.0, 3e7)  # 2 x 1e7 + 0.5 x 2e7: as predicted
    attention = Measurement(Factors(1e7, 0.0, 0.0, 0.0, 0.0, 0.0), 0.0, 2e7)
    said = [feedback.observe(alike._replace(phases=(attention,))) for _ in range(LEAST_STEPS)]
    assert "of their phases 50.0%" in said[-1] and not any(said[:-1])
    np.testing.assert_allclose(feedback.factors[:2], true[:2], rtol=0.05)
    resumed = Feedback(COST, json.loads(json.dumps(feedback.state_dict())))
    assert resumed.state_dict() == feedback.state_dict()


def test_steps_of_an_earlier_version_have_no_phases():
    assert Measurement.from_list([[1.0] * 6, 2.0, 3.0, 0.0]) == Measurement(Factors(*[1.0] * 6), 2.0, 3.0)


def computing_ns(plan: Plan, cost: CostModel, ranks: Sequence[int]) -> float:
    """Mean over ranks of what the simulator has them compute in forwards and backwards."""
    events = simulate(plan, cost).events
    mine = np.isin(events.rank, ranks) & (events.kind <= EventKind.W)
    return float((events.stop - events.start - events.comm)[mine].sum()) / len(ranks)


@pytest.mark.parametrize(
    ("cluster", "planner"), [("1x1xCPU", "static"), ("1x4xCPU", "flex"), ("1x4xCPU", "pipeline:2")]
)
@pytest.mark.parametrize("own", [NO_CHANGE, Factors(0.5, 2.0, 1.5, 0.7, 3.0)])
def test_phases_are_priced_as_the_simulator_does(cluster, planner, own):
    """Computing of a stage is what the simulator gives its ranks; attention is the part that its factor moves."""
    cost = cost_model(cluster, "qwen3-0.6b", capacity=2_048, stages=2, budget_gib=40)
    plan, costs = make_plan(planner, np.array([1_500, 700, 900, 1_200, 50, 60]), cost), FactorCosts(cost, own)
    phases = costs.phases(plan, computing_by_rank)
    more = FactorCosts(cost, own._replace(attention=2 * own.attention)).cost
    assert {phase.phase for phase in phases} == ({"attention"} if planner == "flex" else {"attention", "computing"})
    assert sorted({rank for phase in phases for rank in phase.ranks}) == [*range(cost.ranks)]
    for phase in phases:
        computing = computing_ns(plan, costs.cost, phase.ranks)
        if phase.phase == "computing":
            assert phase.predicted_ns == pytest.approx(computing, rel=0.01)
        else:
            twice = computing_ns(plan, more, phase.ranks)
            assert twice - computing == pytest.approx(phase.predicted_ns, rel=0.02)


def test_calls_of_latent_attention_are_no_phase():
    """They make keys and values from latents, by products that are linear layers to the cost model."""
    cost = cost_model("1x8xH200", "deepseek-v2-lite", sharding="full")
    plan = make_plan("static:8", np.array([3_000, 9_000]), cost)
    assert FactorCosts(cost).phases(plan, computing_by_rank) == []


EXPERTS = cost_model("1x8xH200", "qwen3-30b-a3b", expert=8)


@settings(max_examples=5)
@given(st.floats(1.0, 4.0), st.integers(0, 100))
def test_a_measured_imbalance_of_experts_prices_the_next_plans_and_not_their_memory(measured, seed):
    lengths = np.random.default_rng(seed).integers(1_000, 30_000, 24)
    plan, feedback, given_costs = make_plan("static:8", lengths, EXPERTS), Feedback(EXPERTS), FactorCosts(EXPERTS)
    there = FactorCosts(EXPERTS, Factors(imbalance=measured)).cost
    took = predicted_ns(plan, there)
    factors, derivatives = NO_CHANGE.resolved(EXPERTS), given_costs.derivatives(plan, predicted_ns)
    step = Measurement.of(factors, derivatives, predicted_ns(plan, EXPERTS), took, measured)
    for _ in range(LEAST_STEPS):
        feedback.observe(step)
    if feedback.factors == NO_CHANGE:  # a plan takes about as long
        assert abs(took / predicted_ns(plan, EXPERTS) - 1) < 0.03
    else:
        assert feedback.factors.imbalance == round(measured, 4)
        assert abs(predicted_ns(plan, FactorCosts(EXPERTS, feedback.factors).cost) / took - 1) < 0.03
    assert Feedback(EXPERTS, feedback.state_dict()).state_dict() == feedback.state_dict()
    policy = EXPERTS.policies[0]
    assert there.capacity(policy) == EXPERTS.capacity(policy)
