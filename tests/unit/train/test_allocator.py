"""The setting of torch's allocator: given to processes that are started here, advised elsewhere, never overruled."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from seqloom.cli.doctor import examine
from seqloom.train import launch
from seqloom.train.launch import NAMES, SETTING, advice, for_new_processes

SHOW = f"import os; print([os.environ.get(name) for name in {NAMES!r}])"


@pytest.fixture
def unset(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def seen_by_a_new_process() -> str:
    with for_new_processes():
        return subprocess.run([sys.executable, "-c", SHOW], capture_output=True, text=True, check=True).stdout.strip()


def test_new_processes_are_given_the_setting_and_this_one_is_left_alone(unset):
    before = dict(os.environ)
    assert seen_by_a_new_process() == str([SETTING, None])
    assert dict(os.environ) == before


@pytest.mark.parametrize("name", NAMES)
def test_what_the_user_has_set_stays(unset, monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:64")
    assert seen_by_a_new_process() == str(["max_split_size_mb:64" if each == name else None for each in NAMES])
    assert advice("cuda") is None
    choice = examine("8x8xH100")["choices"]["GPU allocator"]
    assert choice["choice"] == f"{name}=max_split_size_mb:64" and "left as it is" in choice["why"]


def test_an_empty_variable_is_not_set(unset, monkeypatch):
    monkeypatch.setenv(NAMES[0], "")
    assert seen_by_a_new_process() == str([SETTING, None])
    assert os.environ[NAMES[0]] == ""


def test_advice_is_for_gpus(unset):
    assert f"{NAMES[0]}={SETTING}" in str(advice("cuda"))
    assert advice("cpu") is None
    assert SETTING in examine("8x8xH100")["choices"]["GPU allocator"]["choice"]


def test_train_starts_its_ranks_with_it(unset, monkeypatch):
    """What the processes of a run would inherit, at the moment they are started."""
    found = {}

    def start(*_, **__):
        found.update(os.environ)
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "start_processes", start)
    monkeypatch.setattr(launch, "_check_machine", lambda _: None)
    setup = SimpleNamespace(config=None, planners=SimpleNamespace(cut=False, strategies=()))
    monkeypatch.setattr(launch.Setup, "of", lambda *_: setup)
    monkeypatch.setattr(launch, "dtypes", lambda _: (None, None))
    kind = launch.ModelFamily(lambda *_: None, lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        launch.train_on_processes(None, 2, kind=kind)
    assert found[NAMES[0]] == SETTING and NAMES[0] not in os.environ
