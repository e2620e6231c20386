"""The watchdog of a rank: what it says of a lost rank, and what signals do."""

import ctypes
import os
import signal
import time
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch.distributed as dist

from seqloom.errors import LeftEarly, LostRankError, SeqloomError
from seqloom.train.signals import END, LEAVE_SIGNALS
from seqloom.train.watchdog import EXIT_FAILED, Watchdog
from support.runs import be_stuck

GLOO = "[/third_party/gloo/tcp/pair.cc:537] Read error [127.0.0.1]:48049: Connection reset by peer. This is typical"
STEP = "step 7, plan 0123456789ab"


@pytest.fixture(autouse=True)
def handlers():
    """A watchdog leaves signals ignored in a process that will end."""
    before = {each: signal.getsignal(each) for each in (*LEAVE_SIGNALS, END)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def words_after(error: BaseException, folder: Path, phase: str = STEP) -> str:
    with pytest.raises(type(error) if not phase else SeqloomError) as found, Watchdog(4, 30, folder, print) as watchdog:
        if phase:
            watchdog.enter_phase(phase)
        raise error
    return str(found.value)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RuntimeError(GLOO), "Read error [127.0.0.1]:48049: Connection reset by peer"),
        (
            RuntimeError("[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 30000ms for recv"),
            "Timed out waiting 30000ms for recv",
        ),
        (dist.DistBackendError("NCCL error: remote process exited\nmore"), "NCCL error: remote process exited"),
        (
            RuntimeError("NCCL Error 6: remote process exited or there was"),
            "NCCL Error 6: remote process exited or there was",
        ),
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
    said = words_after(LostRankError("rank 1 waits for rank 0 (Timed out waiting):\nhost 0 | 0F0\nhost 1 |"), tmp_path)
    assert said.startswith(f"{STEP}: one of 4 ranks has died or hangs (rank 1 waits for rank 0 (Timed out waiting));")
    assert said.endswith("to go on\nhost 0 | 0F0\nhost 1 |")


def test_other_refusals_say_where_and_those_of_the_start_are_left_alone(tmp_path):
    assert words_after(SeqloomError("the norm is nan"), tmp_path) == f"{STEP}: the norm is nan"
    assert words_after(SeqloomError("step 7: other lengths"), tmp_path) == "step 7: other lengths"
    assert words_after(SeqloomError("no such model"), tmp_path, phase="") == "no such model"
    assert words_after(SeqloomError("timeout.json is no plan"), tmp_path) == f"{STEP}: timeout.json is no plan"


def test_a_defect_keeps_its_type_and_gets_a_note(tmp_path):
    with pytest.raises(KeyError) as found, Watchdog(4, 30, tmp_path, print) as watchdog:
        watchdog.enter_phase(STEP)
        raise KeyError("x")
    assert found.value.__notes__ == [f"at {STEP}"]


def test_nothing_of_it_stays_after_a_good_end(tmp_path):
    before = [signal.getsignal(each) for each in LEAVE_SIGNALS]
    with Watchdog(4, 30, tmp_path, print) as watchdog:
        watchdog.enter_phase(STEP)
        assert not {signal.getsignal(each) for each in LEAVE_SIGNALS} & {*before}
    assert [signal.getsignal(each) for each in LEAVE_SIGNALS] == before and signal.set_wakeup_fd(-1) == -1


def test_a_handler_that_a_library_has_replaced_is_back_at_the_next_phase(tmp_path):
    """As LLVM does when Triton compiles: Python does not know of it, and SIGUSR1 is lost."""
    with Watchdog(4, 30, tmp_path, print) as watchdog:
        watchdog.begin_steps()
        ctypes.CDLL(None).signal(signal.SIGUSR1, 1)  # 1: to be ignored
        os.kill(os.getpid(), signal.SIGUSR1)
        watchdog.enter_phase(STEP)
        time.sleep(0.05)
        assert not watchdog.asked_to_leave
        os.kill(os.getpid(), signal.SIGUSR1)
        until = time.monotonic() + 10
        while not watchdog.asked_to_leave:
            assert time.monotonic() < until
            time.sleep(0.01)


def test_a_signal_during_steps_is_a_request_and_the_warning_of_slurm_does_not_count_as_the_first(tmp_path):
    with Watchdog(4, 30, tmp_path, print) as watchdog:
        watchdog.begin_steps()
        assert not watchdog.asked_to_leave
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
            os.kill(os.getpid(), number)
        until = time.monotonic() + 10
        while not watchdog.asked_to_leave and time.monotonic() < until:
            time.sleep(0.01)
        assert watchdog.asked_to_leave


def test_after_the_checkpoint_signals_have_no_effect(tmp_path):
    with Watchdog(4, 30, tmp_path, print) as watchdog:
        watchdog.begin_steps()
        watchdog.finish()
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_request_that_is_not_met_in_time_is_reported_once(tmp_path, monkeypatch):
    monkeypatch.setattr("seqloom.train.watchdog._LATE_S", 0.0)
    monkeypatch.setattr("seqloom.train.watchdog._POLL_S", 0.01)
    said = []
    with Watchdog(4, 30, tmp_path, said.append) as watchdog:
        watchdog.enter_phase(STEP)
        watchdog.begin_steps()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
    assert len(said) == 1 and said[0].startswith(f"{STEP}: has not ended 0 s after a signal to leave")


@pytest.mark.parametrize(
    ("limit", "in_steps", "numbers", "code", "words"),
    [
        (600, True, [END], EXIT_FAILED, "one of 4 ranks has died or hangs (ended by the launcher"),
        pytest.param(600, False, [END], EXIT_FAILED, "(ended by the launcher", marks=pytest.mark.slow),
        (600, True, [signal.SIGINT, signal.SIGTERM], EXIT_FAILED, f"{STEP}: ended at once by SIGTERM, a second"),
        (600, False, [signal.SIGTERM], LeftEarly.exit_code, "the same command starts it again"),
        (1, True, [signal.SIGTERM], EXIT_FAILED, "nothing has moved for 1 s"),
    ],
)
def test_a_rank_that_is_stuck_in_a_call_speaks_and_ends(fork_server, tmp_path, limit, in_steps, numbers, code, words):
    process = get_context("forkserver").Process(target=be_stuck, args=(tmp_path, STEP, limit, in_steps, numbers))
    process.start()
    process.join(timeout=60)
    assert process.exitcode == code
    said = (tmp_path / "said").read_text()
    assert words in said
    assert ("one of 4 ranks" not in said) or said.endswith("to go on\nat action 1F3")


def test_a_rank_that_waits_for_a_disk_has_a_limit_too(fork_server, tmp_path):
    """Another rank may have stopped where all write a checkpoint: no message between them runs into a limit there."""
    process = get_context("forkserver").Process(target=be_stuck, args=(tmp_path, "checkpoint", 0.4, True, [], True))
    start = time.monotonic()
    process.start()
    process.join(timeout=60)
    assert process.exitcode == EXIT_FAILED and time.monotonic() - start > 1.2
    said = (tmp_path / "said").read_text()
    assert "(nothing has moved for 1.2 s)" in said
    assert "run.timeout_s = 0.4 s for each other, and 1.2 s for a disk." in said
