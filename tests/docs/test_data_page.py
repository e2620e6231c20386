"""docs/data.md is run: its commands and its Python, one after the other in one folder."""

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from seqloom.data import IGNORE_INDEX, PrepareCounts, TokenStore
from seqloom.train.config import Data

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_page_runs_and_shows_what_the_store_holds(tmp_path, run_block):
    blocks = FENCE.findall(PAGE)
    assert [language for language, _ in blocks] == ["sh", "toml", "sh", "python", "toml"]
    for language, block in blocks:
        if language != "toml":
            run_block(language, block)
    store = TokenStore(tmp_path / "store")
    assert store.meta.prepared["counts"] == {
        "records": 5,
        "empty": 1,
        "nothing_to_learn": 0,
        "too_long": 1,
        "tokens_lost": 5,
        "merged": 0,
    }
    assert _shown("token") == [_name(id) for id in store.tokens(0, 0, 10)]
    assert _shown("label") == [_name(id) for id in store.labels(0, 0, 10)]
    assert sorted(path.name for path in store.path.iterdir()) == sorted(
        re.findall(r"^ {6}([\w.]+) ", PAGE, re.MULTILINE)
    )


def test_the_mixture_of_the_page_is_one():
    named, block = [block for language, block in FENCE.findall(PAGE) if language == "toml"]
    own = Data(**tomllib.loads(named)["data"], sequences=1)
    assert len(own.source) == 2 and own.fields.prompt == "question"
    data = Data(**tomllib.loads(block)["data"], sequences=1)
    assert data.sources is not None and [str(each.path) for each in data.sources] == ["web", "code", "maths"]
    assert sum(each.weight for each in data.sources) == pytest.approx(1)


def _shown(row: str) -> list[str]:
    [line] = [line for line in PAGE.splitlines() if line.startswith(f"    {row} ")]
    return line.replace("' '", "_").split()[1:11]


def _name(id: int) -> str:
    return {IGNORE_INDEX: ".", 256: "end", 32: "_"}.get(int(id)) or chr(id)


def test_every_count_is_explained():
    for field in fields(PrepareCounts):
        assert field.name == "records" or f"`{field.name}`" in PAGE
