"""Verbs run in this process, through the same door as the command: exit codes, stdout and stderr are real."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from seqloom.cli import main

LENGTHS = (512, 700, 1_300, 900, 4_096, 260, 33_000, 2_048, 800, 610, 12_000, 5_500)


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        assert self.code == 0, self.err
        return json.loads(self.out)


@pytest.fixture(scope="session")
def lengths() -> tuple[int, ...]:
    """Lengths of the documents in lengths.txt."""
    return LENGTHS


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: it holds lengths.txt and nothing else."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lengths.txt").write_text("".join(f"{length}\n" for length in LENGTHS))
    return tmp_path


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run ``seqloom`` with these arguments (one string each, or one line)."""

    def call(line: str, *more: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["seqloom", *line.split(), *more])
        with pytest.raises(SystemExit) as stopped:
            main()
        return Result(int(stopped.value.code or 0), *capsys.readouterr())

    return call


@pytest.fixture
def refused(run: Callable[..., Result], folder: Path) -> Callable[..., str]:
    """Run ``seqloom`` and return its message: exit code 2, one line on stderr, nothing printed or written."""

    def call(line: str, *more: str) -> str:
        before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
        result = run(line, *more)
        assert result.code == 2, result
        assert result.out == ""
        assert result.err.startswith("seqloom: ")
        assert result.err.count("\n") == 1
        assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
        return result.err

    return call
