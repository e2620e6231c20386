"""The benchmark of strategies that switch runs, from measuring the machine to the written result."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cpu_strategies.py"


@pytest.mark.slow
@pytest.mark.distributed
def test_smallest_mode_writes_a_result(tmp_path):
    out = tmp_path / "result.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--ranks", "4", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    assert "exposed switch" in done.stdout
    result = json.loads(out.read_text())
    rows = result["figures"]["steps"]
    assert len(rows) == 3 and result["quick"] and str(tmp_path) not in out.read_text()
    assert all(row[name] > 0 for row in rows for name in ("switching", "fixed", "own", "predicted"))


def test_what_a_switch_costs_is_counted_where_there_was_one(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from strategies_report import judged

    kept = {"shape": "t1p1 on 4", "switched": False, "switching": 500.0, "own": 100.0, "fixed": 600.0}
    rows = [kept, kept | {"shape": "t2p1 on 4", "switched": True, "switching": 105.0}]
    share, gain, shapes = judged(rows)
    assert share.measured == pytest.approx(5) and not share.passed
    assert gain.measured == pytest.approx(1200 / 605) and gain.passed
    assert shapes.measured == 2 and not shapes.passed
