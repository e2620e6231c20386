"""``seqloom simulate PLAN``: read a plan file, check every rule, run it in the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from seqloom.cli.shared import (
    AsJson,
    BudgetGib,
    ClusterName,
    ModelName,
    Picture,
    ProfileName,
    print_json,
    require_picture,
)

if TYPE_CHECKING:
    from rich.console import Console

    from seqloom.cli.shared import Outcome
    from seqloom.cost import CostModel

PlanFile = Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file, .json or .txt.")]
OwnSharding = Annotated[
    str | None, typer.Option("--sharding", help="full, hybrid or none; without it, the plan's own.")
]
RunLength = Annotated[
    int | None, typer.Option("--max-length", help="Longest sequence of the run, tokens, as when planning.")
]


def simulate(
    plan: PlanFile,
    cluster: ClusterName,
    model: ModelName,
    profile: ProfileName = None,
    sharding: OwnSharding = None,
    max_length: RunLength = None,
    budget_gib: BudgetGib = None,
    picture: Picture = None,
    json: AsJson = False,
) -> None:
    """Simulate a plan file: step time, idle, communication, memory and a timeline.

    \b
    Example:
        seqloom simulate plan.json --cluster 8x8xH200 --model llama3-8b
    """
    from seqloom.api import cost_model, simulated
    from seqloom.cli.shared import Outcome, setting
    from seqloom.plan import Plan
    from seqloom.planners.bounds import plan_bound

    require_picture(picture)
    loaded = Plan.load(plan)
    cost = cost_model(
        cluster,
        model,
        profile=profile,
        sharding=loaded.sharding if sharding is None else sharding,
        budget_gib=budget_gib,
        max_length=max_length,
        stages=max(len(pipeline.stages) for pipeline in loaded.pipelines),
    )
    simulation = simulated(loaded, cost)
    outcome = Outcome(loaded, simulation, plan_bound(loaded, cost))
    if json:
        print_json({"plan": str(plan)} | setting(cost) | outcome.described())
    else:
        _print_simulation(cost, outcome)
    if picture is not None:
        from seqloom.view import save_picture

        save_picture(picture, "seqloom simulate", lambda console: _draw_simulation(console, cost, outcome))


def _print_simulation(cost: CostModel, outcome: Outcome) -> None:
    from rich.console import Console

    _draw_simulation(Console(highlight=False), cost, outcome)


def _draw_simulation(console: Console, cost: CostModel, outcome: Outcome) -> None:
    from seqloom.cli.shared import heading
    from seqloom.view import Gantt, plan_table

    console.print(heading(cost), markup=False)
    console.print(repr(outcome.plan), markup=False)
    console.print(plan_table(outcome.plan, outcome.simulation))
    console.print(Gantt(outcome.simulation))
    console.print()
    console.print(outcome.summary(), markup=False)
