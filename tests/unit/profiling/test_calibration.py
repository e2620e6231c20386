"""Measuring a machine: the trials tell all that plans cost, and the measurement gives every rank the same profile."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")


from seqloom.cost import CostModel, Profile  # noqa: E402
from seqloom.cost.calibrate import CONSTANTS, Trial, calibrate, scale_constants  # noqa: E402
from seqloom.describe import Cluster, ModelSpec  # noqa: E402
from seqloom.dist import SingleRankTransport  # noqa: E402
from seqloom.plan import Sharding  # noqa: E402
from seqloom.planners import make_plan  # noqa: E402
from seqloom.profiling import calibration  # noqa: E402
from seqloom.profiling.calibration import describe_trial, trial_plans  # noqa: E402
from seqloom.simulate import predicted_ns, simulate  # noqa: E402

MODEL = ModelSpec("m", 2, 64, 4, 2, 16, 128, gated=True, vocabulary=256, tied=False)
OWN = {"document_us": 50.0, "gathered_us": 700.0, "step_us": 900.0}
START = replace(Profile.load("cpu"), **OWN, round_us=0.0, overlap=0.0)


def cost_of(profile, sharding="none", ranks=8):
    return CostModel(Cluster.parse(f"1x{ranks}xCPU"), MODEL, profile, sharding, max_length=8192, capacity=1024)


@pytest.mark.parametrize(("sharding", "seed"), [pytest.param("none", 0, marks=pytest.mark.slow), ("full", 1)])
def test_a_machine_that_follows_the_cost_model_is_found_again(seed, sharding):
    rng = np.random.default_rng(seed)
    machine = scale_constants(START, {name: float(rng.uniform(0.3, 4)) for name in CONSTANTS})
    start, true = cost_of(START, sharding), cost_of(machine, sharding)
    trials = [Trial(plan, true.plan_ns(plan)) for plan in trial_plans(start, 4096)]
    found = calibrate(start, trials, {})
    assert max(map(abs, found.errors)) < 1e-3
    fitted = cost_of(found.profile, sharding)
    for planner in ("flex", "adaptive", "static:8"):
        plan = make_plan(planner, rng.integers(20, 6000, size=24), true)
        assert fitted.plan_ns(plan) == pytest.approx(true.plan_ns(plan), rel=0.02)


@pytest.mark.parametrize("sharding", Sharding)
@pytest.mark.parametrize("ranks", [1, 2, 6, 8])
def test_trials_are_legal_and_give_all_groups_the_same(ranks, sharding):
    cost = cost_of(START, sharding, ranks)
    plans = list(trial_plans(cost, 4096))
    for plan in plans:
        plan.validate()
        for each in plan.pipelines[0].rounds:
            groups = each.by_stage[0].groups
            assert len({tuple(span.tokens for span in group.spans) for group in groups}) == 1
    shapes = {(g.ulysses, g.ring) for plan in plans for g in plan.pipelines[0].rounds[0].by_stage[0].groups}
    assert (1, 1) in shapes and (ranks < 2 or {(2, 1), (1, 2)} <= shapes) and (ranks < 8 or (4, 2) in shapes)


def test_a_trial_in_words():
    plans = list(trial_plans(cost_of(START, ranks=2), 2048))
    assert describe_trial(plans[0]) == "2 of u1r1, each 1 x 64 tokens"
    assert "1 of u2r1, each 1 x 128 tokens, 3 rounds" in map(describe_trial, plans)


def test_one_rank_measures_a_profile(monkeypatch):
    monkeypatch.setattr(calibration, "KERNEL_LENGTHS", {"cpu": (16, 64)})
    monkeypatch.setattr(calibration, "TURNS", 1)
    cost = CostModel(Cluster.parse("1x1xCPU"), MODEL, "cpu", "free", max_length=128, capacity=64)
    calibrator = calibration.Calibrator(cost, SingleRankTransport(), torch.device("cpu"), torch.float32)
    found = calibrator.calibrate(128)
    assert found.profile.matmul_tflops > 0 and found.profile.attention.lengths == (64,)


def test_products_have_a_rate():
    assert 0 < calibration.matmul_tflops(MODEL, torch.device("cpu"), torch.float32) < 100


def test_copies_to_the_host_and_updates_there_have_a_rate():
    assert 0 < calibration.host_copy_gb_s(torch.device("cpu"), 1 << 20) < 10_000
    assert 0 < calibration.host_update_gb_s(1 << 16) < 10_000


@pytest.mark.parametrize("slower", [pytest.param(1.0, marks=pytest.mark.slow), 1.3])
def test_what_a_handover_takes_is_found_from_a_step_and_its_busy_time(slower):
    start = cost_of(START)
    plan = make_plan("pipeline", np.full(8, 256), start, stages=2, schedule="1f1b", pieces=1)
    true = cost_of(replace(START, handover_us=2_500.0))
    expected = simulate(plan, start)
    busy = slower * float((expected.busy_ns + expected.comm_ns).mean())
    assert predicted_ns(plan, true) > predicted_ns(plan, start)
    for factor, step in ((slower, predicted_ns(plan, true)), (0.9 * slower, predicted_ns(plan, start))):
        handover_us = calibration.solve_handover_us(plan, start, factor * step, busy)
        assert handover_us == pytest.approx(2_500.0 if factor == slower else 0.0, abs=2)


def test_handovers_are_timed_while_parameters_stay_with_their_stages(monkeypatch):
    """A machine that follows the cost model of such a run is found again from a run under free sharding."""
    true = cost_of(replace(START, handover_us=1_200.0), "full")

    class Clock:
        def __init__(self, cost, transport, device, dtype, stages):
            assert len(stages) == 2

        def seconds(self, plan):
            assert plan.sharding == Sharding.FULL
            self.plan = plan
            return predicted_ns(plan, true) / 1e9

        @property
        def busy_seconds(self):
            expected = simulate(self.plan, cost_of(START, "full"))
            return float((expected.busy_ns + expected.comm_ns).mean()) / 1e9

    monkeypatch.setattr(calibration, "StepTimer", Clock)
    found = calibration.measure_stage_costs(
        cost_of(START, "free"), SingleRankTransport(), torch.device("cpu"), torch.float32, 2
    )
    assert found.handover_us == pytest.approx(1_200.0, abs=2)
