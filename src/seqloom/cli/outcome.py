"""What is reported of a plan: its simulated step beside the bound, in the units of the border."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from seqloom.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from seqloom.cost import CostModel
    from seqloom.describe import Batch
    from seqloom.plan import Plan
    from seqloom.simulate import Simulation

GIB = 1024**3
MS = 1e6
"""Nanoseconds of a millisecond."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A plan, simulated."""

    plan: Plan
    simulation: Simulation
    bound_ns: int | None
    """What no plan on the same stages beats; None where nothing is proven, see `plan_bound`."""
    plan_ns: int | None = None
    """What planning took; None for a plan that was read from a file."""

    @property
    def gap(self) -> float | None:
        """How far the step is above the bound, as a share of the bound."""
        return None if self.bound_ns is None else self.simulation.step_ns / self.bound_ns - 1

    def figures(self) -> dict[str, Any]:
        """The figures of a comparison, by their names in JSON."""
        return {
            "step_ms": self.simulation.step_ns / MS,
            "bound_ms": _ms(self.bound_ns),
            "plan_ms": _ms(self.plan_ns),
            "rounds": self.plan.rounds,
            "comm_share": float(self.simulation.comm_share),
            "idle_share": float(self.simulation.idle_share),
            "peak_memory_gib": float(self.simulation.peak_memory.max()) / GIB,
            "plan_hash": self.plan.hash,
        }

    def described(self) -> dict[str, Any]:
        """One plan for a report in JSON."""
        size = {"sequences": len(self.plan.documents), "tokens": self.plan.tokens}
        cards = dict(zip(("busiest", "mean"), self.simulation.nic_shares, strict=True))
        return {"planner": self.plan.planner, **size, **self.figures(), "gap": self.gap, "nic_share": cards}

    def summary(self) -> str:
        """The step and its gap in one line of text."""
        from seqloom.view.numbers import duration

        line = f"step {duration(self.simulation.step_ns)}"
        if self.bound_ns is not None and self.gap is not None:
            which = "plan on these stages" if staged(self.plan) else "plan"
            line += f", {100 * self.gap:.1f} % above the bound of {duration(self.bound_ns)} that no {which} can beat"
        if len(self.simulation.nic_busy_ns) > 1:
            busiest, mean = (f"{100 * share:.0f} %" for share in self.simulation.nic_shares)
            line += f"; network cards in use {mean} of the time, the busiest {busiest}"
        peak = float(self.simulation.peak_memory.max()) / GIB
        return f"{line}; at most {peak:.1f} GiB per GPU; hash {self.plan.hash[:12]}"


def _ms(ns: int | None) -> float | None:
    return None if ns is None else ns / MS


def staged(plan: Plan) -> bool:
    """Whether the bound of a plan is that of its stages: several, teams, or gathered for every pass."""
    from seqloom.plan.per_pass import stages_per_pass

    lines = plan.pipelines
    teams = any(stage.tensor > 1 for line in lines for stage in line.stages)
    return teams or any(len(line.stages) > 1 or stages_per_pass(line) for line in lines)


def outcomes(
    planners: Sequence[str],
    batches: Sequence[Batch],
    cost: CostModel,
    *,
    seed: int,
    progress: Callable[[str, int], None] | None,
) -> list[dict[str, Outcome]]:
    """Plan and simulate every batch with every planner: one dictionary per batch."""
    from seqloom.api import lower_bound
    from seqloom.planners import plan_batches
    from seqloom.planners.bounds import plan_bound
    from seqloom.simulate import simulate

    planned = plan_batches(planners, [batch.lengths for batch in batches], cost, seed=seed, progress=progress)
    rows = []
    for batch, plans in zip(batches, planned, strict=True):
        alike = None if all(staged(made.plan) for made in plans.values()) else lower_bound(batch, cost)
        row = {}
        for name, made in plans.items():
            bound_ns = plan_bound(made.plan, cost) if staged(made.plan) else alike
            row[name] = Outcome(made.plan, simulate(made.plan, cost), bound_ns, made.plan_ns)
        rows.append(row)
    return rows


def setting(cost: CostModel) -> dict[str, Any]:
    """What plans were priced with, for a report in JSON."""
    return {
        "version": __version__,
        "cluster": cost.cluster.name,
        "model": cost.model.name,
        "profile": cost.profile.name,
        "sharding": cost.sharding.value,
        "budget_gib": cost.budget_bytes / GIB,
    }


def heading(cost: CostModel) -> str:
    """The same in one line of text."""
    return (
        f"{cost.cluster.name}, {cost.model.name}, profile {cost.profile.name}, "
        f"{cost.sharding} sharding, {cost.budget_bytes / GIB:.1f} GiB per GPU"
    )
