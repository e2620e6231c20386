"""What a planner is asked, and how its answer becomes a plan."""

import numpy as np
import pytest

from seqloom.errors import SeqloomError
from seqloom.plan import Checkpoint
from seqloom.planners.loops import NEVER
from seqloom.planners.problem import GroupPlacement, fitting_problems
from seqloom.planners.recompute import CHECKPOINTS
from support.strategies import roomy_cost_model

PUBLISHED = roomy_cost_model("1x8xA100-40G", "gpt-7b", "flexsp-a100", "full", 1)
ANALYTIC = roomy_cost_model("1x4xH100", "qwen3-0.6b", None, "full", 0)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "empty"),
        ([5, 0], "sequence 1: 0 is not a length"),
        ([-7], "-7 is not a length"),
        ([3.5], "3.5 is not a length"),
        ([float("nan")], "nan is not a length"),
    ],
)
def test_what_is_no_batch_is_refused(lengths, message):
    with pytest.raises(SeqloomError, match=message):
        fitting_problems(np.array(lengths), PUBLISHED)
    with pytest.raises(SeqloomError, match=message):
        fitting_problems(lengths, PUBLISHED, PUBLISHED.policies[0])[0]


def test_too_long_names_the_document_and_a_length_that_fits():
    with pytest.raises(SeqloomError, match=r"sequence 1 has 10000000 tokens.*--max-length (\d+)") as refused:
        fitting_problems([7, 10**7], PUBLISHED, PUBLISHED.policies[0])[0]
    room = int(str(refused.value).split("--max-length ")[1].split(";")[0])
    assert fitting_problems([room], PUBLISHED, PUBLISHED.policies[0])[0].fits
    with pytest.raises(SeqloomError):
        fitting_problems([room + 1], PUBLISHED, PUBLISHED.policies[0])[0]


def test_only_variants_that_hold_the_batch_are_left():
    capacity = sorted({ANALYTIC.capacity(policy) for policy in ANALYTIC.policies})
    most = max(shape.degree for shape in ANALYTIC.shapes)
    assert len(fitting_problems([1], ANALYTIC)) == len(ANALYTIC.policies)
    (only,) = fitting_problems([most * capacity[-1]], ANALYTIC)
    assert only.tables.capacity == capacity[-1]


def test_tables_for_the_hot_loops_agree_with_the_prices():
    problem = fitting_problems([100, 9_000, 40_000], PUBLISHED, PUBLISHED.policies[0])[0]
    search = problem.batch_tables
    for d, degree in enumerate(search.degrees.tolist()):
        for k, tokens in enumerate(search.tokens.tolist()):
            fits = tokens <= degree * search.capacity
            shape = int(search.solo_shape[d, k])
            assert search.shape_degree[shape] == degree
            assert search.solo_ns[d, k] == (problem.tables.group_ns(shape, np.array([k])) if fits else NEVER)
    assert (search.value >= 1).all() and (np.diff(search.value) > 0).all()
    assert len(search.cost) == len(search.fixed) == 1  # streams that the published constants never use are left out


def test_each_round_keeps_as_much_as_its_memory_allows():
    capacity = {
        v.checkpoint: ANALYTIC.capacity(v) for v in ANALYTIC.policies if v.reduce == ANALYTIC.policies[0].reduce
    }
    lengths = [capacity[Checkpoint.NONE], capacity[Checkpoint.SELECTIVE], capacity[Checkpoint.FULL]]
    roomiest = next(v for v in ANALYTIC.policies if v.checkpoint == Checkpoint.FULL)
    problem = fitting_problems(lengths, ANALYTIC, roomiest)[0]
    shape = problem.tables.shapes[0]
    plan = problem.plan([[GroupPlacement(shape, 0, [k])] for k in range(3)], "test")
    plan.validate()
    assert [current.by_stage[0].checkpoint for current in plan.pipelines[0].rounds] == list(CHECKPOINTS[:3])


def test_groups_stand_slow_links_first():
    cost = roomy_cost_model("3x2xH100", "qwen3-0.6b", None, "full", 0)
    problem = fitting_problems([100] * 4, cost, cost.policies[0])[0]
    by_degree = {shape.degree: shape for shape in problem.tables.shapes}
    placements = [
        GroupPlacement(by_degree[1], 0, [0]),
        GroupPlacement(by_degree[2], 0, [1]),
        GroupPlacement(by_degree[4], 0, [2]),
        GroupPlacement(by_degree[1], 5, [3]),
    ]
    plan = problem.plan([placements], "test")
    plan.validate()
    assert [group.ranks for group in plan.pipelines[0].rounds[0].groups] == [(0, 1, 2, 3), (0, 1), (0,), (5,)]
