import inspect
import subprocess
import sys

import numpy as np
import pytest

import seqloom as sl

LENGTHS = [512, 700, 1_300, 33_000, 4_096, 260]
HERE = {"cluster": "1x8xH200", "model": "llama3-8b"}


def test_plan_validate_simulate():
    plan = sl.plan(LENGTHS, **HERE, planner="adaptive")
    plan.validate()
    assert plan.documents == tuple(LENGTHS)
    simulation = sl.simulate(plan, **HERE)
    cost = sl.cost_model(**HERE)
    assert simulation.step_ns == cost.plan_ns(plan) >= sl.lower_bound(LENGTHS, cost) > 0


def test_names_and_objects_are_the_same():
    by_name = sl.plan(LENGTHS, **HERE, profile="h200", planner="adaptive")
    cluster, model = sl.Cluster.parse("1x8xH200"), sl.ModelSpec.load("llama3-8b")
    batch = sl.Batch.of(np.array(LENGTHS))
    by_value = sl.plan(batch, cluster=cluster, model=model, profile=sl.Profile.load("h200"), planner="adaptive")
    assert by_name == by_value
    assert by_name.hash == by_value.hash


def test_auto_is_the_default_and_never_worse():
    cost = sl.cost_model(**HERE)
    best, plain = sl.plan(LENGTHS, **HERE), sl.plan(LENGTHS, **HERE, planner="static")
    assert cost.plan_ns(best) <= cost.plan_ns(plain)


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([], {}, "empty"),
        ([4, 0], {}, "sequence 1: 0 is not a length"),
        ([4, float("nan")], {}, "nan"),
        ([10**9], {}, "largest group"),
        (LENGTHS, {"max_length": 8_192}, "sequence 3 has 33,000 tokens, max_length is 8,192"),
        (LENGTHS, {"planner": "flexx"}, "did you mean"),
        (LENGTHS, {"budget_gib": 1}, "does not fit"),
        (LENGTHS, {"sharding": "some"}, "unknown sharding"),
    ],
)
def test_what_cannot_be_planned_is_refused(lengths, options, message):
    with pytest.raises(sl.SeqloomError, match=message):
        sl.plan(lengths, **HERE, **options)


@pytest.mark.parametrize(
    ("elsewhere", "message"),
    [
        ({"cluster": "2x8xH200"}, "it has 8 ranks, not 16"),
        ({"model": "gpt-7b"}, "query heads"),
        ({"sharding": "hybrid"}, "full sharding, not hybrid"),
        ({"budget_gib": 17.0}, "GiB"),
    ],
)
def test_a_plan_is_simulated_only_where_it_belongs(elsewhere, message):
    plan = sl.plan(LENGTHS, **HERE, planner="adaptive")
    with pytest.raises(sl.SeqloomError, match=message):
        sl.simulate(plan, **{**HERE, **elsewhere})


def test_every_public_name_exists():
    for name in sl.__all__:
        assert getattr(sl, name) is not None
        assert name in dir(sl)
    with pytest.raises(AttributeError, match="no attribute 'plam'"):
        _ = sl.plam


def test_plan_and_simulate_are_rooms_and_verbs():
    import seqloom.plan as room

    assert room is sl.plan
    assert room.Plan is sl.Plan
    assert list(inspect.signature(sl.plan).parameters)[:3] == ["lengths", "cluster", "model"]
    assert callable(sl.simulate)


def test_importing_loads_nothing_heavy():
    code = "import sys, seqloom; print('numpy' in sys.modules, 'seqloom.api' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]
