"""The demo compares and races for real, here on two ranks with a smaller model."""

import io

import pytest
from rich.console import Console

from seqloom.cli import demo

pytestmark = pytest.mark.distributed


def test_plans_give_the_same_result_and_are_raced(monkeypatch, fork_server, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # of the measured profile
    monkeypatch.setattr(demo, "TINY_MODEL", demo.TINY_MODEL.replace("layers = 4", "layers = 1"))
    monkeypatch.setattr(demo, "RANKS", 2)
    monkeypatch.setattr(demo, "LONGEST", 512)
    monkeypatch.setattr(demo, "RACED_BATCHES", 2)
    found = demo.run_here(3)
    assert [row.planner for row in found.comparisons] == list(demo.VERIFIED)
    assert all(row.passed for row in found.comparisons)
    assert found.race.predicted > 0.99  # flex never plans worse than static
    assert len(found.race.ratios) in (0, 4) and all(ratio > 0 for ratio in found.race.ratios)
    console = Console(record=True, width=160, file=io.StringIO())
    demo.draw_here(console, found)
    text = console.export_text()
    assert text.count("same") >= len(demo.VERIFIED)
    assert ("pairs of training steps" if found.race.ratios else "are not raced") in text
