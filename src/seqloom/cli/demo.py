"""The end of the demo: a tiny model trained on this machine, with a fixed degree and with a plan per step."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seqloom.cli.shared import AsJson, Picture, Seed, print_json, require_picture, require_writable

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from seqloom.cli.shared import Outcome, Workload
    from seqloom.cost import CostModel
    from seqloom.describe import Batch
    from seqloom.train.logging import StepRecord


RANKS, STEPS, TRAINED_SEQUENCES, LONGEST = 4, 24, 8, 2_048
TRAINED_PLANNERS = ("static", "flex")
CONFIG = f"""
[run]
steps = {STEPS}
ranks = {RANKS}
output = "run"
[model]
spec = "tiny.toml"
[data]
source = "toy:1"
sequences = {TRAINED_SEQUENCES}
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
    from seqloom.train.logging import read_steps

    found = {}
    with tempfile.TemporaryDirectory(prefix="seqloom-demo-") as place:
        folder = Path(place)
        (folder / "tiny.toml").write_text(TINY)
        (folder / "demo.toml").write_text(CONFIG)
        source = f"data.source=toy:{STEPS * TRAINED_SEQUENCES}:{seed}"
        for name in TRAINED_PLANNERS:
            settings = [source, f"plan.planner={name}", f"run.output={folder / name}", f"run.seed={seed}"]
            config = Config.load(folder / "demo.toml", settings)
            summary = train_on_processes(config, RANKS, show=show)
            found[name] = {"summary": summary, "steps": read_steps(config.metrics)}
    return found


def print_training(console: Console, found: dict[str, dict[str, Any]]) -> None:
    """Losses and times under each other: the losses are the same, the times are not."""
    from rich.table import Table

    table = Table(
        "step", *(f"loss, {name}" for name in TRAINED_PLANNERS), *(f"ms, {name}" for name in TRAINED_PLANNERS), box=None
    )
    columns: list[list[StepRecord]] = [found[name]["steps"] for name in TRAINED_PLANNERS]
    for records in zip(*columns, strict=True):
        if records[0].step % 4 == 0 or records[0].step == 1:
            losses, times = ([f"{one.loss:.4f}" for one in records], [f"{one.measured_ms:,.0f}" for one in records])
            table.add_row(str(records[0].step), *losses, *times)
    console.print(table)
    static, flex = (found[name]["summary"] for name in TRAINED_PLANNERS)
    measured, predicted = (static[key] / flex[key] for key in ("measured_ms", "predicted_ms"))
    console.print(
        f"The same model twice, on {RANKS} processes of this machine: whatever the plan, the losses agree to float32's "
        f"rounding. A fixed degree took {measured:.2f}x the time of a plan per step (predicted {predicted:.2f}x): "
        "between processes of one machine messages cost little, and the planner runs on the same cores "
        "(seqloom\\[fast] makes it about 20 times as fast); the figures above are for 64 GPUs."
    )


# ---- merged: cli.demo
# ``seqloom demo``: what a fixed degree wastes on a long-tailed batch, and what a plan per step saves.


CLUSTER, MODEL, PROFILE = "8x8xA100-40G", "gpt-7b", "flexsp-a100"
SAMPLER, SEQUENCES, MAX_LENGTH = "wikipedia", 512, 192 * 1024
PLANNERS = ("static", "adaptive", "flexsp", "flex", "auto")
SOLVER = {"counts": 1}
"""Keeps the published solver to the fewest micro-batches; its full search takes about a minute here."""
FRAME = 9
"""Columns of a chart beside its time: a node's name and the two sides."""

OutFile = Annotated[Path, typer.Option("--out", help="Where auto's plan is written: .json or .txt.")]
Train = Annotated[bool, typer.Option("--train/--no-train", help="End by training a tiny model on this machine.")]


def demo(
    out: OutFile = Path("seqloom-demo-plan.json"),
    picture: Picture = None,
    seed: Seed = 0,
    train: Train = True,
    json: AsJson = False,
) -> None:
    """Plan a long-tailed batch on 64 GPUs with every planner, then train a tiny model on this machine.

    \b
    Example:
        seqloom demo
    """
    from seqloom.api import cost_model
    from seqloom.cli.compare import report
    from seqloom.cli.shared import Source, Workload, planning

    require_writable(out)
    require_picture(picture)
    names, left_out = planners_here()
    cost = cost_model(CLUSTER, MODEL, profile=PROFILE, max_length=MAX_LENGTH)
    workload = Workload.by_count(Source(SAMPLER, seed, MAX_LENGTH), SEQUENCES)
    with planning(len(names)) as progress:
        row = run(names, workload.batches[0], cost, seed, progress)
    row["auto"].plan.save(out)
    if json:
        content = report(cost, workload, [row], batch_size=SEQUENCES, left_out=left_out, out=str(out))
        print_json(content | ({"training": _trained(seed)} if train else {}))
    else:
        _print_demo(cost, workload, row, left_out, out)
        if train:
            _print_training(seed)
    if picture is not None:
        from seqloom.view import save_picture

        save_picture(picture, "seqloom demo", lambda console: _draw_comparison(console, cost, row))


def _trained(seed: int) -> dict[str, Any]:
    """Summaries of the training runs by planner, or why there are none."""

    why_not = missing()
    if why_not is not None:
        return {"left_out": why_not}
    return {name: found["summary"] for name, found in train_both(seed, show=False).items()}


def _print_training(seed: int) -> None:
    from rich.console import Console

    console, why_not = Console(highlight=False), missing()
    console.print()
    if why_not is not None:
        console.print(f"A tiny model would be trained here now; {why_not}.", markup=False)
        return
    console.print("And now for real: a tiny model, trained with a fixed degree and with a plan per step.")
    print_training(console, train_both(seed, show=True))


def run(
    names: list[str],
    batch: Batch,
    cost: CostModel,
    seed: int,
    progress: Callable[[str, int], None] | None,
) -> dict[str, Outcome]:
    """Plan the batch with every planner; the published solver is kept short, and auto sees its plan too."""
    from seqloom.cli.shared import Outcome, outcomes
    from seqloom.planners import make_plan
    from seqloom.simulate import simulate

    quick = [name for name in names if name != "flexsp"]
    [row] = outcomes(quick, [batch], cost, seed=seed, progress=progress)
    if "flexsp" in names:
        if progress is not None:
            progress("flexsp", 0)
        begin = time.perf_counter_ns()
        plan = make_plan("flexsp", batch.lengths, cost, seed=seed, **SOLVER)
        spent = time.perf_counter_ns() - begin
        row["flexsp"] = Outcome(plan, simulate(plan, cost), row["auto"].bound_ns, spent)
        row["auto"] = min(row["auto"], row["flexsp"], key=lambda outcome: outcome.simulation.step_ns)
    return {name: row[name] for name in names}


def planners_here() -> tuple[list[str], dict[str, str]]:
    """The planners that this installation has, and why others are left out."""
    from seqloom.cli.doctor import probe

    solver = probe("highspy")
    if solver.available:
        return list(PLANNERS), {}
    why = f"its solver highspy is {solver.problem}: pip install 'seqloom[exact]'"
    return [name for name in PLANNERS if name != "flexsp"], {"flexsp": why}


def _print_demo(
    cost: CostModel, workload: Workload, row: dict[str, Outcome], left_out: dict[str, str], out: Path
) -> None:
    from rich.console import Console

    from seqloom.view import LengthHistogram

    console = Console(highlight=False)
    [batch] = workload.batches
    console.print(f"One batch: {len(batch):,} sequences, {batch.tokens:,} tokens, longest {batch.longest:,}.")
    for note in workload.notes():
        console.print(f"{note[0].upper()}{note[1:]}.", markup=False)
    console.print(LengthHistogram(batch.lengths))
    _draw_comparison(console, cost, row)
    if left_out:
        console.print(f"flexsp is left out: {left_out['flexsp']}.", markup=False)
    else:
        console.print(
            "flexsp is the published solver, here with its fewest micro-batches only; "
            "seqloom compare runs its full search."
        )
    console.print()
    _print_closing(console, row, out)


def _draw_comparison(console: Console, cost: CostModel, row: dict[str, Outcome]) -> None:
    """The table of planners and the two timelines."""
    from seqloom.cli.compare import columns
    from seqloom.view import comparison_table

    console.print(
        f"One step of {cost.model.name} on {cost.cluster.name} ({cost.ranks} GPUs, {cost.sharding} sharding) "
        f"in a run with sequences of up to {MAX_LENGTH // 1024}K. Times are predictions with the constants "
        f"that FlexSP's authors published (profile {cost.profile.name}), not measurements."
    )
    console.print(comparison_table(columns([row])))
    console.print()
    _print_timelines(console, row)


def _print_timelines(console: Console, row: dict[str, Outcome]) -> None:
    """Static and auto under each other, on one time scale: the narrower chart is the shorter step."""
    from seqloom.view import Gantt

    drawn = {name: row[name].simulation for name in ("static", "auto")}
    longest = max(simulation.step_ns for simulation in drawn.values())
    room = console.width - FRAME
    for name, simulation in drawn.items():
        console.print(f"[bold]{name}[/bold]")
        console.print(Gantt(simulation, width=FRAME + round(room * simulation.step_ns / longest)))
        console.print()


def _print_closing(console: Console, row: dict[str, Outcome], out: Path) -> None:
    faster = row["static"].simulation.step_ns / row["auto"].simulation.step_ns
    setting = f"--cluster {CLUSTER} --model {MODEL} --profile {PROFILE} --max-length {MAX_LENGTH}"
    lines = [
        f"auto: {row['auto'].summary()}.",
        f"static takes {faster:.2f}x as long on this batch. auto's plan is in {out}.",
        "",
        "Next: look at the plan again, plan your own data, take the mean over several batches.",
        f"  seqloom simulate {out} {setting}",
        "  seqloom plan --lengths YOUR.jsonl --cluster 8x8xH200 --model llama3-8b --view",
        f"  seqloom compare --lengths {SAMPLER} {setting} --planners static,flex --batches 8",
    ]
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)
