"""The demo trains for real, here on two ranks for a few steps."""

import io

import pytest
from rich.console import Console

from seqloom.cli import demo

pytestmark = pytest.mark.distributed


def test_both_planners_train_the_same_model(monkeypatch, fork_server):
    monkeypatch.setattr(demo, "CONFIG", demo.CONFIG.replace("steps = 24", "steps = 5"))
    monkeypatch.setattr(demo, "TINY_MODEL", demo.TINY_MODEL.replace("layers = 4", "layers = 1"))
    monkeypatch.setattr(demo, "RANKS", 2)
    found = demo.train_twice(3, show=False)
    static, flex = ([step.loss for step in found[name]["steps"]] for name in ("static", "flex"))
    assert len(static) == 5 and static == pytest.approx(flex, rel=1e-4)
    assert static[-1] < static[0]
    console = Console(record=True, width=160, file=io.StringIO())
    demo.draw_runs(console, found)
    assert "the losses agree" in console.export_text()
