"""Stages that are gathered for every pass: what the messages take, and what a rank then holds.

Messages. The ranks of a stage with the same slice of its weights, ``column`` of them, have ``1 / column`` each. Before
a pass every one sends its share to the others, in bf16; in a backward it sends them their shares of its gradients, in
float32, as soon as a layer has them. An exchange goes straight from rank to rank, a bundle after the other, one for
every layer, one for the embedding and one for norm and head. Computing waits for it, so nothing of it hides.

Memory, with P parameters on a rank while it computes:

    always                  (2 + 4) P / column      shares of parameters and gradients
                            4 bytes of the head     its gradient is made in a forward and waits for the backward
    in every pass           2 P                     the copies
    in a backward           4 bytes of a layer      the gradients of the layer that goes backward
    where a backward ends   4 bytes of the rest     embedding, positions and norm; the unit's activations have gone
                            8 bytes of a table      packed and received, beyond a layer's, which `StageMemory` has
    from the first W on     4 P                     gradients of weight halves, until the REDUCE

A stage whose parameters stay for the step has 6 P all the time.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from seqloom.cost.analytic import AnalyticEngine
from seqloom.cost.memory import GRADIENT_BYTES, PARAMETER_BYTES
from seqloom.cost.stage_memory import StageMemory
from seqloom.cost.stages import stage_parameters
from seqloom.plan import Part, Sharding
from seqloom.plan.per_pass import PassMove, pass_moves, stages_per_pass

if TYPE_CHECKING:
    from seqloom.cost.model import CostModel
    from seqloom.plan import Checkpoint, Pipeline, Stage


class PassTimes(NamedTuple):
    """ns of the moves of one pass of a stage."""

    gather: int  # parameters, before every pass
    sum: int  # gradients, after a backward

    def of(self, move: PassMove | None) -> int:
        """ns of one move; of none, nothing."""
        return 0 if move is None else self.gather if move is PassMove.GATHER else self.sum


def priced_passes(cost: CostModel, pipeline: Pipeline) -> dict[int, PassTimes]:
    """Times of every stage that the pipeline gathers for every pass. Only free sharding does."""
    if cost.sharding != Sharding.FREE:
        return {}
    parts = pipeline.parts
    return {s: pass_times(cost, pipeline.stages[s], parts[s]) for s in sorted(stages_per_pass(pipeline))}


def passes_ns(cost: CostModel, pipeline: Pipeline) -> int:
    """ns of all moves of a pipeline of one stage in a step."""
    times = priced_passes(cost, pipeline)
    return sum(times[0].of(move) for move in pass_moves(pipeline.actions[0], frozenset(times))) if times else 0


@lru_cache(maxsize=256)
def pass_times(cost: CostModel, stage: Stage, part: Part) -> PassTimes:
    """What gathering a stage, and bringing its gradients back to shares, takes."""
    engine, cluster = cost.engine, cost.cluster
    column = column_of(stage)
    if column == 1 or not isinstance(engine, AnalyticEngine):
        return PassTimes(0, 0)
    ranks, width = np.array(stage.ranks), cluster.gpus_per_node
    node, member = ranks // width, np.arange(len(ranks)) % stage.tensor
    near = ((node[:, None] == node) & (member[:, None] == member)).sum(axis=1) - 1
    far = column - 1 - near
    card = node * cluster.nics_per_node + np.asarray(cluster.nic_of_gpu)[ranks % width]
    share = stage_parameters(cost, part, stage.tensor) / column
    latency = engine.links.latency("all_to_all", bool(far.any()), (column - 1).bit_length())
    calls = part.stop - part.first + part.begins + part.ends
    times = []
    for size in (PARAMETER_BYTES, GRADIENT_BYTES):
        link, through = engine.links.message_ns(size * share, "all_to_all")
        busiest = max(int(near.max()) * link, float(np.bincount(card, far).max()) * through)
        times.append(int(np.rint(busiest + calls * latency)))
    return PassTimes(*times)


def column_of(stage: Stage) -> int:
    """Ranks of a stage that have the same slice of its weights."""
    return len(stage.ranks) // stage.tensor


class PassMemory(NamedTuple):
    """Bytes of parameters and gradients on a rank of a stage that is gathered for every pass, see above."""

    always: int
    copies: int
    layer: int
    rest: int
    halves: int

    @classmethod
    def of(cls, cost: CostModel, part: Part, column: int) -> PassMemory:
        """Of a part of the model, by the cost model's tensor degree, over so many ranks."""
        parameters = stage_parameters(cost, part)
        if column == 1:  # nobody to share with: they stay for the step
            return cls((PARAMETER_BYTES + GRADIENT_BYTES) * parameters, 0, 0, 0, 0)
        head = cost.model.head_parameters if part.ends else 0
        layers = [cost.model.layer_parameters(layer, cost.tensor) for layer in range(part.first, part.stop)]
        table = cost.model.head_parameters if part.begins or part.ends else 0
        packed = 2 * max(0, table - max(layers))
        return cls(
            always=(PARAMETER_BYTES + GRADIENT_BYTES) * -(-parameters // column) + GRADIENT_BYTES * head,
            copies=PARAMETER_BYTES * parameters,
            layer=GRADIENT_BYTES * max(layers),
            rest=GRADIENT_BYTES * (parameters - sum(layers) - head + packed),
            halves=GRADIENT_BYTES * (parameters - head),
        )


def one_stage_bytes(cost: CostModel, column: int, checkpoint: Checkpoint, tokens: np.ndarray) -> np.ndarray:
    """int64[n] bytes of ranks with so many tokens in a round, of a pipeline of one stage gathered for every pass.

    Args:
        cost: prices, of the stage's tensor degree.
        column: ranks that share its parameters.
        checkpoint: of the round.
        tokens: int64[n].
    """
    part = Part(0, cost.model.layers, cost.model.layers)
    stage, moved = StageMemory(cost, part), PassMemory.of(cost, part, column)
    held, forward, backward, *_ = stage.holding(checkpoint, offload=False)
    begins = np.maximum(tokens * (held + forward), tokens * (held + backward) + moved.layer)
    most = np.maximum(begins, tokens * backward + moved.layer + moved.rest)
    return stage.working_bytes() + moved.always + moved.copies + np.ceil(most).astype(np.int64)


def tokens_in_passes(cost: CostModel, part: Part, column: int, checkpoint: Checkpoint, units: int) -> int:
    """Tokens of a unit that a rank of a stage gathered for every pass can hold, with so many units in flight."""
    stage, moved = StageMemory(cost, part), PassMemory.of(cost, part, column)
    room = cost.budget_bytes - stage.working_bytes() - moved.always - moved.copies
    held, forward, backward, *_ = stage.holding(checkpoint, offload=False)
    in_forward = room // (units * held + forward)
    in_backward = (room - moved.layer) // (units * held + backward)
    at_its_end = (room - moved.layer - moved.rest) // ((units - 1) * held + backward)
    fits = max(0, int(min(in_forward, in_backward, at_its_end)))
    fits = fits if cost.most is None else min(fits, cost.most)
    return fits - fits % cost.granule
