"""What a plan of several stages must respect: how many tokens of one unit a rank can hold, by what is kept of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from seqloom.cost.stage_memory import StageMemory
from seqloom.errors import SeqloomError
from seqloom.plan import Checkpoint, Limits, Part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from seqloom.cost.model import CostModel

GIB = 1024**3


def pipeline_checkpoints(cost: CostModel) -> tuple[Checkpoint, ...]:
    """What may be kept of a unit, from the fastest choice to the one that keeps least."""
    known = {variant.checkpoint for variant in cost.engine.variants}
    if Checkpoint.PROFILE in known:
        return (Checkpoint.PROFILE,)
    return (Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL, Checkpoint.STAGE)


def host_bytes(cost: CostModel, shares: Sequence[Part], island: int) -> int:
    """Bytes of a rank before any token, on a host with these stages and islands of `island` ranks."""
    stages = [StageMemory(cost, share) for share in shares]
    return sum(stage.state_bytes(island) for stage in stages) + max(stage.working_bytes() for stage in stages)


def pipeline_limits(cost: CostModel, hosts: Sequence[Sequence[Part]], island: int) -> Limits:
    """Limits of plans whose hosts have these stages.

    The capacity of a checkpoint is what the fullest host can hold of one unit and nothing else: how many units are
    in flight is the plan's choice, and the simulator's walk checks it. SeqloomError if the state alone does not fit.

    Args:
        cost: prices and budget.
        hosts: the stages of every host.
        island: ranks that share parameter shards.
    """
    free = [cost.budget_bytes - host_bytes(cost, shares, island) for shares in hosts]
    if min(free) <= 0:
        worst = free.index(min(free))
        need = (cost.budget_bytes - free[worst]) / GIB
        raise SeqloomError(
            f"{cost.model.name} does not fit: stage {worst} needs {need:.1f} GiB per GPU for parameters, gradients, "
            f"optimiser and buffers, the budget is {cost.budget_bytes / GIB:.1f} GiB; use more stages or more GPUs, "
            f"or raise the budget above {need:.1f} GiB"
        )
    capacity = []
    for checkpoint in pipeline_checkpoints(cost):
        fits = []
        for shares, room in zip(hosts, free, strict=True):
            for share in shares:
                own = StageMemory(cost, share).holding(checkpoint, offload=False)
                fits.append(int(room // (own.held + max(own.forward, own.backward))))
        least = min(fits) if cost.most is None else min(*fits, cost.most)
        least -= least % cost.granule
        if least > 0:
            capacity.append((checkpoint, least))
    if not capacity:
        raise SeqloomError(
            f"a budget of {cost.budget_bytes / GIB:.1f} GiB holds the state of {cost.model.name} but no token; "
            "use more stages or raise the budget"
        )
    return Limits(cost.ranks, cost.node_size, cost.model.heads, tuple(capacity), cost.granule)
