"""Memory of a rank: state by sharding, activations by checkpointing, the chunked logits, working buffers.

State per parameter: bf16 copy (2 bytes), float32 master and two Adam moments (12), float32 gradient (4). Under free
sharding the copy and a gradient are those of all that the rank computes with; master, moments and the gradient to be
applied are spread over all ranks of the cluster.

What is kept per token and layer:

    none        every value that backward reads
    selective   the layer's input, attention output and log-sum-exp; q, k, v and the rest are recomputed
    full        the layer's input

The attention output counts twice: with Ulysses it is kept as the kernel left it, all tokens of some heads, and as it
came back, some tokens of all heads. Groups without Ulysses need less; a rank's room is one number for all groups.
Recomputing needs one layer's ``none`` set at a time on top. Tensor ranks gather hidden states of all tokens of their
team: what backward reads of them is kept so, and partial sums are sent and received so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from seqloom.cost.compute import kv_width, layer_values, query_width
from seqloom.plan import Checkpoint, Reduce

if TYPE_CHECKING:
    from seqloom.cost.profile import AnalyticProfile
    from seqloom.cost.shapes import MemoryPolicy
    from seqloom.describe import ModelSpec


GIB = 1024**3
PARAMETER_BYTES = 2
OPTIMISER_BYTES = 12
GRADIENT_BYTES = 4
CHUNK_LOGIT_BYTES = 6  # bf16 logits turned into their gradient in place, and a float32 softmax


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one model, its weights split over teams of ``tensor`` ranks and sharded over ``shard_ranks`` teams."""

    profile: AnalyticProfile
    model: ModelSpec
    parameters: int
    shard_ranks: int
    tensor: int = 1
    owners: int = 0
    """Ranks over which free sharding spreads masters and moments; 0: sharding is not free."""

    @property
    def held(self) -> int:
        """Parameters that a rank of a plan of one stage computes with."""
        return split_parameters(self.model, self.parameters, self.tensor)

    def state_bytes(self, reduce: Reduce) -> int:
        """Parameters, optimiser and gradients of a rank; reducing once per step keeps a whole gradient."""
        if self.owners:
            return free_bytes(self.held, self.parameters, self.owners)
        held = -(-self.held // self.shard_ranks)
        state = (PARAMETER_BYTES + OPTIMISER_BYTES + GRADIENT_BYTES) * held
        if self.shard_ranks > 1 and reduce == Reduce.STEP:
            state += GRADIENT_BYTES * self.held
        return state

    def working_bytes(self, reduce: Reduce) -> int:
        """Gathered parameters, a chunk of logits, and what the device and its communicators take.

        Two layers are gathered at a time (one computes, one is fetched) beside embedding and head; per
        round reduction also holds two layers' whole gradients. Under free sharding two layers' gradients are packed
        to be sent.
        """
        logits = self.profile.head_chunk * self.model.vocabulary * CHUNK_LOGIT_BYTES
        layers = 2 * max(self.model.layer_parameters(k, self.tensor) for k in range(self.model.layers))
        gathered = GRADIENT_BYTES * layers if self.owners > 1 else 0
        if self.shard_ranks > 1:
            tables = self.model.head_parameters * (1 if self.model.tied else 2)
            gathered = PARAMETER_BYTES * (layers + tables)
            if reduce == Reduce.ROUND:
                gathered += GRADIENT_BYTES * layers
        return logits + gathered + int(self.profile.workspace_gib * GIB)

    def fixed_bytes(self, policy: MemoryPolicy) -> int:
        """Bytes of a rank before any token."""
        return self.state_bytes(policy.reduce) + self.working_bytes(policy.reduce)

    def token_bytes(self, policy: MemoryPolicy) -> float:
        """Bytes that each token on a rank adds.

        Besides the layers: hidden state, its norm and its gradient at the head, and the exchange buffers of
        one layer (q, k, v, output sent and received; two K/V pairs in bf16 and two in float32 for a ring).
        """
        query, kv, hidden = query_width(self.model), kv_width(self.model), self.model.hidden
        layers = layer_values(self.model, self.tensor)
        statistics = 4 * self.model.heads  # log-sum-exp, float32
        whole = [2 * layer.kept + statistics for layer in layers]
        head = 2 * 3 * hidden
        exchange = 2 * 2 * (2 * query + 2 * kv) + 2 * 2 * kv * (2 + 4) + partial_bytes(self.model, self.tensor)
        if policy.checkpoint == Checkpoint.NONE:
            return float(sum(whole) + head + exchange)
        kept = 2 * hidden
        if policy.checkpoint == Checkpoint.SELECTIVE:
            kept += 2 * 2 * query + statistics
        return float(len(layers) * kept + max(whole) + head + exchange)


def split_parameters(model: ModelSpec, parameters: int, tensor: int) -> int:
    """What a rank has of all ``parameters`` of a model where teams of ``tensor`` ranks split them."""
    cut = sum(model.layer_parameters(k) - model.layer_parameters(k, tensor) for k in range(model.layers))
    return parameters - cut


def free_bytes(held: int, parameters: int, owners: int) -> int:
    """State of a rank under free sharding: of the ``held`` parameters, and of its part of all of them."""
    own = -(-(OPTIMISER_BYTES + GRADIENT_BYTES) * parameters // owners)
    return (PARAMETER_BYTES + GRADIENT_BYTES) * held + own


def partial_bytes(model: ModelSpec, tensor: int) -> int:
    """Bytes per token of a rank that partial sums of its team take while they are sent and received, bf16."""
    return 2 * 2 * tensor * model.hidden if tensor > 1 else 0


# ---- merged: cost.offload
# What it takes to keep a unit's activations in host memory: copies over the bus, beside the computing.


HOST_GB_S = 20.0
"""GB/s of a GPU to and from pinned host memory, in one direction: 16 lanes of PCIe 4 carry 25 to 28 when nothing else
uses them, and the GPUs of a node share its memory. No profile has a figure of its own."""


def copy_ns(size: float) -> int:
    """ns of copying so many bytes between a GPU and host memory, one way."""
    return math.ceil(size / HOST_GB_S)
