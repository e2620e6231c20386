"""``seqloom plan`` and ``seqloom simulate``: plan one batch, or read a plan file, and show the step beside its bound.

With ``--planner hbp`` the sequences are a data set: Hierarchical Balance Packing makes steps of it, with a plan each.
"""

from __future__ import annotations

import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from seqloom.cli import shared
from seqloom.errors import MemoryBudgetError, SeqloomError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from seqloom.api import Evaluation
    from seqloom.cli.shared import Source, Workload
    from seqloom.cost import CostModel
    from seqloom.packing import Packing

DEFAULT_SIZE = 512

Planner = Annotated[
    str,
    Option(
        help="static (static:64 fixes the degree), adaptive, flexsp, flex, zones, pieces, pipeline:4 (4 stages), "
        "hydraulis (sharding free), exact, auto; hbp: all sequences are made into steps. `seqloom list planners` names "
        "all, the published rivals among them."
    ),
]
Tokens = Annotated[int | None, Option(help="Instead: as many whole sequences as fit in this many tokens.")]
Out = Annotated[Path | None, Option(help="Write the plan to this file: .json, or .txt with one line per action.")]


def plan(
    cluster: shared.Cluster,
    model: shared.Model,
    lengths: shared.Lengths = shared.DEFAULT_LENGTHS,
    profile: shared.Profile = None,
    sharding: shared.Sharding = "full",
    planner: Planner = "auto",
    batch_size: Annotated[int | None, Option(help=f"Sequences of the batch.  [default: {DEFAULT_SIZE}]")] = None,
    tokens_per_batch: Tokens = None,
    tokens_per_step: Annotated[int | None, Option(help="Of hbp: tokens of a step, at most.")] = None,
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
    out: Out = None,
    picture: shared.Picture = None,
    trace: shared.Trace = None,
    html: shared.Html = None,
    seed: shared.Seed = 0,
    json: shared.AsJson = False,
    view: Annotated[bool, Option("--view", help="Draw the lengths and the timeline as well.")] = False,
    explain: Annotated[bool, Option("--explain", help="Say for each class of documents why it is placed so.")] = False,
) -> None:
    """Plan one batch, price the plan and say how far it is from the bound.

    \b
    Example:
        seqloom plan --lengths wikipedia --cluster 8x8xH200 --model llama3-8b --out plan.json --view
    """
    from seqloom.api import cost_models, degrees_of, evaluate_planners, with_fitting_optimiser
    from seqloom.cost import MadeFor
    from seqloom.planners import PLANNERS, requested_stages

    shared.check_output(out)
    shared.check_picture(picture)
    shared.check_output(trace, "trace", (".json",))
    shared.check_output(html, "report", (".html",))
    planner = planner.lower()
    packs = planner in PLANNERS and PLANNERS[planner].packs_dataset
    _check_step_tokens(planner, packs, tokens_per_step, drawn=view or explain or any((picture, trace, html)))
    options: dict[str, Any] = {"profile": profile, "sharding": sharding, "float8": float8}
    options |= {"budget_gib": budget_gib, "max_length": max_length}
    options |= {"offload": shared.parse_offload(offload), "host_gib": host_gib}
    options |= {"expert": shared.parse_degree("expert", expert), "tensor": shared.parse_degree("tensor", tensor)}
    options["stages"] = 1 if packs else requested_stages([planner])
    chunk_count = shared.parse_chunks(chunks, [planner])
    spec, place = shared.load_model(model), shared.parse_offload(offload_optimiser)

    @cache
    def build(offloaded: bool) -> list[CostModel]:
        return cost_models(cluster, spec, **options, offload_optimiser=offloaded)

    with suppress(MemoryBudgetError):
        build(place is True)  # refuses what is wrong with the options before anything is read
    source = shared.Source(lengths, seed, max_length, column, tokenizer, chat_template)
    if tokens_per_step is not None:
        costs = with_fitting_optimiser(lambda own: own, build, place)
        workload = _workload(source, batch_size, tokens_per_batch, skip)
        _pack_steps(costs, workload, tokens_per_step, seed=seed, out=out, json=json)
        return
    workload = _workload(source, batch_size, tokens_per_batch, skip)

    def run(own: list[CostModel]) -> tuple[CostModel, Evaluation]:
        with shared.planning_progress(len(own)) as progress:
            given: dict[str, Any] = {"others": own[1:], "chunks": chunk_count, "seed": seed, "progress": progress}
            [row] = evaluate_planners([planner], workload.batches, own[0], **given)
        degrees = degrees_of(row[planner].plan)
        return next(cost for cost in own if cost.degrees == degrees), row[planner]

    cost, evaluation = with_fitting_optimiser(run, build, place)
    if out is not None:
        MadeFor.of(cost).on(evaluation.plan).save(out)

    def draw(console: Console) -> None:
        _draw_plan(console, cost, workload, evaluation, view)
        if explain:
            _draw_explanation(console, cost, evaluation)
        _print_end(planner, evaluation, out, cost)

    _save_views(picture, trace, cost, evaluation, *workload.notes())
    shared.save_report(html, cost, {planner: evaluation}, *workload.notes())
    shared.report(json, lambda: _as_dict(cost, workload, evaluation, planner, out, explain), draw)


def simulate(
    plan: Annotated[Path, Argument(metavar="PLAN", help="Plan file, .json or .txt.")],
    cluster: Annotated[str | None, Option(help="Preset, spelling or file; without it, the plan's own.")] = None,
    model: Annotated[
        str | None, Option(help="Preset, folder, config.json or hub name; without it, the plan's own.")
    ] = None,
    profile: Annotated[str | None, Option(help="Constants by name or file; without it, the plan's own.")] = None,
    sharding: Annotated[str | None, Option(help="full, hybrid or none; without it, the plan's own.")] = None,
    max_length: Annotated[int | None, Option(help="Longest sequence of the run, tokens, as when planning.")] = None,
    budget_gib: shared.BudgetGib = None,
    float8: shared.Float8 = False,
    offload_optimiser: shared.OffloadOptimiser = "auto",
    host_gib: shared.HostGib = None,
    picture: shared.Picture = None,
    trace: shared.Trace = None,
    html: shared.Html = None,
    json: shared.AsJson = False,
) -> None:
    """Simulate a plan file: step time, idle, communication, memory and a timeline.

    The file says what the plan was made for; options that are given take its place, and differences are named.

    \b
    Example:
        seqloom simulate plan.json
    """
    from seqloom.api import cost_model_of, evaluate, with_fitting_optimiser
    from seqloom.cost import MadeFor
    from seqloom.plan import Plan

    shared.check_picture(picture)
    shared.check_output(trace, "trace", (".json",))
    shared.check_output(html, "report", (".html",))
    loaded = Plan.load(plan)
    made_for = MadeFor.read(loaded)
    options: dict[str, Any] = {"profile": profile, "sharding": sharding, "float8": float8 or None}
    options |= {"budget_gib": budget_gib, "max_length": max_length, "host_gib": host_gib}
    spec = None if model is None else shared.load_model(model)

    def build(offloaded: bool) -> list[CostModel]:
        return [cost_model_of(loaded, cluster, spec, **options, offload_optimiser=offloaded)]

    place = shared.parse_offload(offload_optimiser)
    if place == "auto" and made_for is not None and "offload_optimiser" in made_for.options:
        place = True
    cost, evaluation = with_fitting_optimiser(lambda own: (own[0], evaluate(loaded, own[0])), build, place)
    _save_views(picture, trace, cost, evaluation)
    shared.save_report(html, cost, {evaluation.plan.planner or plan.name: evaluation})
    differences = [] if made_for is None else made_for.differences(cost)
    shared.report(
        json,
        lambda: {"plan": str(plan)} | shared.cost_dict(cost) | {"differences": differences} | evaluation.as_dict(),
        lambda console: _draw_simulation(console, cost, evaluation, differences),
    )


def _save_views(picture: Path | None, trace: Path | None, cost: CostModel, evaluation: Evaluation, *notes: str) -> None:
    """Draw lengths and timeline of a plan to a file, and write its trace, where one is named."""
    from seqloom.view import plan_picture
    from seqloom.view.trace import save_trace

    if picture is not None:
        made_by = f"planner {evaluation.plan.planner}; " if evaluation.plan.planner else ""
        lines = [shared.cost_line(cost), f"{made_by}{evaluation.plan.tokens:,} tokens", *notes]
        plan_picture(evaluation.plan, evaluation.simulation, evaluation.bound_ns, lines).save(picture)
    if trace is not None:
        save_trace(trace, evaluation.simulation, title=repr(evaluation.plan))


def _workload(source: Source, size: int | None, tokens: int | None, skip: int) -> Workload:
    """Take the batch to plan: by a number of sequences, or of tokens."""
    if tokens is None:
        return shared.Workload.by_count(source, DEFAULT_SIZE if size is None else size, skip=skip)
    if size is not None:
        raise SeqloomError(
            f"both --batch-size {size} and --tokens-per-batch {tokens} are given; "
            "a batch ends at one of them, leave the other out"
        )
    return shared.Workload.by_tokens(source, tokens, skip=skip)


def _as_dict(
    cost: CostModel, workload: Workload, evaluation: Evaluation, planner: str, out: Path | None, explain: bool
) -> dict[str, Any]:
    from seqloom.planners.explain import explain as explanation_of

    content = {
        **shared.cost_dict(cost),
        **workload.as_dict(),
        **evaluation.as_dict(),
        "planner": planner,
        "made_by": evaluation.plan.planner,
        "out": None if out is None else str(out),
    }
    return content | ({"explanation": explanation_of(evaluation.plan, cost).as_dict()} if explain else {})


def _draw_plan(console: Console, cost: CostModel, workload: Workload, evaluation: Evaluation, view: bool) -> None:
    from seqloom.view import Gantt, LengthHistogram, plan_table

    shared.print_heading(console, cost, workload)
    if view:
        console.print(LengthHistogram(workload.batches[0].lengths))
    console.print(plan_table(evaluation.plan, evaluation.simulation))
    if view:
        console.print(Gantt(evaluation.simulation))
        console.print()


def _draw_simulation(console: Console, cost: CostModel, evaluation: Evaluation, differences: list[str]) -> None:
    from seqloom.view import Gantt, plan_table

    shared.print_lines(console, shared.cost_line(cost), repr(evaluation.plan), *differences)
    console.print(plan_table(evaluation.plan, evaluation.simulation))
    console.print(Gantt(evaluation.simulation))
    shared.print_lines(console, "", shared.evaluation_line(evaluation, cost))
    if line := shared.experts_line(cost, evaluation):
        shared.print_lines(console, line)


def _draw_explanation(console: Console, cost: CostModel, evaluation: Evaluation) -> None:
    from seqloom.planners.explain import explain
    from seqloom.view import bounds_lines, explanation_table

    explanation = explain(evaluation.plan, cost)
    console.print(explanation_table(explanation))
    for line in bounds_lines(explanation):
        console.print(line)


def _print_end(planner: str, evaluation: Evaluation, out: Path | None, cost: CostModel) -> None:
    from seqloom.api import chunk_count
    from seqloom.planners.registry import verdicts
    from seqloom.view.format import duration

    typer.echo(shared.evaluation_line(evaluation, cost))
    if line := shared.experts_line(cost, evaluation):
        typer.echo(line)
    chosen = "" if planner == evaluation.plan.planner else f" (chose {evaluation.plan.planner})"
    chunks = chunk_count(evaluation.plan)
    chosen += f", {chunks} chunks per pipeline rank" if chunks > 1 else ""
    typer.echo(f"planner {planner}{chosen}, {duration(evaluation.planning_ns or 0)} to plan")
    for name, line in verdicts([planner], cost.profile.name).items():
        typer.echo(f"{name}: {line}")
    if out is not None:
        typer.echo(f"wrote {out}")


# Packing a data set into steps: --planner hbp.


def _check_step_tokens(planner: str, packs: bool, tokens_per_step: int | None, *, drawn: bool) -> None:
    """Refuse options that do not fit the planner: one that packs a data set makes many plans, of a given size."""
    if not packs and tokens_per_step is not None:
        raise SeqloomError(
            f"--tokens-per-step {tokens_per_step} with planner {planner!r}, which plans one batch; "
            "use --tokens-per-batch, or planner hbp"
        )
    if packs and tokens_per_step is None:
        raise SeqloomError("planner 'hbp' makes steps of a data set; say how large one is with --tokens-per-step N")
    if packs and drawn:
        raise SeqloomError(
            "--view, --explain, --picture, --trace and --html show one plan, hbp makes one per step; write them with "
            "--out and look at one with seqloom simulate"
        )


def _pack_steps(
    costs: list[CostModel], workload: Workload, tokens_per_step: int, *, seed: int, out: Path | None, json: bool
) -> None:
    """Pack the data set with hbp and with first-fit, report both, and write hbp's plans, one file per step."""
    from seqloom.api import MS
    from seqloom.packing import hbp, plain_packing
    from seqloom.planners.registry import fastest

    [batch] = workload.batches

    def pack(cost: CostModel) -> tuple[int, Packing]:
        packing = hbp(batch.lengths, cost, tokens_per_step, seed=seed)
        return int(packing.step_ns.sum()), packing

    begin = time.perf_counter_ns()
    packing = fastest(costs, pack)
    packing_ns = time.perf_counter_ns() - begin
    plain = plain_packing(batch.lengths, packing.cost, tokens_per_step)
    files = [] if out is None else _save_steps(packing, out)
    shared.report(
        json,
        lambda: {
            **shared.cost_dict(packing.cost),
            **workload.as_dict(),
            "planner": packing.name,
            "sequences": len(batch),
            "tokens": batch.tokens,
            "tokens_per_step": tokens_per_step,
            "plan_ms": packing_ns / MS,
            "levels": _level_figures(packing),
            "steps": [
                {"level": int(level), "documents": packing.batch(step).tolist(), "step_ms": packing.step_ns[step] / MS}
                for step, level in enumerate(packing.step_levels)
            ],
            "balance": {one.name: one.balance.as_dict() for one in (packing, plain)},
            "out": list(map(str, files)),
        },
        lambda console: _draw_packing(console, packing, plain, workload, packing_ns, files),
    )


def _save_steps(packing: Packing, out: Path) -> list[Path]:
    """Write plan-000.json, plan-001.json, ... beside the name that was given."""
    from seqloom.cost import MadeFor

    digits = len(str(packing.steps - 1))
    files = [out.with_stem(f"{out.stem}-{step:0{digits}}") for step in range(packing.steps)]
    for step, file in enumerate(files):
        plan = packing.plan(step)
        plan.validate()
        MadeFor.of(packing.cost).on(plan).save(file)
    return files


def _level_figures(packing: Packing) -> list[dict[str, Any]]:
    """Return of every packing level its packs, how ranks run them, and its share of the data set, by JSON keys."""
    from seqloom.api import MS

    rows = []
    for index, level in enumerate(packing.levels):
        here = packing.step_levels == index
        batches = [packing.batch(step) for step in here.nonzero()[0].tolist()]
        row = {
            "pack_tokens": level.tokens,
            "ulysses": level.shape.ulysses,
            "ring": level.shape.ring,
            "checkpoint": level.policy.checkpoint.value,
            "packs_per_step": level.packs,
            "steps": int(here.sum()),
            "documents": sum(map(len, batches)),
            "tokens": int(sum(packing.lengths[batch].sum() for batch in batches)),
            "step_ms": packing.step_ns[here].mean() / MS,
        }
        rows.append(row)
    return rows


def _draw_packing(
    console: Console, packing: Packing, plain: Packing, workload: Workload, packing_ns: int, files: list[Path]
) -> None:
    from seqloom.view import balance_table
    from seqloom.view.format import duration

    shared.print_heading(console, packing.cost, workload, "a data set of ")
    console.print(_level_table(packing))
    console.print(balance_table({one.name: one.balance for one in (packing, plain)}))
    total, plain_total = (int(one.step_ns.sum()) for one in (packing, plain))
    typer.echo(
        f"{packing.steps:,} steps, {duration(total)} together; first-fit packing takes {duration(plain_total)}, "
        f"{plain_total / total:.2f}x as long; {duration(packing_ns)} to pack"
    )
    if files:
        typer.echo(f"wrote {files[0]}" + (f" .. {files[-1].name}" if len(files) > 1 else ""))


def _level_table(packing: Packing) -> Table:
    """Draw one row per level: tokens of a pack, how ranks run it, packs of a step, and its share of all tokens."""
    from seqloom.api import MS
    from seqloom.view.format import bar, milliseconds, percent, table_of

    names = ("pack of", "shape", "checkpoint", "packs", "steps", "sequences", "step ms", "tokens %", "")
    table = table_of(names, left=("checkpoint", ""))
    for level, figures in zip(packing.levels, _level_figures(packing), strict=True):
        share = figures["tokens"] / int(packing.lengths.sum())
        table.add_row(
            f"{level.tokens:,}",
            str(level.shape),
            figures["checkpoint"],
            *(f"{figures[key]:,}" for key in ("packs_per_step", "steps", "documents")),
            milliseconds(figures["step_ms"] * MS),
            percent(share),
            f"[cyan]{bar(share, 10)}",
        )
    table.caption, table.caption_justify = "shape u2r4: Ulysses degree 2 and a ring of 4", "left"
    return table
