"""``seqloom propose``: a data set and a cluster -> the strategies that a run should choose from at every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from seqloom.cli.shared import (
    AsJson,
    BudgetGib,
    ClusterName,
    Column,
    Lengths,
    MaxLength,
    ModelName,
    OutStrategies,
    ProfileName,
    Seed,
    Tokenizer,
    print_json,
    require_writable,
)
from seqloom.errors import SeqloomError

if TYPE_CHECKING:
    import numpy as np
    from rich.table import Table

    from seqloom.cli.shared import Source
    from seqloom.cost import CostModel
    from seqloom.planners.hydraulis import Strategy

StepTokens = Annotated[int, typer.Option("--tokens-per-step", help="Tokens of an optimiser step.")]
Sequences = Annotated[int, typer.Option("--sequences", help="Sequences that stand for the data; a file is read whole.")]
Steps = Annotated[int, typer.Option("--steps", help="Steps of the data on which the strategies are tried.")]
Most = Annotated[int, typer.Option("--most", help="Strategies to propose, at most.")]


def propose(
    lengths: Lengths,
    cluster: ClusterName,
    model: ModelName,
    tokens_per_step: StepTokens,
    max_length: MaxLength = None,
    profile: ProfileName = None,
    budget_gib: BudgetGib = None,
    sequences: Sequences = 20_000,
    steps: Steps = 32,
    most: Most = 8,
    column: Column = None,
    tokenizer: Tokenizer = None,
    out: OutStrategies = None,
    seed: Seed = 0,
    json: AsJson = False,
) -> None:
    """Propose strategies for a data set: lists of pipelines side by side, of which every step takes the best one.

    \b
    Example:
        seqloom propose --lengths wikipedia --cluster 4x8xH100 --model llama3-8b \\
            --max-length 65536 --tokens-per-step 1048576 --out strategies.json
    """
    from seqloom.api import cost_model
    from seqloom.cli.shared import Source
    from seqloom.cli.shared import steps as progress
    from seqloom.planners.hydraulis import propose_strategies, strategies_to_json

    require_writable(out, "strategies", (".json",))
    counts = {"tokens-per-step": tokens_per_step, "sequences": sequences, "steps": steps, "most": most}
    for name, value in counts.items():
        if value < 1:
            raise SeqloomError(f"--{name} {value}; give 1 or more")
    asked = {"profile": profile, "budget_gib": budget_gib, "max_length": max_length}
    cost = cost_model(cluster, model, sharding="free", **asked, stages=2)
    source = Source(lengths, seed, max_length, column, tokenizer)
    data, dropped = source.read(sequences)
    with progress("proposing strategies", 2) as begin:
        found = propose_strategies(data, cost, tokens_per_step=tokens_per_step, most=most, seed=seed)
        if begin is not None:
            begin(f"trying {len(found)} strategies")
        trial = tried(data, found, cost, tokens_per_step, steps)
    if out is not None:
        out.write_text(strategies_to_json(found) + "\n", encoding="utf-8")
    if json:
        asked = {"tokens_per_step": tokens_per_step, "out": None if out is None else str(out)}
        print_json(_report(cost, source, data, dropped, found, trial) | asked)
    else:
        _print(cost, source, data, dropped, found, trial)
        if out is not None:
            typer.echo(f"wrote {out}")


@dataclass(frozen=True, slots=True)
class Trial:
    """Strategies on some steps of the data.

    Attributes:
        chosen: of every step the index of the strategy that is fastest.
        step_ns: predicted, of every step under it.
        fixed: the one strategy that is fastest where it is kept for all of these steps.
        fixed_ns: its steps.
    """

    chosen: tuple[int, ...]
    step_ns: tuple[int, ...]
    fixed: int
    fixed_ns: tuple[int, ...]

    def share(self, strategy: int) -> float:
        """Part of the steps that a strategy is chosen for."""
        return self.chosen.count(strategy) / len(self.chosen)

    def mean_ns(self, strategy: int) -> float | None:
        """Its mean step where it is chosen; None: nowhere."""
        own = [ns for ns, each in zip(self.step_ns, self.chosen, strict=True) if each == strategy]
        return sum(own) / len(own) if own else None

    @property
    def gain(self) -> float:
        """How much longer the steps take when the best single strategy is kept."""
        return sum(self.fixed_ns) / sum(self.step_ns)


def tried(data: np.ndarray, strategies: Sequence[Strategy], cost: CostModel, tokens: int, steps: int) -> Trial:
    """Assign the first steps of the data under every strategy, by the prices that choosing looks at.

    Args:
        data: int64[n] tokens, cut into steps of at most ``tokens`` in their order.
        strategies: to choose from; the first holds every document.
        cost: prices them.
        tokens: of a step.
        steps: at most.
    """
    from itertools import islice

    from seqloom.describe import batches_by_tokens
    from seqloom.planners.hydraulis.costs import costs_of
    from seqloom.planners.hydraulis.dispatch import rank_strategies

    costs = costs_of(strategies, cost)
    rows = []
    for batch in islice(batches_by_tokens(data, tokens), steps):
        ranked = rank_strategies(batch.lengths, strategies, costs)
        rows.append({each.strategy: each.ns for each in ranked})
    chosen = tuple(next(iter(row)) for row in rows)
    whole = [k for k in range(len(strategies)) if all(k in row for row in rows)]
    fixed = min(whole, key=lambda k: sum(row[k] for row in rows))
    best = tuple(row[k] for row, k in zip(rows, chosen, strict=True))
    return Trial(chosen, best, fixed, tuple(row[fixed] for row in rows))


def _report(
    cost: CostModel, source: Source, data: np.ndarray, dropped: int, strategies: Sequence[Strategy], trial: Trial
) -> dict[str, Any]:
    from seqloom.cli.shared import MS, setting

    times = [trial.mean_ns(k) for k in range(len(strategies))]
    return {
        **setting(cost),
        **source.described(dropped),
        "sequences": len(data),
        "longest": int(data.max()),
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


def _print(
    cost: CostModel, source: Source, data: np.ndarray, dropped: int, strategies: Sequence[Strategy], trial: Trial
) -> None:
    from rich.console import Console

    from seqloom.cli.shared import heading
    from seqloom.view import rank_chart
    from seqloom.view.format import duration

    console = Console(highlight=False)
    console.print(heading(cost), markup=False)
    console.print(f"{len(data):,} sequences, {int(data.sum()):,} tokens, longest {int(data.max()):,}")
    for note in source.notes(dropped):
        console.print(note, markup=False)
    console.print(_table(strategies, trial))
    console.print(rank_chart(strategies, cost.node_size))
    mean = sum(trial.step_ns) / len(trial.step_ns)
    console.print(
        f"On the first {len(trial.chosen)} steps: {duration(mean)} a step; strategy {trial.fixed} kept for all takes "
        f"{trial.gain:.2f}x as long. Prices are those that choose a strategy, without the switch.",
        markup=False,
    )


def _table(strategies: Sequence[Strategy], trial: Trial) -> Table:
    """One row per strategy: pipelines, longest document, how often it is chosen."""
    from rich import box
    from rich.table import Table

    from seqloom.view.format import bar, milliseconds, percent

    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, collapse_padding=True)
    for name in ("", "pipelines", "longest", "step ms", "chosen %", " "):
        table.add_column(name, justify="left" if name in ("pipelines", " ") else "right", no_wrap=name != "pipelines")
    for k, strategy in enumerate(strategies):
        ns, share = trial.mean_ns(k), trial.share(k)
        shown = "-" if ns is None else milliseconds(ns)
        table.add_row(
            str(k), str(strategy), f"{strategy.max_tokens:,}", shown, percent(share), f"[cyan]{bar(share, 12)}"
        )
    return table
