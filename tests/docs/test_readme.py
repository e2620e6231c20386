"""The README is run: each block of commands and each Python block, in a folder of its own.

Shell lines that install or call `make` are not run; of `make` the target must exist. A plain `seqloom` line is run by
this process, whose ranks are forks of one that has loaded torch; a pipe or any other command by a shell. Every folder
holds `lengths.txt` and `corpus.txt`, so a block may plan and train "your own data". Blocks in other languages show
output and are not run.
"""

import contextlib
import io
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = ("make", "pip", "git", "cd", "python3", "uv", "torchrun")
LENGTHS = [512, 700, 1_300, 900, 4_096, 260, 33_000, 2_048, 800, 610, 12_000, 5_500]


def _blocks(*languages: str) -> list:
    text = README.read_text()
    found = [(text[: match.start()].count("\n") + 1, *match.groups()) for match in FENCE.finditer(text)]
    return [pytest.param(body, id=f"line-{line}") for line, language, body in found if language in languages]


def _lines(block: str) -> list[str]:
    joined = block.replace("\\\n", " ")
    return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with `lengths.txt` in it, where `seqloom` is this interpreter's."""
    command = tmp_path / "bin" / "seqloom"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m seqloom "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent), prepend=":")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lengths.txt").write_text("".join(f"{length}\n" for length in LENGTHS))
    (tmp_path / "corpus.txt").write_text("".join(f"{'to be or not to be ' * (length // 400)}.\n" for length in LENGTHS))
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    return tmp_path


@pytest.mark.parametrize("block", _blocks("sh", "bash"))
def test_shell_block(block: str, folder: Path, seqloom_here):
    for line in _lines(block):
        words = shlex.split(line, comments=True)
        if words[0] in NOT_RUN:
            continue
        if words[0] == "seqloom" and not re.search(r"[|<>&;$]", line):
            done = seqloom_here(*words[1:], folder=folder)
        else:
            done = subprocess.run(["bash", "-eu", "-o", "pipefail", "-c", line], capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("block", _blocks("python"))
def test_python_block(block: str, folder: Path):
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(block, str(README), "exec"), {"__name__": "readme"})


def test_make_targets_exist_and_come_first():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [line.split()[:2] for block in _blocks("sh", "bash") for line in _lines(block.values[0])]
    named = [words[1] for words in commands if words[0] == "make"]
    assert set(named) <= targets
    assert commands[:2] == [["make", "demo"], ["make", "test"]]
