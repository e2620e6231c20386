"""``seqloom check``: what a training run will be, before it is launched."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seqloom.cli.shared import AsJson, print_json
from seqloom.errors import SeqloomError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from transformers import PreTrainedModel

    from seqloom.profiling.check import DocumentCounts, PackingComparison, PredictedSteps, RunCheck

ConfigFile = Annotated[Path, typer.Argument(help="A training config, .toml.", metavar="CONFIG")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="section.key=value, instead of the config's.")]
Ranks = Annotated[int | None, typer.Option("--ranks", help="Processes of the run; without it, the config's.")]
Batches = Annotated[int, typer.Option("--batches", help="First batches that are planned.")]


def check(
    config: ConfigFile,
    overrides: Overrides = None,
    ranks: Ranks = None,
    batches: Batches = 8,
    json: AsJson = False,
) -> None:
    """Say what a training run will be before it is launched: data, steps, predicted times and memory.

    Plans the first batches and starts nothing. Exit code 2, and the reason, when the run could not start.

    \b
    Example:
        seqloom check recipes/tiny-cpu.toml --set plan.planner=flex --batches 4
    """
    from seqloom.cli.shared import planning
    from seqloom.profiling.check import compare_packings, find_warnings, inspect_run, predict_steps
    from seqloom.train.config import Config

    loaded = Config.load(config, overrides or [])
    run = inspect_run(loaded, loaded.run.ranks if ranks is None else ranks, batches)
    if loaded.model.huggingface is not None:
        _require_attachable(loaded.model.huggingface, cut=run.setup.planners.multi_stage)
    with planning(len(run.sample) * (2 if run.has_baseline else 1)) as progress:
        made = predict_steps(run, progress)
    notes = find_warnings(run, made[0])
    packed = compare_packings([batch.lengths for batch in run.sample], run.setup.cost)
    if json:
        print_json(_report(run, made, packed, notes))
    else:
        _print(run, made, packed, notes)


def _require_attachable(folder: Path, *, cut: bool) -> None:
    """Refuse a Hugging Face model that the engine cannot run, or not in stages: the model is made without weights."""
    from seqloom.integrations.transformers import attach, model_adapter  # says what to install where torch is missing

    try:
        attached = model_adapter(attach(_without_weights(folder)))
        if cut:
            from seqloom.train.model import check_splits

            check_splits(attached)
    except SeqloomError as error:
        raise SeqloomError(f"model.huggingface = {str(folder)!r}: {error}") from None


def _without_weights(folder: Path) -> PreTrainedModel:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        described = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(described, trust_remote_code=False)
    except (ValueError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise SeqloomError(f"its config.json makes no causal model ({reason}); give the folder of one") from None


def _report(run: RunCheck, made: list[PredictedSteps], packed: PackingComparison, notes: list[str]) -> dict[str, Any]:
    """One object: the data, the run, for every planner its figures as lists over the batches, and packings of these."""
    from seqloom.cli.shared import setting

    return {
        **setting(run.setup.cost),
        "ranks": run.setup.cost.ranks,
        "steps": run.setup.steps,
        "epochs": run.setup.steps / run.training.batches,
        "training": asdict(run.training),
        "validation": None if run.validation is None else asdict(run.validation),
        "batches": [
            {"documents": len(batch), "tokens": batch.tokens, "longest": int(batch.lengths.max())}
            for batch in run.sample
        ],
        "planners": {each.planner: _figures(each) for each in made},
        "packings": {
            "tokens_per_step": packed.tokens_per_step,
            "balance": {name: balance.as_dict() for name, balance in packed.balance.items()},
            "refused": packed.refused or None,
        },
        "warnings": notes,
    }


def _figures(made: PredictedSteps) -> dict[str, Any]:
    from seqloom.cli.shared import GIB, MS

    return {
        "step_ms": [ns / MS for ns in made.step_ns],
        "bound_ms": [ns / MS for ns in made.bound_ns],
        "gap": list(made.gaps),
        "rounds": list(made.rounds),
        "plan_ms": [ns / MS for ns in made.plan_ns],
        "median_step_ms": median(made.step_ns) / MS,
        "worst_step_ms": max(made.step_ns) / MS,
        "worst_batch": made.worst,
        "worst_step_memory_gib": (made.memory[made.worst] / GIB).tolist(),
        "peak_memory_gib": made.peak_bytes / GIB,
        "balance": made.balance.as_dict(),
    }


def _print(run: RunCheck, made: list[PredictedSteps], packed: PackingComparison, notes: list[str]) -> None:
    from rich.console import Console

    from seqloom.cli.shared import GIB, heading
    from seqloom.view.format import duration

    console = Console(highlight=False, soft_wrap=True)
    lines = [heading(run.setup.cost), f"training: {_documents(run.training)}"]
    if run.validation is not None:
        lines.append(f"validation: {_documents(run.validation)}")
    epochs = run.setup.steps / run.training.batches
    lines.append(f"run: {run.setup.steps:,} steps on {run.setup.cost.ranks} ranks, {epochs:.3g} epochs")
    for line in lines:
        console.print(line, markup=False)
    console.print(_table(made))
    planned = made[0]
    held, budget = planned.memory[planned.worst], run.setup.cost.budget_bytes / GIB
    mean = sum(planned.step_ns) / len(planned.step_ns)
    console.print(
        f"Predicted from the first {len(run.sample)} batches. The longest step, batch {planned.worst}, takes at most "
        f"{held.max() / GIB:.3g} GiB on a rank (the least {held.min() / GIB:.3g}) of {budget:.3g} GiB.",
        markup=False,
    )
    console.print(f"All steps together: about {duration(mean * run.setup.steps)}.", markup=False)
    _print_balance(console, made, packed)
    for note in notes:
        console.print(f"warning: {note}", markup=False)


def _print_balance(console: Console, made: list[PredictedSteps], packed: PackingComparison) -> None:
    """How evenly ranks are used: by the planners, and by packing the same documents into other steps beforehand."""
    from seqloom.view import balance_table

    console.print(balance_table({each.planner: each.balance for each in made} | packed.balance))
    console.print(
        "DBR, ABR: tokens and attention work that ranks lack beside the one that has most; PR: padding; CR: tokens "
        "spread over several ranks.",
        markup=False,
    )
    if packed.refused:
        console.print(f"no packing beforehand: {packed.refused}", markup=False)
    else:
        console.print(
            f"hbp and first-fit choose the documents of a step themselves, at most {packed.tokens_per_step:,} tokens.",
            markup=False,
        )


def _documents(count: DocumentCounts) -> str:
    text = (
        f"{count.documents:,} documents, {count.tokens:,} tokens of which {count.valid:,} count, "
        f"longest {count.longest:,}; {count.batches:,} batches in an epoch"
    )
    changed = [f"{n:,} {what}" for n, what in ((count.truncated, "truncated"), (count.dropped, "dropped")) if n]
    return text + (f"; too long: {', '.join(changed)}, {count.lost:,} tokens lost" if changed else "")


def _table(made: list[PredictedSteps]) -> Table:
    """One row per planner: medians and the worst of step and gap, the highest peak."""
    from rich import box
    from rich.table import Table

    from seqloom.cli.shared import GIB
    from seqloom.view.format import milliseconds, percent

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, collapse_padding=True)
    table.add_column("planner", no_wrap=True)
    for name in ("step ms", "worst ms", "gap %", "worst %", "rounds", "peak GiB", "plan ms"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in made:
        table.add_row(
            each.planner,
            milliseconds(median(each.step_ns)),
            milliseconds(max(each.step_ns)),
            percent(median(each.gaps)),
            percent(max(each.gaps)),
            f"{median(each.rounds):g}",
            f"{each.peak_bytes / GIB:.3g}",
            milliseconds(median(each.plan_ns)),
        )
    return table
