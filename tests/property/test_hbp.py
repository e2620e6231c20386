"""What every packing must hold, over random data sets, clusters, budgets and shardings."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.packing import hbp, plain_packing, plans_balance
from seqloom.packing.levels import max_pack_tokens
from seqloom.simulate import simulate
from seqloom.simulate.memory import peak_memory
from support.strategies import batches, cost_models


@given(
    lengths=batches(max_documents=120, longest=20_000),
    cost=cost_models(max_ranks=16),
    share=st.floats(0.02, 1.0),
    short_first=st.integers(0, 3),
    seed=st.integers(0, 5),
)
@settings(max_examples=25)
def test_packings(lengths, cost, share, short_first, seed):
    lengths = np.minimum(lengths, max_pack_tokens(cost))
    occupied = cost.padded_lengths(lengths)
    budget = max(int(occupied.max()), int(share * occupied.sum()))
    packing = hbp(lengths, cost, budget, short_first=short_first, seed=seed)
    check_structure(packing, lengths, cost, budget)
    check_balance(packing)
    again = hbp(lengths, cost, budget, short_first=short_first, seed=seed)
    assert np.array_equal(again.documents, packing.documents) and np.array_equal(again.step_starts, packing.step_starts)
    other = hbp(lengths, cost, budget, seed=seed + 1)
    assert sorted(map(tuple, map(other.batch, range(other.steps)))) == sorted(
        map(tuple, map(packing.batch, range(packing.steps)))
    )
    for each in (packing, plain_packing(lengths, cost, budget)):
        check_plans(each, lengths, cost)


def check_structure(packing, lengths, cost, budget):
    """Every document exactly once, no pack above its level, no step above its tokens, steps whole but the last made."""
    assert sorted(packing.documents.tolist()) == list(range(len(lengths)))
    part = 0
    for step, index in enumerate(packing.step_levels.tolist()):
        level, packs = packing.levels[index], packing.packs(step)
        tokens = [int(cost.padded_lengths(lengths[pack]).sum()) for pack in packs]
        assert min(map(len, packs)) > 0 and max(tokens) <= level.tokens and sum(tokens) <= budget
        assert level.tokens <= level.shape.degree * cost.capacity(level.policy)
        assert len(packs) <= level.packs
        part += len(packs) < level.packs
    assert part <= 1


def check_balance(packing):
    """Whole steps of a level are consecutive runs of its packs sorted by attention work."""
    for index, level in enumerate(packing.levels):
        runs = [
            sorted(int((packing.lengths[pack] ** 2).sum()) for pack in packing.packs(step))
            for step in np.flatnonzero(packing.step_levels == index).tolist()
        ]
        whole = sorted((run for run in runs if len(run) == level.packs), key=lambda run: (run[0], run[-1]))
        joined = [work for run in whole for work in run]
        inversions = sum(a > b for a, b in pairwise(joined))
        assert inversions <= 1  # the last step made may be as wide as others, and is dealt apart from them


def check_plans(packing, lengths, cost):
    """Plans of steps are valid, hold their batch, and take as long as the packing says; figures agree."""
    plans = [packing.plan(step) for step in range(packing.steps)]
    for step, plan in enumerate(plans):
        plan.validate()
        assert plan.documents == tuple(lengths[packing.batch(step)].tolist())
    for step in {0, packing.steps - 1}:
        assert simulate(plans[step], cost).step_ns == packing.step_ns[step]
        assert (peak_memory(plans[step], cost) <= cost.budget_bytes).all()
    assert packing.balance.as_dict() == pytest.approx(plans_balance(plans, cost).as_dict(), abs=1e-9)
