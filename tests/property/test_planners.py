"""What every plan of every planner must hold, over random batches, clusters, budgets and shardings."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.errors import SeqloomError
from seqloom.planners import make_plan, plan_batches
from seqloom.planners.bounds import lower_bound
from seqloom.simulate import simulate
from seqloom.simulate.memory import peak_memory
from support.strategies import batches, cost_models


def holds(lengths, cost):
    """Whether ranks hold the longest of these documents, with activations in host memory where that is needed."""
    return cost.holding(lengths).holds(lengths)


def check(plan, lengths, cost, bound):
    plan.validate()
    spans = [span for pipeline in plan.pipelines for r in pipeline.rounds for group in r.groups for span in group.spans]
    assert sorted(spans) == [(k, 0, n) for k, n in enumerate(lengths.tolist())]
    assert (peak_memory(plan, cost) <= cost.budget_bytes).all()
    simulation = simulate(plan, cost)
    assert simulation.step_ns == cost.plan_ns(plan)
    assert simulation.step_ns >= bound > 0
    assert (simulation.peak_memory <= cost.budget_bytes).all()


def check_refused(names, lengths, cost):
    said = set()
    for name in names:
        with pytest.raises(SeqloomError) as refused:
            make_plan(name, lengths, cost)
        said.add(str(refused.value))
    assert len(said) == 1  # one rule, one way out, whoever is asked


@settings(max_examples=30)
@given(cost_models(), batches())
def test_every_plan_is_valid_priced_and_above_the_bound(cost, lengths):
    names = ["static", "adaptive", "flex", "zones"]
    if not holds(lengths, cost):
        check_refused(names, lengths, cost)
        return
    bound = lower_bound(lengths, cost.holding(lengths))
    for name in names:
        check(make_plan(name, lengths, cost), lengths, cost, bound)


@settings(max_examples=15)
@given(cost_models(max_nodes=2, max_ranks=8), batches(max_documents=12, longest=30_000))
def test_auto_is_never_above_any_planner(cost, lengths):
    names = ["static", "adaptive", "flexsp", "flex", "zones"]
    if not holds(lengths, cost):
        check_refused([*names, "auto"], lengths, cost)
        return
    plans = {name: make_plan(name, lengths, cost) for name in [*names, "auto"] if name != "flexsp"}
    try:
        plans["flexsp"] = make_plan("flexsp", lengths, cost)
    except SeqloomError as error:  # its degrees are powers of two: not every node has one that is wide enough
        assert "use planner adaptive or flex" in str(error)
    bound = lower_bound(lengths, cost.holding(lengths))
    for plan in plans.values():
        check(plan, lengths, cost, bound)
    times = {name: cost.plan_ns(plan) for name, plan in plans.items()}
    assert times["auto"] <= min(times.values())  # less where only the winner is remapped


@settings(max_examples=10)
@given(cost_models(max_ranks=16), st.lists(batches(max_documents=40), min_size=1, max_size=3))
def test_auto_is_never_above_any_planner_of_a_run(cost, several):
    names = ["auto", "static", "adaptive", "flex", "zones"]
    if not all(holds(lengths, cost) for lengths in several):
        with pytest.raises(SeqloomError):
            plan_batches(names, several, cost)
        return
    degrees = set()
    for lengths, found in zip(several, plan_batches(names, several, cost), strict=True):
        assert list(found) == names
        times = {name: cost.plan_ns(planned.plan) for name, planned in found.items()}
        assert times["auto"] <= min(times.values()) and times["adaptive"] <= times["static"]
        check(found["auto"].plan, lengths, cost, lower_bound(lengths, cost.holding(lengths)))
        degrees |= {g.degree for r in found["static"].plan.pipelines[0].rounds for g in r.groups}
    assert len(degrees) == 1  # one degree for the whole run


@settings(max_examples=12)
@given(cost_models(max_ranks=16), batches(max_documents=30), st.integers(0, 3))
def test_flex_repeats(cost, lengths, seed):
    if holds(lengths, cost):
        assert make_plan("flex", lengths, cost, seed=seed).hash == make_plan("flex", lengths, cost, seed=seed).hash


@settings(max_examples=12)
@given(cost_models(max_ranks=16), batches(max_documents=30))
def test_more_evaluations_are_never_worse(cost, lengths):
    if holds(lengths, cost):
        plans = [make_plan("flex", lengths, cost, evaluations=count) for count in (0, 10, 60)]
        times = [cost.plan_ns(plan) for plan in plans]
        if len(cost.policies) == 1:  # else a round may turn out to keep more than it was searched with
            assert all(more <= fewer for fewer, more in pairwise(times))
