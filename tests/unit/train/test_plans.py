"""One plan for all ranks."""

import pytest

from seqloom.api import cost_model
from seqloom.dist import run_ranks
from seqloom.errors import SeqloomError
from seqloom.plan import Plan
from seqloom.planners import make_plan
from seqloom.planners.ahead import StepPlan
from seqloom.train.trainer import SharedPlans

COST = cost_model("1x4xH200", "llama3-8b")
LENGTHS = [512, 700, 3_300, 40]


class Fixed:
    """Stands for the planner's process."""

    def __init__(self, error: str = "", step: int | None = None) -> None:
        self.error, self.step, self.submitted = error, step, []

    def submit(self, step, lengths):
        self.submitted.append(step)

    def take(self, step, lengths):
        if self.error:
            raise SeqloomError(self.error)
        return StepPlan(
            step if self.step is None else self.step, make_plan("flex", lengths, COST), 5, 7, 9, "it was late"
        )


def take(ahead, lengths_of=lambda rank: LENGTHS):
    def body(transport):
        plans = SharedPlans(transport, ahead if transport.rank == 0 else None)
        plans.submit(4, LENGTHS)
        return plans.take(3, lengths_of(transport.rank))

    return run_ranks(4, body, strict=True)


def test_all_ranks_hold_the_root_s_plan_and_its_story():
    ahead = Fixed()
    taken = take(ahead)
    assert {one.plan.hash for one in taken} == {make_plan("flex", LENGTHS, COST).hash}
    assert {(one.step, one.plan_ns, one.wait_ns, one.predicted_ns, one.fallback_reason) for one in taken} == {
        (3, 5, 7, 9, "it was late")
    }
    assert ahead.submitted == [4], "only the root asks"


def test_no_plan_is_an_error_on_every_rank():
    refused = []

    def body(transport):
        plans = SharedPlans(transport, Fixed("too long") if transport.rank == 0 else None)
        try:
            plans.take(3, LENGTHS)
        except SeqloomError as error:
            refused.append(str(error))

    run_ranks(4, body, strict=True)
    assert refused == ["step 3 cannot be planned: too long"] * 4


def test_another_batch_on_a_rank_is_noticed():
    with pytest.raises(SeqloomError, match="the batch of rank 2 has other lengths than the plan"):
        take(Fixed(), lambda rank: LENGTHS[::-1] if rank == 2 else LENGTHS)


def test_another_step_is_noticed():
    with pytest.raises(SeqloomError, match="rank 0 is at step 3, the plan is for step 9"):
        take(Fixed(step=9))


def test_another_plan_on_a_rank_is_noticed(monkeypatch):
    """A rank whose version reads the plan differently."""
    real = Plan.from_json.__func__
    other = make_plan("static", LENGTHS, COST)
    calls = []

    def from_json(cls, text):
        calls.append(text)
        return other if len(calls) == 3 else real(cls, text)

    monkeypatch.setattr(Plan, "from_json", classmethod(from_json))
    with pytest.raises(SeqloomError, match="holds another plan than rank 0"):
        take(Fixed())


def test_plans_of_the_root_are_handed_out_to_all():
    plans = [make_plan(name, LENGTHS, COST) for name in ("flex", "static")]
    found = run_ranks(4, lambda t: SharedPlans(t, None).hand_out(plans if t.rank == 0 else None), strict=True)
    assert found == [plans] * 4
