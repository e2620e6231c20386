"""The Python surface: lengths, cluster and model in, a plan, its simulation or its bound out.

Names and objects are both accepted: ``cluster="8x8xH200"`` or a ``Cluster``, and so on.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from seqloom.cost import CostModel, Profile
from seqloom.describe import Batch, Cluster, ModelSpec
from seqloom.errors import SeqloomError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from seqloom.plan import Plan, Sharding
    from seqloom.simulate import Simulation

GIB = 1024**3


def cost_model(
    cluster: Cluster | str,
    model: ModelSpec | str,
    *,
    profile: Profile | Path | str | None = None,
    sharding: Sharding | str = "full",
    budget_gib: float | None = None,
    max_length: int | None = None,
    capacity: int | None = None,
    stages: int = 1,
) -> CostModel:
    """What prices plans here.

    Args:
        cluster: a cluster, its spelling (``8x8xH100``), a preset's name, or a .json or .toml file.
        model: a model, a preset's name, or the path of a Hugging Face ``config.json``.
        profile: constants, their name or file; None takes those of the cluster's device.
        sharding: over which ranks parameters are sharded: ``full``, ``hybrid`` (a node) or ``none``.
        budget_gib: memory per GPU that a plan may use; None takes the profile's own, or 0.9 of the device's.
        max_length: longest sequence of the whole run, tokens; ``static`` must hold it, and learned position
            tables grow with it.
        capacity: tokens a GPU may hold in one round; None takes what fits in memory.
        stages: of the pipelines that will be planned; with more than one, a model that only they hold is welcome.
    """
    return CostModel(
        Cluster.parse(cluster) if isinstance(cluster, str) else cluster,
        ModelSpec.load(model) if isinstance(model, str) else model,
        profile,  # pyrefly: ignore
        sharding,
        budget_gib,
        max_length,
        capacity,
        stages,
    )


def plan(
    lengths: ArrayLike | Batch,
    *,
    cluster: Cluster | str,
    model: ModelSpec | str,
    planner: str = "auto",
    profile: Profile | Path | str | None = None,
    sharding: Sharding | str = "full",
    budget_gib: float | None = None,
    max_length: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Plan:
    """Plan one step: how far each sequence of the batch is spread over the GPUs. The plan is validated.

    Args:
        lengths: tokens of every sequence of the batch; a sequence's id in the plan is its index here.
        planner: ``static`` (``static:64`` fixes the degree), ``adaptive``, ``flexsp``, ``flex``, ``zones``,
            ``pipeline`` (``pipeline:4`` has 4 stages), ``hydraulis`` (sharding free), ``exact`` or ``auto``, the best
            of all without stages; under sharding free, of strategies too.
        seed: of the planner's pseudo-random choices; same inputs and seed, same plan.
        options: of that planner, see its function in :mod:`seqloom.planners`.

    The other arguments are those of :func:`cost_model`.
    """
    from seqloom.planners import make_plan, requested_stages

    batch = lengths if isinstance(lengths, Batch) else Batch.of(lengths)
    cost = cost_model(
        cluster,
        model,
        profile=profile,
        sharding=sharding,
        budget_gib=budget_gib,
        max_length=max_length,
        stages=max(requested_stages([planner]), options.get("stages") or 1),
    )
    if max_length is not None and batch.longest > max_length:
        index = int(np.argmax(batch.lengths > max_length))
        raise SeqloomError(
            f"sequence {index} has {int(batch.lengths[index]):,} tokens, max_length is {max_length:,}; "
            "drop it first (seqloom.drop_longer) or raise max_length"
        )
    return make_plan(planner, batch.lengths, cost, seed=seed, **options)


def simulate(
    plan: Plan,
    *,
    cluster: Cluster | str,
    model: ModelSpec | str,
    profile: Profile | Path | str | None = None,
    sharding: Sharding | str | None = None,
    budget_gib: float | None = None,
    max_length: int | None = None,
) -> Simulation:
    """Run a plan in the simulator: step time, idle and communication shares, memory, a timeline.

    Without ``sharding`` the plan's own is taken; the other arguments are those of :func:`cost_model`. A plan
    that breaks a rule, or is not one for this cluster and model, is refused.
    """
    cost = cost_model(
        cluster,
        model,
        profile=profile,
        sharding=plan.sharding if sharding is None else sharding,
        budget_gib=budget_gib,
        max_length=max_length,
        stages=max(len(pipeline.stages) for pipeline in plan.pipelines),
    )
    return simulated(plan, cost)


def simulated(plan: Plan, cost: CostModel) -> Simulation:
    """Validate, check that the plan belongs to this cost model, simulate."""
    from seqloom.simulate import simulate

    plan.validate()
    require_match(plan, cost)
    simulation = simulate(plan, cost)
    _require_memory(simulation.peak_memory, cost)
    return simulation


def lower_bound(lengths: ArrayLike | Batch, cost: CostModel) -> int:
    """ns that no plan for this batch can beat under this cost model."""
    from seqloom.planners.bounds import lower_bound

    batch = lengths if isinstance(lengths, Batch) else Batch.of(lengths)
    return lower_bound(batch.lengths, cost)


def require_match(plan: Plan, cost: CostModel) -> None:
    """Refuse a plan that was made for another cluster, model or sharding, with both values."""
    layers = plan.pipelines[0].stages[-1].layers[1]
    pairs = {
        "ranks": (plan.limits.ranks, cost.ranks),
        "ranks per node": (plan.limits.node_size, cost.node_size),
        "query heads": (plan.limits.heads, cost.model.heads),
        "layers": (layers, cost.model.layers),
        "sharding": (plan.sharding.value, cost.sharding.value),
    }
    differing = [f"{mine} {what}, not {given}" for what, (mine, given) in pairs.items() if mine != given]
    if differing:
        raise SeqloomError(
            f"the plan is not one for {cost.cluster.name}, {cost.model.name} and {cost.sharding} sharding: "
            f"it has {'; '.join(differing)}; give what it was made for, or plan again"
        )


def _require_memory(peak_memory: np.ndarray, cost: CostModel) -> None:
    rank = int(np.argmax(peak_memory))
    if peak_memory[rank] > cost.budget_bytes:
        raise SeqloomError(
            f"the plan needs {peak_memory[rank] / GIB:.1f} GiB on rank {rank}, the budget here is "
            f"{cost.budget_bytes / GIB:.1f} GiB; give the budget and the maximum length it was made with, "
            "or plan again"
        )
