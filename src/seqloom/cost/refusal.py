"""Why a model cannot be trained here, and the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from seqloom.errors import SeqloomError

if TYPE_CHECKING:
    from seqloom.cost.model import CostModel

GIB = 1024**3


def too_small(cost: CostModel) -> SeqloomError:
    """The error that says how much memory the model's state needs on plans of one stage."""
    least = min(cost.engine.fixed_bytes(v) for v in cost.engine.variants) / GIB
    way = "use more GPUs" if cost.island_size == cost.ranks else "shard wider (sharding full)"
    return SeqloomError(
        f"{cost.model.name} does not fit: parameters, gradients, optimiser and buffers need "
        f"{least:.1f} GiB per GPU (sharded over {cost.island_size} ranks), "
        f"the budget is {cost.budget_bytes / GIB:.1f} GiB; {way}, take a smaller model, "
        f"or raise the budget above {least:.1f} GiB"
    )
