"""What the ranks of a plan compute with, counted: by rank, by node, and shared out over the ranks of a node.

The model is cut into units: the table of tokens, that of positions, every layer, and the end (norm and head). Tensor
ranks cut the matrices of a layer into slices, as fine as any stage of the plan does; all else is whole on every rank.
Of a stage that is gathered for every pass each rank keeps a share, which no other rank of its stage has.
"""

from __future__ import annotations

from math import lcm
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from seqloom.cost.analytic import DEFAULT_CONTEXT
from seqloom.cost.stages import stage_parameters
from seqloom.plan import Part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from seqloom.cost.model import CostModel
    from seqloom.plan import Stage

TABLE, POSITIONS, LAYERS = 0, 1, 2
"""The first units; layer k is LAYERS + k, the end comes after the last layer."""


class Holdings(NamedTuple):
    """Parameters that ranks compute with."""

    rank: np.ndarray  # float64[ranks], of each rank
    others: np.ndarray  # float64[ranks], of what k ranks of its node have, 1 - 1 / k: the other ranks' shares
    node: np.ndarray  # float64[nodes], different ones of each node


def holdings(
    cost: CostModel, lines: Sequence[Sequence[Stage]], shared: Sequence[frozenset[int]] = ()
) -> tuple[Holdings, Holdings]:
    """What ranks keep for the step; and of this, the embedding (also where it is the head) and the first layer.

    Args:
        cost: of the model and the whole cluster.
        lines: the stages of every pipeline.
        shared: of every pipeline, the numbers of the stages that are gathered for every pass; () for none at all.
    """
    passing = shared or [frozenset[int]()] * len(lines)
    held = _held(cost, lines, passing)
    whole, cut = _sizes(cost)
    early = np.arange(len(whole)) <= LAYERS
    everything = _counted(held, whole, cut, cost.node_size)
    first = _counted(held, whole * early, cut * early, cost.node_size)
    for line, numbers in zip(lines, passing, strict=True):
        for stage in (line[number] for number in sorted(numbers)):
            part = Part(*stage.layers, line[-1].layers[1])
            everything = _with_shares(everything, stage, stage_parameters(cost, part, stage.tensor))
            first = _with_shares(first, stage, _early(cost, part, stage.tensor))
    return everything, first


def _early(cost: CostModel, part: Part, tensor: int) -> int:
    """Parameters of a part that belong to the embedding or to the first layer."""
    if part.begins:
        return stage_parameters(cost, Part(0, 1, 2), tensor)
    return cost.model.head_parameters if part.ends and cost.model.tied else 0


def _with_shares(found: Holdings, stage: Stage, parameters: int) -> Holdings:
    """What is found, and shares of the parameters of a stage."""
    ranks, share = np.array(stage.ranks), parameters * stage.tensor / len(stage.ranks)
    rank, node = found.rank.copy(), found.node.copy()
    rank[ranks] += share
    node += np.bincount(ranks // (len(rank) // len(node)), minlength=len(node)) * share
    return Holdings(rank, found.others, node)


def _held(cost: CostModel, lines: Sequence[Sequence[Stage]], passing: Sequence[frozenset[int]]) -> np.ndarray:
    """bool[ranks, units, slices], whether a rank has a slice of a unit for the whole step."""
    model = cost.model
    slices = lcm(*(stage.tensor for line in lines for stage in line))
    held = np.zeros((cost.ranks, LAYERS + model.layers + 1, slices), dtype=bool)
    for line, numbers in zip(lines, passing, strict=True):
        last = line[-1].layers[1]
        for stage in (stage for number, stage in enumerate(line) if number not in numbers):
            first, stop = stage.layers
            units = list(range(LAYERS + first, LAYERS + stop))
            units += [TABLE, POSITIONS] if first == 0 else []
            units += [LAYERS + model.layers] + [TABLE] * model.tied if stop == last else []
            width = slices // stage.tensor
            for member in range(stage.tensor):
                places = np.ix_(stage.ranks[member :: stage.tensor], units)
                held[(*places, slice(member * width, (member + 1) * width))] = True
    return held


def _sizes(cost: CostModel) -> tuple[np.ndarray, np.ndarray]:
    """float64[units] each: parameters of a unit that all its ranks have, and that tensor ranks cut."""
    model, context = cost.model, cost.max_length or DEFAULT_CONTEXT
    layers = np.array([model.layer_parameters(layer) for layer in range(model.layers)], dtype=np.float64)
    none = model.parameters() + 1  # cut into so many slices, no matrix has anything left in one
    vectors = np.array([model.layer_parameters(layer, none) for layer in range(model.layers)], dtype=np.float64)
    positions = context * model.hidden if model.learned_positions else 0
    end = model.parameters(context) - layers.sum() - model.head_parameters - positions  # with the head, unless tied
    whole = np.concatenate(([model.head_parameters, positions], vectors, [end]))
    return whole, np.concatenate(([0, 0], layers - vectors, [0]))


def _counted(held: np.ndarray, whole: np.ndarray, cut: np.ndarray, node_size: int) -> Holdings:
    """Add up units of these sizes."""
    by_node = held.reshape(-1, node_size, *held.shape[1:])
    entire = np.asarray(by_node.any(axis=3))
    parts, wholes = (each * (1 - 1 / np.maximum(each.sum(axis=1, keepdims=True), 1)) for each in (by_node, entire))
    return Holdings(
        rank=(entire @ whole + by_node.mean(axis=3) @ cut).ravel(),
        others=(wholes @ whole + parts.mean(axis=3) @ cut).ravel(),
        node=entire.any(axis=1) @ whole + by_node.any(axis=1).mean(axis=2) @ cut,
    )
