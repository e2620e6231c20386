"""docs/fine-tuning.md is run from an empty folder: a newcomer's path from chats to a model that answers."""

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from seqloom.data import TokenStore, document_lengths
from seqloom.train.config import Lora
from seqloom.train.logging import read_steps

PAGE = (Path(__file__).parents[2] / "docs" / "fine-tuning.md").read_text()
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]


def test_the_page_runs_from_an_empty_folder(tmp_path, run_block):
    blocks = FENCE.findall(PAGE)
    assert [language for language, _ in blocks] == ["python", "toml", "sh", "python", "toml", "python"]
    said = []
    for language, block in blocks:
        if language == "toml":
            name = re.match(r"# (\S+)", block)[1]
            (tmp_path / name).write_text(block)
        else:
            said.append(run_block(language, block))
    [folder] = (tmp_path / "run" / "data").iterdir()
    store, chats = TokenStore(folder), (tmp_path / "chats.jsonl").read_text().splitlines()
    assert len(store) == len(chats) and set(store.valid.tolist()) == {4}, "y, e, s and the end"
    planned = document_lengths(str(tmp_path / "chats.jsonl"), tokenizer=str(tmp_path / "tiny-chat"))
    assert planned.lengths.tolist() == store.lengths.tolist()
    assert said[2].strip() == json.loads(chats[0])["messages"][1]["content"] == "yes", "what it was taught"
    losses = [record.loss for record in read_steps(tmp_path / "run" / "metrics.jsonl")]
    assert len(losses) == 30 and losses[-1] < 0.5 < losses[0]
    listed = PAGE.split("    run/\n")[1].split("\n\n")[0]
    made = {path.name for path in (tmp_path / "run").iterdir() if not path.name.startswith(".")}
    assert made == set(re.findall(r"^ {6}(\S+)", listed, re.MULTILINE))
    assert (tmp_path / "best" / "adapter").is_dir() and (tmp_path / "best" / "config.json").is_file()
    report = (tmp_path / "run" / "report.html").read_text()
    assert "30 steps" in report and not re.search(r'(src|href)="(?!data:|#)', report), "it fetches nothing"


def test_every_key_is_explained():
    for key in fields(Lora):
        default = {(): "all"}.get(key.default, key.default)
        assert f"| `{key.name}` | {default} |" in PAGE
