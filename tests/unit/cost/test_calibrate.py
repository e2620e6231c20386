"""Calibration: which constants are fitted, which stay, and that the fit is the best; curves from kernel times."""

from dataclasses import replace

import numpy as np
import pytest

from seqloom.cost import CostModel, Profile
from seqloom.cost.calibrate import Trial, calibrate, fit_curve, non_negative_least_squares, scale_constants
from seqloom.describe import Cluster, ModelSpec
from seqloom.errors import SeqloomError
from seqloom.planners import make_plan

MODEL = ModelSpec("m", 2, 64, 2, 2, 32, 128, gated=True, vocabulary=256, tied=False)
START = replace(Profile.load("cpu"), document_us=50.0, step_us=900.0, overlap=0.0)
LOADS = [(1, 64), (4, 200), (2, 500), (1, 1000), (6, 64)]
"""Documents of every group, and their tokens for each of its ranks."""


def cost_of(profile):
    return CostModel(Cluster.parse("1x4xCPU"), MODEL, profile, "none", max_length=4096, capacity=1024)


def trial_plans(cost):
    """Groups of equal work: as many equal documents as blocks, in one round or several."""
    for degree in (1, 2, 4):
        for documents, length in LOADS:
            lengths = np.full(documents * (4 // degree), length * degree)
            yield make_plan(f"static:{degree}", lengths, cost)


def measured(profile):
    cost = cost_of(profile)
    return [Trial(plan, cost.plan_ns(plan)) for plan in trial_plans(cost_of(START))]


def test_what_no_trial_depends_on_stays():
    found = calibrate(cost_of(START), measured(scale_constants(START, {"matmul": 2.0})), {})
    assert found.profile.network == START.network
    assert found.factors["network.p2p.call"] == 1


def test_constants_measured_apart_hold_where_trials_cannot_tell():
    """Products and elementwise work are per token alike: only their sum shows, and what is known of one tells both."""
    machine = scale_constants(START, {"memory": 3.0})
    found = calibrate(cost_of(START), measured(machine), {"matmul": 1.0})
    assert found.factors["matmul"] == pytest.approx(1, abs=0.02)
    assert found.factors["memory"] == pytest.approx(3, abs=0.1)


def test_a_dearer_document_is_found():
    machine = scale_constants(START, {"document": 5.0, "step": 2.0})
    found = calibrate(cost_of(START), measured(machine), {})
    assert max(map(abs, found.errors)) < 1e-3
    assert found.profile.document_us == pytest.approx(250, rel=0.02)
    true, fitted = (cost.step_overhead_ns(cost.policies[0]) for cost in (cost_of(machine), cost_of(found.profile)))
    assert fitted == pytest.approx(true, rel=0.02)  # in all: its parts, summed once per step, cannot be told apart


def test_tiles_are_told_from_causal_documents_where_a_ring_has_them():
    found = calibrate(cost_of(START), measured(scale_constants(START, {"attention": 1.5, "tile": 2.5})), {})
    assert found.factors["attention"] == pytest.approx(1.5, abs=0.05)
    assert found.factors["tile"] == pytest.approx(2.5, abs=0.05)


def test_without_a_ring_tiles_go_with_causal_documents():
    machine, start = scale_constants(START, {"attention": 1.5}), cost_of(START)
    plans = [make_plan("static:1", np.full(4 * documents, length), start) for documents, length in LOADS]
    found = calibrate(start, [Trial(plan, cost_of(machine).plan_ns(plan)) for plan in plans], {})
    assert found.factors["tile"] == found.factors["attention"] == pytest.approx(1.5, abs=0.05)


def test_published_constants_cannot_be_calibrated():
    cost = CostModel(Cluster.parse("8x8xA100-40G"), ModelSpec.load("gpt-7b"), "flexsp-a100")
    with pytest.raises(SeqloomError, match="analytic"):
        calibrate(cost, [], {})


@pytest.mark.parametrize("seed", range(8))
def test_non_negative_least_squares_is_optimal(seed):
    """Karush, Kuhn and Tucker: no slope where a coefficient is above 0, none that would help where it is 0."""
    rng = np.random.default_rng(seed)
    columns, times = rng.normal(size=(12, 6)) ** 2, rng.normal(size=12) + 1
    found = non_negative_least_squares(columns, times)
    slope = columns.T @ (times - columns @ found)
    assert found.min() >= 0
    assert np.abs(slope[found > 0]).max(initial=0) < 1e-8
    assert slope.max() < 1e-8


def test_curve_from_times():
    curve = fit_curve([1024, 2048, 4096], [100, 90, 400], [250, 500, 1000], heads=32, head_dim=128)
    assert curve.forward[0] == pytest.approx(2 * 1024**2 * 4096 / 100 / 1e6)
    assert curve.forward[1] == pytest.approx(3 * curve.forward[0])  # the faster time was noise: 4/3 of the shorter's
    assert curve.backward[0] == pytest.approx(curve.forward[0])


@pytest.mark.parametrize("seed", range(4))
def test_a_curve_from_noise_is_legal(tmp_path, seed):
    rng = np.random.default_rng(seed)
    times = [rng.uniform(1, 100, size=5).tolist() for _ in range(2)]
    curve = fit_curve([16, 64, 100, 1024, 4096], *times, heads=4, head_dim=32)
    profile = replace(Profile.load("cpu"), attention=curve, tile=curve)
    profile.save(tmp_path / "noise.json")
    assert Profile.load(tmp_path / "noise.json").attention == curve


@pytest.mark.parametrize(("lengths", "times"), [([2, 1], [1.0, 1.0]), ([1, 2], [0.0, 1.0]), ([1, 2], [1.0])])
def test_times_that_make_no_curve(lengths, times):
    with pytest.raises(SeqloomError, match="a curve needs"):
        fit_curve(lengths, times, times, heads=1, head_dim=1)
