"""``seqloom demo``: how much a fixed degree wastes on a long-tailed batch, and how much a plan per step saves.

1. One batch of Wikipedia lengths for 64 GPUs, planned with every planner: predicted.
2. A tiny model on this machine: loss and gradients under four planners equal those of one process.
3. The same model, trained on processes of this machine with a fixed degree and with a plan per step, in turns.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from seqloom.cli import shared

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from seqloom.api import Evaluation
    from seqloom.cli.shared import Workload
    from seqloom.cost import CostModel
    from seqloom.describe import Batch, ModelSpec
    from seqloom.profiling.race import RaceResult, RaceSettings
    from seqloom.profiling.verify import PlanComparison
    from seqloom.train.launch import RankProcess

CLUSTER, MODEL, PROFILE = "8x8xA100-40G", "gpt-7b", "flexsp-a100"
SAMPLER, SEQUENCES, MAX_LENGTH = "wikipedia", 512, 192 * 1024
PLANNERS = ("static", "adaptive", "flexsp", "flex", "auto")
FLEXSP_OPTIONS = {"counts": 1}
"""Only the fewest micro-batches: the published solver's full search takes about a minute here."""
CHART_MARGIN = 9
"""Columns of a timeline beside its time: a node's name and the frame."""

RANKS = 4
RACED = ("static", "flex")
CAPACITY, LONGEST, SHORT, SHORTEST, LONGER = 256, 1_024, 64, 16, 128
"""Of the raced batches: tokens of a rank, of the long document, how many short ones, their least and most tokens."""
RACED_BATCHES = 8
VERIFIED = ("static", "adaptive", "flex", "zones")
VERIFIED_CORPUS, VERIFIED_DOCUMENTS = 64, 12
BUSY = 0.5
"""Load per core from which on the machine counts as busy."""
TINY_MODEL = """
name = "tiny"
layers = 4
hidden = 128
heads = 2
kv_heads = 2
head_dim = 64
ffn = 384
gated = true
vocabulary = 257
tied = true
"""

Out = Annotated[Path, typer.Option(help="Where auto's plan is written: .json or .txt.")]
Html = Annotated[Path, typer.Option(help="Where the report of all planners is written, for any browser: .html.")]
Train = Annotated[bool, typer.Option("--train/--no-train", help="End with a tiny model on this machine.")]


def demo(
    out: Out = Path("seqloom-demo-plan.json"),
    html: Html = Path("seqloom-demo.html"),
    picture: shared.Picture = None,
    seed: shared.Seed = 0,
    train: Train = True,
    json: shared.AsJson = False,
) -> None:
    """Plan a long-tailed batch on 64 GPUs with every planner, then check and race a tiny model on this machine.

    \b
    Example:
        seqloom demo
    """
    from seqloom.api import cost_model
    from seqloom.cli.compare import comparison, save_picture
    from seqloom.cli.doctor import probe
    from seqloom.cost import MadeFor

    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0  # before this process adds to it
    shared.check_output(out)
    shared.check_output(html, "report", (".html",))
    shared.check_picture(picture)
    names, left_out = installed_planners()
    cost = cost_model(CLUSTER, MODEL, profile=PROFILE, max_length=MAX_LENGTH)
    workload = shared.Workload.by_count(shared.Source(SAMPLER, seed, MAX_LENGTH), SEQUENCES)
    with shared.planning_progress(len(names)) as progress:
        row = evaluate_batch(names, workload.batches[0], cost, seed, progress)
    MadeFor.of(cost).on(row["auto"].plan).save(out)

    no_torch = "" if probe("torch").version else "training needs torch: pip install 'seqloom[train]'"

    def content() -> dict[str, Any]:
        result = comparison(
            cost, workload, [row], batch_size=SEQUENCES, left_out=left_out, out=str(out), html=str(html)
        )
        if train:
            result["here"] = {"left_out": no_torch} if no_torch else run_here(seed).to_dict()
        return result

    def draw(console: Console) -> None:
        _draw_planning(console, cost, workload, row, left_out)
        _print_closing(row, out, cost)
        if train and no_torch:
            shared.print_lines(console, "", f"A tiny model would be trained here now; {no_torch}.")
        elif train:
            if load > BUSY * (os.cpu_count() or 1):
                busy = f"This machine is busy (load {load:.1f} on {os.cpu_count()} cores): times will scatter"
                shared.print_lines(console, "", f"{busy}.")
            draw_here(console, run_here(seed))
        shared.print_lines(console, "", f"Open {html} in a browser: the steps of all planners, GPU by GPU.")

    shared.save_report(html, cost, row, *workload.notes())
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


def _print_closing(row: dict[str, Evaluation], out: Path, cost: CostModel) -> None:
    options = f"--cluster {CLUSTER} --model {MODEL} --profile {PROFILE} --max-length {MAX_LENGTH}"
    faster = row["static"].simulation.step_ns / row["auto"].simulation.step_ns
    typer.echo(
        f"""auto: {shared.evaluation_line(row["auto"], cost)}.
static takes {faster:.2f}x as long on this batch. auto's plan is in {out}.

Next: look at the plan again, plan your own data, take the mean over several batches.
  seqloom simulate {out}
  seqloom plan --lengths YOUR.jsonl --cluster 8x8xH200 --model llama3-8b --view
  seqloom compare --lengths {SAMPLER} {options} --planners static,flex --batches 8"""
    )


# A tiny model on this machine.


class Here(NamedTuple):
    """What a tiny model showed on this machine."""

    comparisons: list[PlanComparison]
    race: RaceResult

    def to_dict(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        return {"verified": [asdict(row) for row in self.comparisons], "race": self.race.to_dict()}


def run_here(seed: int) -> Here:
    """Compare plans with one process, then race a fixed degree against a plan per step."""
    from seqloom.profiling.race import RaceResult
    from seqloom.train.launch import run_on_processes

    settings = race_settings(seed)
    comparisons = verify_plans(settings.spec, seed)
    result = run_on_processes(race_rank, RANKS, settings, on_cpu=True)
    return Here(comparisons, RaceResult(**result))


def race_settings(seed: int) -> RaceSettings:
    """Return batches of one long document, which all ranks must share, and many short ones, which need not be."""
    import tomllib

    import numpy as np

    from seqloom.describe import ModelSpec
    from seqloom.profiling.race import RaceSettings
    from seqloom.profiling.stored import stored_profiles

    draw = np.random.default_rng(seed)
    short = draw.integers(SHORTEST, LONGER, size=(RACED_BATCHES, SHORT)).tolist()
    batches = tuple((LONGEST, *lengths) for lengths in short)
    spec = ModelSpec(**tomllib.loads(TINY_MODEL))
    return RaceSettings(spec, batches, RACED, CAPACITY, profiles=str(stored_profiles()))


def verify_plans(spec: ModelSpec, seed: int) -> list[PlanComparison]:
    """Compare a plan of every planner with one process, in float64, on threads that obey NCCL's rules."""
    import numpy as np

    from seqloom.api import cost_model
    from seqloom.data import Batch, open_source
    from seqloom.profiling.verify import plan_batch, verify

    source = open_source(f"toy:{VERIFIED_CORPUS}:{seed}", vocabulary=spec.vocabulary)
    documents = np.flatnonzero(source.lengths <= RANKS * CAPACITY)[:VERIFIED_DOCUMENTS]
    batch = Batch(documents, source.lengths[documents], source.valid[documents])
    cost = cost_model(f"1x{RANKS}xCPU", spec, capacity=CAPACITY)
    with shared.progress_bar(len(VERIFIED), "checking plans against one process") as step:
        rows = []
        for row in verify(spec, source, batch, plan_batch(batch, VERIFIED, cost, seed), seed=seed):
            step(f"checking plans against one process: {row.planner}")
            rows.append(row)
    return rows


def race_rank(process: RankProcess, settings: RaceSettings) -> dict[str, Any]:
    """Race as one of the ranks; rank 0 shows the progress."""
    from contextlib import nullcontext

    from seqloom.dist import Communicators, TorchTransport
    from seqloom.plan import GroupFamily
    from seqloom.profiling.race import race

    (rank, ranks, *_), device, _ = process
    communicators = Communicators(GroupFamily(ranks, ranks))
    communicators.warm_up()
    transport = TorchTransport(communicators)
    silent = nullcontext(lambda text: None)
    with silent if rank else shared.progress_bar(None, "measuring this machine") as report:
        result = asdict(race(settings, transport, device, report))
    communicators.close()
    return result


def draw_here(console: Console, here: Here) -> None:
    """Draw what plans change, which is the time, and what they do not: the result."""
    from seqloom.cli.train import draw_comparisons

    console.print("\n[bold]On this machine: the same result[/bold]")
    draw_comparisons(console, here.comparisons, f"of a tiny model on {RANKS} threads, float64")
    console.print("\n[bold]On this machine: the time[/bold]")
    shared.print_lines(console, *race_lines(here.race))


def race_lines(result: RaceResult) -> list[str]:
    """Say how the race ended, or why there was none."""
    from seqloom.profiling.race import LEAST_GAIN

    what = f"{RANKS} processes, batches of one document of {LONGEST:,} tokens and {SHORT} of {SHORTEST} - {LONGER}"
    predicted = (
        f"Measured on {what}: by a profile made in a few seconds (off by {result.calibration_error:.0%} on its own "
        f"trials) a fixed degree takes {result.predicted:.2f}x the time of a plan per step."
    )
    if result.median is None or result.interval is None:
        return [predicted, f"Below {LEAST_GAIN}x a difference would drown in noise here: the two are not raced."]
    low, high = result.interval
    verdict = "" if result.conclusive else " Inconclusive: the interval spans 1, run it again on a quiet machine."
    return [
        predicted,
        f"Raced, the same batches in turns, {len(result.ratios)} pairs of training steps: {result.median:.2f}x in the "
        f"median, 95 % interval {low:.2f} - {high:.2f}.{verdict}",
        "One model and one kind of batch; between GPUs messages and kernels cost other times (the figures above).",
    ]
