"""docs/hydraulis.md: its commands and its Python run, its chart is the one that the code draws."""

import contextlib
import io
import json
import re
import shlex
import shutil
from pathlib import Path

from typer.testing import CliRunner

from seqloom.cli import app
from seqloom.packing import Balance
from seqloom.planners.hydraulis import strategies_from_json

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "hydraulis.md").read_text()
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_commands_run_and_write_what_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    lines = [line for language, block in FENCE.findall(PAGE) if language == "sh" for line in block.splitlines()]
    results = [CliRunner().invoke(app, shlex.split(line)[1:]) for line in lines]
    assert [result.exit_code for result in results] == [0, 0, 0], [result.output for result in results]
    text = (tmp_path / "strategies.json").read_text()
    assert len(strategies_from_json(text)) > 1
    fields = set(json.loads(text)["strategies"][0]["pipelines"][0])
    assert fields == {"stages", "tensor", "ulysses", "ring", "ranks", "longest"}
    assert all(f"`{name}`" in PAGE for name in fields)
    assert len(list(tmp_path.glob("step-*.json"))) > 1
    assert "hbp" in results[2].output and "adaptive" in results[2].output


def test_the_python_runs_and_the_chart_is_what_it_draws():
    blocks = [block for language, block in FENCE.findall(PAGE) if language == "python"]
    said = []
    for block in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(block, "docs/hydraulis.md", "exec"), {})
        said.append(out.getvalue())
    shown = PAGE.split("\n    0  AAAA")[1].split("\n\nNeighbouring")[0]
    chart = "0  AAAA" + re.sub(r"^ {4}", "", shown, flags=re.MULTILINE)
    assert [line.rstrip() for line in said[0].splitlines()] == [line.rstrip() for line in chart.splitlines()]
    assert "Plan(hbp" in said[1] and "Balance(" in said[1]


def test_every_figure_is_explained():
    for name in Balance(0, 0, 0, 0, 1, 0).as_dict():
        assert name in ("steps", "mean_step_ms") or f"| {name.upper()} |" in PAGE
