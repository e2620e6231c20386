"""The benchmark of real training steps runs, from measuring the machine to the written result."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cpu_training.py"


@pytest.mark.slow
@pytest.mark.distributed
def test_smallest_mode_writes_a_result(tmp_path):
    out = tmp_path / "result.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--ranks", "2", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    assert "best static, speed" in done.stdout
    result = json.loads(out.read_text())
    figures = result["figures"]
    assert set(figures["planners"]) == {"static:2", "adaptive", "flex", "zones", "auto"}
    assert len(figures["steps"]) == 1 and result["quick"] and str(tmp_path) not in out.read_text()
    for row in figures["steps"][0].values():
        assert row["measured_ms"] > 0 and row["predicted_ms"] > 0
    assert all(trial["measured_ms"] > 0 for trial in figures["calibration"])


@pytest.mark.slow
@pytest.mark.distributed
def test_smallest_mode_with_experts_writes_a_result(tmp_path):
    out = tmp_path / "result.json"
    command = [sys.executable, str(SCRIPT.with_name("cpu_experts.py")), "--quick", "--ranks", "2", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())["figures"]
    assert set(figures["sides"]) == {"static:2, 1", "auto"} and len(figures["steps"]) == 1
    for side in figures["steps"][0].values():
        assert side["measured_ms"] > 0 and side["predicted_ms"] > 0 and side["wall_ms"] > 0
