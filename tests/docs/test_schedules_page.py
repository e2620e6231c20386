"""docs/schedules.md is run, and its grid, its message and its table are what the code says."""

import json
import re
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from seqloom.cli import main
from seqloom.errors import PlanError
from seqloom.schedules import SCHEDULE_NAMES, Schedule, build_schedule
from seqloom.schedules.timing import schedule_metrics

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "schedules.md").read_text()
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RATIOS = {"1:1:1": ("1", "1", "1"), "1:1.6:0.6": ("1", "1.6", "0.6"), "1:2:0.3": ("1", "2", "0.3")}


def test_the_commands_run_and_show_what_the_page_shows(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    said = ""
    for language, block in FENCE.findall(PAGE):
        for line in block.splitlines() if language == "sh" else ():
            monkeypatch.setattr(sys, "argv", line.split())
            with pytest.raises(SystemExit) as stopped:
                main()
            assert not stopped.value.code
            said += capsys.readouterr().out
    assert (tmp_path / "zb.csv").exists() and (tmp_path / "zb.svg").exists()
    shown = [block for language, block in FENCE.findall(PAGE) if not language]
    assert shown[0] in said
    for block in [block for language, block in FENCE.findall(PAGE) if language == "python"]:
        exec(compile(block, "docs/schedules.md", "exec"), {})


def test_the_message_of_a_deadlock():
    shown = [block for language, block in FENCE.findall(PAGE) if not language][1]
    with pytest.raises(PlanError) as caught:
        Schedule.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "bad.csv")
    first, *grid = shown.splitlines()
    assert str(caught.value).startswith(first.removeprefix("seqloom: ").removesuffix(" .."))
    assert str(caught.value).splitlines()[1:] == grid


def test_every_name_is_on_the_page():
    for name in SCHEDULE_NAMES:
        assert f"`{name}`" in PAGE


def table_rows() -> list[list[str]]:
    lines = PAGE[PAGE.index("| name | pieces |") :].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines[2 : lines.index("")]]
    assert {row[0].strip("`") for row in rows} == {*SCHEDULE_NAMES} - {"balanced"}
    return rows


@pytest.mark.parametrize("row", table_rows(), ids=lambda row: f"{row[0]}-{row[1]}")
def test_the_table_of_bubbles(row):
    name, pieces, *bubbles, memory = row
    found = []
    for ratio in RATIOS.values():
        times = [Fraction(value) for value in ratio]
        whole = tuple(int(10 * value) for value in times)
        found.append(schedule_metrics(build_schedule(name.strip("`"), 8, 16, int(pieces), times=whole), *times))
    assert [f"{100 * figure.bubble:.1f}" for figure in found] == bubbles
    assert f"{max(max(figure.peak_memory) for figure in found):.4g}" == memory


def test_what_waiting_at_the_end_of_a_step_costs_is_what_was_simulated():
    """The table's shares are those of the committed result; 1F1B loses nothing."""
    figures = json.loads((ROOT / "benchmarks" / "results" / "step_end.json").read_text())["figures"]
    for name in (
        "512 documents of Wikipedia",
        "512 documents of CommonCrawl",
        "64 documents of 8K",
        "8 documents of 64K",
    ):
        batch = name.replace(" documents", "")
        lost = [figures[f"{batch}, head on {head}, auto"]["lost, %"] for head in ("the last", "all")]
        assert f"| {name} | {lost[0]:.1f} % | {lost[1]:.1f} % |" in PAGE
        assert all(figures[f"{batch}, head on {head}, 1f1b"]["lost, %"] == 0 for head in ("the last", "all"))
