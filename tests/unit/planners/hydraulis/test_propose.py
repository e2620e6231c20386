"""The proposal against exhaustive search; the dynamic programme against a plain one; placement; published tables."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hydraulis_constants import published_model

from seqloom.errors import SeqloomError
from seqloom.planners.hydraulis.dispatch import rank_strategies
from seqloom.planners.hydraulis.propose import NEVER, Histogram, best_mix, interval_times, propose
from seqloom.planners.hydraulis.strategy import ConfigCost, ParallelConfig, check_placement, fits_nodes, place_pipelines
from support.exhaustive_strategies import all_mixtures, best_assignment

SMALL = (ParallelConfig(1, 1), ParallelConfig(1, 2), ParallelConfig(2, 1), ParallelConfig(1, 4))
LONGEST = {
    "32b": {(1, 4): 1920, (2, 2): 3968, (2, 4): 6272, (2, 6): 7040, (4, 1): 7808, (4, 2): 12416, (4, 4): 14592,
            (4, 6): 15360, (8, 1): 21888, (8, 2): 25856, (8, 3): 27264, (8, 4): 27904, (16, 1): 43520},
    "13b": {(1, 1): 1152, (1, 2): 4864, (1, 4): 6528, (1, 8): 7424, (2, 1): 9472, (2, 2): 12928, (2, 4): 14720,
            (2, 8): 15488, (4, 1): 25984, (4, 2): 29568, (4, 4): 31232, (8, 1): 48000},
    "7b": {(1, 2): 11264, (1, 4): 12672, (1, 8): 13312, (2, 1): 21888, (2, 2): 24832, (2, 4): 26112, (2, 8): 26880,
           (4, 1): 46080, (4, 2): 48768, (4, 4): 50048, (8, 1): 85248, (8, 2): 87552, (16, 1): 137984},
}  # fmt: skip


def drawn_costs(draw):
    """Configs of 1, 2, 2 and 4 ranks: wider ones hold more and are a little less efficient."""
    base = int(draw.integers(300, 900))
    capacities = {
        ParallelConfig(1, 1): base,
        ParallelConfig(1, 2): 2 * base + 300,
        ParallelConfig(2, 1): 2 * base,
        ParallelConfig(1, 4): 5 * base,
    }
    return {
        s: ConfigCost(
            float(draw.uniform(0.001, 0.01)) / s.ranks,
            float(10 * draw.uniform(1, 1.25) / s.ranks),
            int(draw.integers(50, 900)),
            capacities[s],
        )
        for s in SMALL
    }


@pytest.mark.parametrize("name", LONGEST)
def test_memory_formula_gives_the_published_lengths(name):
    model = published_model(name)
    assert {key: model.longest(*key) for key in model.configs} == LONGEST[name]
    assert all(cost.max_tokens == LONGEST[name][s.tensor, s.stages] for s, cost in model.costs().items())
    with pytest.raises(SeqloomError, match="unknown published model"):
        published_model("33b")


def test_states_that_do_not_fit_hold_nothing():
    model = published_model("32b")
    assert model.longest(1, 2) == 0 == model.longest(2, 1)


def brute_force(times, options, units, classes):
    """The dynamic programme's optimum by trying every cut of the classes and every option for every interval."""
    best = NEVER
    for cuts in range(classes):
        for edges in itertools.combinations(range(1, classes), cuts):
            spans = list(itertools.pairwise((0, *edges, classes)))
            for chosen in itertools.product(range(len(options)), repeat=len(spans)):
                if sum(options[k][2] for k in chosen) <= units:
                    best = min(best, max(int(times[k][r, s]) for k, (r, s) in zip(chosen, spans, strict=True)))
    return best


@pytest.mark.parametrize("seed", range(8))
def test_partition_is_the_best_cut_of_all(seed):
    draw = np.random.default_rng(seed)
    costs = drawn_costs(draw)
    histogram = Histogram.of(draw.integers(20, max(c.max_tokens for c in costs.values()), 12), classes=3)
    options = [(s, copies, copies * s.ranks) for s in costs for copies in range(1, 4 // s.ranks + 1)]
    times = [interval_times(histogram, costs[s], s.stages, np.array([copies]))[0] for s, copies, _ in options]
    ns, chosen = best_mix(histogram, costs, 4)
    assert ns == brute_force(times, options, 4, len(histogram.edges))
    assert sum(s.ranks * copies for s, copies in chosen.items()) <= 4
    longest = max(costs[s].max_tokens for s in chosen)
    assert longest >= histogram.edges[-1]


def test_proposal_is_near_the_best_of_all():
    """All strategies, all dispatches, all packings."""
    excess = []
    for seed in range(100):
        draw = np.random.default_rng(seed)
        costs = drawn_costs(draw)
        lengths = draw.integers(20, max(c.max_tokens for c in costs.values()), 4)
        found = rank_strategies(lengths, propose(lengths, costs, 4, 4), costs)[0].ns
        known = {}
        every = [best_assignment(lengths.tolist(), mixture, costs, known) for mixture in all_mixtures(SMALL, 4)]
        optimum = min(ns for ns in every if ns is not None)
        assert found >= optimum
        excess.append(found / optimum - 1)
    assert np.mean(excess) <= 0.03, np.mean(excess)


def test_histogram_keeps_documents_tokens_and_squares():
    lengths = np.random.default_rng(0).integers(1, 5000, 800)
    histogram = Histogram.of(lengths, ends=[1000, 10_000])
    assert histogram.count.sum() == 800 and histogram.tokens.sum() == lengths.sum()
    assert histogram.squares.sum() == (lengths.astype(float) ** 2).sum() and histogram.edges[-1] == lengths.max()
    below = histogram.upto(lengths[lengths <= 1000].max())
    assert below.edges[-1] <= 1000 and below.tokens.sum() == pytest.approx(lengths.sum())
    assert Histogram.of(lengths, 10 * int(lengths.sum())).count.sum() == pytest.approx(8000)


def test_a_short_list_for_a_data_set():
    costs = published_model("32b").costs()
    lengths = np.minimum(np.exp(np.random.default_rng(0).normal(6, 1.4, 2000)).astype(np.int64) + 1, 32_768)
    proposed = propose(lengths, costs, 32, 8, tokens_per_step=30_000, most=4)
    assert 2 <= len(proposed) <= 4 and len(set(map(str, proposed))) == len(proposed)
    assert proposed[0].max_tokens >= lengths.max()
    for strategy in proposed:
        check_placement(strategy, 32, 8)
    assert proposed == propose(lengths, costs, 32, 8, tokens_per_step=30_000, most=4)
    with pytest.raises(SeqloomError, match=r"43521 tokens.*holds 43520.*--max-length 43520"):
        propose(np.array([43_521]), costs, 32, 8)


def test_a_list_is_proposed_for_the_switch_cost_that_its_steps_pay():
    """Small pipelines compute fastest; where a switch to them costs a second, a list without them is faster."""
    costs = published_model("32b").costs()
    draw = np.random.default_rng(0)
    lengths = np.minimum(np.exp(draw.normal(6, 1.4, 2000)).astype(np.int64) + 1, 16_384)

    def switch_ns(strategy):
        return 4_000_000_000 // min(len(pipe.ranks) for pipe in strategy.pipelines)

    free, charged = (
        propose(lengths, costs, 32, 8, tokens_per_step=30_000, switch_ns=price) for price in (None, switch_ns)
    )
    steps = [draw.choice(lengths, 30) for _ in range(8)]

    def mean_ns(listed):
        switches = [switch_ns(strategy) for strategy in listed]
        return np.mean([rank_strategies(step, listed, costs, switches, most=1)[0].ns for step in steps])

    assert mean_ns(charged) < 0.98 * mean_ns(free)
    assert propose(lengths, costs, 32, 8, tokens_per_step=30_000, switch_ns=lambda _: 0)[0].max_tokens >= lengths.max()


@pytest.mark.parametrize(("ranks", "node"), [(64, 8), (24, 8), (12, 6), (16, 4)])
def test_pipelines_lie_in_aligned_blocks(ranks, node):
    costs = {
        ParallelConfig(stages, 1, width): ConfigCost(0.0, 1.0, 1, 100 * width)
        for stages in (1, 2, 3)
        for width in (1, 2, 3, 4, 6, 8, 16, 24)
    }
    legal = [config for config in costs if fits_nodes(config, ranks, node)]
    draw = np.random.default_rng(ranks)
    found = 0
    for _ in range(60):
        left, chosen = ranks, []
        while left:
            fitting = [config for config in legal if config.ranks <= left]
            chosen.append(fitting[int(draw.integers(len(fitting)))])
            left -= chosen[-1].ranks
        strategy = place_pipelines(chosen, costs, ranks, node)
        if strategy is None:
            continue
        found += 1
        check_placement(strategy, ranks, node)
        assert Counter(chosen) == Counter(pipe.parallel for pipe in strategy.pipelines)
        for pipe in strategy.pipelines:
            inside = {rank // node for rank in pipe.ranks}
            assert len(inside) == 1 or len(pipe.ranks) % node == 0
            for k in range(pipe.parallel.stages):
                stage = pipe.ranks[k * pipe.parallel.ranks_per_stage : (k + 1) * pipe.parallel.ranks_per_stage]
                assert len({rank // node for rank in stage}) == max(1, pipe.parallel.ranks_per_stage // node)
                assert (
                    stage[0] % pipe.parallel.ranks_per_stage == 0
                    or (stage[0] % node) % pipe.parallel.ranks_per_stage == 0
                )
    assert found >= 20
