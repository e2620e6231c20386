"""Every training run writes its report: predicted against measured over its steps, and the plan of the last one."""

import subprocess
import sys
from pathlib import Path

import pytest

from seqloom.train.logging import read_steps
from support.reports import Report

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_and_its_second_half_write_one_report_and_name_it(tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "seqloom", "train", str(ROOT / "recipes" / "tiny-cpu.toml"), "--ranks", "2"]
    for steps in (6, 8):  # the second process goes on from the checkpoint of the first
        options = ["--set", f"run.output={folder}", "--set", f"run.steps={steps}"]
        result = subprocess.run([*command, *options], capture_output=True, text=True, timeout=150, check=True)
        assert result.stdout.splitlines()[-1] == f"report: {folder / 'report.html'}"
        data, records = Report.load(folder / "report.html").data, read_steps(folder / "metrics.jsonl")
        columns = data["run"]["columns"]
        assert columns["step"] == list(range(1, steps + 1))
        assert columns["measured_ms"] == [record.measured_ms for record in records]
        assert columns["predicted_ms"] == [record.predicted_ms for record in records]
        assert columns["loss"] == [record.loss for record in records]
        assert data["run"]["figures"]["steps"] == steps and data["unit"] == "rank"
        [step] = data["steps"]
        assert step["figures"]["plan_hash"] == records[-1].plan_hash
