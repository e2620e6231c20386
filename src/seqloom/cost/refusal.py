"""Why a model cannot be trained here, or not in this way, and the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from seqloom.cost.profile import AdditiveProfile
from seqloom.errors import SeqloomError
from seqloom.plan import Sharding

if TYPE_CHECKING:
    from seqloom.cost.model import CostModel

GIB = 1024**3


def require_tensor(cost: CostModel) -> None:
    """Refuse a tensor degree that the model or the ranks do not allow, and what published constants know nothing of."""
    if isinstance(cost.profile, AdditiveProfile) and (cost.tensor > 1 or cost.sharding == Sharding.FREE):
        what = f"tensor degree {cost.tensor}" if cost.tensor > 1 else "sharding free"
        raise SeqloomError(f"profile {cost.profile.name} has no constants for {what}; leave the profile out")
    cost.model.check_tensor(cost.tensor)
    sizes = [size for size in cost.family.sizes if cost.ranks % size == 0]
    if cost.tensor not in sizes:
        legal = [size for size in cost.model.tensor_degrees if size in sizes]
        nearest = min(legal, key=lambda t: (abs(t - cost.tensor), t))
        raise SeqloomError(
            f"tensor degree {cost.tensor} on {cost.ranks} ranks in nodes of {cost.node_size}: teams are blocks of the "
            f"group family that divide the ranks; use {nearest}"
        )


def too_small(cost: CostModel) -> SeqloomError:
    """The error that says how much memory the model's state needs on plans of one stage."""
    least = min(cost.engine.fixed_bytes(v) for v in cost.engine.variants) / GIB
    if cost.sharding == Sharding.FREE:
        return SeqloomError(
            f"{cost.model.name} does not fit in one stage: its parameters and gradients, split over teams of "
            f"{cost.tensor}, a part of the optimiser and buffers need {least:.1f} GiB per GPU, the budget is "
            f"{cost.budget_bytes / GIB:.1f} GiB; use more stages or a larger tensor degree, take a smaller model, or "
            f"raise the budget above {least:.1f} GiB"
        )
    way = "use more GPUs" if cost.island_size == cost.ranks else "shard wider (sharding full)"
    return SeqloomError(
        f"{cost.model.name} does not fit: parameters, gradients, optimiser and buffers need "
        f"{least:.1f} GiB per GPU (sharded over {cost.island_size} ranks), "
        f"the budget is {cost.budget_bytes / GIB:.1f} GiB; {way}, take a smaller model, "
        f"or raise the budget above {least:.1f} GiB"
    )
