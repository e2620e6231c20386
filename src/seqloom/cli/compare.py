"""``seqloom compare``: several planners over several batches, each plan beside its lower bound."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from seqloom.cli import shared
from seqloom.errors import MemoryBudgetError, SeqloomError

if TYPE_CHECKING:
    from rich.console import Console

    from seqloom.api import Evaluation
    from seqloom.cli.shared import Workload
    from seqloom.cost import CostModel

Planners = Annotated[
    str,
    Option(
        help="Names with commas between; static:64 fixes the degree, pipeline:4 has 4 stages, hydraulis needs sharding "
        "free. `seqloom list planners` names all, the published rivals among them."
    ),
]


def compare(
    cluster: shared.Cluster,
    model: shared.Model,
    lengths: shared.Lengths = shared.DEFAULT_LENGTHS,
    profile: shared.Profile = None,
    sharding: shared.Sharding = "full",
    planners: Planners = "static,adaptive,flex,zones,auto",
    batch_size: Annotated[int, Option(help="Sequences per batch.")] = 512,
    batches: Annotated[int, Option(help="Batches to plan.")] = 1,
    skip: shared.Skip = 0,
    max_length: shared.MaxLength = None,
    budget_gib: shared.BudgetGib = None,
    float8: shared.Float8 = False,
    offload: shared.Offload = "auto",
    offload_optimiser: shared.OffloadOptimiser = "auto",
    host_gib: shared.HostGib = None,
    expert: shared.Expert = "auto",
    tensor: shared.Tensor = "1",
    chunks: shared.Chunks = "1",
    column: shared.Column = None,
    tokenizer: shared.Tokenizer = None,
    chat_template: shared.ChatTemplate = None,
    csv: Annotated[Path | None, Option("--csv", help="Write a row per planner and batch to this .csv file.")] = None,
    picture: shared.Picture = None,
    html: shared.Html = None,
    seed: shared.Seed = 0,
    json: shared.AsJson = False,
) -> None:
    """Plan the same batches with several planners and compare the steps.

    A planner that cannot plan the batches has its reason in the place of its row.

    \b
    Example:
        seqloom compare --lengths wikipedia --cluster 8x8xA100-40G --model gpt-7b \\
            --profile flexsp-a100 --planners static,flex --max-length 196608 --batches 4
    """
    from seqloom.api import cost_models, evaluate_planners, with_fitting_optimiser
    from seqloom.planners import requested_stages

    shared.check_picture(picture)
    shared.check_output(html, "report", (".html",))
    shared.check_output(csv, "table", (".csv",))
    names = planner_names(planners)
    options: dict[str, Any] = {"profile": profile, "sharding": sharding, "float8": float8}
    options |= {"budget_gib": budget_gib, "max_length": max_length}
    options |= {"offload": shared.parse_offload(offload), "host_gib": host_gib}
    options |= {"expert": shared.parse_degree("expert", expert), "tensor": shared.parse_degree("tensor", tensor)}
    degrees = {name: options[name] for name in ("tensor", "expert")}
    degrees["chunks"] = shared.parse_chunks(chunks, names)
    spec, place = shared.load_model(model), shared.parse_offload(offload_optimiser)

    @cache
    def build(offloaded: bool) -> list[CostModel]:
        return cost_models(cluster, spec, **options, stages=requested_stages(names), offload_optimiser=offloaded)

    with suppress(MemoryBudgetError):
        build(place is True)  # refuses what is wrong with the options before anything is read
    source = shared.Source(lengths, seed, max_length, column, tokenizer, chat_template)
    workload = shared.Workload.by_count(source, batch_size, skip=skip, count=batches)

    refused: dict[str, SeqloomError] = {}

    def run(own: list[CostModel], last: bool = False) -> tuple[CostModel, list[dict[str, Evaluation]]]:
        refused.clear()
        with shared.planning_progress(len(names) * batches * len(own)) as progress:
            given: dict[str, Any] = {"others": own[1:], "seed": seed, "progress": progress, "refused": refused}
            given["chunks"] = degrees["chunks"]
            rows = evaluate_planners(names, workload.batches, own[0], **given)
        lacking = [error for error in refused.values() if isinstance(error, MemoryBudgetError)]
        if len(refused) == len(names) or (lacking and not last):
            raise next(iter(lacking or refused.values()))
        return own[0], rows

    try:
        cost, rows = with_fitting_optimiser(run, build, place)
    except MemoryBudgetError:  # wherever the optimiser is, some planner lacks memory: the others have rows
        cost, rows = run(build(place is True), last=True)
    if csv is not None:
        save_csv(csv, rows)
    if picture is not None:
        save_picture(picture, cost, workload, rows[0], "the first batch" if batches > 1 else "")
    shared.save_report(html, cost, rows[0], *(["the first batch"] if batches > 1 else []), *workload.notes())
    shared.report(
        json,
        lambda: comparison(cost, workload, rows, skip=skip, batch_size=batch_size, **degrees, refused=_texts(refused)),
        lambda console: _draw(console, cost, workload, rows, _texts(refused)),
    )


def _texts(refused: dict[str, SeqloomError]) -> dict[str, str]:
    return {name: str(error) for name, error in refused.items()}


def save_csv(path: Path, rows: list[dict[str, Evaluation]]) -> None:
    """Write the figures of every planner and batch, one row each; figures that are not known stay empty."""
    from csv import DictWriter

    table = [
        {"planner": name, "batch": number, **evaluation.figures()}
        for number, row in enumerate(rows)
        for name, evaluation in row.items()
    ]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows(table)


def planner_names(text: str) -> list[str]:
    """Split a list of planners and refuse unknown names."""
    from seqloom.planners.registry import parse_planner

    names = shared.split_names(text.lower(), "planner", "static,flex")
    for name in names:
        parse_planner(name)
    return names


def comparison(cost: CostModel, workload: Workload, rows: list[dict[str, Evaluation]], **more: Any) -> dict[str, Any]:
    """Return what was compared and the figures of every planner as lists over the batches, by JSON keys.

    ``published`` says of every published planner whether it reproduces its own speed-up under this profile.
    """
    from seqloom.planners.registry import verdicts

    return {
        **shared.cost_dict(cost),
        **workload.as_dict(),
        "batches": len(rows),
        **more,
        "planners": columns(rows),
        "published": verdicts(list(rows[0]), cost.profile.name),
    }


def columns(rows: list[dict[str, Evaluation]]) -> dict[str, dict[str, list[Any]]]:
    """Return the figures of every planner, each a list over the batches."""
    figures = {name: [row[name].figures() for row in rows] for name in rows[0]}
    return {name: {key: [one[key] for one in batches] for key in batches[0]} for name, batches in figures.items()}


def save_picture(path: Path, cost: CostModel, workload: Workload, row: dict[str, Evaluation], which: str = "") -> None:
    """Draw the steps of one batch under every planner to a file, on one time axis."""
    from seqloom.view import comparison_picture

    size = f"{len(workload.batches[0]):,} sequences on {cost.ranks} {cost.rank_word}s"
    steps = {name: (evaluation.simulation, evaluation.bound_ns) for name, evaluation in row.items()}
    notes = [shared.cost_line(cost) + (f"; {which}" if which else ""), *workload.notes()]
    comparison_picture(f"One step of {size}", steps, notes).save(path)


def _draw(
    console: Console,
    cost: CostModel,
    workload: Workload,
    rows: list[dict[str, Evaluation]],
    refused: dict[str, str],
) -> None:
    from seqloom.planners.registry import verdicts
    from seqloom.view import comparison_table

    shared.print_heading(console, cost, workload, f"{len(rows)} batch{'es' * (len(rows) > 1)}, ")
    published = verdicts(list(rows[0]), cost.profile.name)
    starred = [name for name, line in published.items() if line.startswith("not validated")]
    console.print(comparison_table(columns(rows), starred))
    shared.print_lines(
        console,
        *(f"{name}: not planned, {reason}" for name, reason in refused.items()),
        *(f"{'* ' if name in starred else ''}{name}: {line}." for name, line in published.items()),
        "Means over the batches; the gap is to a proven lower bound, the speed-up over the first row.",
    )
