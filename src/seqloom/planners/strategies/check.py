"""Are given strategies legal here? And what do their schemes cost?"""

from __future__ import annotations

from collections.abc import Sequence

from seqloom.cost import CostModel
from seqloom.errors import SeqloomError
from seqloom.planners.strategies.place import check_placement
from seqloom.planners.strategies.price import SchemeCost
from seqloom.planners.strategies.schemes import fit
from seqloom.planners.strategies.values import Scheme, Strategy


def check_strategies(strategies: Sequence[Strategy], cost: CostModel) -> None:
    """Refuse strategies that the cluster or the model does not allow, with the reason and the nearest way out."""
    if not strategies:
        raise SeqloomError("no strategies to choose from; propose some (seqloom propose), or leave them out")
    model = cost.model
    for strategy in strategies:
        check_placement(strategy, cost.ranks, cost.node_size)
        for scheme in dict.fromkeys(pipe.scheme for pipe in strategy.pipelines):
            if scheme.stages > model.layers:
                raise SeqloomError(
                    f"pipeline {scheme} of strategy {strategy} has {scheme.stages} stages for the {model.layers} "
                    f"layers of {model.name}: every stage needs a layer; use at most {model.layers} stages"
                )
            model.check_tensor(scheme.tensor)
            if scheme.tensor * scheme.ulysses > model.heads:
                raise SeqloomError(
                    f"pipeline {scheme} of strategy {strategy} spreads the {model.heads} heads of {model.name} over "
                    f"{scheme.tensor * scheme.ulysses} ranks: each needs one; use a ring for the rest"
                )


def costs_of(strategies: Sequence[Strategy], cost: CostModel) -> dict[Scheme, SchemeCost]:
    """Prices of every scheme in these strategies; SeqloomError for one whose state does not fit in memory."""
    costs = {}
    for scheme in dict.fromkeys(pipe.scheme for strategy in strategies for pipe in strategy.pipelines):
        priced = fit(cost, scheme)
        if priced is None:
            raise SeqloomError(
                f"pipeline {scheme} has no room for a token of {cost.model.name} beside its parameters and gradients "
                f"in {cost.budget_bytes / 1024**3:.1f} GiB per GPU; raise the memory budget, or propose strategies anew"
            )
        costs[scheme] = priced
    return costs
