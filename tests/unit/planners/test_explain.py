"""Why documents are where they are: bounds, reasons, next best choices, checked against the cost tables."""

import numpy as np
import pytest

from seqloom.api import cost_model
from seqloom.cost import GroupShape
from seqloom.describe import sample
from seqloom.errors import SeqloomError
from seqloom.plan import Method
from seqloom.planners import make_plan
from seqloom.planners.explain import explain, method_name
from seqloom.view import bounds_lines, explanation_table

COST = cost_model("2x4xH200", "llama3-8b")
LENGTHS = np.concatenate([sample("commoncrawl", 60, seed=2, max_length=20_000), [90_000]])


@pytest.mark.parametrize("planner", ["static", "adaptive", "zones"])
def test_every_document_is_in_one_class(planner):
    plan = make_plan(planner, LENGTHS, COST)
    classes = explain(plan, COST).classes
    assert sum(one.documents for one in classes) == len(LENGTHS)
    assert max(one.longest for one in classes) == 90_000
    zones = {one.placement.zone for one in classes}
    degrees = {len(group.ranks) for r in plan.pipelines[0].rounds for group in r.groups}
    assert ("local" in zones) == (1 in degrees) and ("inter-node" in zones) == (8 in degrees)


def test_costs_and_reasons_are_those_of_the_tables():
    plan = make_plan("zones", LENGTHS, COST)
    policy = next(v for v in COST.policies if v.checkpoint == plan.pipelines[0].rounds[0].by_stage[0].checkpoint)
    [longest] = [one for one in explain(plan, COST).classes if one.longest == 90_000]
    assert longest.placement.reason == "memory"  # more than a rank holds
    tables = COST.tables(np.array([90_000]), policy)
    spent = tables.cost[:2, :, 0].max(axis=0) * tables.degree
    assert longest.cost_ns == spent[tables.shapes.index(longest.placement.shape)]
    assert longest.next_ns is None or longest.next_ns in spent.tolist()
    for one in explain(plan, COST).classes:
        if one.placement.reason == "cheapest":
            assert one.next_ns is None or one.cost_ns <= one.next_ns
        if one.placement.zone == "local":
            assert one.cost_ns == one.whole_ns


def test_the_words_of_a_shape():
    assert method_name(GroupShape(1, 1)) == "whole"
    assert method_name(GroupShape(8, 1)) == "ulysses 8"
    assert method_name(GroupShape(1, 4, Method.GATHER)) == "gather 4"
    assert method_name(GroupShape(4, 2, Method.RING, True)) == "ulysses 4 x ring 2, routed"


def test_the_table_has_a_row_per_class():
    reasons = explain(make_plan("zones", LENGTHS, COST), COST)
    table = explanation_table(reasons)
    assert table.row_count == len(reasons.classes)
    assert [column.header for column in table.columns][:3] == ["lengths", "docs", "zone"]
    assert sum("pays" in line for line in bounds_lines(reasons)) == 2
    assert set(reasons.as_dict()["bounds"]) >= {"break_even", "intra_pays", "inter_forced"}


def test_several_stages_are_refused(two_stages):
    with pytest.raises(SeqloomError, match="several stages"):
        explain(two_stages, COST)


@pytest.fixture
def two_stages():
    from dataclasses import replace

    from seqloom.plan import Stage

    plan = make_plan("static", LENGTHS[:4], COST)
    [line] = plan.pipelines
    layers = line.stages[0].layers[1]
    stages = (Stage(line.stages[0].ranks, (0, 1)), Stage(line.stages[0].ranks, (1, layers)))
    return replace(plan, pipelines=(replace(line, stages=stages),))
