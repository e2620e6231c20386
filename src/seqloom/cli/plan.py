"""``seqloom plan``: one batch of your own lengths -> a plan, priced, with its gap to the bound."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from seqloom.cli.options import (
    AsJson,
    BudgetGib,
    ClusterName,
    Column,
    Draw,
    Lengths,
    MaxLength,
    ModelName,
    Out,
    Picture,
    ProfileName,
    Seed,
    ShardingName,
    Skip,
    Tokenizer,
    print_json,
    require_picture,
    require_writable,
)
from seqloom.errors import SeqloomError

if TYPE_CHECKING:
    from rich.console import Console

    from seqloom.cli.outcome import Outcome
    from seqloom.cli.workload import Source, Workload
    from seqloom.cost import CostModel
    from seqloom.planners.explain import Explanation

DEFAULT_SIZE = 512

Planner = Annotated[
    str,
    typer.Option(
        "--planner",
        help="static (static:64 fixes the degree), adaptive, flexsp, flex, zones, pipeline:4 (4 stages), strategies "
        "(sharding free), exact, auto; published ones: te-cp, llama-cp, hybrid-dp, megatron, zeppelin; "
        "hbp: all sequences are made into steps.",
    ),
]
Size = Annotated[int | None, typer.Option("--batch-size", help=f"Sequences of the batch.  [default: {DEFAULT_SIZE}]")]
Explain = Annotated[bool, typer.Option("--explain", help="Say for each class of documents why it is placed so.")]
Tokens = Annotated[
    int | None,
    typer.Option("--tokens-per-batch", help="Instead: as many whole sequences as fit in this many tokens."),
]
StepTokens = Annotated[int | None, typer.Option("--tokens-per-step", help="Of hbp: tokens of a step, at most.")]


def plan(
    lengths: Lengths,
    cluster: ClusterName,
    model: ModelName,
    profile: ProfileName = None,
    sharding: ShardingName = "full",
    planner: Planner = "auto",
    batch_size: Size = None,
    tokens_per_batch: Tokens = None,
    tokens_per_step: StepTokens = None,
    skip: Skip = 0,
    max_length: MaxLength = None,
    budget_gib: BudgetGib = None,
    column: Column = None,
    tokenizer: Tokenizer = None,
    out: Out = None,
    picture: Picture = None,
    seed: Seed = 0,
    json: AsJson = False,
    view: Draw = False,
    explain: Explain = False,
) -> None:
    """Plan one batch, price the plan and say how far it is from the bound.

    \b
    Example:
        seqloom plan --lengths wikipedia --cluster 8x8xH200 --model llama3-8b --out plan.json --view
    """
    from seqloom.api import cost_model
    from seqloom.cli.outcome import outcomes, setting
    from seqloom.cli.packing import pack_steps, step_tokens
    from seqloom.cli.progress import planning
    from seqloom.cli.workload import Source
    from seqloom.planners import stages_asked

    require_writable(out)
    require_picture(picture)
    asked = {"profile": profile, "sharding": sharding, "budget_gib": budget_gib, "max_length": max_length}
    per_step = step_tokens(planner, tokens_per_step, view or explain or picture is not None)
    cost = cost_model(cluster, model, **asked, stages=stages_asked([planner]) if per_step is None else 1)
    source = Source(lengths, seed, max_length, column, tokenizer)
    workload = one_batch(source, batch_size, tokens_per_batch, skip)
    if per_step is not None:
        pack_steps(cost, workload, per_step, seed=seed, out=out, json=json)
        return
    with planning(1) as progress:
        [row] = outcomes([planner], workload.batches, cost, seed=seed, progress=progress)
    outcome = row[planner]
    if out is not None:
        outcome.plan.save(out)
    if json:
        asked = {
            "planner": planner,
            "made_by": outcome.plan.planner,
            "out": None if out is None else str(out),
        }
        reasons = {"explanation": explained(cost, outcome).as_dict()} if explain else {}
        print_json(setting(cost) | workload.described() | outcome.described() | asked | reasons)
    else:
        _print_plan(cost, workload, outcome, view)
        if explain:
            _print_reasons(cost, outcome)
        _print_end(planner, outcome, out, cost.profile.name)
    if picture is not None:
        from seqloom.view import save_picture

        save_picture(picture, "seqloom plan", lambda console: _draw_plan(console, cost, workload, outcome, True))


def one_batch(source: Source, size: int | None, tokens: int | None, skip: int) -> Workload:
    """The batch to plan: so many sequences, or so many tokens."""
    from seqloom.cli.workload import Workload

    if tokens is None:
        return Workload.by_count(source, DEFAULT_SIZE if size is None else size, skip=skip)
    if size is not None:
        raise SeqloomError(
            f"both --batch-size {size} and --tokens-per-batch {tokens} are given; "
            "a batch ends at one of them, leave the other out"
        )
    return Workload.by_tokens(source, tokens, skip=skip)


def explained(cost: CostModel, outcome: Outcome) -> Explanation:
    """Why the plan places documents as it does."""
    from seqloom.planners.explain import explain

    return explain(outcome.plan, cost)


def _print_reasons(cost: CostModel, outcome: Outcome) -> None:
    from rich.console import Console

    from seqloom.view import bounds_lines, explanation_table

    reasons = explained(cost, outcome)
    console = Console(highlight=False)
    console.print(explanation_table(reasons))
    for line in bounds_lines(reasons):
        console.print(line)


def _print_plan(cost: CostModel, workload: Workload, outcome: Outcome, view: bool) -> None:
    from rich.console import Console

    _draw_plan(Console(highlight=False), cost, workload, outcome, view)


def _draw_plan(console: Console, cost: CostModel, workload: Workload, outcome: Outcome, view: bool) -> None:
    from seqloom.cli.outcome import heading
    from seqloom.view import gantt, length_histogram, plan_table

    [batch] = workload.batches
    console.print(heading(cost), markup=False)
    console.print(f"{len(batch):,} sequences, {batch.tokens:,} tokens, longest {batch.longest:,}")
    for note in workload.notes():
        console.print(note, markup=False)
    if view:
        console.print(length_histogram(batch.lengths))
    console.print(plan_table(outcome.plan, outcome.simulation))
    if view:
        console.print(gantt(outcome.simulation))
        console.print()


def _print_end(planner: str, outcome: Outcome, out: Path | None, profile: str) -> None:
    from seqloom.planners.rivals.published import verdicts
    from seqloom.view.numbers import duration

    typer.echo(outcome.summary())
    chosen = "" if planner == outcome.plan.planner else f" (chose {outcome.plan.planner})"
    typer.echo(f"planner {planner}{chosen}, {duration(outcome.plan_ns or 0)} to plan")
    for name, line in verdicts([planner], profile).items():
        typer.echo(f"{name}: {line}")
    if out is not None:
        typer.echo(f"wrote {out}")
