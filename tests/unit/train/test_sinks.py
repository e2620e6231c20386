import sys
from types import ModuleType, SimpleNamespace

import pytest

from seqloom.errors import SeqloomError
from seqloom.train.logging import open_sinks

SETTINGS = {"run": {"steps": 3}}


@pytest.fixture
def calls(monkeypatch):
    """Trackers in place of the real ones, and what they were asked to do."""
    calls = []

    class Run:
        id = "abc"

        def log(self, figures, step):
            calls.append(("log", figures, step))

        def finish(self):
            calls.append(("finish",))

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            calls.append(("open", folder, purge_step))

        def add_text(self, name, text):
            calls.append(("text", name, text))

        def add_scalar(self, name, value, step):
            calls.append(("scalar", name, value, step))

        def close(self):
            calls.append(("close",))

    def init(**options):
        calls.append(("init", options))
        return Run()

    for name in ("wandb", "trackio"):
        module = ModuleType(name)
        module.init = init  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=SummaryWriter))
    return calls


def test_nothing_is_imported_when_nothing_is_asked_for(tmp_path):
    assert open_sinks([], tmp_path, settings=SETTINGS) == []


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_an_error_at_the_start(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    with pytest.raises(SeqloomError, match=f"log.sinks names '{name}', which cannot be imported.*pip install {name}"):
        open_sinks([name], tmp_path, settings=SETTINGS)


def test_no_tracker_starts_when_another_is_missing(tmp_path, calls, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(SeqloomError, match="trackio"):
        open_sinks(["wandb", "trackio"], tmp_path, settings=SETTINGS)
    assert calls == []


def test_an_unknown_tracker_is_refused(tmp_path):
    with pytest.raises(SeqloomError, match="unknown tracker 'wandbs'; did you mean wandb"):
        open_sinks(["wandbs"], tmp_path, settings=SETTINGS)


def test_tensorboard(tmp_path, calls):
    [sink] = open_sinks(["tensorboard"], tmp_path, settings=SETTINGS)
    sink.write(2, {"loss": 1.5})
    sink.close()
    open_sinks(["tensorboard"], tmp_path, settings=SETTINGS, done=4)
    folder = str(tmp_path / "tensorboard")
    assert calls == [
        ("open", folder, None),
        ("text", "config", "    run.steps = 3"),
        ("scalar", "loss", 1.5, 2),
        ("close",),
        ("open", folder, 5),
    ]


def test_wandb_goes_on_in_the_same_run(tmp_path, calls):
    folder = tmp_path / "night"
    [sink] = open_sinks(["wandb"], folder, settings=SETTINGS)
    sink.write(2, {"loss": 1.5})
    sink.close()
    open_sinks(["wandb"], folder, settings=SETTINGS, done=2)
    common = {"project": "seqloom", "name": "night", "dir": str(folder), "config": SETTINGS}
    assert calls == [
        ("init", common),
        ("log", {"loss": 1.5}, 2),
        ("finish",),
        ("init", {**common, "id": "abc", "resume": "must"}),
    ]


def test_trackio(tmp_path, calls):
    for done in (0, 2):
        [sink] = open_sinks(["trackio"], tmp_path / "night", settings=SETTINGS, done=done)
        sink.write(done + 1, {"loss": 1.5})
        sink.close()
    assert [call[1]["resume"] for call in calls if call[0] == "init"] == ["never", "allow"]
    assert calls[1:3] == [("log", {"loss": 1.5}, 1), ("finish",)]
