"""Blocks of pages are run by this process: commands through `seqloom_here`, whose ranks are forks; Python by exec."""

import contextlib
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

NOT_RUN = ("make", "pip", "git", "cd", "python3", "uv", "torchrun")
"""Commands that a reader runs once, or elsewhere."""


@pytest.fixture
def run_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seqloom_here):
    """Run a block in the test's folder and return what it printed: `run_block("sh", text)`.

    A plain `seqloom` line is run here; a pipe or any other command by a shell that finds `seqloom` on its path.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, module in (("seqloom", "seqloom"), ("torchrun", "torch.distributed.run")):
        command = folder / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m {module} "$@"\n')
        command.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.chdir(tmp_path)

    def run(language: str, block: str) -> str:
        if language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(block, "page", "exec"), {"__name__": "page"})
            return out.getvalue()
        said = ""
        for line in command_lines(block):
            if line.startswith("seqloom ") and not re.search(r"[|<>&;$]", line):
                done = seqloom_here(*shlex.split(line, comments=True)[1:], folder=tmp_path)
            else:
                done = subprocess.run(["bash", "-eu", "-o", "pipefail", "-c", line], capture_output=True, text=True)
            assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
            said += done.stdout
        return said

    return run


def command_lines(block: str) -> list[str]:
    """The command lines of a block that a reader would run here."""
    joined = block.replace("\\\n", " ").splitlines()
    return [line for line in joined if line.strip() and not line.startswith("#") and line.split()[0] not in NOT_RUN]
