import inspect
import pydoc
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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sl.plan(LENGTHS, **HERE, max_length="x"), "max_length is 'x'; give a whole number"),
        (lambda: sl.plan(LENGTHS, **HERE, budget_gib="x"), "budget_gib is 'x'; give a number of GiB"),
        (lambda: sl.plan(LENGTHS, **HERE, tensor=1.5), "tensor is 1.5; give 1, 2, 4"),
        (lambda: sl.plan(LENGTHS, **HERE, float8="x"), "float8 is 'x'; give True or False"),
        (lambda: sl.plan(LENGTHS, **HERE, offload_optimiser="x"), "offload_optimiser is 'x'; give True, False or"),
        (lambda: sl.plan("abc", **HERE), "lengths 'abc' is no list; give the tokens of every sequence"),
        (lambda: sl.plan(None, **HERE), "None is not a flat list"),
        (lambda: sl.plan(LENGTHS, model="llama3-8b"), "plan lacks cluster"),
        (lambda: sl.lower_bound([1, 2], 3), "cost is 3; give a CostModel"),
        (lambda: sl.cost_model(**HERE, shardng="full"), "argument of cost_model 'shardng'; did you mean sharding?"),
        (lambda: sl.cost_model(**HERE, tensor="auto"), "one cost model has one degree"),
        (lambda: sl.cost_model("1x8xH200"), "cost_model lacks model"),
        (lambda: sl.simulate(3, **HERE), "plan is 3; give a Plan"),
        (lambda: sl.evaluate(3, 4), "give a Plan"),
        (lambda: sl.drop_longer(LENGTHS, "x"), "max_length is 'x'; give a whole number"),
    ],
)
def test_arguments_of_the_wrong_name_or_kind_are_refused_with_the_way_out(call, message):
    with pytest.raises(sl.SeqloomError) as refused:
        call()
    assert message in str(refused.value)


def test_numbers_of_numpy_are_numbers():
    plain = sl.plan(LENGTHS, **HERE, planner="static", max_length=65_536, budget_gib=120)
    given = {"max_length": np.int64(65_536), "budget_gib": np.float64(120)}
    assert sl.plan(LENGTHS, **HERE, planner="static", **given) == plain


def test_public_names_are_those_of_their_modules():
    from seqloom import api, describe

    assert sl.drop_longer is describe.drop_longer
    assert sl.plan is api.plan and sl.simulate is api.simulate


def test_plan_and_simulate_are_functions_beside_the_packages_of_their_names():
    import seqloom.plan
    import seqloom.simulate
    from seqloom.plan import Plan

    assert Plan is sl.Plan
    assert list(inspect.signature(sl.plan).parameters)[:3] == ["lengths", "cluster", "model"]
    assert callable(sl.simulate)
    assert pydoc.render_doc(seqloom.plan, "Help on %s:").startswith("Help on function plan in module seqloom.api")


def test_importing_loads_nothing_heavy():
    code = "import sys, seqloom; print('numpy' in sys.modules, 'seqloom.api' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]
