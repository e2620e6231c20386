"""The end of the demo: a tiny model trained on this machine, with a fixed degree and with a plan per step."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from seqloom.train.metrics import StepRecord

RANKS, STEPS, SEQUENCES, LONGEST = 4, 24, 8, 2_048
PLANNERS = ("static", "flex")
CONFIG = f"""
[run]
steps = {STEPS}
ranks = {RANKS}
output = "run"
[model]
spec = "tiny.toml"
[data]
source = "toy:1"
sequences = {SEQUENCES}
max_length = {LONGEST}
too_long = "truncate"
[plan]
capacity = {LONGEST // 2}
[optimiser]
lr = 3e-3
[schedule]
warmup = 4
"""
TINY = """
layers = 4
hidden = 128
heads = 4
kv_heads = 2
head_dim = 32
ffn = 384
gated = true
vocabulary = 257
tied = true
"""


def missing() -> str | None:
    """What this installation lacks for training, and the way to it; None: nothing."""
    from seqloom.cli.doctor import probe

    if probe("torch").available:
        return None
    return "training needs torch: pip install 'seqloom[train]'"


def train_both(seed: int, *, show: bool) -> dict[str, dict[str, Any]]:
    """Train with every planner on the same data; return a summary and the steps of each, by planner.

    Args:
        seed: of lengths, text and order.
        show: show steps on stderr while they run.
    """
    from seqloom.train.config import Config
    from seqloom.train.launch import train_on_processes
    from seqloom.train.metrics import read_steps

    found = {}
    with tempfile.TemporaryDirectory(prefix="seqloom-demo-") as place:
        folder = Path(place)
        (folder / "tiny.toml").write_text(TINY)
        (folder / "demo.toml").write_text(CONFIG)
        source = f"data.source=toy:{STEPS * SEQUENCES}:{seed}"
        for name in PLANNERS:
            settings = [source, f"plan.planner={name}", f"run.output={folder / name}", f"run.seed={seed}"]
            config = Config.load(folder / "demo.toml", settings)
            summary = train_on_processes(config, RANKS, show=show)
            found[name] = {"summary": summary, "steps": read_steps(config.metrics)}
    return found


def print_training(console: Console, found: dict[str, dict[str, Any]]) -> None:
    """Losses and times under each other: the losses are the same, the times are not."""
    from rich.table import Table

    table = Table("step", *(f"loss, {name}" for name in PLANNERS), *(f"ms, {name}" for name in PLANNERS), box=None)
    columns: list[list[StepRecord]] = [found[name]["steps"] for name in PLANNERS]
    for records in zip(*columns, strict=True):
        if records[0].step % 4 == 0 or records[0].step == 1:
            losses, times = ([f"{one.loss:.4f}" for one in records], [f"{one.measured_ms:,.0f}" for one in records])
            table.add_row(str(records[0].step), *losses, *times)
    console.print(table)
    static, flex = (found[name]["summary"] for name in PLANNERS)
    measured, predicted = (static[key] / flex[key] for key in ("measured_ms", "predicted_ms"))
    console.print(
        f"The same model twice, on {RANKS} processes of this machine: whatever the plan, the losses agree to float32's "
        f"rounding. A fixed degree took {measured:.2f}x the time of a plan per step (predicted {predicted:.2f}x): "
        "between processes of one machine messages cost little, and the planner runs on the same cores "
        "(seqloom\\[fast] makes it about 20 times as fast); the figures above are for 64 GPUs."
    )
