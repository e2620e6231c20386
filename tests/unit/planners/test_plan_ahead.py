"""Planning ahead in another process: plans as made here, and what stands in when there is none."""

import os
import signal
import time

import numpy as np
import pytest

from seqloom.api import cost_model
from seqloom.cost.feedback import NO_CHANGE, FactorCosts, Factors
from seqloom.errors import SeqloomError
from seqloom.planners import make_plan
from seqloom.planners.bounds import lower_bound
from seqloom.planners.plan_ahead import MOST_ENDS, PlanAhead
from seqloom.simulate import predicted_ns, simulate
from seqloom.simulate.microbatch import computing_by_rank

COST = cost_model("1x8xH200", "llama3-8b")
BATCHES = [np.array([512, 700, 33_000, 4_096]), np.array([90, 260]), np.array([70_000, 10])]


def test_plans_are_those_made_here_in_any_order():
    with PlanAhead(COST, "adaptive", patience_s=120) as ahead:
        for step, lengths in enumerate(BATCHES):
            ahead.submit(step, lengths)
        for step in (0, 2):  # step 1 is asked for and never taken
            taken = ahead.take(step, BATCHES[step])
            assert (taken.step, taken.fallback_reason) == (step, "")
            assert taken.plan.hash == make_plan("adaptive", BATCHES[step], COST).hash
            assert taken.plan_ns > 0 and taken.wait_ns > 0
            assert taken.bound_ns == lower_bound(BATCHES[step], COST)
            simulation = simulate(taken.plan, COST)
            assert (taken.predicted_ns, taken.idle_share) == (simulation.step_ns, simulation.idle_share)
        again = ahead.take(7, BATCHES[1])
        assert again.plan.hash == make_plan("adaptive", BATCHES[1], COST).hash, "planned now when nobody asked before"


def test_batches_of_evaluation_are_planned_between_steps():
    """Their numbers are below those of all steps; they were never planned, and every evaluation waited in vain."""
    with PlanAhead(COST, "adaptive", patience_s=120) as ahead:
        ahead.submit(3, BATCHES[2])
        for step, lengths in ((2, BATCHES[0]), (-1, BATCHES[1]), (-2, BATCHES[0]), (3, BATCHES[2]), (-1, BATCHES[1])):
            ahead._timeout_s = 20.0  # of a wait in vain
            taken = ahead.take(step, lengths)
            assert (taken.step, taken.fallback_reason) == (step, "")
            assert taken.plan.hash == make_plan("adaptive", lengths, COST).hash


def test_plans_are_made_and_priced_by_the_factors_of_their_request():
    factors = Factors(attention=3.0, exchange=0.5)
    scaled = FactorCosts(COST, factors)
    with PlanAhead(COST, "adaptive", patience_s=120, feedback=True) as ahead:
        ahead.submit(0, BATCHES[0])
        ahead.factors = factors
        before, after = ahead.take(0, BATCHES[0]), ahead.take(1, BATCHES[0])
        ahead._timeout_s = 0.0
        late = ahead.take(2, BATCHES[0])
    assert before.factors == NO_CHANGE and before.plan.hash == make_plan("adaptive", BATCHES[0], COST).hash
    plan = make_plan("adaptive", BATCHES[0], scaled.cost)
    assert (after.factors, after.plan.hash) == (factors, plan.hash)
    assert after.predicted_ns == simulate(plan, scaled.cost).step_ns
    assert after.factor_ns == scaled.derivatives(plan, predicted_ns)
    assert after.phases == scaled.phases(plan, computing_by_rank)
    assert late.fallback_reason and late.factors == factors and late.factor_ns is None and not late.phases
    assert late.predicted_ns == predicted_ns(late.plan, scaled.cost)


def test_a_gain_inside_the_error_of_predictions_leaves_the_static_plan():
    lengths = np.array([20_000, 9_000, 5_000, 4_000, *[500] * 40])
    zones, static = (make_plan(name, lengths, COST) for name in ("zones", "static"))
    gain = 1 - predicted_ns(zones, COST) / predicted_ns(static, COST)
    assert gain > 0.01
    with PlanAhead(COST, "zones", patience_s=120) as ahead:
        found = []
        for step, error in enumerate((None, gain - 0.005, gain + 0.005)):
            ahead.error = error
            found.append(ahead.take(step, lengths))
    assert [each.plan.hash for each in found] == [zones.hash, zones.hash, static.hash]
    assert [bool(each.within_error) for each in found] == [False, False, True]
    assert "zones is predicted to gain" in found[2].within_error and not found[2].fallback_reason
    assert found[2].predicted_ns == predicted_ns(static, COST)


def test_plans_are_made_by_the_speeds_of_their_request():
    speeds = (1.0, 0.5, *[1.0] * (COST.ranks - 2))
    with PlanAhead(COST, "zones", patience_s=120, feedback=True) as ahead:
        ahead.speeds = speeds
        taken = ahead.take(0, BATCHES[0])
        ahead._timeout_s = 0.0
        late = ahead.take(1, BATCHES[0])
    own = COST.with_speeds(speeds)
    assert tuple(taken.speeds) == tuple(late.speeds) == speeds
    assert taken.plan.hash == make_plan("zones", BATCHES[0], own).hash
    assert taken.predicted_ns == predicted_ns(taken.plan, own) >= taken.bound_ns == lower_bound(BATCHES[0], own)
    assert late.predicted_ns == predicted_ns(late.plan, own)


def test_a_late_plan_is_replaced_by_the_static_one_and_does_not_disturb_later_ones():
    with PlanAhead(COST, "adaptive", patience_s=0.0) as ahead:
        taken = ahead.take(0, BATCHES[0])
        assert taken.fallback_reason == "no plan within 0 s"
        assert taken.plan.hash == make_plan("static", BATCHES[0], COST).hash
        assert taken.predicted_ns == simulate(taken.plan, COST).step_ns
        ahead.submit(1, BATCHES[1])
        ahead._timeout_s = 120
        assert ahead.take(1, BATCHES[1]).plan.hash == make_plan("adaptive", BATCHES[1], COST).hash


def test_a_planner_that_refuses_is_replaced_with_its_reason():
    with PlanAhead(COST, "static:64", patience_s=120) as ahead:
        taken = ahead.take(0, BATCHES[1])
    assert taken.fallback_reason.startswith("planner 'static:64': ")
    assert taken.plan.hash == make_plan("static", BATCHES[1], COST).hash


def test_batches_larger_than_a_pipe_do_not_block():
    """Lengths of 14,000 documents, and their plan, are more than a pipe holds: both sides used to wait for ever."""
    cost = cost_model("1x2xH200", "qwen3-0.6b")
    lengths = np.full(14_000, 64)
    with PlanAhead(cost, "static:1", patience_s=120) as ahead:
        begin = time.monotonic()
        for step in range(8):
            ahead.submit(step, lengths)
        assert time.monotonic() - begin < 1, "the trainer does not wait for the planner to read"
        for step in range(2):
            assert ahead.take(step, lengths).fallback_reason == ""


def test_a_planner_that_dies_is_replaced():
    with PlanAhead(COST, "adaptive", patience_s=120) as ahead:
        assert ahead.take(0, BATCHES[1]).fallback_reason == ""
        os.kill(ahead._process.pid, signal.SIGKILL)
        taken = ahead.take(1, BATCHES[1])
        assert taken.fallback_reason == "the planner's process has died (exit code -9)"
        assert taken.plan.hash == make_plan("static", BATCHES[1], COST).hash
        assert ahead.take(2, BATCHES[1]).plan.hash == make_plan("adaptive", BATCHES[1], COST).hash


def test_a_planner_that_hangs_is_replaced_and_steps_do_not_wait_for_it_twice():
    with PlanAhead(COST, "adaptive", patience_s=0.2, first_patience_s=120) as ahead:
        assert ahead.take(0, BATCHES[1]).fallback_reason == ""
        hanging, ahead._hang_s = ahead._process, 1.0
        os.kill(hanging.pid, signal.SIGSTOP)
        assert ahead.take(1, BATCHES[1]).fallback_reason == "no plan within 0.2 s"
        assert ahead.take(2, BATCHES[1]).fallback_reason == "no plan within 0 s"
        ahead._hang_s, deadline = 120.0, time.monotonic() + 60  # for the next one, which has to start
        while ahead._process is hanging and time.monotonic() < deadline:
            time.sleep(0.01)
        assert hanging.exitcode == -signal.SIGKILL
        assert ahead.take(3, BATCHES[1]).fallback_reason == ""


def test_a_planner_that_cannot_start_is_not_replaced_for_ever(monkeypatch):
    started = []
    start = PlanAhead._start
    monkeypatch.setattr(PlanAhead, "_start", lambda self: (started.append(1), _killed(start(self)))[1])
    with PlanAhead(COST, "adaptive", patience_s=120) as ahead:
        for step in range(MOST_ENDS + 2):
            assert "has died" in ahead.take(step, BATCHES[1]).fallback_reason
    assert len(started) == MOST_ENDS


def _killed(started):
    started[0].kill()
    started[0].join()
    return started


def test_a_batch_that_no_plan_can_hold_is_refused():
    with PlanAhead(COST, "adaptive", patience_s=120) as ahead, pytest.raises(SeqloomError):
        ahead.take(0, np.array([10**9]))


def test_closing_stops_the_process():
    ahead = PlanAhead(COST, "adaptive")
    ahead.close()
    deadline = time.monotonic() + 5
    while ahead._process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not ahead._process.is_alive()


def test_the_first_plan_may_take_longer():
    with PlanAhead(COST, "adaptive", patience_s=0.0, first_patience_s=120) as ahead:
        assert ahead.take(0, BATCHES[1]).fallback_reason == ""
        assert ahead.take(1, BATCHES[0]).fallback_reason == "no plan within 0 s"
