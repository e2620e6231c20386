"""Why a model cannot be trained here, or not in this way, and the way out."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from seqloom.cost.profile import AdditiveProfile
from seqloom.errors import SeqloomError
from seqloom.plan import Sharding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from seqloom.cost.model import CostModel

GIB = 1024**3


def require_sizes(budget_gib: float | None, max_length: int | None) -> None:
    """Refuse a memory budget and a longest sequence that hold nothing."""
    if budget_gib is not None and not 0 < budget_gib < math.inf:
        raise SeqloomError(f"a memory budget of {budget_gib} GiB holds nothing; give a number above 0")
    if max_length is not None and max_length < 1:
        raise SeqloomError(f"a longest sequence of {max_length} tokens; give 1 or more, or leave it out")


def require_tensor(cost: CostModel) -> None:
    """Refuse a tensor degree that the model or the ranks do not allow, and what published constants know nothing of."""
    if isinstance(cost.profile, AdditiveProfile) and (cost.tensor > 1 or cost.sharding == Sharding.FREE):
        what = f"tensor degree {cost.tensor}" if cost.tensor > 1 else "sharding free"
        raise SeqloomError(f"profile {cost.profile.name} has no constants for {what}; leave the profile out")
    cost.model.check_tensor(cost.tensor)
    sizes = [size for size in cost.family.sizes if size in cost.whole.family.sizes]
    if cost.tensor not in sizes:
        raise _no_team(cost, cost.ranks, cost.tensor, sizes, "teams are blocks of the group family")


def require_teams(cost: CostModel, ranks: int, tensor: int) -> None:
    """Refuse to plan for ranks that are not whole teams."""
    cost.model.check_tensor(tensor)
    if ranks % tensor:
        sizes = [size for size in cost.family.sizes if ranks % size == 0]
        raise _no_team(cost, ranks, tensor, sizes, "teams divide the ranks")


def _no_team(cost: CostModel, ranks: int, tensor: int, sizes: Sequence[int], rule: str) -> SeqloomError:
    legal = [size for size in cost.model.tensor_degrees if size in sizes]
    nearest = min(legal, key=lambda t: (abs(t - tensor), t))
    where = f"tensor degree {tensor} on {ranks} ranks in nodes of {cost.node_size}"
    return SeqloomError(f"{where}: {rule}; use {nearest}")


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
