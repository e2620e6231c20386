"""Measuring real ranks: all of them find the same profile, it can be saved, and plans can be made with it."""

import numpy as np
import pytest
import torch

from seqloom.cost import CostModel, Profile
from seqloom.describe import Cluster
from seqloom.planners import make_plan
from seqloom.profiling import calibration
from seqloom.profiling.calibration import Calibrator
from support.steps import tiny_spec

torch.set_num_threads(1)
LENGTHS = (16, 64, 128)


def cost_of(profile, ranks, sharding):
    return CostModel(Cluster.parse(f"1x{ranks}xCPU"), tiny_spec(), profile, sharding, max_length=256, capacity=64)


def measured(transport, sharding):
    calibration.KERNEL_LENGTHS = {"cpu": LENGTHS}  # in this worker only: seconds become milliseconds
    calibration.MESSAGE_BYTES = (1 << 10, 1 << 18)
    cost = cost_of("cpu", transport.ranks, sharding)
    said, stages = [], 2 if sharding == "none" else 1
    calibrator = Calibrator(cost, transport, torch.device("cpu"), torch.float32)
    found = calibrator.calibrate(128, said.append, stages=stages)
    assert len(said) == len(found.trials) + calibration.TURNS + 2 * (stages > 1)
    measured = {"handover_us", "split_us", "alone"} <= found.profile.sources.keys()
    assert measured == (stages > 1) and 0 < found.profile.solo_time_ratio <= 1
    return found.profile, tuple(trial.ns for trial in found.trials)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "full"])
def test_all_ranks_find_the_same_profile(gloo_pool, tmp_path, sharding):
    found = gloo_pool.run(measured, sharding, ranks=8, timeout_s=150)
    profile, times = found[0]
    assert all(other == found[0] for other in found)
    assert min(times) > 0 and profile.matmul_tflops > 0 and profile.overlap == 0
    profile.save(tmp_path / "machine.json")
    assert Profile.load(tmp_path / "machine.json") == profile
    cost = cost_of(tmp_path / "machine.json", 8, sharding)
    lengths = np.array([200, 60, 30, 10, 100])
    assert cost.plan_ns(make_plan("auto", lengths, cost)) > 0
