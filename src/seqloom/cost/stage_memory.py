"""Memory of a rank of a stage: its state, and what a unit's tokens hold from forward to backward.

State: parameters whole in bf16 and gradients whole in float32 from the first unit to the last; master and moments, and
the scattered gradient, over the ranks of the island (free sharding: of the whole model, over all ranks). What a unit
holds per token:

    none        every value that backward reads, until the backward is done
    selective, full
                less, see `Memory`; while a unit goes backward, one layer's ``none`` set beside it
    stage       the stage's input; while a unit goes backward, all of the stage's ``none`` set
    offload     nothing: what its checkpoint keeps lies in host memory; while it goes forward or backward, that much
                twice, since one unit is copied while another is worked on

A backward in halves (I, W) leaves the inputs of the stage's products and the gradients of their outputs from I to W,
whatever was kept before. Keys and values of a document in pieces stay for the whole document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from seqloom.cost.activations import kv_width, layer_values, query_width
from seqloom.cost.additive import AdditiveEngine
from seqloom.cost.memory import (
    CHUNK_LOGIT_BYTES,
    GIB,
    GRADIENT_BYTES,
    OPTIMISER_BYTES,
    PARAMETER_BYTES,
    free_bytes,
    partial_bytes,
)
from seqloom.cost.stages import stage_parameters
from seqloom.plan import Checkpoint, Part
from seqloom.plan.group import even_ranges

if TYPE_CHECKING:
    from seqloom.cost.model import CostModel
    from seqloom.plan import Group

RECOMPUTING = (Checkpoint.SELECTIVE, Checkpoint.FULL, Checkpoint.STAGE)
KEY_BYTES = 2  # keys and values in bf16
KEY_GRADIENT_BYTES = 4  # their gradients are sums of many pieces: float32


class Holding(NamedTuple):
    """Bytes that each token of a unit takes on a rank of one stage."""

    held: float  # from the start of its F to the end of its B or I
    forward: float  # on top of that while F runs
    backward: float  # on top of that while B or I runs
    deferred: float  # from the end of its I to the end of its W
    split: float  # on top of everything while an I runs, before what is held has gone


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory of a rank of one stage."""

    cost: CostModel
    share: Part

    def state_bytes(self, island: int) -> int:
        """Parameters, gradients and optimiser, sharded over `island` ranks."""
        engine = self.cost.engine
        if isinstance(engine, AdditiveEngine):
            whole = engine.state_bytes * self.cost.island_size
            return -(-whole * (self.share.stop - self.share.first) // (self.share.of * island))
        parameters = stage_parameters(self.cost, self.share)
        if engine.memory.owners:
            return (PARAMETER_BYTES + GRADIENT_BYTES) * parameters
        island = max(1, island // self.cost.tensor)
        sharded = OPTIMISER_BYTES + (GRADIENT_BYTES if island > 1 else 0)
        return (PARAMETER_BYTES + GRADIENT_BYTES) * parameters + -(-sharded * parameters // island)

    def working_bytes(self) -> int:
        """A chunk of logits on the last stage, and what the device takes: once per rank, whatever stages it has.

        Under free sharding also the rank's part of the optimiser's state, and two layers' gradients to be sent.
        """
        engine = self.cost.engine
        if isinstance(engine, AdditiveEngine):
            return 0
        logits = engine.profile.head_chunk * self.cost.model.vocabulary * CHUNK_LOGIT_BYTES if self.share.ends else 0
        own = 0
        if engine.memory.owners:
            own = free_bytes(0, engine.memory.parameters, engine.memory.owners)
            layers = range(self.share.first, self.share.stop)
            packed = 2 * max(self.cost.model.layer_parameters(layer, self.cost.tensor) for layer in layers)
            own += GRADIENT_BYTES * packed if engine.memory.owners > 1 else 0
        return own + logits + int(engine.profile.workspace_gib * GIB)

    def holding(self, checkpoint: Checkpoint, offload: bool) -> Holding:
        """What a unit of this choice takes per token."""
        engine, model = self.cost.engine, self.cost.model
        if isinstance(engine, AdditiveEngine):
            each = engine.constants.mib_per_token * 1024**2 * (self.share.stop - self.share.first) / self.share.of
            return Holding(0.0, 2 * each, 2 * each, each, 0.0) if offload else Holding(each, 0.0, 0.0, each, 0.0)
        query, kv, hidden = query_width(model), kv_width(model), model.hidden
        tensor = self.cost.tensor
        layers = layer_values(model, tensor)[self.share.first : self.share.stop]
        statistics = 4 * model.heads  # log-sum-exp, float32
        whole = [2 * layer.kept + statistics for layer in layers]
        outputs = 2 * (tensor - 1) * hidden  # gradients of both halves' outputs, gathered from the team
        deferred = float(sum(2 * (layer.kept - query + outputs) for layer in layers))
        busy = 2 * 2 * (2 * query + 2 * kv) + 2 * 2 * kv * (2 + 4) + (2 * 3 * hidden if self.share.ends else 0)
        busy += partial_bytes(model, tensor)
        kept = {
            Checkpoint.NONE: sum(whole),
            Checkpoint.SELECTIVE: len(layers) * (2 * hidden + 2 * 2 * query + statistics),
            Checkpoint.FULL: len(layers) * 2 * hidden,
            Checkpoint.STAGE: 2 * hidden,
        }[checkpoint]
        again = {Checkpoint.NONE: 0, Checkpoint.STAGE: sum(whole)}.get(checkpoint, max(whole))
        forward = max(whole) if checkpoint in RECOMPUTING else 0  # the layer that is being run keeps its values
        split = deferred if checkpoint in RECOMPUTING else 0.0
        held, twice = (0.0, 2.0 * kept) if offload else (float(kept), 0.0)
        return Holding(held, busy + forward + twice, busy + again + twice, deferred, split)

    def carried_bytes(self, group: Group, tokens: int) -> tuple[int, int]:
        """(keys and values, their gradients) of a document of so many tokens in pieces, on each rank of its group.

        A rank has the tokens of its ring index, and the key/value heads that its query heads read.
        """
        model = self.cost.model
        shared = model.heads // model.kv_heads
        ranges = even_ranges(model.heads // self.cost.tensor, group.ulysses // self.cost.tensor)
        heads = max(-(-high // shared) - low // shared for low, high in ranges)
        values = 2 * heads * model.head_dim * -(-tokens // group.ring) * (self.share.stop - self.share.first)
        return KEY_BYTES * values, KEY_GRADIENT_BYTES * values
