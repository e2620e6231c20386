"""Profiles that are measured by need: measured once, found again by those they fit, and the same on all ranks."""

from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from seqloom.cost import Profile  # noqa: E402
from seqloom.cost.calibrate import Calibration, Trial  # noqa: E402
from seqloom.describe import ModelSpec  # noqa: E402
from seqloom.dist import SingleRankTransport, run_ranks  # noqa: E402
from seqloom.errors import SeqloomError  # noqa: E402
from seqloom.profiling import calibration  # noqa: E402
from seqloom.profiling.calibration import Calibrator, trial_plans  # noqa: E402
from seqloom.profiling.stored import (  # noqa: E402
    MachineSetup,
    find_stored,
    measured_profile,
    stored_path,
)
from seqloom.train.config import Config  # noqa: E402
from seqloom.train.launch import needs_profile, with_machine_profile  # noqa: E402

ROOT = Path(__file__).parents[3]
MODEL = ModelSpec("m", 2, 64, 4, 2, 16, 128, gated=True, vocabulary=256, tied=False)
SETUP = MachineSetup(MODEL, None, "full", 256, 512, "float32")
CPU = torch.device("cpu")
UNKNOWN = """
name = "mine"
nodes = 1
gpus_per_node = 2
device = { name = "X1", memory_gib = 8, peak_tflops = 1, hbm_gb_s = 20 }
intra = { name = "wire", gb_s = 5, latency_us = 20 }
nic = { name = "wire", gb_s = 5, latency_us = 20 }
nics_per_node = 1
nic_of_gpu = [0, 0]
"""


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setattr("seqloom.profiling.stored.cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "profiles"


class Measuring(Calibrator):
    """Measures nothing, and counts how often it is asked to; every rank would find something else."""

    def __init__(self, cost, transport):
        self.cost, self.transport, self.device, self.dtype, self.calls = cost, transport, CPU, torch.float32, 0

    def calibrate(self, longest, report=None, **options):
        self.calls += 1
        assert options == {"quick": True}
        plan = next(trial_plans(self.cost, longest))
        profile = replace(Profile.load("cpu"), matmul_tflops=0.5 + self.transport.rank)
        return Calibration(profile, {}, (Trial(plan, 100.0), Trial(plan, 200.0)), (110.0, 160.0))


def test_it_is_measured_once_and_all_ranks_have_that_of_the_first(cache):
    def body(transport):
        calibrator = Measuring(SETUP.cost(2), transport)
        first, again = (measured_profile(calibrator, 512) for _ in range(2))
        return calibrator.calls, first, again

    for calls, (first, stored), (again, there) in run_ranks(2, body):
        assert calls == 1 and (stored, there) == (False, True) and first == again
        assert first.profile.matmul_tflops == 0.5 and (first.error, first.steps) == (0.15, 2)
    [path] = cache.iterdir()
    assert path == stored_path(SETUP.cost(2), "cpu", torch.float32)
    text, note = find_stored(SETUP, 2, torch.get_num_threads())
    assert "off by 15% on its own 2 steps" in note and str(path) in note
    (cache / "here.json").write_text(text)
    assert Profile.load(cache / "here.json") == first.profile


def test_one_that_cannot_be_read_is_measured_again(cache):
    calibrator = Measuring(SETUP.cost(1), SingleRankTransport())
    path = stored_path(SETUP.cost(1), "cpu", torch.float32)
    path.parent.mkdir(parents=True)
    for broken in (b"", b"{", b"\xff", b'{"profile": {}, "error": 0, "steps": 1, "seconds": 1}'):
        path.write_bytes(broken)
        assert find_stored(SETUP, 1, torch.get_num_threads()) is None
        assert measured_profile(calibrator, 512)[1] is False
        assert find_stored(SETUP, 1, torch.get_num_threads()) is not None
    assert calibrator.calls == 4


def test_without_a_folder_to_write_to_it_is_measured_nevertheless(cache):
    cache.parent.write_text("a file")
    calibrator = Measuring(SETUP.cost(1), SingleRankTransport())
    assert measured_profile(calibrator, 512)[0].steps == 2


def test_it_fits_an_equal_model_on_as_many_ranks_with_the_same_dtype_sharding_and_threads():
    own = stored_path(SETUP.cost(2), "cpu", torch.float32, threads=1)
    named = SETUP._replace(model=replace(MODEL, name="other"), max_length=256)
    assert stored_path(named.cost(2), "cpu", torch.float32, threads=1) == own
    deeper = SETUP._replace(model=replace(MODEL, layers=3, windows=(None,) * 3))
    others = [
        stored_path(deeper.cost(2), "cpu", torch.float32, threads=1),
        stored_path(SETUP.cost(4), "cpu", torch.float32, threads=1),
        stored_path(SETUP.cost(2), "cpu", torch.float64, threads=1),
        stored_path(SETUP.cost(2), "cpu", torch.float32, threads=2),
        stored_path(SETUP._replace(sharding="none").cost(2), "cpu", torch.float32, threads=1),
    ]
    assert len({own, *others}) == 6


def config_of(tmp_path, *changes):
    return Config.load(ROOT / "recipes" / "tiny-cpu.toml", [f"run.output={tmp_path}", "plan.cluster=1x2xCPU", *changes])


def test_a_run_needs_one_if_it_asks_for_it_or_its_device_is_not_known(tmp_path):
    cluster = tmp_path / "mine.toml"
    cluster.write_text(UNKNOWN)
    asked = config_of(tmp_path, "plan.profile=measured")
    unknown = config_of(tmp_path, f"plan.cluster={cluster}")
    assert needs_profile(asked) and needs_profile(unknown)
    for config in (config_of(tmp_path), config_of(tmp_path, f"plan.cluster={cluster}", "plan.profile=cpu")):
        assert not needs_profile(config) and with_machine_profile(config) is config
    assert with_machine_profile(asked).plan.profile == str(tmp_path / "profile.json")
    start = MachineSetup.of_run(unknown, MODEL, "float32").cost(2)
    assert start.profile == Profile.load("cpu")
    with pytest.raises(SeqloomError, match="unknown profile"):
        config_of(tmp_path, "plan.profile=mesured")


def test_a_run_measures_no_more_than_takes_seconds(tmp_path):
    free = config_of(tmp_path, "plan.sharding=free", "plan.capacity=100000", "data.max_length=500000")
    setup = MachineSetup.of_run(free, MODEL, "float32")
    assert (setup.sharding, setup.capacity, setup.max_length) == ("full", 1_024, 2_048)
    small = MachineSetup.of_run(config_of(tmp_path, "plan.capacity=64", "data.max_length=100"), MODEL, "float32")
    assert (small.capacity, small.max_length) == (64, 100)


class Steps:
    """Steps that take a second of a clock each."""

    def __init__(self, plans):
        self.plans, self.now, self.timed = plans, 0.0, 0

    def seconds(self, plan):
        self.now, self.timed = self.now + 1.0, self.timed + 1
        return 1.0

    def slowest(self, seconds):
        return seconds


@pytest.mark.parametrize(
    ("limit", "timed", "trials"), [(float("inf"), 24, 12), (14.5, 15, 12), (8.5, 9, 9), (2.0, 6, 6)]
)
def test_a_quick_measurement_ends_in_time(limit, timed, trials):
    plans = list(trial_plans(SETUP.cost(2), 512, quick=True))[:12]
    calibrator, steps = Measuring(SETUP.cost(2), SingleRankTransport()), Steps(plans)
    calibrator.timer, calibrator.clock = steps, lambda: steps.now
    calibrator._begin, calibrator._limit_s = 0.0, limit
    found = calibrator._time_trials(plans, lambda text: None, calibration.QUICK_TURNS)
    assert (steps.timed, len(found)) == (timed, trials)
    assert all(trial.ns == 1e9 for trial in found)
