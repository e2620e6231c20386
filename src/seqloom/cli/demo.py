"""``seqloom demo``: how much a fixed degree wastes on a long-tailed batch, and how much a plan per step saves.

Plans one batch of Wikipedia lengths for 64 GPUs with every planner, then trains a tiny model on this machine with a
fixed degree and with a plan per step: the losses agree.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seqloom.cli import shared
from seqloom.errors import LeftEarly

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from seqloom.api import Evaluation
    from seqloom.cli.shared import Workload
    from seqloom.cost import CostModel
    from seqloom.describe import Batch
    from seqloom.train.logging import StepRecord

CLUSTER, MODEL, PROFILE = "8x8xA100-40G", "gpt-7b", "flexsp-a100"
SAMPLER, SEQUENCES, MAX_LENGTH = "wikipedia", 512, 192 * 1024
PLANNERS = ("static", "adaptive", "flexsp", "flex", "auto")
FLEXSP_OPTIONS = {"counts": 1}
"""Only the fewest micro-batches: the published solver's full search takes about a minute here."""
CHART_MARGIN = 9
"""Columns of a timeline beside its time: a node's name and the frame."""

RANKS, STEPS, TRAINED_SEQUENCES, TRAINED_LENGTH = 4, 24, 8, 2_048
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
max_length = {TRAINED_LENGTH}
too_long = "truncate"
[plan]
capacity = {TRAINED_LENGTH // 2}
[optimiser]
lr = 3e-3
[schedule]
warmup = 4
"""
TINY_MODEL = """
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

Out = Annotated[Path, typer.Option(help="Where auto's plan is written: .json or .txt.")]
Train = Annotated[bool, typer.Option("--train/--no-train", help="End by training a tiny model on this machine.")]


def demo(
    out: Out = Path("seqloom-demo-plan.json"),
    picture: shared.Picture = None,
    seed: shared.Seed = 0,
    train: Train = True,
    json: shared.AsJson = False,
) -> None:
    """Plan a long-tailed batch on 64 GPUs with every planner, then train a tiny model on this machine.

    \b
    Example:
        seqloom demo
    """
    from seqloom.api import cost_model
    from seqloom.cli.compare import comparison, save_picture
    from seqloom.cli.doctor import probe

    shared.check_output(out)
    shared.check_picture(picture)
    names, left_out = installed_planners()
    cost = cost_model(CLUSTER, MODEL, profile=PROFILE, max_length=MAX_LENGTH)
    workload = shared.Workload.by_count(shared.Source(SAMPLER, seed, MAX_LENGTH), SEQUENCES)
    with shared.planning_progress(len(names)) as progress:
        row = evaluate_batch(names, workload.batches[0], cost, seed, progress)
    row["auto"].plan.save(out)

    no_torch = "" if probe("torch").version else "training needs torch: pip install 'seqloom[train]'"

    def content() -> dict[str, Any]:
        result = comparison(cost, workload, [row], batch_size=SEQUENCES, left_out=left_out, out=str(out))
        if train and no_torch:
            result["training"] = {"left_out": no_torch}
        elif train:
            result["training"] = {name: run["summary"] for name, run in train_twice(seed, show=False).items()}
        return result

    def draw(console: Console) -> None:
        _draw_planning(console, cost, workload, row, left_out)
        _print_closing(row, out)
        if train and no_torch:
            shared.print_lines(console, "", f"A tiny model would be trained here now; {no_torch}.")
        elif train:
            console.print("\nAnd now for real: a tiny model, trained with a fixed degree and with a plan per step.")
            draw_runs(console, train_twice(seed, show=True))

    if picture is not None:
        save_picture(picture, cost, workload, row)
    shared.report(json, content, draw)


def installed_planners() -> tuple[list[str], dict[str, str]]:
    """Return the planners that run in this installation, and why others do not."""
    from seqloom.cli.doctor import probe

    solver = probe("highspy")
    if solver.version:
        return list(PLANNERS), {}
    why = f"its solver highspy is {solver.problem}: pip install 'seqloom[exact]'"
    return [name for name in PLANNERS if name != "flexsp"], {"flexsp": why}


def evaluate_batch(
    names: list[str], batch: Batch, cost: CostModel, seed: int, progress: Callable[[str, int], None]
) -> dict[str, Evaluation]:
    """Plan the batch with every planner; flexsp's search is cut short, and auto may take its plan."""
    from seqloom.api import evaluate, evaluate_planners
    from seqloom.planners import make_plan

    [row] = evaluate_planners([name for name in names if name != "flexsp"], [batch], cost, seed=seed, progress=progress)
    if "flexsp" in names:
        progress("flexsp", 0)
        begin = time.perf_counter_ns()
        plan = make_plan("flexsp", batch.lengths, cost, seed=seed, **FLEXSP_OPTIONS)
        planning_ns = time.perf_counter_ns() - begin
        row["flexsp"] = evaluate(plan, cost, bound_ns=row["auto"].bound_ns, planning_ns=planning_ns)
        row["auto"] = min(row["auto"], row["flexsp"], key=lambda evaluation: evaluation.simulation.step_ns)
    return {name: row[name] for name in names}


def _draw_planning(
    console: Console, cost: CostModel, workload: Workload, row: dict[str, Evaluation], left_out: dict[str, str]
) -> None:
    from seqloom.view import LengthHistogram

    [batch] = workload.batches
    console.print(f"One batch: {len(batch):,} sequences, {batch.tokens:,} tokens, longest {batch.longest:,}.")
    shared.print_lines(console, *(f"{note[0].upper()}{note[1:]}." for note in workload.notes()))
    console.print(LengthHistogram(batch.lengths))
    _draw_comparison(console, cost, row)
    note = "the published solver, here with its fewest micro-batches only; seqloom compare runs its full search"
    why = left_out.get("flexsp")
    shared.print_lines(console, f"flexsp is {note if why is None else f'left out: {why}'}.", "")


def _draw_comparison(console: Console, cost: CostModel, row: dict[str, Evaluation]) -> None:
    """Draw the table of planners, then the timelines of static and auto on one time scale."""
    from seqloom.cli.compare import columns
    from seqloom.view import Gantt, comparison_table

    console.print(
        f"One step of {cost.model.name} on {cost.cluster.name} ({cost.ranks} GPUs, {cost.sharding} sharding) "
        f"in a run with sequences of up to {MAX_LENGTH // 1024}K. Times are predictions with the constants "
        f"that FlexSP's authors published (profile {cost.profile.name}), not measurements."
    )
    console.print(comparison_table(columns([row])))
    console.print()
    simulations = {name: row[name].simulation for name in ("static", "auto")}
    longest = max(simulation.step_ns for simulation in simulations.values())
    for name, simulation in simulations.items():
        console.print(f"[bold]{name}[/bold]")
        width = CHART_MARGIN + round((console.width - CHART_MARGIN) * simulation.step_ns / longest)
        console.print(Gantt(simulation, width=width))
        console.print()


def _print_closing(row: dict[str, Evaluation], out: Path) -> None:
    faster = row["static"].simulation.step_ns / row["auto"].simulation.step_ns
    options = f"--cluster {CLUSTER} --model {MODEL} --profile {PROFILE} --max-length {MAX_LENGTH}"
    typer.echo(
        f"""auto: {shared.evaluation_line(row["auto"])}.
static takes {faster:.2f}x as long on this batch. auto's plan is in {out}.

Next: look at the plan again, plan your own data, take the mean over several batches.
  seqloom simulate {out} {options}
  seqloom plan --lengths YOUR.jsonl --cluster 8x8xH200 --model llama3-8b --view
  seqloom compare --lengths {SAMPLER} {options} --planners static,flex --batches 8"""
    )


# Training a tiny model with a fixed degree and with a plan per step.


def train_twice(seed: int, *, show: bool) -> dict[str, dict[str, Any]]:
    """Train with each planner on the same data; return summary and step records, by planner."""
    from seqloom.train.config import Config
    from seqloom.train.launch import train_on_processes
    from seqloom.train.logging import read_steps

    runs = {}
    with tempfile.TemporaryDirectory(prefix="seqloom-demo-") as path:
        folder = Path(path)
        (folder / "tiny.toml").write_text(TINY_MODEL)
        (folder / "demo.toml").write_text(CONFIG)
        source = f"data.source=toy:{STEPS * TRAINED_SEQUENCES}:{seed}"
        for name in TRAINED_PLANNERS:
            overrides = [source, f"plan.planner={name}", f"run.output={folder / name}", f"run.seed={seed}"]
            config = Config.load(folder / "demo.toml", overrides)
            try:
                summary = train_on_processes(config, RANKS, show=show)
            except LeftEarly as left:  # nothing goes on from the folder of a demo
                raise typer.Exit(left.exit_code) from None
            runs[name] = {"summary": summary, "steps": read_steps(config.metrics)}
    return runs


def draw_runs(console: Console, runs: dict[str, dict[str, Any]]) -> None:
    """Draw losses and step times of the runs side by side: the losses are the same, the times are not."""
    from seqloom.view.format import table_of

    table = table_of(["step", *(f"{what}, {name}" for what in ("loss", "ms") for name in TRAINED_PLANNERS)], left=())
    columns: list[list[StepRecord]] = [runs[name]["steps"] for name in TRAINED_PLANNERS]
    for records in zip(*columns, strict=True):
        if records[0].step % 4 == 0 or records[0].step == 1:
            losses, times = [f"{one.loss:.4f}" for one in records], [f"{one.measured_ms:,.0f}" for one in records]
            table.add_row(str(records[0].step), *losses, *times)
    console.print(table)
    static, flex = (runs[name]["summary"] for name in TRAINED_PLANNERS)
    measured, predicted = (static[key] / flex[key] for key in ("measured_ms", "predicted_ms"))
    console.print(
        f"The same model twice, on {RANKS} processes of this machine: whatever the plan, the losses agree to float32's "
        f"rounding. A fixed degree took {measured:.2f}x the time of a plan per step (predicted {predicted:.2f}x): "
        "between processes of one machine messages cost little, and the planner runs on the same cores "
        "(seqloom\\[fast] makes it about 20 times as fast); the figures above are for 64 GPUs."
    )
