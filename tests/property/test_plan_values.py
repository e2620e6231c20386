"""Plans that the strategies draw are valid and survive every form they can be written in."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from seqloom.plan import Action, ActionKind, Plan, Round
from support.strategies import plans, rounds

relaxed = settings(max_examples=80, deadline=None)


@relaxed
@given(plans(), st.data())
def test_a_drawn_plan_is_valid_and_survives_every_form(plan: Plan, data: st.DataObject) -> None:
    plan.validate()
    assert_every_token_once(plan)
    for write, read in ((Plan.to_json, Plan.from_json), (Plan.to_text, Plan.from_text), (pickle.dumps, pickle.loads)):
        again = read(write(plan))
        assert again == plan and again.planner == plan.planner
        assert again.hash == plan.hash and hash(again) == hash(plan)
        assert write(again) == write(plan) or write is pickle.dumps
    renamed = replace(plan, planner="somebody else")
    assert renamed == plan and renamed.hash == plan.hash and hash(renamed) == hash(plan)
    lengths = list(plan.documents)
    lengths[data.draw(st.integers(0, len(lengths) - 1))] += 1
    other = replace(plan, documents=tuple(lengths))
    assert other != plan and other.hash != plan.hash


def assert_every_token_once(plan: Plan) -> None:
    seen = [set() for _ in plan.documents]
    for pipeline in plan.pipelines:
        for current in pipeline.rounds:
            for document, start, stop in current.by_stage[0].spans():
                assert seen[document].isdisjoint(range(start, stop))
                seen[document].update(range(start, stop))
    assert [len(tokens) for tokens in seen] == list(plan.documents)


@pytest.mark.slow
def test_stages_that_share_their_ranks_are_drawn() -> None:
    """Interleaved, V-shaped with the last stage on the first pipeline rank, and others."""
    missing = {"0101", "0110", "00", "010"}

    def nothing_is_missing(plan: Plan) -> bool:
        for pipeline in plan.pipelines:
            missing.discard("".join(str(pipeline.pp_rank_of(s)) for s in range(len(pipeline.stages))))
        return not missing

    find(plans(), nothing_is_missing, settings=settings(max_examples=2000, derandomize=True, phases=[Phase.generate]))


@relaxed
@given(rounds())
def test_derived_and_explicit_layouts_hold_the_round_once(current: Round) -> None:
    for work in current.by_stage:
        wanted = sorted((s.document, t) for s in work.spans() for t in range(s.start, s.stop))
        for layout in (work.attention_layout(), work.linear_layout()):
            assert sorted((s.document, t) for s in layout for t in range(s.start, s.stop)) == wanted


@given(st.integers(0, 999), st.sampled_from(ActionKind), st.none() | st.integers(0, 9999))
def test_actions_round_trip(stage: int, kind: ActionKind, number: int | None) -> None:
    action = Action(stage, kind, number)
    assert Action.parse(str(action)) == action
