"""``seqloom compare``: several planners over several batches, against one bound."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from seqloom.cli.shared import (
    AsJson,
    BatchSize,
    BudgetGib,
    ClusterName,
    Column,
    Lengths,
    MaxLength,
    ModelName,
    ProfileName,
    Seed,
    ShardingName,
    Skip,
    Tokenizer,
    print_json,
)
from seqloom.errors import SeqloomError

if TYPE_CHECKING:
    from seqloom.cli.shared import Outcome, Workload
    from seqloom.cost import CostModel

Planners = Annotated[
    str,
    typer.Option(
        "--planners",
        help="Names with commas between; static:64 fixes the degree, pipeline:4 has 4 stages, strategies need sharding "
        "free. "
        "Published ones: flexsp, te-cp, llama-cp, hybrid-dp, megatron, zeppelin.",
    ),
]
Batches = Annotated[int, typer.Option("--batches", help="Batches to plan.")]


def compare(
    lengths: Lengths,
    cluster: ClusterName,
    model: ModelName,
    profile: ProfileName = None,
    sharding: ShardingName = "full",
    planners: Planners = "static,adaptive,flex,zones,auto",
    batch_size: BatchSize = 512,
    batches: Batches = 1,
    skip: Skip = 0,
    max_length: MaxLength = None,
    budget_gib: BudgetGib = None,
    column: Column = None,
    tokenizer: Tokenizer = None,
    seed: Seed = 0,
    json: AsJson = False,
) -> None:
    """Plan the same batches with several planners and compare the steps.

    \b
    Example:
        seqloom compare --lengths wikipedia --cluster 8x8xA100-40G --model gpt-7b \\
            --profile flexsp-a100 --planners static,flex --max-length 196608 --batches 4
    """
    from seqloom.api import cost_model
    from seqloom.cli.shared import Source, Workload, outcomes, planning
    from seqloom.planners import requested_stages

    names = planner_names(planners)
    asked = {"profile": profile, "sharding": sharding, "budget_gib": budget_gib, "max_length": max_length}
    cost = cost_model(cluster, model, **asked, stages=requested_stages(names))
    source = Source(lengths, seed, max_length, column, tokenizer)
    workload = Workload.by_count(source, batch_size, skip=skip, count=batches)
    with planning(len(names) * batches) as progress:
        rows = outcomes(names, workload.batches, cost, seed=seed, progress=progress)
    if json:
        print_json(report(cost, workload, rows, skip=skip, batch_size=batch_size))
    else:
        _print_table(cost, workload, rows)


def planner_names(text: str) -> list[str]:
    """Split a list of planners; every name must be known, and one that is given twice counts once."""
    from seqloom.planners.registry import parse_planner

    names = list(dict.fromkeys(name for name in map(str.strip, text.split(",")) if name))
    if not names:
        raise SeqloomError(f"no planner in {text!r}; name at least one, for example static,flex")
    for name in names:
        parse_planner(name)
    return names


def report(cost: CostModel, workload: Workload, rows: list[dict[str, Outcome]], **more: Any) -> dict[str, Any]:
    """One object: what was compared, and for every planner its figures as lists over the batches.

    ``published`` says of every published planner whether it reproduces its own speed-up under this profile.
    """
    from seqloom.cli.shared import setting
    from seqloom.planners.published.verdicts import verdicts

    return {
        **setting(cost),
        **workload.described(),
        "batches": len(rows),
        **more,
        "planners": columns(rows),
        "published": verdicts(list(rows[0]), cost.profile.name),
    }


def columns(rows: list[dict[str, Outcome]]) -> dict[str, dict[str, list[Any]]]:
    """Every planner's figures, each a list over the batches."""
    figures = {name: [row[name].figures() for row in rows] for name in rows[0]}
    return {name: {key: [one[key] for one in batches] for key in batches[0]} for name, batches in figures.items()}


def _print_table(cost: CostModel, workload: Workload, rows: list[dict[str, Outcome]]) -> None:
    from rich.console import Console

    from seqloom.cli.shared import heading
    from seqloom.planners.published.verdicts import verdicts
    from seqloom.view import comparison_table

    console = Console(highlight=False)
    sequences = sum(len(batch) for batch in workload.batches)
    tokens = sum(batch.tokens for batch in workload.batches)
    console.print(heading(cost), markup=False)
    console.print(f"{len(rows)} batches, {sequences:,} sequences, {tokens:,} tokens")
    for note in workload.notes():
        console.print(note, markup=False)
    told = verdicts(list(rows[0]), cost.profile.name)
    starred = [name for name, line in told.items() if line.startswith("not validated")]
    console.print(comparison_table(columns(rows), starred))
    for name, line in told.items():
        console.print(f"{'* ' if name in starred else ''}{name}: {line}.", markup=False)
    console.print("Means over the batches; the gap is to a proven lower bound, the speed-up over the first row.")
