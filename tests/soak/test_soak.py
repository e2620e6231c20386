"""A short soak; `make soak` has thousands of steps and as many batches as there is time for."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from soak.plans import Side, differing
from support.pieces import Pieces

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_two_interpreters_plan_alike():
    with Side(sys.executable, 1) as first, Side(sys.executable, 2) as second:
        unequal, refused = differing((first, second), 10**9, 24)
    assert unequal == [] and refused <= 2


def test_a_difference_is_found_with_its_batch():
    class Wrong:
        """Plans batch 7 differently."""

        def ask(self, first, count):
            self.asked = range(first, first + count)

        def digest(self):
            return f"{'other' if 7 in self.asked else 'same'} 0"

    class Right(Wrong):
        def digest(self):
            return "same 0"

    assert differing((Right(), Wrong()), 0, 20) == ([7], 0)
    assert differing((Right(), Wrong()), 8, 20) == ([], 0)


def test_pieces_go_on_with_the_same_sources_only(tmp_path):
    path = tmp_path / "state.json"
    for done in (0, 1):
        pieces = Pieces(path, {"commit": "a"}, {"done": 0}, limit_s=60)
        assert pieces.counts["done"] == done and pieces.has_time
        pieces.counts["done"] += 1
        pieces.keep()
    assert Pieces(path, {"commit": "b"}, {"done": 0}, limit_s=0).counts["done"] == 0
    assert not Pieces(path, {"commit": "b"}, {"done": 0}, limit_s=0).has_time


@pytest.mark.slow
@pytest.mark.distributed
def test_changing_plans_leave_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    out = tmp_path / "steps.json"
    monkeypatch.setattr(sys, "argv", ["long_run.py", "--ranks", "2", "--steps", "60", "--out", str(out), "--quick"])
    with pytest.raises(SystemExit, match="False"):
        importlib.import_module("long_run").main()
    growth = json.loads(out.read_text())["figures"]["growth"]
    assert {name: growth[name] for name in ("communicators", "file_handles", "threads")} == {
        "communicators": 0,
        "file_handles": 0,
        "threads": 0,
    }
