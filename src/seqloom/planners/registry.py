"""Planners by name, and the comparison of several planners over several batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from seqloom.cost import CostModel
from seqloom.describe import Batch
from seqloom.errors import SeqloomError, unknown_name
from seqloom.plan import Plan, Sharding

PLANNERS: tuple[str, ...] = ("static", "adaptive", "flexsp", "flex", "zones", "pipeline", "strategies", "exact", "auto")

RIVALS: tuple[str, ...] = ("te-cp", "llama-cp", "hybrid-dp", "megatron", "zeppelin")
"""Published planners to compare with; ``auto`` does not ask them."""

OFFLINE: tuple[str, ...] = ("hbp",)
"""Planners of whole data sets: they decide which documents make a batch, and plan no batch that is given."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and what it took to make it."""

    plan: Plan
    plan_ns: int
    """Wall time from lengths to the validated and hashed plan."""


def planner(name: str) -> Callable[..., Plan]:
    """The planner of that name: ``(lengths, cost, **options) -> Plan``. Modules are loaded on first use."""
    if name == "static":
        from seqloom.planners.uniform import plan_static

        return plan_static
    if name == "adaptive":
        from seqloom.planners.uniform import plan_adaptive

        return plan_adaptive
    if name == "flexsp":
        from seqloom.planners.published.flexsp import plan_flexsp

        return plan_flexsp
    if name == "flex":
        from seqloom.planners.flex import plan_flex

        return plan_flex
    if name == "zones":
        from seqloom.planners.zones import plan_zones

        return plan_zones
    if name == "pipeline":
        from seqloom.planners.pipeline import plan_pipeline

        return plan_pipeline
    if name == "strategies":
        from seqloom.planners.hydraulis import plan_strategies

        return plan_strategies
    if name == "exact":
        from seqloom.planners.exact import plan_exact

        return plan_exact
    if name == "auto":
        from seqloom.planners.auto import plan_auto

        return plan_auto
    if name in RIVALS:
        from seqloom.planners.published import RIVAL_PLANNERS

        return RIVAL_PLANNERS[name]
    raise unknown_name("planner", name, (*PLANNERS, *RIVALS))


WARMED: tuple[str, ...] = ("static", "adaptive", "flex", "zones", "pipeline", "strategies", "auto")
"""Planners that answer at once: they are asked for a tiny plan before any is timed."""

_OPTIONS = {"static": "degree", "pipeline": "stages"}
"""Planners that take a number after their name, and what it is."""


def parse_name(name: str) -> tuple[str, dict[str, Any]]:
    """Split a planner's name from its option: ``static:64`` has groups of 64 GPUs, ``pipeline:4`` has 4 stages."""
    base, colon, option = name.partition(":")
    if base in OFFLINE:
        raise SeqloomError(
            f"planner {name!r} packs a whole data set into steps of its own, it plans no batch that is given; ask "
            "seqloom plan --planner hbp --tokens-per-step N for its steps, or choose flex for your batches"
        )
    if base not in (*PLANNERS, *RIVALS):
        raise unknown_name("planner", base, (*PLANNERS, *RIVALS))
    if not colon:
        return base, {}
    if base not in _OPTIONS or not option.isdecimal() or int(option) < 1:
        raise SeqloomError(
            f"planner {name!r}: only static and pipeline take an option, a degree or a number of stages, "
            "for example static:64 or pipeline:4"
        )
    return base, {_OPTIONS[base]: int(option)}


def stages_asked(names: Sequence[str]) -> int:
    """Stages of the pipelines that these planners make, as far as their names say; 1: none makes any."""
    parsed = [parse_name(name) for name in names]
    return max((given.get("stages", 2 if base == "pipeline" else 1) for base, given in parsed), default=1)


def makes_stages(name: str) -> bool:
    """Say whether the planner of that name cuts the model into several stages."""
    base = parse_name(name)[0]
    return _OPTIONS.get(base) == "stages" or base == "strategies"


def chooses_strategies(name: str, sharding: str) -> bool:
    """Say whether the planner of that name chooses from a list of strategies, among other plans or alone."""
    return parse_name(name)[0] in ("strategies", "auto") and sharding == Sharding.FREE


def make_plan(name: str, lengths: np.ndarray, cost: CostModel, *, seed: int = 0, **options: Any) -> Plan:
    """Plan one batch with the planner of that name; the plan is validated.

    Args:
        lengths: int64[n] tokens.
        seed: start of the pseudo-random choices of planners that make any.
        options: of that planner, see its function.
    """
    base, given = parse_name(name)
    if base in ("flexsp", "flex", "strategies", "auto"):
        given["seed"] = seed
    plan = planner(base)(Batch.of(lengths).lengths, cost, **given, **options)
    plan.validate()
    return plan


def plan_batches(
    names: Sequence[str],
    batches: Sequence[np.ndarray],
    cost: CostModel,
    *,
    seed: int = 0,
    progress: Callable[[str, int], None] | None = None,
) -> list[dict[str, Planned]]:
    """Plan every batch with every planner, one after another.

    ``static`` keeps one degree for all batches, as a run would; ``auto`` also sees what the others found for a batch.

    Args:
        progress: called with the planner's name and the batch's index before each planning.

    Returns:
        one dictionary per batch, from the name as given to what it planned.
    """
    options: dict[str, dict[str, Any]] = {name: {} for name in names}
    if "static" in options:
        from seqloom.planners.uniform import fastest_static_degree

        options["static"] = {"degree": fastest_static_degree(batches, cost)}
    for name in names:  # load, and compile where that is installed, before the clock runs
        if parse_name(name)[0] in WARMED and len(batches):
            make_plan(name, batches[0][:2], cost, seed=seed, **options[name])
    results: list[dict[str, Planned]] = []
    for index, batch in enumerate(batches):
        made: dict[str, Planned] = {}
        for name in sorted(names, key=lambda name: name == "auto"):
            if progress is not None:
                progress(name, index)
            begin = time.perf_counter_ns()
            asked = [made[other].plan for other in made if other not in RIVALS]
            known = {"known": asked} if name == "auto" else {}
            plan = make_plan(name, batch, cost, seed=seed, **options[name], **known)
            assert plan.hash
            made[name] = Planned(plan, time.perf_counter_ns() - begin)
        results.append({name: made[name] for name in names})
    return results


# ---- merged: planners.choice
# A planner with its options, as a value: what a run was set to plan with, here or in another process.


@dataclass(frozen=True, slots=True)
class Choice:
    """Who plans, and how.

    Attributes:
        name: of the planner, see `make_plan`.
        options: of that planner.
        seed: of its pseudo-random choices.
    """

    name: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __str__(self) -> str:
        """Name and options, for example ``pipeline:4,1,1f1b``; of a list its length, or the only one on it."""
        return ":".join([self.name, *filter(None, [",".join(map(_spelled, self.options.values()))])])

    def plan(self, lengths: Sequence[int] | np.ndarray, cost: CostModel) -> Plan:
        """Plan one batch, int64[n] tokens; the plan is validated."""
        return make_plan(self.name, np.asarray(lengths, dtype=np.int64), cost, seed=self.seed, **self.options)


def _spelled(value: Any) -> str:
    """Spell the value of an option."""
    if not isinstance(value, tuple):
        return str(value)
    return str(value[0]) if len(value) == 1 else f"{len(value)} candidates"
