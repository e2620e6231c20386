"""``seqloom propose``: the strategies (pipelines side by side) that a run on a data set should choose from per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from seqloom.cli import shared
from seqloom.errors import SeqloomError

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console
    from rich.table import Table

    from seqloom.cli.shared import Workload
    from seqloom.cost import CostModel
    from seqloom.planners.hydraulis import Strategy

Out = Annotated[Path | None, Option(help="Write the strategies to this .json file, for plan.strategies of a config.")]


def propose(
    lengths: shared.Lengths,
    cluster: shared.Cluster,
    model: shared.Model,
    tokens_per_step: Annotated[int, Option(help="Tokens of an optimiser step.")],
    max_length: shared.MaxLength = None,
    profile: shared.Profile = None,
    budget_gib: shared.BudgetGib = None,
    float8: shared.Float8 = False,
    sequences: Annotated[int, Option(help="Sequences that stand for the data; a file is read whole.")] = 20_000,
    steps: Annotated[int, Option(help="Steps of the data on which the strategies are tried.")] = 32,
    most: Annotated[int, Option(help="Strategies to propose, at most.")] = 8,
    column: shared.Column = None,
    tokenizer: shared.Tokenizer = None,
    chat_template: shared.ChatTemplate = None,
    out: Out = None,
    seed: shared.Seed = 0,
    json: shared.AsJson = False,
) -> None:
    """Propose strategies for a data set: lists of pipelines side by side, of which every step takes the best one.

    \b
    Example:
        seqloom propose --lengths wikipedia --cluster 4x8xH100 --model llama3-8b \\
            --max-length 65536 --tokens-per-step 1048576 --out strategies.json
    """
    from seqloom.api import cost_model
    from seqloom.planners.hydraulis import propose_strategies, strategies_to_json

    shared.check_output(out, "strategies", (".json",))
    counts = {"tokens-per-step": tokens_per_step, "sequences": sequences, "steps": steps, "most": most}
    for name, value in counts.items():
        if value < 1:
            raise SeqloomError(f"--{name} {value}; give 1 or more")
    options = {"profile": profile, "budget_gib": budget_gib, "max_length": max_length, "float8": float8}
    cost = cost_model(cluster, shared.load_model(model), sharding="free", **options, stages=2)
    workload = shared.Workload.data_set(
        shared.Source(lengths, seed, max_length, column, tokenizer, chat_template), sequences
    )
    data = workload.batches[0].lengths
    with shared.progress_bar(2, "proposing strategies") as step:
        strategies = propose_strategies(data, cost, tokens_per_step=tokens_per_step, most=most, seed=seed)
        step(f"trying {len(strategies)} strategies")
        trial = try_strategies(data, strategies, cost, tokens_per_step, steps)
    if out is not None:
        out.write_text(strategies_to_json(strategies) + "\n", encoding="utf-8")
    request = {"tokens_per_step": tokens_per_step, "out": None if out is None else str(out)}
    shared.report(
        json,
        lambda: _as_dict(cost, workload, strategies, trial) | request,
        lambda console: _draw(console, cost, workload, strategies, trial),
    )
    if out is not None and not json:
        typer.echo(f"wrote {out}")


@dataclass(frozen=True, slots=True)
class Trial:
    """Strategies on the first steps of the data; tuples have one entry per step."""

    chosen: tuple[int, ...]  # index of the fastest strategy
    step_ns: tuple[int, ...]  # its predicted time
    fixed: int  # the strategy that is fastest where one is kept for all of these steps
    fixed_ns: tuple[int, ...]  # its predicted time

    def share(self, strategy: int) -> float:
        """Return the share of the steps that choose a strategy."""
        return self.chosen.count(strategy) / len(self.chosen)

    def mean_ns(self, strategy: int) -> float | None:
        """Return the mean time of the steps that choose a strategy; None: no step does."""
        times = [ns for ns, chosen in zip(self.step_ns, self.chosen, strict=True) if chosen == strategy]
        return sum(times) / len(times) if times else None

    @property
    def gain(self) -> float:
        """How many times as long the steps take with the best single strategy."""
        return sum(self.fixed_ns) / sum(self.step_ns)


def try_strategies(data: np.ndarray, strategies: Sequence[Strategy], cost: CostModel, tokens: int, steps: int) -> Trial:
    """Price the first steps of the data under every strategy, as the planner does when it chooses one.

    Steps are of at most ``tokens``, in the order of ``data``, int64[n] tokens. The first strategy holds every document.
    """
    from seqloom.describe import batches_by_tokens
    from seqloom.planners.hydraulis.costs import costs_of
    from seqloom.planners.hydraulis.dispatch import rank_strategies

    costs = costs_of(strategies, cost)
    rows = []  # of every step the ns of the strategies that hold it, fastest first
    for batch in islice(batches_by_tokens(data, tokens), steps):
        ranked = rank_strategies(batch.lengths, strategies, costs)
        rows.append({one.strategy: one.ns for one in ranked})
    chosen = tuple(next(iter(row)) for row in rows)
    always = [k for k in range(len(strategies)) if all(k in row for row in rows)]
    fixed = min(always, key=lambda k: sum(row[k] for row in rows))
    best = tuple(row[k] for row, k in zip(rows, chosen, strict=True))
    return Trial(chosen, best, fixed, tuple(row[fixed] for row in rows))


def _as_dict(cost: CostModel, workload: Workload, strategies: Sequence[Strategy], trial: Trial) -> dict[str, Any]:
    from seqloom.api import MS

    [data] = workload.batches
    times = [trial.mean_ns(k) for k in range(len(strategies))]
    return {
        **shared.cost_dict(cost),
        **workload.as_dict(),
        "sequences": len(data),
        "longest": data.longest,
        "strategies": [
            {
                **strategy.as_dict(),
                "name": str(strategy),
                "chosen_share": trial.share(k),
                "mean_step_ms": None if ns is None else ns / MS,
            }
            for k, (strategy, ns) in enumerate(zip(strategies, times, strict=True))
        ],
        "sample": {
            "steps": len(trial.chosen),
            "chosen": list(trial.chosen),
            "step_ms": [ns / MS for ns in trial.step_ns],
            "fixed": trial.fixed,
            "fixed_step_ms": [ns / MS for ns in trial.fixed_ns],
        },
    }


def _draw(console: Console, cost: CostModel, workload: Workload, strategies: Sequence[Strategy], trial: Trial) -> None:
    from seqloom.view import RankChart
    from seqloom.view.format import duration

    shared.print_heading(console, cost, workload)
    console.print(_table(strategies, trial))
    console.print(RankChart(strategies, cost.node_size))
    mean = sum(trial.step_ns) / len(trial.step_ns)
    shared.print_lines(
        console,
        f"On the first {len(trial.chosen)} steps: {duration(mean)} a step; strategy {trial.fixed} kept for all takes "
        f"{trial.gain:.2f}x as long. Prices are those that choose a strategy, without the switch.",
    )


def _table(strategies: Sequence[Strategy], trial: Trial) -> Table:
    """Draw one row per strategy: pipelines, longest document, how often steps choose it."""
    from seqloom.view.format import bar, milliseconds, percent, table_of

    names = ("", "pipelines", "longest", "step ms", "chosen %", " ")
    table = table_of(names, left=("pipelines", " "), folding="pipelines")
    for k, strategy in enumerate(strategies):
        ns, share = trial.mean_ns(k), trial.share(k)
        shown = "-" if ns is None else milliseconds(ns)
        table.add_row(
            str(k), str(strategy), f"{strategy.max_tokens:,}", shown, percent(share), f"[cyan]{bar(share, 12)}"
        )
    return table
