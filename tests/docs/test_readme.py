"""The README is run: each block of commands and each Python block, in a folder of its own.

Shell lines that install or call `make` are not run; of `make` the target must exist. Every folder holds `lengths.txt`
and `corpus.txt`, so a block may plan and train "your own data". Blocks in other languages show output and are not run.
"""

import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LENGTHS = [512, 700, 1_300, 900, 4_096, 260, 33_000, 2_048, 800, 610, 12_000, 5_500]


def _blocks(*languages: str) -> list:
    text = README.read_text()
    found = [(text[: match.start()].count("\n") + 1, *match.groups()) for match in FENCE.finditer(text)]
    return [pytest.param(language, body, id=f"line-{line}") for line, language, body in found if language in languages]


@pytest.mark.parametrize(("language", "block"), _blocks("sh", "python"))
def test_block(language: str, block: str, tmp_path: Path, run_block):
    (tmp_path / "lengths.txt").write_text("".join(f"{length}\n" for length in LENGTHS))
    (tmp_path / "corpus.txt").write_text("".join(f"{'to be or not to be ' * (length // 400)}.\n" for length in LENGTHS))
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    run_block(language, block)


def test_make_targets_exist_and_come_first():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [line.split()[:2] for block in _blocks("sh") for line in block.values[1].splitlines() if line]
    named = [words[1] for words in commands if words[0] == "make"]
    assert set(named) <= targets
    assert commands[:2] == [["make", "demo"], ["make", "test"]]
