"""``seqloom train``, ``seqloom verify`` and ``seqloom replay``: train a config's model, compare its steps under several
plans with one process, gradient by gradient, or run one again that has failed."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from seqloom.cli import shared
from seqloom.errors import SeqloomError, import_extra, unknown_name

if TYPE_CHECKING:
    from rich.console import Console

    from seqloom.planners.registry import PlannerChoice
    from seqloom.profiling.replay import Replay
    from seqloom.profiling.verify import PlanComparison
    from seqloom.train.config import Config

DTYPES = ("float64", "float32")
USUAL_PLANNERS = "static,adaptive,flex,zones"
Ranks = Annotated[
    int | None, Option(callback=shared.at_least_one, help="Processes to start here; without it, the config's.")
]


def train(
    config: shared.ConfigFile,
    overrides: shared.Overrides = None,
    ranks: Ranks = None,
    share_gpu: Annotated[
        bool, Option("--share-gpu", help="More ranks than GPUs on a node, to try things out: slow, with exact results.")
    ] = False,
    json: shared.AsJson = False,
) -> None:
    """Train with a fresh plan for every step.

    Starts processes on this machine itself, or is one of those that torchrun or srun has started, on one node or
    several (recipes/launch). Goes on from the latest checkpoint of the output folder. At SIGTERM, SIGINT or SIGUSR1 it
    finishes the step, writes a checkpoint and exits with code 75.

    \b
    Example:
        seqloom train recipes/tiny-cpu.toml --ranks 4
        torchrun --nproc-per-node 4 -m seqloom train recipes/tiny-cpu.toml
    """
    from seqloom.train import Config
    from seqloom.train import train as run
    from seqloom.train.run_folder import REPORT_FILE

    loaded = Config.load(config, overrides or [])
    summary = run(loaded, ranks=ranks, share_gpu=share_gpu, show=not json, ends_process=True)
    if summary:  # of the first rank
        speed = summary["tokens_per_second"]
        text = (
            f"{summary['steps']} steps, loss {summary['first_loss']:.4f} -> {summary['final_loss']:.4f}, "
            f"{'already complete' if speed is None else f'{speed:,.0f} tokens/s'}\n"
            f"checkpoints and metrics: {loaded.run.output}\n"
            f"trained model: {loaded.run.output / 'model'}\nreport: {loaded.run.output / REPORT_FILE}"
        )
        if summary["stopped"] is not None:
            text = f"stopped after {summary['stopped']}\n{text}"
        if summary["best"] is not None:
            best = summary["best"]
            text += f"\nbest checkpoint: step {best['step']}, loss {best['loss']:.4f} on the validation documents"
        shared.report(json, lambda: summary, lambda _: typer.echo(text))


def verify(
    config: shared.ConfigFile,
    overrides: shared.Overrides = None,
    planners: Annotated[
        str | None, Option(help=f"Names with commas between; without it {USUAL_PLANNERS}, and the run's stages.")
    ] = None,
    ranks: Annotated[
        int | None, Option(callback=shared.at_least_one, help="Ranks of the plans; without it, the config's.")
    ] = None,
    gloo: Annotated[bool, Option("--gloo", help="Ranks are processes on CPUs, with gloo between them.")] = False,
    nccl: Annotated[
        bool, Option("--nccl", help="Ranks are processes on the GPUs of this machine, shared if they are fewer.")
    ] = False,
    dtype: Annotated[str, Option(help="float64, or float32 with a wider tolerance.")] = "float64",
    batches: Annotated[int, Option(callback=shared.at_least_one, help="Steps that are compared.")] = 1,
    json: shared.AsJson = False,
) -> None:
    """Show that a plan does not change the result: loss, gradient norm and every gradient.

    The first batches of a run are computed in one process, and again under a plan of every planner; of the run's
    pipeline too, if it has one, or of every strategy that it chooses from. Exit code 1 when one is out of
    tolerance. Layers run as they stand, whatever model.compile says. Ranks are threads that obey NCCL's rules, with
    replicated parameters; with --gloo or --nccl real processes, with parameters sharded as in a run.

    \b
    Example:
        seqloom verify recipes/tiny-cpu.toml --planners static,flex,pipeline:2
        seqloom verify recipes/qwen3-8xh200.toml --nccl
    """
    names = shared.split_names(USUAL_PLANNERS if planners is None else planners, "planner", USUAL_PLANNERS)
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    if gloo and nccl:
        raise SeqloomError("--gloo and --nccl: ranks talk over one of them; leave one out")
    import_extra("seqloom verify", "train", "torch")
    from seqloom.profiling.verify import check_processes
    from seqloom.train.config import Config

    loaded = Config.load(config, overrides or [])
    on = "gloo" if gloo else "nccl" if nccl else "threads"
    ranks = ranks or loaded.run.ranks
    described = check_processes(on, ranks)
    rows = _verify_batches(loaded, names, ranks, dtype, batches, planners is None, on)
    passed = all(row.passed for row in rows)
    summary = {"passed": passed, "dtype": dtype, "ranks": ranks, "on": on}
    shared.report(
        json,
        lambda: {**summary, "plans": [asdict(row) for row in rows]},
        lambda console: draw_comparisons(console, rows, f"on {described}, {dtype}"),
    )
    if not passed:
        raise typer.Exit(1)


def _verify_batches(
    config: Config, names: list[str], ranks: int, dtype: str, batches: int, with_config_planner: bool, on: str
) -> list[PlanComparison]:
    """Compare every batch under every planner, also the config's own pipeline or strategies if asked for."""
    import torch

    from seqloom.profiling.verify import plan_batch, verify, verify_on_processes
    from seqloom.train import model_family_of
    from seqloom.train.setup import RunSetup

    family = model_family_of(config)
    setup = RunSetup.load(config, ranks, describe=family.describe, show=partial(typer.echo, err=True))
    config, seed, precision = setup.config, config.model.seed, getattr(torch, dtype)
    sample = setup.sampler.peek(batches)
    planners: list[list[str | PlannerChoice]] = [[*names] for _ in sample]
    if with_config_planner and setup.planners.multi_stage:
        planners = [[*names, *setup.planners.alternatives(batch.lengths)] for batch in sample]
    planned = [plan_batch(batch, each, setup.cost, seed) for batch, each in zip(sample, planners, strict=True)]
    if on != "threads":
        return verify_on_processes(setup, planned, dtype=precision, model_family=family, on=on)
    build = partial(family.build, config, torch.device("cpu"), precision)
    options = {"dtype": precision, "seed": seed, "build": build}
    rows = []
    with shared.progress_bar(sum(map(len, planned)), "one process") as step:
        for index, batch in enumerate(sample):
            for row in verify(setup.spec, setup.source, batch, planned[index], **options):
                rows.append(row)
                step(f"batch {index}: {row.planner}")
    return rows


def replay(
    dump: Annotated[Path, Argument(help="Folder that a run has left in failed/ of its output.", metavar="DUMP")],
    dtype: Annotated[
        str | None, Option(help="What layers compute in: float64, float32 or bfloat16; without it, as in the run.")
    ] = None,
    plan: Annotated[bool, Option("--plan", help="Run it under its plan as well, with threads for ranks.")] = False,
    json: shared.AsJson = False,
) -> None:
    """Run a step again that has ended a run, on CPU in one process: loss, gradient norm, and what is not finite first.

    A step whose loss or gradient norm is no number, whose gradient is zero, or that fails the checks of a run, is saved
    with its parameters, documents and plan. Exit code 1 when its gradient is of no use here either.

    \b
    Example:
        seqloom replay runs/tiny/failed/step-00000012
        seqloom replay runs/tiny/failed/step-00000012 --dtype float64 --plan
    """
    import_extra("seqloom replay", "train", "torch")
    from seqloom.profiling.replay import DTYPES, load_dump
    from seqloom.profiling.replay import replay as run_again
    from seqloom.train import model_family_of

    found, config = load_dump(dump)
    dtype = dtype or config.model.dtype
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    result = run_again(dump, found, config, model_family_of(config), dtype=dtype, under_plan=plan)
    shared.report(json, result.as_dict, lambda console: _draw_replay(console, result))
    if result.fails:
        raise typer.Exit(1)


def _draw_replay(console: Console, result: Replay) -> None:
    shared.print_lines(
        console,
        f"step {result.step}, plan {result.plan_hash[:12]}: {result.documents:,} documents, {result.tokens:,} tokens",
        f"the run stopped here: {result.reason}",
        f"one process, {result.dtype}: loss {result.loss:.9g}, gradient norm {result.grad_norm:.9g}",
    )
    if result.plan_loss is not None:
        numbers = f"loss {result.plan_loss:.9g}, gradient norm {result.plan_grad_norm:.9g}"
        shared.print_lines(console, f"its plan, {result.dtype}: {numbers}")
    if result.first_not_finite is not None:
        shared.print_lines(console, f"first value that is no number: {result.first_not_finite}")
    elif result.fails:
        shared.print_lines(console, "no parameter has a gradient here either: look for values that overflow in a norm")
    else:
        shared.print_lines(console, "all numbers are finite here: look at the machine that ran the step")
    if result.documents_not_finite:
        numbers = ", ".join(map(str, result.documents_not_finite[:10]))
        shared.print_lines(console, f"documents whose loss is no number: {numbers}")


def draw_comparisons(console: Console, rows: list[PlanComparison], how: str) -> None:
    """Draw a line for every plan that was compared with one process."""
    from seqloom.profiling.verify import TOLERANCE
    from seqloom.view.format import table_of

    names = ("planner", "plan", "rounds", "groups", "loss", "grad norm", "difference", "")
    table = table_of(names, left=("planner", "plan", ""), folding="planner")  # a name that is cut off names nothing
    for row in rows:
        numbers = (f"{row.loss:.9f}", f"{row.grad_norm:.9f}", f"{row.max_relative_gradient_difference:.1e}")
        verdict = "same" if row.passed else "DIFFERS"
        table.add_row(row.planner, row.plan_hash[:8], str(row.rounds), str(row.groups), *numbers, verdict)
    console.print(f"One process beside plans {how}. Difference: of gradients, the largest relative one of all tensors.")
    tolerance = max(row.tolerance for row in rows)
    own = "" if tolerance in TOLERANCE.values() else ": one process differs from itself by a tenth of it, in other sums"
    console.print(f"Tolerance {tolerance:.1e}{own}.")
    console.print(table)
