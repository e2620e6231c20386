"""What a rank says when it cannot go on: where it was, why, and what is left."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from seqloom.errors import SeqloomError
from seqloom.train.watch import FAILED, Watch

GLOO = "[/third_party/gloo/tcp/pair.cc:537] Read error [127.0.0.1]:48049: Connection reset by peer. This is typical"
STEP = "step 7, plan 0123456789ab"


def words_after(error: BaseException, folder: Path, place: str = STEP) -> str:
    with pytest.raises(type(error) if not place else SeqloomError) as found, Watch(4, 30, folder, print) as watch:
        if place:
            watch.at(place)
        raise error
    return str(found.value)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RuntimeError(GLOO), "Read error [127.0.0.1]:48049: Connection reset by peer"),
        (RuntimeError("Timed out waiting 30000ms for recv"), "Timed out waiting 30000ms for recv"),
        (dist.DistBackendError("NCCL error: remote process exited\nmore"), "NCCL error: remote process exited"),
    ],
)
def test_a_lost_rank_is_told_with_step_plan_limit_and_checkpoint(error, why, tmp_path):
    said = words_after(error, tmp_path)
    assert said.startswith(f"{STEP}: one of 4 ranks has died or hangs ({why});")
    assert "run.timeout_s = 30 s" in said and "no checkpoint yet" in said
    done = tmp_path / "step-00000006"
    done.mkdir()
    for name in ("seqloom.json", ".metadata"):
        (done / name).touch()
    assert f"{done} is intact" in words_after(error, tmp_path)


def test_a_message_that_does_not_come_is_told_with_the_grid(tmp_path):
    said = words_after(SeqloomError("rank 1 waits for rank 0 (Timed out waiting):\nhost 0 | 0F0\nhost 1 |"), tmp_path)
    assert said.startswith(f"{STEP}: one of 4 ranks has died or hangs (rank 1 waits for rank 0 (Timed out waiting));")
    assert said.endswith("to go on\nhost 0 | 0F0\nhost 1 |")


def test_other_refusals_say_where_and_those_of_the_start_are_left_alone(tmp_path):
    assert words_after(SeqloomError("the norm is nan"), tmp_path) == f"{STEP}: the norm is nan"
    assert words_after(SeqloomError("step 7: other lengths"), tmp_path) == "step 7: other lengths"
    assert words_after(SeqloomError("no such model"), tmp_path, place="") == "no such model"


def test_a_defect_keeps_its_type_and_gets_a_note(tmp_path):
    with pytest.raises(KeyError) as found, Watch(4, 30, tmp_path, print) as watch:
        watch.at(STEP)
        raise KeyError("x")
    assert found.value.__notes__ == [f"at {STEP}"]


def test_nothing_of_it_stays_after_a_good_end(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with Watch(4, 30, tmp_path, print) as watch:
        watch.at(STEP)
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before and signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize(
    ("limit", "limited", "sends", "why"),
    [
        (600, True, True, "stopped by SIGTERM"),
        pytest.param(600, False, True, "stopped by SIGTERM", marks=pytest.mark.slow),
        (1, True, False, "nothing has moved for 1 s"),
    ],
)
def test_a_rank_that_is_stuck_in_a_call_speaks_and_ends(tmp_path, limit, limited, sends, why):
    code = f"""
import ctypes, os, pathlib, signal, threading
from seqloom.train.watch import Watch
with Watch(4, {limit}, pathlib.Path({str(tmp_path)!r}), lambda text: print(text, flush=True)) as watch:
    watch.at("{STEP}", limited={limited}, where=lambda: "at action 1F3")
    if {sends}:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    libc = ctypes.CDLL(None)
    while libc.sleep(60):  # signals interrupt it, and it goes on
        pass
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == FAILED, result.stderr
    assert result.stdout.startswith(f"{STEP}: one of 4 ranks") and why in result.stdout
    assert result.stdout.endswith("to go on\nat action 1F3\n")
