"""Models by their published name: the cache of Hugging Face, without a network."""

import json
from pathlib import Path

import pytest

from seqloom.errors import SeqloomError
from seqloom.train import config as hub
from seqloom.train.config import Config, fetched, is_hub_name

pytest.importorskip("huggingface_hub")
NAME = "someone/a-model"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache and no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def store(cache: Path, *files: str) -> Path:
    """Put a model into the cache as huggingface_hub lays it out."""
    model = cache / "models--someone--a-model"
    snapshot = model / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0" * 40)
    for name in files:
        (snapshot / name).write_text(json.dumps({}))
    return snapshot


def test_what_is_a_name(tmp_path):
    (tmp_path / "models" / "mine").mkdir(parents=True)
    assert is_hub_name("Qwen/Qwen3-1.7B", tmp_path)
    for folder in ("models/mine", "model", "./a/b", "../a/b", "/a/b", "a/b/c", "~/a", "a/"):
        assert not is_hub_name(folder, tmp_path), folder


def test_a_whole_model_in_the_cache_is_used(cache):
    snapshot = store(cache, "config.json", "model.safetensors")
    assert fetched(NAME) == snapshot


@pytest.mark.parametrize(("files", "why"), [([], "is no folder here"), (["config.json"], "has no .*safetensors in")])
def test_a_model_that_is_not_there_or_has_no_parameters_is_refused(cache, files, why):
    if files:
        store(cache, *files)
    with pytest.raises(SeqloomError, match=f"'someone/a-model' {why}.*hf download someone/a-model"):
        fetched(NAME)


CONFIG = """
[run]
steps = 1
output = "out"
[model]
huggingface = "someone/a-model"
[data]
source = "toy:8"
sequences = 2
"""


def test_a_config_has_the_folder_and_asks_for_it_only_where_it_is_wanted(cache, tmp_path, monkeypatch):
    snapshot = store(cache, "config.json", "model.safetensors")
    (tmp_path / "run.toml").write_text(CONFIG)
    assert Config.load(tmp_path / "run.toml").model.huggingface == snapshot
    monkeypatch.setattr("seqloom.train.config.fetched", lambda name: pytest.fail("an override names a folder"))
    found = Config.load(tmp_path / "run.toml", [f"model.huggingface={tmp_path}"]).model.huggingface
    assert found == tmp_path.resolve()


def test_only_files_that_a_run_needs_are_wanted():
    assert not any(pattern.endswith((".py", ".bin")) for pattern in hub.WANTED)
