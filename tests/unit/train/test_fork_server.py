"""What ranks inherit: the setting of torch's allocator, and a process that has not touched a GPU."""

import os
import subprocess
import sys
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess

import pytest

from seqloom.cli.doctor import examine
from seqloom.train import launch
from seqloom.train.fork_server import (
    ALLOCATOR_SETTING,
    ALLOCATOR_VARIABLES,
    CUDA_CHECK,
    allocator_advice,
    allocator_environment,
    start_fork_server,
)

SHOW = f"import os; print([os.environ.get(name) for name in {ALLOCATOR_VARIABLES!r}])"


@pytest.fixture
def unset(monkeypatch):
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def seen_by_a_new_process() -> str:
    with allocator_environment():
        return subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True).stdout.strip()


def test_new_processes_are_given_the_setting_and_this_one_is_left_alone(unset):
    before = dict(os.environ)
    assert seen_by_a_new_process() == str([ALLOCATOR_SETTING, None])
    assert dict(os.environ) == before


@pytest.mark.parametrize("name", ALLOCATOR_VARIABLES)
def test_what_the_user_has_set_stays(unset, monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:64")
    assert seen_by_a_new_process() == str(
        ["max_split_size_mb:64" if each == name else None for each in ALLOCATOR_VARIABLES]
    )
    assert allocator_advice("cuda") is None
    choice = examine("8x8xH100")["choices"]["GPU allocator"]
    assert choice["choice"] == f"{name}=max_split_size_mb:64" and "left as it is" in choice["why"]


def test_an_empty_variable_is_not_set(unset, monkeypatch):
    monkeypatch.setenv(ALLOCATOR_VARIABLES[0], "")
    assert seen_by_a_new_process() == str([ALLOCATOR_SETTING, None])
    assert os.environ[ALLOCATOR_VARIABLES[0]] == ""


def test_advice_is_for_gpus(unset):
    assert f"{ALLOCATOR_VARIABLES[0]}={ALLOCATOR_SETTING}" in str(allocator_advice("cuda"))
    assert allocator_advice("cpu") is None
    assert ALLOCATOR_SETTING in examine("8x8xH100")["choices"]["GPU allocator"]["choice"]


@pytest.mark.parametrize("users", [None, "0"])
def test_the_server_asks_for_gpus_without_using_them(monkeypatch, users):
    """What the server inherits when it is started."""
    found = {}
    monkeypatch.delenv(CUDA_CHECK, raising=False)
    if users is not None:
        monkeypatch.setenv(CUDA_CHECK, users)
    monkeypatch.setattr(forkserver, "ensure_running", lambda: found.update(os.environ))
    start_fork_server()
    assert found[CUDA_CHECK] == (users or "1") and os.environ.get(CUDA_CHECK) == users


def test_ranks_are_started_with_it(unset, monkeypatch):
    """What the processes of a run would inherit, at the moment they are started."""
    found = {}

    def start(process):
        found.update(os.environ)
        raise KeyboardInterrupt

    monkeypatch.setattr(BaseProcess, "start", start)
    with pytest.raises(KeyboardInterrupt):
        launch.run_on_processes(print, 2)
    assert found[ALLOCATOR_VARIABLES[0]] == ALLOCATOR_SETTING and ALLOCATOR_VARIABLES[0] not in os.environ
