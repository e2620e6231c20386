"""Runs that meet one fault after the other until they are complete, compared with a run that meets none.

A campaign starts `seqloom train` again and again on one folder. Every start meets a fault, drawn with its moment; it
ends by itself within `LIMIT_S`, with a message and without a traceback, or goes on. In the end all steps have the
losses of the undisturbed run, each once, in order: no document was lost or repeated.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from support.processes import children_of, ranks_of

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny-cpu.toml"
TINY = """
layers = 2
hidden = 16
heads = 4
kv_heads = 2
head_dim = 4
ffn = 24
gated = true
vocabulary = 257
tied = true
"""
EVERY = 5
LIMIT_S = 120
"""Seconds after which a start that neither ends nor goes on counts as hanging."""
OWN_DISK, FREEZES, FAKE_CLOCK = "a file system of its own", "a file system that freezes", "libfaketime"
CLOCK = "clock"
"""File with the seconds by which the clock of a start is off."""
TIMEOUT_S = 20
"""`run.timeout_s`: how long ranks wait for each other."""


SAID = r"step-\d+ is intact|no checkpoint yet|the last checkpoint is intact"
"""What a run says that cannot go on."""


class Failed(AssertionError):  # noqa: N818 - as tests say it
    """A promise that a start or a campaign has broken."""


@dataclass
class Start:
    """One start of the run: its process, where it works, and what was injected."""

    process: subprocess.Popen[str]
    folder: Path
    ranks: int

    def rank_pids(self) -> list[int]:
        """Processes of the ranks; fewer if some have not started or have ended."""
        return ranks_of(self.process.pid)

    def planner_pid(self) -> int | None:
        """The planning process of rank 0."""
        pids = self.rank_pids()
        children = children_of(pids[0]) if pids else []
        return children[0] if children else None

    def send(self, pid: int | None, number: int) -> None:
        """Send a signal to a process that may have ended."""
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong.

    Attributes:
        inject: called while the run works, some time after its first step; None: nothing happens then.
        before: called with the folder of the run before it starts.
        codes: exit codes of a start that meets it; 0 is always one of them, since the run may end before.
        said: what a start with another code than 0 and 75 says.
        environment: variables of the start, given the place of the campaign.
        needs: what the place has to have, of `OWN_DISK`, `FREEZES` and `FAKE_CLOCK`.
    """

    name: str
    inject: Callable[[Start, random.Random], None] | None = None
    before: Callable[[Path, random.Random], None] | None = None
    codes: frozenset[int] = frozenset({2})
    said: str = SAID
    environment: Callable[[Path], dict[str, str]] | None = None
    needs: str = ""


def _kill_a_rank(start: Start, draw: random.Random) -> None:
    pids = start.rank_pids()
    if pids:
        start.send(draw.choice(pids), signal.SIGKILL)


def _stop_a_rank(start: Start, draw: random.Random) -> None:
    pids = start.rank_pids()
    if pids:
        start.send(draw.choice(pids), signal.SIGSTOP)


def _slow_a_rank(start: Start, draw: random.Random) -> None:
    pids = start.rank_pids()
    slow = draw.choice(pids) if pids else None
    for _ in range(10):
        start.send(slow, signal.SIGSTOP)
        time.sleep(0.15)
        start.send(slow, signal.SIGCONT)
        time.sleep(0.05)


def _kill_the_launcher(start: Start, draw: random.Random) -> None:
    pids = start.rank_pids()
    start.send(start.process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() and "Z" not in _state(pid) for pid in pids):
        if time.monotonic() > deadline:
            raise Failed(f"ranks {pids} outlive their launcher")
        time.sleep(0.05)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def _ask(number: signal.Signals) -> Callable[[Start, random.Random], None]:
    return lambda start, draw: start.send(start.process.pid, number)


def _ask_a_rank(start: Start, draw: random.Random) -> None:
    pids = start.rank_pids()
    if pids:
        start.send(draw.choice(pids), signal.SIGTERM)


def _ask_twice(start: Start, draw: random.Random) -> None:
    start.send(start.process.pid, signal.SIGTERM)
    time.sleep(draw.choice((0.0, 0.02, 0.2)))
    start.send(start.process.pid, signal.SIGTERM)


def _to_the_planner(number: signal.Signals) -> Callable[[Start, random.Random], None]:
    return lambda start, draw: start.send(start.planner_pid(), number)


def _newest(folder: Path) -> Path | None:
    found = sorted((folder / "checkpoints").glob("step-*"))
    return found[-1] if found else None


def _damage(folder: Path, draw: random.Random, change: Callable[[Path], None]) -> None:
    newest = _newest(folder)
    if newest is not None:
        change(draw.choice(sorted(path for path in newest.iterdir() if path.suffix == ".distcp")))


def _flip_a_bit(folder: Path, draw: random.Random) -> None:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path.write_bytes(data)

    _damage(folder, draw, flip)


def _cut_a_file(folder: Path, draw: random.Random) -> None:
    _damage(folder, draw, lambda path: os.truncate(path, draw.randrange(path.stat().st_size)))


def _remove_a_file(folder: Path, draw: random.Random) -> None:
    _damage(folder, draw, Path.unlink)


def _leave_half_a_checkpoint(folder: Path, draw: random.Random) -> None:
    newest = _newest(folder)
    if newest is not None:
        half = newest.with_name(f".step-{int(newest.name[5:]) + EVERY:08d}.partial-1")
        half.mkdir(exist_ok=True)
        for path in sorted(newest.iterdir())[: draw.randrange(4)]:
            shutil.copy(path, half / path.name)


def _tear_the_metrics(folder: Path, draw: random.Random) -> None:
    path = folder / "metrics.jsonl"
    if path.exists():
        os.truncate(path, max(0, path.stat().st_size - draw.randrange(1, 60)))


def _fill_the_disk(start: Start, draw: random.Random) -> None:
    """Fill the file system of the run for a while: a checkpoint cannot be written."""
    with suppress(OSError), (start.folder / "filler").open("wb") as file:
        while True:
            file.write(b"\0" * (1 << 16))
            file.flush()
    start.process.wait(timeout=LIMIT_S)
    (start.folder / "filler").unlink(missing_ok=True)


def _make_read_only(start: Start, draw: random.Random) -> None:
    mount = ["mount", "-o", "remount,ro", str(start.folder.parent)]
    if subprocess.run(mount, capture_output=True).returncode:
        return
    try:
        start.process.wait(timeout=LIMIT_S)
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(start.folder.parent)], check=True)


def _slow_the_disk(start: Start, draw: random.Random) -> None:
    """Let every write wait for seconds, again and again: what is frozen goes on later."""
    for _ in range(4):
        _freeze(start.folder.parent, draw.uniform(0.5, 3))
        time.sleep(draw.uniform(0, 0.3))


def _freeze(place: Path, seconds: float) -> None:
    subprocess.run(["fsfreeze", "--freeze", str(place)], check=True)
    try:
        time.sleep(seconds)
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", str(place)], check=True)


def _fake_clock(place: Path) -> dict[str, str]:
    """Let the start take the time of day from a file; clocks that only run forward are the machine's."""
    _set_clock(place, 0)
    return {
        "LD_PRELOAD": str(fake_clock_library()),
        "FAKETIME_TIMESTAMP_FILE": str(place / CLOCK),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "NO_FAKE_STAT": "1",
    }


def fake_clock_library() -> Path | None:
    """Debian's libfaketime; None: it is not installed."""
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    return found[0] if found else None


def _set_clock(place: Path, seconds: int) -> None:
    part = place / f"{CLOCK}.part"
    part.write_text(f"{seconds:+d}\n")
    part.replace(place / CLOCK)


def _let_the_clock_jump(start: Start, draw: random.Random) -> None:
    for _ in range(draw.randint(1, 4)):
        _set_clock(start.folder.parent, draw.choice((-86_400, -3_600, -7, 7, 3_600, 86_400)))
        time.sleep(draw.uniform(0.05, 1))


def _start_a_second(start: Start, draw: random.Random) -> None:
    """Start the same command beside: it is refused, and the first goes on."""
    second = subprocess.run(start.process.args, capture_output=True, text=True, timeout=LIMIT_S)
    if start.process.poll() is None and (second.returncode != 2 or "is in use by process" not in second.stderr):
        raise Failed(f"a second run was not refused: {second.returncode}, {second.stderr}")


GOES_ON = frozenset[int]()
FAULTS = (
    Fault("rank killed", _kill_a_rank),
    Fault("rank stopped", _stop_a_rank),
    Fault("rank slowed", _slow_a_rank, codes=GOES_ON),
    Fault("launcher killed", _kill_the_launcher, codes=frozenset({-signal.SIGKILL})),
    Fault("SIGTERM to the launcher", _ask(signal.SIGTERM), codes=frozenset({75})),
    Fault("Ctrl-C", _ask(signal.SIGINT), codes=frozenset({75})),
    Fault("SIGUSR1 to the launcher", _ask(signal.SIGUSR1), codes=frozenset({75})),
    Fault("SIGTERM to a rank", _ask_a_rank, codes=frozenset({75})),
    Fault("SIGTERM twice", _ask_twice, codes=frozenset({2, 75}), said="ended at once by"),
    Fault("planner killed", _to_the_planner(signal.SIGKILL), codes=GOES_ON),
    Fault("planner stopped", _to_the_planner(signal.SIGSTOP), codes=GOES_ON),
    Fault("bit of a checkpoint flipped", before=_flip_a_bit, codes=GOES_ON),
    Fault("file of a checkpoint cut", before=_cut_a_file, codes=GOES_ON),
    Fault("file of a checkpoint missing", before=_remove_a_file, codes=GOES_ON),
    Fault("checkpoint half written", before=_leave_half_a_checkpoint, codes=GOES_ON),
    Fault("metrics torn", before=_tear_the_metrics, codes=GOES_ON),
    Fault("disk full", _fill_the_disk, said="was not written|cannot use|No space left", needs=OWN_DISK),
    Fault("disk read-only", _make_read_only, said="was not written|cannot use|Read-only", needs=OWN_DISK),
    Fault("disk slow", _slow_the_disk, codes=GOES_ON, needs=FREEZES),
    Fault("clock jumps", _let_the_clock_jump, codes=GOES_ON, environment=_fake_clock, needs=FAKE_CLOCK),
    Fault("second run", _start_a_second, codes=GOES_ON),
)


@dataclass
class Campaign:
    """One run, in the folder `place`/run, that meets faults until it is complete."""

    place: Path
    draw: random.Random
    ranks: tuple[int, ...] = (2,)
    steps: int = 240
    injected: list[str] = field(default_factory=list)

    def command(self, run: str, ranks: int) -> list[str]:
        """The words that start the run."""
        (self.place / "tiny.toml").write_text(TINY)
        settings = {
            "data.source": "toy:64",
            "data.validation": "",
            "data.sequences": 4,
            "data.max_length": 48,
            "data.too_long": "truncate",
            "model.spec": self.place / "tiny.toml",
            "model.dtype": "float64",
            "plan.planner": "flex",
            "plan.capacity": 96,
            "run.steps": self.steps,
            "run.output": self.place / run,
            "run.timeout_s": TIMEOUT_S,
            "schedule.warmup": 0,
            "evaluation.every": 0,
            "checkpoint.every": EVERY,
        }
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        return [sys.executable, "-m", "seqloom", "train", str(RECIPE), *words, "--ranks", str(ranks), "--json"]

    def undisturbed(self) -> dict[int, float]:
        """Losses of a run that meets no fault."""
        command = self.command("whole", self.ranks[0])
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        return losses(self.place / "whole")

    def run(self, faults: Sequence[Fault] = FAULTS, most: int = 60) -> None:
        """Start until the run is complete; `most` starts may be needed."""
        for _ in range(most):
            if self.start(self.draw.choice(faults)):
                return
        raise Failed(f"not complete after {most} starts")

    def start(self, fault: Fault) -> bool:
        """Start the run once, with a fault; return whether it is complete."""
        folder = self.place / "run"
        if fault.before is not None:
            fault.before(folder, self.draw)
        ranks = self.draw.choice(self.ranks)
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        environment = os.environ | (fault.environment(self.place) if fault.environment else {})
        process = subprocess.Popen(self.command("run", ranks), env=environment, **pipes)
        said: list[str] = []
        reader = threading.Thread(target=lambda: said.append(process.stderr.read()), daemon=True)
        reader.start()
        try:
            if fault.inject is not None and wait_for_steps(lambda: process.poll() is None, folder):
                time.sleep(self.draw.random() * 1.5)
                fault.inject(Start(process, folder, ranks), self.draw)
            process.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise Failed(f"{fault.name}: the run hangs") from None
        finally:
            for pid in (*ranks_of(process.pid), process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
            reader.join(timeout=10)
            process.stderr.close()
        self.injected.append(fault.name)
        text = "".join(said)
        if "Traceback" in text:
            raise Failed(f"{fault.name}: a traceback\n{text}")
        if process.returncode not in {0, *fault.codes}:
            raise Failed(f"{fault.name}: exit code {process.returncode}\n{text}")
        if process.returncode == 2 and not re.search(fault.said, text):
            raise Failed(f"{fault.name}: the message does not say how to go on\n{text}")
        return process.returncode == 0


def wait_for_steps(works: Callable[[], bool], folder: Path) -> bool:
    """Wait until a start that works has done a step; False: it has ended before."""
    path, deadline = folder / "metrics.jsonl", time.monotonic() + LIMIT_S
    before = path.stat().st_mtime_ns if path.exists() else 0
    while works() and time.monotonic() < deadline:
        if path.exists() and path.stat().st_mtime_ns != before and '"loss"' in path.read_text():
            return True
        time.sleep(0.02)
    return False


def losses(folder: Path) -> dict[int, float]:
    """Losses by step; every step must be there once at most, in order."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record["step"] for record in records if "loss" in record]
    if steps != sorted(set(steps)):
        raise Failed(f"steps {steps}")
    return {record["step"]: record["loss"] for record in records if "loss" in record}


def compare(found: dict[int, float], whole: dict[int, float], *, torn: bool) -> None:
    """Refuse losses that are not those of the undisturbed run, to rounding.

    Where the end of the metrics was torn off, lines of steps that a checkpoint has are gone.
    """
    missing = whole.keys() - found.keys()
    if found.keys() - whole.keys() or (missing and not torn) or max(whole) in missing:
        raise Failed(f"steps {sorted(found)} of {len(whole)}")
    worst = max(abs(found[step] - whole[step]) / abs(whole[step]) for step in found)
    if not worst < 1e-9:
        raise Failed(f"losses differ by {worst:.1e}")
