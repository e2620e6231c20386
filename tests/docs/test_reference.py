"""The site's reference has every option, key and name; its navigation has every page. `make docs` builds it."""

import json
import re
import runpy
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest
from typer.main import get_command

import seqloom
from seqloom.cli import app
from seqloom.train.config import Config

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def settings():
    path = list(sys.path)
    yield runpy.run_path(str(DOCS / "conf.py"))
    sys.path[:] = path


def test_every_option_of_every_verb(settings):
    sections = dict(re.findall(r"^## seqloom ([a-z ]+)\n(.*?)(?=^## |\Z)", made(settings, "command line"), re.M | re.S))
    group = get_command(app)
    verbs = {name: verb for name, verb in group.commands.items() if name != "data"}
    verbs |= {f"data {name}": verb for name, verb in group.commands["data"].commands.items()}
    assert list(sections) == sorted(sections, key=list(verbs).index) and sections.keys() == verbs.keys()
    for name, verb in verbs.items():
        words, example, table = sections[name].split("```")
        assert words.strip() and f"seqloom {name}" in example
        shown = [option.lower() for option in re.findall(r"^\| `([\w-]+)", table, re.M)]
        assert shown == [(each.metavar or each.opts[0]).lower() for each in verb.params if each.name != "help"]


def test_every_key_of_a_config_with_its_meaning(settings):
    text = made(settings, "configuration")
    for section, cls in get_type_hints(Config).items():
        table = text.split(f"## `[{section}]`\n")[1].split("\n## ")[0]
        rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", table, re.M))
        assert list(rows) == [field.name for field in fields(cls)]
    assert "| `rank` | whole number from 1 | `16` | Width of an adapter. |" in text
    assert '| `kind` | `"cosine"` or `"linear"` or `"constant"` | `cosine` |' in text


def test_every_key_of_a_plan_file(settings):
    named = set(re.findall(r"^\| `(\w+)` \|", made(settings, "plan files"), re.M)) | {"format", "version"}

    def keys(value):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value if type(value) is list else ()):
            yield from [key] if isinstance(value, dict) else []
            yield from keys(inner) if key != "made_for" else ()

    plan = seqloom.plan([9_000, 512, 700], cluster="1x4xH200", model="llama3-8b", planner="pipeline:2")
    written = set(keys(json.loads(plan.to_json())))
    assert "made_for" in written and "granule" in written and written <= named


@pytest.mark.slow  # imports all packages
def test_every_public_name_is_found(settings):
    text = made(settings, "python")
    assert ".. autofunction:: seqloom.api.plan" in text and ".. autoclass:: seqloom.plan.Plan" in text
    named = re.findall(r"^\.\. auto\w+:: (\S+)$", text, re.M)
    assert len(named) == len(set(named)) > 150


def test_every_page_is_in_the_navigation_once(settings):
    listed = re.findall(r"^([\w/-]+)$", settings["navigation"]((DOCS / "index.md").read_text()), re.M)
    pages = [path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")]
    assert sorted(listed) == sorted(page for page in pages if page != "index")


def made(settings: dict, name: str) -> str:
    """What a page gets in the place of its mark."""
    pages = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    assert f"<!-- made from the code: {name} -->" in pages
    return settings["MADE_FROM_CODE"][name]()
