"""Tensor parallelism on the links: what a team of ranks that split the weights exchanges.

Between the products that are split, hidden states lie with the tokens. Each half of a layer, attention and the
feed-forward, gathers its input from the team and sends partial sums of its output back, each rank getting those of its
own tokens:

    forward     2 gathers, 2 sums per layer
    backward    of a gather a sum, of a sum a gather: 2 and 2
    again       where the layer is run again: 2 and 2

A gather is an all-gather; a sum is an all-to-all of the partial rows, added up by their owner. So a rank sends its own
tokens' hidden states, or its peer's, to each of its peers: one message of as many bytes each time.

What happens inside attention is that of the column: the ranks of one index in all teams of a group, which share
1 / tensor of the heads by Ulysses and ring exactly as ranks without teams share all of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from seqloom.cost.routing import Flow, direct_flow
from seqloom.plan import Checkpoint

if TYPE_CHECKING:
    from seqloom.cost.communication import Communication
    from seqloom.cost.reach import Reach
    from seqloom.cost.values import Shape
    from seqloom.describe import ModelSpec

HIDDEN_BYTES = 2  # bf16 on the wire
REPEATING = (Checkpoint.SELECTIVE, Checkpoint.FULL, Checkpoint.STAGE)


def column_model(model: ModelSpec, tensor: int) -> ModelSpec:
    """The model as the ranks of a column see its attention."""
    return replace(model, heads=model.heads // tensor, kv_heads=model.kv_heads // tensor) if tensor > 1 else model


def column_shape(shape: Shape, tensor: int) -> Shape:
    """The shape of a column of a group: Ulysses beyond tensor."""
    return shape._replace(ulysses=shape.ulysses // tensor) if tensor > 1 else shape


def exchanges(checkpoint: Checkpoint) -> int:
    """Gathers of a layer, forward and backward, with what is repeated; there are as many sums."""
    return 6 if checkpoint in REPEATING else 4


def team_flow(links: Communication, shape: Shape, reach: Reach, checkpoint: Checkpoint) -> Flow:
    """ns per token of the group, all layers, forward and backward."""
    if not (reach.team.near or reach.team.sent):
        return Flow()
    message = exchanges(checkpoint) * links.model.layers * links.model.hidden * HIDDEN_BYTES / shape.degree
    gathers = direct_flow(reach.team, *links.message_ns(message, "collective"))
    return gathers + direct_flow(reach.team, *links.message_ns(message, "all_to_all"))


def team_latency(links: Communication, tensor: int, reach: Reach, checkpoint: Checkpoint) -> float:
    """ns per round, all layers, forward and backward."""
    if tensor == 1:
        return 0.0
    crosses = reach.team.left > 0
    gather = links.latency("collective", crosses, tensor - 1)
    total = gather + links.latency("all_to_all", crosses, (tensor - 1).bit_length())
    return exchanges(checkpoint) * links.model.layers * total


def adding_ns(model: ModelSpec, tensor: int, checkpoint: Checkpoint, memory_gb_s: float) -> float:
    """ns per token of a rank, all layers: a sum reads a row of every team member and writes one."""
    if tensor == 1:
        return 0.0
    touched = exchanges(checkpoint) * model.layers * (tensor + 1) * model.hidden
    return touched * HIDDEN_BYTES / memory_gb_s
