"""Full plans of strategies: every pipeline as its config says, merged, valid, repeatable; what is refused and why."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.api import cost_model
from seqloom.cost.resharding import reshard_times
from seqloom.describe import sample
from seqloom.errors import SeqloomError
from seqloom.plan import Plan
from seqloom.planners import make_plan
from seqloom.planners.hydraulis import (
    ParallelConfig,
    PipelineConfig,
    Strategy,
    check_strategies,
    plan_strategies,
    propose_strategies,
    strategies_from_json,
    strategies_to_json,
)
from seqloom.planners.hydraulis.costs import config_costs, fit_config, legal_configs, relative_fit, switch_ns
from seqloom.planners.hydraulis.planner import blocks
from seqloom.simulate import predicted_ns, simulate

COST = cost_model("1x8xH100", "qwen3-0.6b", sharding="free")
LENGTHS = sample("commoncrawl", 24, seed=3, max_length=30_000)


def strategy_of(*configs, max_tokens=200_000):
    """Pipelines of these configs on ranks that follow each other."""
    pipes, start = [], 0
    for config in configs:
        pipes.append(PipelineConfig(config, tuple(range(start, start + config.ranks)), max_tokens))
        start += config.ranks
    return Strategy(tuple(pipes))


MIXED = strategy_of(ParallelConfig(2, 2), ParallelConfig(1, 2), ParallelConfig(1, 1), ParallelConfig(1, 1))


def test_a_plan_has_the_strategy_s_stages_and_degrees():
    plan = plan_strategies(LENGTHS, COST, strategies=[MIXED])
    plan.validate()
    assert plan.documents == tuple(LENGTHS.tolist()) and plan.planner == "hydraulis"
    shapes = {(len(p.stages), p.stages[0].tensor, p.ranks) for p in plan.pipelines}
    assert shapes == {(2, 2, (0, 1, 2, 3)), (1, 2, (4, 5)), (1, 1, (6, 7))}
    assert Plan.from_json(plan.to_json()) == plan
    assert simulate(plan, COST).step_ns == predicted_ns(plan, COST)


def test_it_repeats_and_takes_plain_values():
    first = plan_strategies(LENGTHS, COST, strategies=[MIXED])
    plain = json.loads(json.dumps([MIXED.as_dict()]))
    assert plan_strategies(LENGTHS, COST, strategies=plain).hash == first.hash
    assert make_plan("hydraulis", LENGTHS, COST, strategies=[MIXED]).hash == first.hash


def test_the_best_of_several_is_taken():
    several = [strategy_of(ParallelConfig(8, 1)), MIXED, strategy_of(*[ParallelConfig(1, 1)] * 8)]
    best = predicted_ns(plan_strategies(LENGTHS, COST, strategies=several), COST)
    assert best <= min(predicted_ns(plan_strategies(LENGTHS, COST, strategies=[one]), COST) for one in several)


@pytest.mark.parametrize("seed", range(4))
def test_strategies_that_are_given_up_early_would_not_have_won(monkeypatch, seed):
    """Against every candidate planned to the end and searched in full."""
    several = [
        MIXED,
        strategy_of(
            ParallelConfig(2, 1), ParallelConfig(2, 1), ParallelConfig(1, 2), ParallelConfig(1, 1), ParallelConfig(1, 1)
        ),
        strategy_of(ParallelConfig(4, 1), *[ParallelConfig(1, 1)] * 4),
    ]
    lengths = sample("commoncrawl", 12, seed=seed, max_length=20_000)
    found = predicted_ns(plan_strategies(lengths, COST, strategies=several), COST)
    monkeypatch.setattr("seqloom.planners.hydraulis.planner.NEAR_PERCENT", 10**9)
    assert found == predicted_ns(plan_strategies(lengths, COST, strategies=several), COST)


def test_empty_pipelines_are_left_out():
    plan = plan_strategies(np.array([500]), COST, strategies=[MIXED])
    plan.validate()
    assert len(plan.pipelines) == 1


def test_auto_asks_it_under_free_sharding_only():
    plan = make_plan("auto", LENGTHS, COST)
    for name in ("hydraulis", "flex", "static"):
        assert predicted_ns(plan, COST) <= predicted_ns(make_plan(name, LENGTHS, COST), COST)
    full = cost_model("1x8xH100", "qwen3-0.6b")
    assert make_plan("auto", LENGTHS[:4], full).planner != "hydraulis"
    with pytest.raises(SeqloomError, match=r"sharding full.*use sharding free"):
        plan_strategies(LENGTHS, full)


def test_a_model_that_one_stage_cannot_hold():
    cost = cost_model("1x8xA100-40G", "llama3-8b", sharding="free")
    with pytest.raises(SeqloomError, match="does not fit in one stage"):
        make_plan("flex", LENGTHS[:6], cost)
    for name in ("hydraulis", "auto"):
        plan = make_plan(name, LENGTHS[:6], cost)
        assert max(len(p.stages) * p.stages[0].tensor for p in plan.pipelines) > 1


@settings(max_examples=6)
@given(st.data())
def test_any_legal_strategy_gives_a_valid_plan(data):
    configs, left = [], 8
    legal = sorted(s for s in legal_configs(COST) if s.ranks <= 4)
    while left:
        configs.append(data.draw(st.sampled_from([s for s in legal if s.ranks <= left])))
        left -= configs[-1].ranks
    strategy = strategy_of(*sorted(configs, key=lambda config: -config.ranks))
    lengths = np.array(data.draw(st.lists(st.integers(1, 6000), min_size=1, max_size=6)))
    plan = plan_strategies(lengths, COST, strategies=[strategy])
    plan.validate()
    assert plan.documents == tuple(lengths.tolist())


def test_a_switch_costs_more_the_more_every_rank_holds():
    whole, cut = strategy_of(*[ParallelConfig(1, 1)] * 8), strategy_of(ParallelConfig(1, 8))
    assert 0 < switch_ns(cut, COST) < switch_ns(whole, COST)
    plan = plan_strategies(LENGTHS, COST, strategies=[whole])
    times = reshard_times(COST, plan.pipelines)
    assert switch_ns(whole, COST) == round(times.first + times.last)


def test_neighbours_with_the_same_parameters_are_planned_together():
    found = list(
        blocks(
            strategy_of(
                ParallelConfig(1, 2), ParallelConfig(1, 2), ParallelConfig(1, 1, 2), *[ParallelConfig(1, 1)] * 2
            ),
            8,
            8,
        )
    )
    assert [(block.start, block.ranks, block.pipelines) for block in found] == [(0, 4, (0, 1)), (4, 4, (2, 3, 4))]
    staged = list(blocks(strategy_of(ParallelConfig(2, 1), ParallelConfig(2, 1), ParallelConfig(1, 4)), 8, 8))
    assert [block.ranks for block in staged] == [2, 2, 4]


def test_prices_are_near_the_cost_model():
    """Documents alone on a rank, on heads, on positions and in a tensor group: within a tenth over all lengths."""
    for config in (ParallelConfig(1, 1), ParallelConfig(1, 1, 4), ParallelConfig(1, 2), ParallelConfig(1, 1, 1, 2)):
        priced = fit_config(COST, config)
        inside = COST.for_submesh(config.ranks, config.tensor)
        lengths = np.array([512, 4096, 16_384, 65_536])
        ulysses = config.tensor * config.ulysses
        shapes = [s for s in inside.engine.shapes if (s.ulysses, s.ring) == (ulysses, config.ring)]
        tables = inside.tables(lengths, inside.policies[0], shapes)
        assert priced.documents_ns(lengths) == pytest.approx(tables.cost.max(axis=0).min(axis=0), rel=0.15)
        assert priced.max_tokens >= inside.capacity(inside.policies[-1]) * config.ranks_per_stage
    a, b = relative_fit(np.array([100.0, 1000.0]), np.array([3e4 + 700, 3e6 + 7000]))
    assert (a, b) == pytest.approx((3.0, 7.0))


def test_configs_worth_considering_hold_the_longest():
    costs = config_costs(COST, 30_000)
    assert max(cost.max_tokens for cost in costs.values()) >= 30_000 and {1, 2, 4, 8} <= {s.ranks for s in costs}
    assert len(costs) < len(list(legal_configs(COST)))


def test_proposals_are_legal_and_survive_a_file():
    proposed = propose_strategies(LENGTHS, COST, tokens_per_step=40_000, most=3)
    check_strategies(proposed, COST)
    assert strategies_from_json(strategies_to_json(proposed)) == proposed
    assert set(proposed[0].as_dict()["pipelines"][0]) == {
        "stages", "tensor", "ulysses", "ring", "ranks", "longest",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        (strategy_of(ParallelConfig(1, 4)), "leaves out rank 4.*4 of 8 ranks"),
        (strategy_of(*[ParallelConfig(1, 4)] * 3), "names rank 8"),
        (
            strategy_of(ParallelConfig(1, 1), ParallelConfig(1, 2), ParallelConfig(1, 4), ParallelConfig(1, 1)),
            "nearest place is 0 to 1",
        ),
        (strategy_of(ParallelConfig(1, 3), ParallelConfig(1, 4), ParallelConfig(1, 1)), "3 ranks in nodes of 8"),
    ],
)
def test_strategies_that_do_not_suit_the_cluster_are_refused(strategy, why):
    with pytest.raises(SeqloomError, match=why):
        plan_strategies(LENGTHS, COST, strategies=[strategy])


def test_strategies_that_do_not_suit_the_model_are_refused():
    deep = cost_model("5x8xH100", "qwen3-0.6b", sharding="free")
    with pytest.raises(SeqloomError, match=r"40 stages for the 28 layers.*at most 28"):
        check_strategies([strategy_of(ParallelConfig(40, 1))], deep)
    wide = cost_model("2x8xH100", "qwen3-0.6b", sharding="free")
    with pytest.raises(SeqloomError, match=r"tensor degree 16; it must divide.*use 8"):
        check_strategies([strategy_of(ParallelConfig(1, 16))], wide)
    with pytest.raises(SeqloomError, match="no strategies"):
        check_strategies([], COST)
    with pytest.raises(SeqloomError, match=r"16 heads.*over 32 ranks"):
        check_strategies([strategy_of(ParallelConfig(1, 1, 32))], cost_model("4x8xH100", "qwen3-0.6b", sharding="free"))


def test_documents_that_no_candidate_holds_are_refused():
    with pytest.raises(SeqloomError, match=r"has 9000 tokens.*1 candidate.*holds more than 5000.*--max-length 5000"):
        plan_strategies(np.array([9000]), COST, strategies=[strategy_of(*[ParallelConfig(1, 1)] * 8, max_tokens=5000)])
    with pytest.raises(SeqloomError, match="--max-length"):
        propose_strategies(np.array([10**9]), COST)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON"),
        ("[]", "a list of strategies is"),
        ('{"strategies": []}', "at least one"),
        ('{"strategies": [{"pipelines": []}]}', "without pipelines"),
        ('{"strategies": [{"pipelines": [{"stages": 1}]}]}', "its keys are longest, ranks, ring"),
        ('{"strategies": [3]}', "a strategy is"),
    ],
)
def test_files_that_are_no_list_of_strategies_are_refused(text, why):
    with pytest.raises(SeqloomError, match=why):
        strategies_from_json(text)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"stages": 2}, "makes 2 ranks"),
        ({"tensor": 0}, "every degree is at least 1"),
        ({"longest": 0}, "holds 0 tokens"),
        ({"ranks": [0.5]}, r"ranks\[0\] is 0.5; give a whole number"),
        ({"ranks": [1]}, "rank 1 is in two pipelines"),
    ],
)
def test_pipelines_that_contradict_themselves_are_refused(change, why):
    plain = strategy_of(ParallelConfig(1, 1), ParallelConfig(1, 1)).as_dict()
    plain["pipelines"][0] |= change
    with pytest.raises(SeqloomError, match=why):
        Strategy.from_dict(plain)
