"""``seqloom plan --planner hbp``: the sequences are a data set, made into steps, with a plan for every step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from seqloom.cli.options import print_json
from seqloom.errors import SeqloomError

if TYPE_CHECKING:
    from rich.table import Table

    from seqloom.cli.workload import Workload
    from seqloom.cost import CostModel
    from seqloom.planners.hbp import Packing

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
    from seqloom.planners.hbp import hbp, plain_packing

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
    from seqloom.cli.outcome import MS, setting

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
    from seqloom.cli.outcome import MS

    found = []
    for index, level in enumerate(packing.levels):
        own = packing.step_levels == index
        batches = [packing.batch(step) for step in own.nonzero()[0].tolist()]
        found.append(
            {
                "pack_tokens": level.tokens,
                "ulysses": level.shape.ulysses,
                "ring": level.shape.ring,
                "checkpoint": level.variant.checkpoint.value,
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

    from seqloom.cli.outcome import heading
    from seqloom.view import balance_table
    from seqloom.view.numbers import duration

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

    from seqloom.view.histogram import bar
    from seqloom.view.numbers import milliseconds, percent

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
