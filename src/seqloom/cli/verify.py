"""``seqloom verify``: the same batch in one process and under several plans, compared number by number."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from seqloom.cli.shared import AsJson, print_json
from seqloom.errors import SeqloomError, unknown_name

if TYPE_CHECKING:
    from seqloom.planners.registry import PlannerChoice
    from seqloom.profiling.verify import PlanComparison

DTYPES = ("float64", "float32")
USUAL = "static,adaptive,flex,zones"

ConfigFile = Annotated[Path, typer.Argument(help="A training config, .toml.", metavar="CONFIG")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="section.key=value, instead of the config's.")]
Planners = Annotated[
    str | None,
    typer.Option("--planners", help=f"Names with commas between; without it {USUAL}, and the run's stages."),
]
Ranks = Annotated[int | None, typer.Option("--ranks", help="Threads that play ranks; without it, the config's.")]
Dtype = Annotated[str, typer.Option("--dtype", help="float64, or float32 with a wider tolerance.")]
Batches = Annotated[int, typer.Option("--batches", help="Steps that are compared.")]


def verify(
    config: ConfigFile,
    overrides: Overrides = None,
    planners: Planners = None,
    ranks: Ranks = None,
    dtype: Dtype = "float64",
    batches: Batches = 1,
    json: AsJson = False,
) -> None:
    """Show that a plan does not change the result: loss, gradient norm and every gradient.

    The first batches of a run are computed in one process, and again under a plan of every planner; of the run's
    pipeline too, if it has one, or of every strategy that it chooses from. Exit code 1 when one is out of
    tolerance. Layers run as they stand, whatever model.compile says.

    \b
    Example:
        seqloom verify recipes/tiny-cpu.toml --planners static,flex,pipeline:2
    """
    names = [name for name in map(str.strip, (USUAL if planners is None else planners).split(",")) if name]
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    if not names or batches < 1:
        raise SeqloomError(f"{len(names)} planners and {batches} batches to compare; give at least one of each")
    rows = _verified(config, overrides or [], names, ranks, dtype, batches, own=planners is None)
    passed = all(row.passed for row in rows)
    if json:
        print_json({"passed": passed, "dtype": dtype, "plans": [asdict(row) for row in rows]})
    else:
        _print_rows(rows, dtype)
    if not passed:
        raise typer.Exit(1)


def _verified(
    path: Path, overrides: list[str], names: list[str], ranks: int | None, dtype: str, batches: int, *, own: bool
) -> list[PlanComparison]:
    """Run the comparisons, with progress; `own`: of the run's own pipeline or strategies too, if it has any."""
    try:
        import torch
    except ImportError as error:
        raise SeqloomError(f"seqloom verify needs torch ({error}); pip install 'seqloom[train]'") from None
    from seqloom.cli.shared import steps
    from seqloom.cli.train import model_family_of
    from seqloom.profiling.verify import verify as compare
    from seqloom.train.config import Config
    from seqloom.train.setup import RunSetup

    loaded = Config.load(path, overrides)
    setup = RunSetup.load(loaded, ranks or loaded.run.ranks)
    config, spec, source, cost = setup.config, setup.spec, setup.source, setup.cost
    given = setup.sampler.peek(batches)
    asked: list[list[str | PlannerChoice]] = [[*names] for _ in given]
    if own and setup.planners.multi_stage:
        asked = [[*names, *setup.planners.alternatives(batch.lengths)] for batch in given]
    rows = []
    precision = getattr(torch, dtype)
    build = partial(model_family_of(config).build, config, torch.device("cpu"), precision)
    options = {"dtype": precision, "seed": config.model.seed, "build": build}
    with steps("one process", sum(map(len, asked))) as step:
        for number, (batch, planners) in enumerate(zip(given, asked, strict=True)):
            for row in compare(spec, source, batch, cost, planners, **options):
                rows.append(row)
                if step is not None:
                    step(f"batch {number}: {row.planner}")
    return rows


def _print_rows(rows: list[PlanComparison], dtype: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("planner", overflow="fold")  # a name that is cut off names nothing
    for name in ("plan", "rounds", "groups", "loss", "grad norm", "difference", ""):
        table.add_column(name, no_wrap=True)
    for row in rows:
        numbers = (f"{row.loss:.9f}", f"{row.grad_norm:.9f}", f"{row.max_relative_gradient_difference:.1e}")
        verdict = "same" if row.passed else "DIFFERS"
        table.add_row(row.planner, row.plan_hash[:8], str(row.rounds), str(row.groups), *numbers, verdict)
    console = Console(highlight=False)
    console.print(
        f"One process beside plans, {dtype}. Difference: of gradients, the largest relative one of all tensors."
    )
    console.print(table)
