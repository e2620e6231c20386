"""``seqloom check``: data, steps, predicted times and memory of a training run, before it is launched."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from seqloom.cli import shared
from seqloom.errors import import_extra

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from seqloom.describe import ModelSpec
    from seqloom.profiling.check import (
        DocumentCounts,
        OffloadedOptimiser,
        OffloadedSteps,
        PackingComparison,
        PredictedSteps,
        RunCheck,
    )
    from seqloom.train.config import Config

    Offloaded = tuple[OffloadedSteps | None, OffloadedOptimiser | None]


def check(
    config: shared.ConfigFile,
    overrides: shared.Overrides = None,
    ranks: Annotated[
        int | None, Option(callback=shared.at_least_one, help="Processes of the run; without it, the config's.")
    ] = None,
    batches: Annotated[int, Option(help="First batches that are planned.")] = 8,
    json: shared.AsJson = False,
) -> None:
    """Say what a training run will be before it is launched: data, steps, predicted times and memory.

    Plans the first batches and starts nothing; documents are prepared where the run finds them. Exit code 2, and the
    reason, when the run could not start.

    \b
    Example:
        seqloom check recipes/tiny-cpu.toml --set plan.planner=flex --batches 4
    """
    from seqloom.profiling.check import (
        OffloadedOptimiser,
        OffloadedSteps,
        compare_packings,
        find_warnings,
        inspect_run,
        predict_steps,
    )
    from seqloom.train.config import Config

    loaded = Config.load(config, overrides or [])
    show = partial(typer.echo, err=True)
    run = inspect_run(loaded, loaded.run.ranks if ranks is None else ranks, batches, _describe, show)
    trained = _check_model(loaded, run)
    with shared.planning_progress(len(run.sample) * (2 if run.has_baseline else 1)) as progress:
        planned = predict_steps(run, progress)
    notes = find_warnings(run, planned[0])
    packings = compare_packings([batch.lengths for batch in run.sample], run.setup.cost)
    steps, cost = planned[0].evaluations, run.setup.cost
    offloaded = OffloadedSteps.of(steps, cost), OffloadedOptimiser.of(steps, cost)
    shared.report(
        json,
        lambda: _as_dict(run, planned, packings, offloaded, notes, trained),
        lambda console: _draw(console, run, planned, packings, offloaded, notes, trained),
    )


def _describe(config: Config) -> ModelSpec:
    """Return the shapes of a run's model; only adapters and types that no table has need torch."""
    from seqloom.train.setup import load_model_spec

    if config.model.lora is not None:
        import_extra("checking the model of this run", "train,hf", "torch")
        from seqloom.train import model_family_of

        return model_family_of(config).describe(config)
    folder = config.model.huggingface
    return load_model_spec(config) if folder is None else shared.load_model(folder)


def _check_model(config: Config, run: RunCheck) -> int | None:
    """Refuse what the run would refuse of its model: layers, files of parameters, a checkpoint of another model.

    Loads no weights, and not even torch where the shapes of the model say all of it. Returns how many parameters
    `model.freeze` leaves to train; None: it names none.
    """
    model, resumed = config.model, run.resumed
    biased = config.optimiser.expert_bias_rate > 0
    needs_layers = biased or bool(model.freeze) or resumed is not None or model.float8 or model.compile
    if model.huggingface is None and model.parameters is None and not needs_layers:
        return None
    import_extra("checking the model of this run", "train,hf" if model.huggingface else "train", "torch")
    import torch

    from seqloom.models import use_float8
    from seqloom.train import model_family_of
    from seqloom.train.launch import check_compilers
    from seqloom.train.model import check_expert_bias, check_splits, parameter_dtypes, state_shapes

    if model.compile:
        check_compilers("cuda" if torch.cuda.is_available() else "cpu")
    adapter = model_family_of(config).build(config, torch.device("meta"), parameter_dtypes(config)[0])
    if run.setup.planners.multi_stage:
        check_splits(adapter)
    adapter.check_tp_degree(run.setup.cost.tensor)
    if model.float8:
        use_float8(adapter.layers)
    check_expert_bias(adapter, config.optimiser)
    if resumed is not None:
        resumed[1].check(resumed[0], {"model": state_shapes(adapter, config.optimiser)})
    if not model.freeze:
        return None
    return sum(each.numel() for each in adapter.module.parameters() if each.requires_grad)


def _as_dict(
    run: RunCheck,
    planned: list[PredictedSteps],
    packings: PackingComparison,
    offloaded: Offloaded,
    notes: list[str],
    trained: int | None,
) -> dict[str, Any]:
    """Return data, run, figures of every planner as lists over the batches, and packings, by JSON keys."""
    return {
        **shared.cost_dict(run.setup.cost),
        "ranks": run.setup.cost.ranks,
        "steps": run.setup.steps,
        "parameters": _parameters(run.setup.spec, trained),
        "epochs": run.setup.steps / run.training.batches,
        "training": asdict(run.training),
        "sources": [asdict(each) for each in run.sources],
        "validation": None if run.validation is None else asdict(run.validation),
        "batches": [
            {"documents": len(batch), "tokens": batch.tokens, "longest": int(batch.lengths.max())}
            for batch in run.sample
        ],
        "planners": {one.planner: _figures(one) for one in planned},
        "packings": {
            "tokens_per_step": packings.tokens_per_step,
            "balance": {name: balance.as_dict() for name, balance in packings.balance.items()},
            "refused": packings.refused or None,
        },
        "offloaded": {
            what: None if each is None else asdict(each)
            for what, each in zip(("activations", "optimiser"), offloaded, strict=True)
        },
        "warnings": notes,
    }


def _parameters(spec: ModelSpec, trained: int | None) -> dict[str, int]:
    """Return how many parameters the model has, without a table of positions, and how many are trained."""
    every = spec.parameters()
    return {"all": every, "trained": trained or spec.adapter_parameters or every}


def _figures(planned: PredictedSteps) -> dict[str, Any]:
    from seqloom.api import GIB

    figures = [each.figures() for each in planned.evaluations]
    steps = [each["step_ms"] for each in figures]
    return {
        "step_ms": steps,
        "bound_ms": [each["bound_ms"] for each in figures],
        "gap": planned.gaps,
        "rounds": [each["rounds"] for each in figures],
        "plan_ms": [each["plan_ms"] for each in figures],
        "median_step_ms": median(steps),
        "worst_step_ms": max(steps),
        "worst_batch": planned.worst,
        "worst_step_memory_gib": (planned.evaluations[planned.worst].simulation.peak_memory / GIB).tolist(),
        "peak_memory_gib": max(each["peak_memory_gib"] for each in figures),
        "balance": planned.balance.as_dict(),
    }


def _draw(
    console: Console,
    run: RunCheck,
    planned: list[PredictedSteps],
    packings: PackingComparison,
    offloaded: Offloaded,
    notes: list[str],
    trained: int | None,
) -> None:
    from seqloom.api import GIB
    from seqloom.view import balance_table
    from seqloom.view.format import duration

    typer.echo(shared.cost_line(run.setup.cost))
    if trained is not None or run.setup.spec.adapters:
        typer.echo(_trained_line(run.setup.spec, trained))
    typer.echo(f"training{', an epoch of the mixture' if run.sources else ''}: {_documents_line(run.training)}")
    taken = sum(each.taken_tokens for each in run.sources)
    for each in run.sources:
        typer.echo(
            f"  {each.path} ({100 * each.share:.3g} % of {run.setup.config.data.weigh_by}): {each.documents:,} "
            f"documents, {each.tokens:,} tokens; the run takes {each.taken_documents:,} documents "
            f"({each.passes:.3g} passes), {each.taken_tokens:,} tokens ({100 * each.taken_tokens / taken:.3g} %)"
        )
    if run.validation is not None:
        typer.echo(f"validation: {_documents_line(run.validation)}")
    steps, ranks = run.setup.steps, run.setup.cost.ranks
    typer.echo(f"run: {steps:,} steps on {ranks} ranks, {steps / run.training.batches:.3g} epochs")
    console.print(_table(planned))
    chosen = planned[0]
    memory, budget = chosen.evaluations[chosen.worst].simulation.peak_memory / GIB, run.setup.cost.budget_bytes / GIB
    mean = sum(chosen.step_ns) / len(chosen.step_ns)
    typer.echo(
        f"Predicted from the first {len(run.sample)} batches. The longest step, batch {chosen.worst}, takes at most "
        f"{memory.max():.3g} GiB on a rank (the least {memory.min():.3g}) of {budget:.3g} GiB.\n"
        f"All steps together: about {duration(mean * steps)}."
    )
    activations, optimiser = offloaded
    if activations is not None:
        longer = 100 * activations.copies_ns / (activations.step_ns - activations.copies_ns)
        typer.echo(
            f"Activations of up to {activations.layers} layers go to host memory in {activations.steps} of the steps: "
            f"at most {activations.host_bytes / GIB:.3g} GiB of a rank; copies make them {longer:.1f} % longer."
        )
    if optimiser is not None:
        where = "by the CPUs" if optimiser.update_on_host else "on the device"
        typer.echo(
            f"The optimiser is in host memory, {optimiser.host_bytes / GIB:.3g} GiB of a rank, and updated {where}: "
            f"{duration(optimiser.update_ns)} of every step."
        )
    console.print(balance_table({one.planner: one.balance for one in planned} | packings.balance))
    typer.echo(
        "DBR, ABR: tokens and attention work that ranks lack beside the one that has most; PR: padding; CR: tokens "
        "spread over several ranks."
    )
    if packings.refused:
        typer.echo(f"no packing beforehand: {packings.refused}")
    else:
        most = f"at most {packings.tokens_per_step:,} tokens"
        typer.echo(f"hbp and first-fit choose the documents of a step themselves, {most}.")
    for note in notes:
        typer.echo(f"warning: {note}")


def _trained_line(spec: ModelSpec, trained: int | None) -> str:
    """Say how many parameters are trained: those of adapters, or those that `model.freeze` leaves."""
    parameters = _parameters(spec, trained)
    share = f"{100 * parameters['trained'] / parameters['all']:.2g} %"
    counts = f"{parameters['trained']:,} of {parameters['all']:,} parameters are trained ({share})"
    if trained is None:
        return f"adapters: {counts}; the frozen ones count without gradients and moments"
    return f"frozen: {counts}; figures below count all as if they were, and are too high"


def _documents_line(count: DocumentCounts) -> str:
    text = (
        f"{count.documents:,} documents, {count.tokens:,} tokens of which {count.valid:,} count, "
        f"longest {count.longest:,}; {count.batches:,} batches in an epoch"
    )
    changed = [f"{n:,} {what}" for n, what in ((count.truncated, "truncated"), (count.dropped, "dropped")) if n]
    return text + (f"; too long: {', '.join(changed)}, {count.lost:,} tokens lost" if changed else "")


def _table(planned: list[PredictedSteps]) -> Table:
    """Draw one row per planner: medians and the worst of step and gap, the highest peak."""
    from seqloom.view.format import milliseconds, percent, table_of

    names = ("planner", "step ms", "worst ms", "gap %", "worst %", "rounds", "peak GiB", "plan ms")
    table = table_of(names, left=("planner",))
    for each in planned:
        proven = [gap for gap in each.gaps if gap is not None]
        gaps = [percent(median(proven)), percent(max(proven))] if proven else ["not proven"] * 2
        table.add_row(
            each.planner,
            milliseconds(median(each.step_ns)),
            milliseconds(max(each.step_ns)),
            *gaps,
            f"{median(one.plan.rounds for one in each.evaluations):g}",
            f"{max(one.peak_memory_gib for one in each.evaluations):.3g}",
            milliseconds(median(each.planning_ns)),
        )
    return table
