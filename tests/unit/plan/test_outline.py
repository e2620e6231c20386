"""Plans in a few characters."""

from dataclasses import replace

import seqloom as sl
from seqloom.plan import Pipeline, Reduce, Stage
from seqloom.plan.plan import plan_shape


def line(first, stages, width, tensor=1):
    ranks = [tuple(range(first + width * k, first + width * (k + 1))) for k in range(stages)]
    return Pipeline(tuple(Stage(each, (k, k + 1), tensor) for k, each in enumerate(ranks)), (), ((),) * stages)


def test_pipelines_are_named_by_tensor_degree_stages_and_ranks_the_largest_first_and_equal_ones_counted():
    plan = sl.plan([300, 20], cluster="1x8xH200", model="llama3-8b", planner="static")
    assert plan_shape(plan) == "t1p1 on 8"
    assert (
        plan_shape(replace(plan, pipelines=(line(0, 2, 1), line(2, 2, 1), line(4, 2, 2, 2))))
        == "t2p2 on 4, 2 of t1p2 on 2"
    )


def test_a_pp_rank_of_several_stages_counts_once_and_unequal_degrees_are_all_named():
    plan = sl.plan([300, 20], cluster="1x8xH200", model="llama3-8b", planner="static")
    folded = Pipeline(tuple(Stage(ranks, (k, k + 1)) for k, ranks in enumerate([(0,), (1,), (1,), (0,)])), (), ((), ()))
    uneven = Pipeline((Stage((2, 3), (0, 2), 2), Stage((4,), (2, 4))), (), ((), ()))
    single = Pipeline.single((5, 6, 7), 4, (), Reduce.STEP)
    assert plan_shape(replace(plan, pipelines=(folded, uneven, single))) == "t1p1 on 3, t2-1p2 on 3, t1p2 on 2"
