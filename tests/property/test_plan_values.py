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
@given(plans())
def test_drawn_plans_are_valid(plan: Plan) -> None:
    assert plan.validate() is None


@pytest.mark.parametrize("shape", ["0101", "0110", "00", "010"])
def test_stages_that_share_their_ranks_are_drawn(shape: str) -> None:
    """Interleaved, V-shaped with the last stage on the first host, and others."""

    def placed(plan: Plan) -> bool:
        return any("".join(str(p.pp_rank_of(s)) for s in range(len(p.stages))) == shape for p in plan.pipelines)

    find(plans(), placed, settings=settings(max_examples=2000, derandomize=True, phases=[Phase.generate]))


@relaxed
@given(plans())
def test_json_round_trips(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.planner == plan.planner
    assert again.hash == plan.hash
    assert again.to_json() == plan.to_json()


@relaxed
@given(plans())
def test_text_round_trips(plan: Plan) -> None:
    again = Plan.from_text(plan.to_text())
    assert again == plan
    assert again.planner == plan.planner
    assert again.to_text() == plan.to_text()


@relaxed
@given(plans())
def test_pickle_round_trips_and_hash_ignores_the_planner(plan: Plan) -> None:
    again = pickle.loads(pickle.dumps(plan))
    other = replace(plan, planner="somebody else")
    assert again == plan == other
    assert hash(again) == hash(plan) == hash(other)
    assert again.hash == plan.hash == other.hash


@relaxed
@given(plans(), st.data())
def test_different_documents_give_a_different_hash(plan: Plan, data: st.DataObject) -> None:
    document = data.draw(st.integers(0, len(plan.documents) - 1))
    lengths = list(plan.documents)
    lengths[document] += 1
    other = replace(plan, documents=tuple(lengths))
    assert other != plan
    assert other.hash != plan.hash


@relaxed
@given(plans())
def test_tokens_of_all_rounds_are_the_documents(plan: Plan) -> None:
    seen = [set() for _ in plan.documents]
    for pipeline in plan.pipelines:
        for current in pipeline.rounds:
            for document, start, stop in current.by_stage[0].spans():
                assert seen[document].isdisjoint(range(start, stop))
                seen[document].update(range(start, stop))
    assert [len(tokens) for tokens in seen] == list(plan.documents)


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
