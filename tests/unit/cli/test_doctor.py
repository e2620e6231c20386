import importlib
import json

import pytest
from typer.testing import CliRunner

from seqloom.cli import app, doctor
from seqloom.errors import SeqloomError


def _hide(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Let numba and every optional package fail to import with this error."""
    optional = {"numba", *(extra.package for extra in doctor.EXTRAS)}
    real = importlib.import_module

    def import_module(name: str, package: str | None = None):
        if name in optional:
            raise error
        return real(name, package)

    monkeypatch.setattr(doctor.importlib, "import_module", import_module)


def test_json_has_versions_extras_and_choices():
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert set(report) == {"versions", "extras", "gpus", "choices"}
    assert set(report["extras"]) == {"exact", "data", "train", "gpu", "hf"}
    assert all(row["why"] for row in report["choices"].values())


def test_without_numba_and_extras_the_plain_path_is_chosen_and_the_way_out_is_named(monkeypatch):
    _hide(monkeypatch, ModuleNotFoundError("No module"))
    choices = doctor.examine("8x8xH100")["choices"]
    assert choices["planner loops"]["choice"] == "plain"
    assert "pip install numba" in choices["planner loops"]["why"]
    assert choices["exact solver"]["choice"] is None
    assert "seqloom[exact]" in choices["exact solver"]["why"]


def test_the_profile_follows_the_cluster():
    assert doctor.examine("8x8xH200")["choices"]["profile"]["choice"]
    unknown = CliRunner().invoke(app, ["doctor", "--cluster", "8x8xH2000000"])
    assert isinstance(unknown.exception, SeqloomError)


def test_a_broken_install_is_reported_not_raised(monkeypatch):
    _hide(monkeypatch, OSError("libfoo.so: cannot open"))
    found = doctor.probe("numba")
    assert found.version is None
    assert found.problem == "broken: OSError: libfoo.so: cannot open"


def test_text_names_every_extra():
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    for extra in doctor.EXTRAS:
        assert extra.package in result.stdout


def test_text_names_the_extra_to_install(monkeypatch):
    _hide(monkeypatch, ModuleNotFoundError("hidden"))
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert "pip install numba" in result.output and "pip install 'seqloom[exact]'" in result.output
