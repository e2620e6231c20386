"""The model of a run on one rank: its layers made ready, its parameters where the run's plans want them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from seqloom.comm import Transport
from seqloom.cost import CostModel
from seqloom.plan import Part, Sharding, Stage
from seqloom.runtime import (
    FreeLayout,
    Network,
    Parameters,
    Placement,
    Sharded,
    StageSharded,
    compile_layers,
    recompute_layers,
    split_weights,
)
from seqloom.runtime.placement import parameters_of


def made_ready(network: Network, *, compiled: bool = False, split: bool = True) -> Network:
    """Return a network whose layers recompute and split their backward as plans ask for.

    Args:
        network: fresh; its layers are changed in place.
        compiled: whether the bodies of layers are compiled.
        split: whether plans may split backwards; those of one stage have no use for it.
    """
    if compiled:
        compile_layers(network.layers)
    recompute_layers(network.layers)
    return replace(network, weights=split_weights(network.layers)) if split else network


def require_parts(network: Network, tensor_degrees: Sequence[int] = ()) -> None:
    """Refuse a model that cannot be cut into stages or by these degrees, and parameters that no stage would hold."""
    parameters_of(network, Part(0, len(network.layers), len(network.layers)))
    for degree in tensor_degrees:
        network.check_tensor(degree)


def place(
    network: Network, transport: Transport, stages: Sequence[Stage], cost: CostModel, compute: torch.dtype | None
) -> Parameters:
    """Shard the parameters over all ranks, or every stage's over its own; under free sharding plans move them.

    Args:
        network: made ready, with the same values on all ranks; they are read while they are cut.
        transport: over torch.distributed.
        stages: of all plans of the run; none: every plan may have its own.
        cost: says how far parameters are sharded.
        compute: as in `Sharded`.
    """
    parameters: Parameters
    if cost.sharding == Sharding.FREE:
        parameters = FreeLayout(network, transport, compute=compute)
    elif len(stages) > 1:
        placement = Placement(tuple(stages), cost.sharding, cost.node_size)
        parameters = StageSharded(network, transport, placement, compute=compute)
    else:
        parameters = Sharded(network, transport, cost.sharding, node_size=cost.node_size, compute=compute)
    if network.values is not None:
        network.values.close()
    return parameters
