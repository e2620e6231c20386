"""``seqloom plan --planner hbp``: the sequences are a data set, made into steps, with a plan for every step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seqloom.cli.shared import (
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
    from rich.table import Table

    from seqloom.cli.shared import Outcome, Source, Workload
    from seqloom.cost import CostModel
    from seqloom.packing import Packing
    from seqloom.planners.explain import Explanation


NAME = "hbp"


def step_tokens(planner: str, tokens_per_step: int | None, drawn: bool) -> int | None:
    """Tokens of a step where a data set is to be packed, None where a batch is to be planned.

    Refuses options that do not go together.

    Args:
        planner: its name.
        tokens_per_step: as given.
        drawn: whether one plan is to be drawn or explained.
    """
    if planner != NAME:
        if tokens_per_step is not None:
            raise SeqloomError(
                f"--tokens-per-step {tokens_per_step} with planner {planner!r}, which plans one batch; "
                "use --tokens-per-batch, or planner hbp"
            )
        return None
    if tokens_per_step is None:
        raise SeqloomError("planner 'hbp' makes steps of a data set; say how large one is with --tokens-per-step N")
    if drawn:
        raise SeqloomError(
            "--view, --explain and --picture show one plan, hbp makes one per step; write them with --out and look at "
            "one with seqloom simulate"
        )
    return tokens_per_step


def pack_steps(
    cost: CostModel, workload: Workload, tokens_per_step: int, *, seed: int, out: Path | None, json: bool
) -> None:
    """Pack, report beside plain packing, and write one plan per step."""
    from seqloom.packing import hbp, plain_packing

    [batch] = workload.batches
    begin = time.perf_counter_ns()
    packing = hbp(batch.lengths, cost, tokens_per_step, seed=seed)
    took = time.perf_counter_ns() - begin
    plain = plain_packing(batch.lengths, cost, tokens_per_step)
    files = [] if out is None else _save(packing, out)
    if json:
        print_json(_report(packing, plain, workload, tokens_per_step, took, files))
    else:
        _print(packing, plain, workload, took, files)


def _save(packing: Packing, out: Path) -> list[Path]:
    """Write plan-000.json, plan-001.json, ... beside the name that was given."""
    digits = len(str(packing.steps - 1))
    files = []
    for step in range(packing.steps):
        files.append(out.with_stem(f"{out.stem}-{step:0{digits}}"))
        plan = packing.plan(step)
        plan.validate()
        plan.save(files[-1])
    return files


def _report(
    packing: Packing, plain: Packing, workload: Workload, tokens_per_step: int, took: int, files: list[Path]
) -> dict[str, Any]:
    from seqloom.cli.shared import MS, setting

    [batch] = workload.batches
    return {
        **setting(packing.cost),
        **workload.described(),
        "planner": packing.name,
        "sequences": len(batch),
        "tokens": batch.tokens,
        "tokens_per_step": tokens_per_step,
        "plan_ms": took / MS,
        "levels": _levels(packing),
        "steps": [
            {"level": int(level), "documents": packing.batch(step).tolist(), "step_ms": packing.step_ns[step] / MS}
            for step, level in enumerate(packing.step_levels)
        ],
        "balance": {each.name: each.balance.as_dict() for each in (packing, plain)},
        "out": list(map(str, files)),
    }


def _levels(packing: Packing) -> list[dict[str, Any]]:
    """Of every level: its packs, how they are run, and what it has of the data set."""
    from seqloom.cli.shared import MS

    found = []
    for index, level in enumerate(packing.levels):
        own = packing.step_levels == index
        batches = [packing.batch(step) for step in own.nonzero()[0].tolist()]
        found.append(
            {
                "pack_tokens": level.tokens,
                "ulysses": level.shape.ulysses,
                "ring": level.shape.ring,
                "checkpoint": level.policy.checkpoint.value,
                "packs_per_step": level.packs,
                "steps": int(own.sum()),
                "documents": sum(map(len, batches)),
                "tokens": int(sum(packing.lengths[batch].sum() for batch in batches)),
                "step_ms": packing.step_ns[own].mean() / MS,
            }
        )
    return found


def _print(packing: Packing, plain: Packing, workload: Workload, took: int, files: list[Path]) -> None:
    from rich.console import Console

    from seqloom.cli.shared import heading
    from seqloom.view import balance_table
    from seqloom.view.format import duration

    [batch] = workload.batches
    console = Console(highlight=False)
    console.print(heading(packing.cost), markup=False)
    console.print(f"a data set of {len(batch):,} sequences, {batch.tokens:,} tokens, longest {batch.longest:,}")
    for note in workload.notes():
        console.print(note, markup=False)
    console.print(_table(packing))
    console.print(balance_table({each.name: each.balance for each in (packing, plain)}))
    whole, other = (int(each.step_ns.sum()) for each in (packing, plain))
    typer.echo(
        f"{packing.steps:,} steps, {duration(whole)} together; first-fit packing takes {duration(other)}, "
        f"{other / whole:.2f}x as long; {duration(took)} to pack"
    )
    if files:
        typer.echo(f"wrote {files[0]}" + (f" .. {files[-1].name}" if len(files) > 1 else ""))


def _table(packing: Packing) -> Table:
    """One row per level: tokens of a pack, how it is run, packs of a step, and a bar for its share of all tokens."""
    from rich import box
    from rich.table import Table

    from seqloom.view.format import bar, milliseconds, percent

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, collapse_padding=True)
    for name in ("pack of", "shape", "keeps", "packs", "steps", "sequences", "step ms", "tokens %", ""):
        table.add_column(name, justify="left" if name in ("keeps", "") else "right", no_wrap=True)
    tokens = int(packing.lengths.sum())
    for level, shown in zip(packing.levels, _levels(packing), strict=True):
        share = shown["tokens"] / tokens
        table.add_row(
            f"{level.tokens:,}",
            str(level.shape),
            shown["checkpoint"],
            f"{level.packs:,}",
            f"{shown['steps']:,}",
            f"{shown['documents']:,}",
            milliseconds(shown["step_ms"] * 1e6),
            percent(share),
            f"[cyan]{bar(share, 10)}",
        )
    return table


# ---- merged: cli.plan
# ``seqloom plan``: one batch of your own lengths -> a plan, priced, with its gap to the bound.


DEFAULT_SIZE = 512

Planner = Annotated[
    str,
    typer.Option(
        "--planner",
        help="static (static:64 fixes the degree), adaptive, flexsp, flex, zones, pipeline:4 (4 stages), hydraulis "
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
    from seqloom.cli.shared import Source, outcomes, planning, setting
    from seqloom.planners import requested_stages

    require_writable(out)
    require_picture(picture)
    asked = {"profile": profile, "sharding": sharding, "budget_gib": budget_gib, "max_length": max_length}
    per_step = step_tokens(planner, tokens_per_step, view or explain or picture is not None)
    cost = cost_model(cluster, model, **asked, stages=requested_stages([planner]) if per_step is None else 1)
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
    from seqloom.cli.shared import Workload

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
    from seqloom.cli.shared import heading
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
    from seqloom.planners.published.verdicts import verdicts
    from seqloom.view.format import duration

    typer.echo(outcome.summary())
    chosen = "" if planner == outcome.plan.planner else f" (chose {outcome.plan.planner})"
    typer.echo(f"planner {planner}{chosen}, {duration(outcome.plan_ns or 0)} to plan")
    for name, line in verdicts([planner], profile).items():
        typer.echo(f"{name}: {line}")
    if out is not None:
        typer.echo(f"wrote {out}")
