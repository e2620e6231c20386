"""Two-stage assignment: 1F1B time, dispatch and pack against exhaustive search and against the published greedy."""

import itertools

import numpy as np
import pytest
from hydraulis_constants import published_model

from seqloom.errors import SeqloomError
from seqloom.planners import compiled, loops
from seqloom.planners.hydraulis.dispatch import assign, dispatch, lower_bound, problem_of, rank_strategies
from seqloom.planners.hydraulis.strategy import ConfigCost, ParallelConfig, PipelineConfig, Strategy
from seqloom.planners.loops import estimate_pipeline_ns, one_f_one_b_ns, pack_micro_batches
from seqloom.schedules import Times, build_schedule, simulate_schedule
from support.exhaustive_strategies import best_assignment, micro_batch_ns

PUBLISHED = published_model("32b").costs()


def fastest(*given, **options):
    return rank_strategies(*given, most=1, **options)[0]


def strategy_of(costs, *configs):
    """A strategy of these configs on ranks that follow each other."""
    starts = itertools.accumulate((config.ranks for config in configs), initial=0)
    return Strategy(
        tuple(
            PipelineConfig(s, tuple(range(at, at + s.ranks)), costs[s].max_tokens)
            for s, at in zip(configs, starts, strict=False)
        )
    )


def drawn_costs(draw):
    """Three configs of one, two and one stages, with constants that matter."""
    longest = sorted(draw.integers(900, 3000, 3).tolist())
    configs = (ParallelConfig(1, 1), ParallelConfig(2, 1), ParallelConfig(1, 4))
    speed = draw.uniform(0.6, 1.0, 3)
    return {
        s: ConfigCost(float(draw.uniform(0, 0.02)), float(10 * v / s.ranks), int(draw.integers(50, 3000)), room)
        for s, v, room in zip(configs, speed, longest, strict=True)
    }


@pytest.mark.parametrize("seed", range(12))
def test_one_f_one_b_is_the_time_of_the_schedule(seed):
    draw = np.random.default_rng(seed)
    stages, count = int(draw.integers(1, 6)), int(draw.integers(1, 9))
    times = draw.integers(1, 1000, count)
    forward = np.tile(times // 3, (stages, 1))
    backward = np.tile(times - times // 3, (stages, 1))
    timing = simulate_schedule(build_schedule("1f1b", stages, count), Times(forward, backward, np.zeros_like(forward)))
    assert one_f_one_b_ns(times, stages) == timing.makespan
    equal = np.full(count, 300)
    assert one_f_one_b_ns(equal, stages) == 300 * (stages - 1 + count)


def test_assignment_is_near_the_best_of_all():
    excess = []
    for seed in range(100):
        draw = np.random.default_rng(seed)
        costs = drawn_costs(draw)
        strategy = strategy_of(costs, *costs)
        lengths = draw.integers(50, max(c.max_tokens for c in costs.values()), 5)
        found = fastest(lengths, [strategy], costs).ns
        optimum = best_assignment(lengths.tolist(), list(costs), costs)
        assert found >= optimum
        excess.append(found / optimum - 1)
    assert np.mean(excess) <= 0.03, np.mean(excess)


def shuffled_greedy_ns(lengths, strategy, costs, shuffles=50):
    """The published dispatch by its own measure, best of several shuffles: documents where the maximum grows least."""
    best = None
    priced = {pipe.parallel: costs[pipe.parallel].documents_ns(lengths).tolist() for pipe in strategy.pipelines}
    for seed in range(shuffles):
        sums, largest = [0] * len(strategy.pipelines), [0] * len(strategy.pipelines)
        for i in np.random.default_rng(seed).permutation(len(lengths)).tolist():
            options = []
            for j, pipe in enumerate(strategy.pipelines):
                if lengths[i] <= pipe.max_tokens:
                    own = priced[pipe.parallel][i]
                    done = sums[j] + own + (pipe.parallel.stages - 1) * max(largest[j], own)
                    options.append((done, sums[j] > 0, j, own))
            _, _, j, own = min(options)
            sums[j], largest[j] = sums[j] + own, max(largest[j], own)
        stages = [pipe.parallel.stages for pipe in strategy.pipelines]
        ns = max(a + (k - 1) * b for a, b, k in zip(sums, largest, stages, strict=True))
        best = ns if best is None else min(best, ns)
    return best


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "configs",
    [
        [ParallelConfig(1, 16), *[ParallelConfig(1, 4)] * 12],
        [ParallelConfig(3, 8), *[ParallelConfig(1, 4)] * 10],
        [ParallelConfig(1, 16), ParallelConfig(3, 8), ParallelConfig(3, 8)],
    ],
)
def test_dispatch_is_no_worse_than_fifty_shuffles(configs, seed):
    free = {s: ConfigCost(c.square, c.linear, 0, c.max_tokens) for s, c in PUBLISHED.items()}  # their measure has no c
    strategy = strategy_of(free, *configs)
    draw = np.random.default_rng(seed)
    lengths = np.minimum(np.exp(draw.normal(6, 1.4, 120)).astype(np.int64) + 1, strategy.max_tokens)
    order = np.argsort(-lengths, kind="stable")
    problem = problem_of(lengths[order], strategy, free)
    place = dispatch(problem)
    times = []
    for j, pipe in enumerate(strategy.pipelines):
        own = problem.cost[j, place == j]
        times.append(int(own.sum()) + (pipe.parallel.stages - 1) * int(own.max(initial=0)))
    assert max(times) <= shuffled_greedy_ns(lengths, strategy, free)


def slower_of_two(problem, place, changed, pair):
    """ns of the slower of two pipelines after some documents have moved."""
    moved = place.copy()
    for document, pipeline in changed:
        moved[document] = pipeline
    times = []
    for j in pair:
        own = np.flatnonzero(moved == j)
        work, tokens = int(problem.cost[j, own].sum()), int(problem.tokens[own].sum())
        largest = int(problem.cost[j, own].max(initial=0))
        limits = (int(problem.fixed[j]), int(problem.max_tokens[j]), int(problem.stages[j]), False)
        times.append(int(estimate_pipeline_ns(work, tokens, largest, len(own), *limits)))
    return max(times)


@pytest.mark.parametrize("seed", range(12))
def test_no_change_of_places_helps_the_slowest(seed):
    """Every move and every swap for a shorter document, by plain estimates."""
    draw = np.random.default_rng(seed)
    costs = drawn_costs(draw)
    kinds = list(costs)[:2] if seed % 2 else [s for s in costs if s.stages == 1]
    strategy = strategy_of(costs, *kinds, *kinds)
    lengths = np.sort(draw.integers(1, min(costs[s].max_tokens for s in kinds), 24))[::-1].copy()
    problem = problem_of(lengths, strategy, costs)
    place = dispatch(problem)
    count = len(problem.fixed)
    slow = max(range(count), key=lambda j: slower_of_two(problem, place, [], [j]))
    now = slower_of_two(problem, place, [], [slow])
    for i in np.flatnonzero(place == slow).tolist():
        for j in set(range(count)) - {slow}:
            assert slower_of_two(problem, place, [(i, j)], [slow, j]) >= now
            for k in np.flatnonzero((place == j) & (lengths < lengths[i])).tolist():
                assert slower_of_two(problem, place, [(i, j), (k, slow)], [slow, j]) >= now


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("charge_largest", [False, True])
def test_packing_keeps_every_document_and_the_limit(stages, charge_largest):
    draw = np.random.default_rng(stages)
    for _ in range(20):
        tokens = np.sort(draw.integers(1, 500, int(draw.integers(1, 40))))[::-1].copy()
        cost, batch = tokens * 7, np.full(len(tokens), -1)
        ns = pack_micro_batches(tokens, cost, 40, 500, stages, charge_largest, batch)
        held = np.bincount(batch, weights=tokens)
        times = np.bincount(batch, weights=cost).astype(np.int64) + 40
        assert batch.min() == 0 and held.min() > 0 and held.max() <= 500
        assert ns == (times.max() * (stages - 1 + len(times)) if charge_largest else one_f_one_b_ns(times, stages))
        assert ns >= cost.sum() + 40 * -(-tokens.sum() // 500)


def test_empty_pipelines_and_single_documents_are_fine():
    strategy = strategy_of(PUBLISHED, ParallelConfig(1, 16), *[ParallelConfig(1, 4)] * 12)
    found = fastest(np.array([30_000]), [strategy], PUBLISHED)
    assert found.batches[0] == ((0,),)
    assert found.batches[1:] == ((),) * 12
    assert found.ns == micro_batch_ns(PUBLISHED[ParallelConfig(1, 16)], np.array([30_000]))


def test_order_of_the_pipelines_does_not_matter():
    """Results belong to the pipelines as they are listed, sorted or not."""
    lengths = np.array([30_000, 7_000, 7_000, 500, 400, 300])
    one = strategy_of(PUBLISHED, ParallelConfig(1, 16), ParallelConfig(1, 4), ParallelConfig(1, 4))
    other = strategy_of(PUBLISHED, ParallelConfig(1, 4), ParallelConfig(1, 16), ParallelConfig(1, 4))
    for strategy in (one, other):
        found = fastest(lengths, [strategy], PUBLISHED)
        assert sorted(k for j in range(3) for k in found.documents(j)) == list(range(6))
        for pipe, batches, ns in zip(strategy.pipelines, found.batches, found.pipelines_ns, strict=True):
            assert all(lengths[list(batch)].sum() <= pipe.max_tokens for batch in batches)
            assert ns == sum(micro_batch_ns(PUBLISHED[pipe.parallel], lengths[list(batch)]) for batch in batches)
    assert fastest(lengths, [one], PUBLISHED).ns == fastest(lengths, [other], PUBLISHED).ns


def test_the_fastest_strategy_wins_not_the_one_with_the_fewest_pipelines():
    short = np.full(200, 600)
    wide, narrow = (
        strategy_of(PUBLISHED, *[ParallelConfig(1, 16)] * 4),
        strategy_of(PUBLISHED, *[ParallelConfig(1, 4)] * 16),
    )
    ranked = rank_strategies(short, [wide, narrow], PUBLISHED)
    assert [found.strategy for found in ranked] == [1, 0] and ranked[0].ns < ranked[1].ns
    assert fastest(short, [wide, narrow], PUBLISHED).strategy == 1
    gap = ranked[1].ns - ranked[0].ns
    assert (
        fastest(short, [wide, narrow], PUBLISHED, [0, gap + 1]).strategy == 0
    )  # a switch that costs more than it saves
    assert fastest(short, [wide, narrow], PUBLISHED, [0, gap - 1]).ns == ranked[1].ns - 1


def test_many_short_documents_are_priced_with_their_constants():
    """Two pipelines, one with a large constant: dispatch sees it."""
    costs = {
        ParallelConfig(1, 1): ConfigCost(0.0, 1.0, 10_000, 100),
        ParallelConfig(1, 2): ConfigCost(0.0, 1.0, 10, 100),
    }
    strategy = strategy_of(costs, ParallelConfig(1, 1), ParallelConfig(1, 2))
    found = fastest(np.full(40, 50), [strategy], costs)
    assert len(found.documents(0)) <= 2 < len(found.documents(1))


def test_the_bound_is_below_every_assignment():
    for seed in range(40):
        draw = np.random.default_rng(seed)
        costs = drawn_costs(draw)
        strategy = strategy_of(costs, *costs)
        lengths = np.sort(draw.integers(1, strategy.max_tokens, int(draw.integers(1, 30))))[::-1].copy()
        problem = problem_of(lengths, strategy, costs)
        assert lower_bound(problem) <= assign(problem, np.arange(len(lengths))).ns


def mixed_assignment():
    """One assignment with one and several stages, with and without `charge_largest`."""
    lengths = np.minimum(np.exp(np.random.default_rng(5).normal(6, 1.4, 40)).astype(np.int64) + 1, 20_000)
    listed = [
        strategy_of(PUBLISHED, ParallelConfig(1, 8), ParallelConfig(2, 4)),
        strategy_of(PUBLISHED, ParallelConfig(1, 8), ParallelConfig(2, 8)),
    ]
    return [fastest(lengths, listed, PUBLISHED, charge_largest=charge_largest) for charge_largest in (False, True)]


def test_plain_and_compiled_agree(monkeypatch):
    monkeypatch.setattr(compiled._State, "loaded", loops)
    plain = mixed_assignment()
    monkeypatch.undo()
    assert plain == mixed_assignment()


def test_a_document_that_nobody_holds_is_refused_with_the_way_out():
    strategy = strategy_of(PUBLISHED, ParallelConfig(1, 8), ParallelConfig(1, 4))
    with pytest.raises(SeqloomError, match=r"sequence 1 has 22000 tokens.*holds more than 21888.*--max-length 21888"):
        fastest(np.array([5, 22_000]), [strategy], PUBLISHED)
    tighter = {s: ConfigCost(c.square, c.linear, c.fixed, 1000) for s, c in PUBLISHED.items()}  # less memory than then
    with pytest.raises(SeqloomError, match="holds more than 1000"):
        fastest(np.array([1001]), [strategy], tighter)
    found = fastest(np.array([900, 800, 700]), [strategy], tighter)
    assert all(len(batch) == 1 for batches in found.batches for batch in batches)
