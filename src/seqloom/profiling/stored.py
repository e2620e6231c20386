"""Profiles of this machine that are measured in seconds, by need, and kept in the user's cache folder.

A run whose `plan.profile` is "measured", or whose device no shipped profile knows, takes its own from here, and so does
the race of `seqloom demo`. Rank 0 looks for one that was measured before, on as many ranks of an equal machine for the
same model, dtype and sharding; without one all ranks measure together (`Calibrator.calibrate(quick=True)`), and rank 0
stores what they found. All ranks get it from rank 0.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from seqloom.api import cost_model
from seqloom.attention.kernels.dispatch import cache_folder
from seqloom.cost import CostModel, Profile
from seqloom.cost.calibrate import Calibration
from seqloom.cost.profile import AnalyticProfile, profile_content, read_profile, require_analytic
from seqloom.describe import Cluster, ModelSpec
from seqloom.dist import Communicators, TorchTransport
from seqloom.errors import SeqloomError
from seqloom.plan import GroupFamily, Sharding
from seqloom.profiling.calibration import Calibrator
from seqloom.reader import parse_json, read_object
from seqloom.train.config import Config
from seqloom.train.launch import RankProcess, gpu_name
from seqloom.version import __version__

LONGEST_QUICK, CAPACITY_QUICK = {"cuda": 32_768, "cpu": 2_048}, {"cuda": 16_384, "cpu": 1_024}
"""Of a run's quick measurement, at most: tokens of the longest document, and of a rank in a round."""
START = {"cuda": "a100", "cpu": "cpu"}
"""The profile that gives an unknown device the constants that are no times."""


class MachineSetup(NamedTuple):
    """The training steps to measure."""

    model: str | ModelSpec  # preset, or file of shapes
    cluster: str | None  # spelling; None: CPU processes on this machine
    sharding: str
    capacity: int | None  # tokens of a rank in a round; None: what memory holds
    max_length: int | None  # longest document to try; None: as long as the device allows
    dtype: str  # that layers compute in
    quick: bool = True  # fewer plans, less often, and no stages
    verbose: bool = True  # say on stderr what is being measured
    folder: str | None = None  # of stored profiles; None: `stored_profiles` of the rank's environment

    @classmethod
    def of_run(cls, config: Config, spec: ModelSpec, dtype: str) -> MachineSetup:
        """Measure for a run: its model as it is in one stage, on its cluster."""
        plan, place = config.plan, "cuda" if torch.cuda.is_available() else "cpu"
        sharding = "full" if plan.sharding == Sharding.FREE else plan.sharding
        capacity = min(plan.capacity or CAPACITY_QUICK[place], CAPACITY_QUICK[place])
        ranks = Cluster.parse(plan.cluster).ranks
        longest = min(config.data.max_length or LONGEST_QUICK[place], LONGEST_QUICK[place], ranks * capacity)
        return cls(spec, plan.cluster, sharding, capacity, longest, dtype, folder=str(stored_profiles()))

    def path(self, cost: CostModel, device: str, threads: int | None = None) -> Path:
        """Return the file of the profile, for so many threads of a rank; None: those of this process."""
        return stored_path(cost, device, getattr(torch, self.dtype), self.folder, threads)

    def cost(self, ranks: int, nodes: str | None = None) -> CostModel:
        """Build the cost model whose constants are measured, for so many ranks; `nodes`: where they were started."""
        cluster = Cluster.parse(self.cluster or nodes or f"1x{ranks}xCPU")
        if cluster.ranks != ranks:
            raise SeqloomError(
                f"--cluster {self.cluster} has {cluster.ranks} ranks, the measurement {ranks}; start {cluster.ranks} "
                f"processes, or name a cluster of {ranks}"
            )
        sizes = {"max_length": self.max_length, "capacity": self.capacity}
        start = None if Profile.knows(cluster.device.name) else START["cuda" if torch.cuda.is_available() else "cpu"]
        return cost_model(cluster, self.model, sharding=self.sharding, profile=start, **sizes)


@dataclass(frozen=True, slots=True)
class StoredProfile:
    """A profile of this machine, and how well it predicts the steps that it was fitted to."""

    profile: AnalyticProfile
    error: float  # mean over these steps, relative
    steps: int
    seconds: float  # that measuring took

    @classmethod
    def of(cls, calibration: Calibration, seconds: float) -> StoredProfile:
        """Keep what a calibration of so many seconds has found."""
        error = statistics.fmean(map(abs, calibration.errors))
        return cls(calibration.profile, round(error, 4), len(calibration.trials), round(seconds, 1))

    def save(self, path: Path) -> None:
        """Write it in the place of what was stored."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(self.to_json(), encoding="utf-8")
        temporary.replace(path)

    def to_json(self) -> str:
        """Return what is stored."""
        return json.dumps(asdict(self) | {"profile": profile_content(self.profile)}, indent=2, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> StoredProfile:
        """Read what was stored."""
        content = read_object(parse_json(text, where), where, ("profile", "error", "steps", "seconds"), ())
        profile = require_analytic(read_profile(content.pop("profile"), f"{where}.profile"))
        numbers = {name: float(value) for name, value in content.items()}
        return cls(profile, numbers["error"], int(numbers["steps"]), numbers["seconds"])

    def as_file(self, origin: str) -> tuple[str, str]:
        """Return the file of the profile, and in words how it was measured and where it is from."""
        text = json.dumps(profile_content(self.profile), indent=2, allow_nan=False)
        measured = f"measured in {self.seconds:.0f} s, off by {self.error:.0%} on its own {self.steps} steps"
        return f"{text}\n", f"profile of this machine: {measured}, {origin}"


def stored_profiles() -> Path:
    """Return the folder of stored profiles: the user's, by the environment of this process."""
    return cache_folder() / "profiles"


def stored_path(
    cost: CostModel, device: str, dtype: torch.dtype, folder: str | None = None, threads: int | None = None
) -> Path:
    """Return the file of the profile of a model's steps on this machine.

    Args:
        cost: of the measurement: its model, cluster and sharding.
        device: cpu or cuda.
        dtype: that layers compute in.
        folder: None: `stored_profiles`.
        threads: of a rank; None: those of this process.
    """
    model = {name: value for name, value in asdict(cost.model).items() if name != "name"}
    machine = gpu_name() if device == "cuda" else f"{cpu_name()}, {threads or torch.get_num_threads()} threads"
    about = machine, cost.cluster.spelling, model, str(dtype), str(cost.sharding), torch.__version__, __version__
    return Path(folder or stored_profiles()) / f"{hashlib.sha256(repr(about).encode()).hexdigest()[:16]}.json"


def cpu_name() -> str:
    """Return what tells the CPUs of this machine from others of another speed."""
    name = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {os.cpu_count()} cores"


def measured_profile(
    calibrator: Calibrator,
    longest: int,
    report: Callable[[str], None] = lambda text: None,
    folder: str | None = None,
) -> tuple[StoredProfile, bool]:
    """Return the stored profile of these ranks, and whether it was there. All ranks call it and get the same.

    Args:
        calibrator: measures where none is stored.
        longest: tokens of the longest document to try.
        report: called with what comes next, while ranks measure.
        folder: of stored profiles; None: `stored_profiles`.
    """
    transport = calibrator.transport
    path = stored_path(calibrator.cost, calibrator.device.type, calibrator.dtype, folder)
    payload = _read(path) if transport.rank == 0 else None
    if told := transport.broadcast(payload):
        return StoredProfile.from_json(told.decode(), str(path)), True
    begin = time.monotonic()
    calibration = calibrator.calibrate(longest, report, quick=True)
    found = StoredProfile.of(calibration, time.monotonic() - begin)
    if transport.rank == 0:
        with suppress(OSError):  # without a folder to write to, the next start measures again
            found.save(path)
    told = transport.broadcast(found.to_json().encode() if transport.rank == 0 else None)
    return StoredProfile.from_json(told.decode(), str(path)), False


def _read(path: Path) -> bytes:
    """Return a stored profile; nothing where there is none, or none that can be read."""
    try:
        text = path.read_text(encoding="utf-8")
        StoredProfile.from_json(text, str(path))
    except (OSError, UnicodeDecodeError, SeqloomError, TypeError, ValueError):
        return b""
    return text.encode()


def find_stored(setup: MachineSetup, ranks: int, threads: int) -> tuple[str, str] | None:
    """Return the profile that so many ranks of this machine have measured before; None: there is none.

    As the file of a profile has it, and in words how it was measured and where it is from.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    path = setup.path(setup.cost(ranks), device, threads)
    text = _read(path)
    return StoredProfile.from_json(text.decode(), str(path)).as_file(f"as it is in {path}") if text else None


def measure_stored(process: RankProcess, setup: MachineSetup) -> tuple[str, str]:
    """Measure this machine as one of the ranks, unless it was before; all ranks call it and get the same.

    Returns what `find_stored` does.
    """
    ranks, device = process.job_rank.ranks, process.device
    cost = setup.cost(ranks)
    communicators = Communicators(GroupFamily(ranks, cost.node_size))
    communicators.warm_up()
    calibrator = Calibrator(cost, TorchTransport(communicators), device, getattr(torch, setup.dtype))
    longest = min(setup.max_length or LONGEST_QUICK[device.type], LONGEST_QUICK[device.type])
    found, stored = measured_profile(calibrator, longest, folder=setup.folder)
    communicators.close()
    path = setup.path(cost, device.type)
    return found.as_file(f"as it is in {path}" if stored else f"kept in {path}")
