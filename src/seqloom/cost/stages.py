"""A stage of a pipeline: its parameters, and what it costs once per step.

A stage's parameters are gathered once, before its first round, and its gradients are summed and scattered once, after
its last. So its rounds carry no such traffic, and the step's end has it all, beside the optimiser on this rank's part.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from seqloom.cost.additive import AdditiveEngine
from seqloom.cost.analytic import DEFAULT_CONTEXT, AnalyticEngine
from seqloom.cost.compute import kv_width, layer_values, query_width
from seqloom.cost.memory import (
    CHUNK_LOGIT_BYTES,
    GIB,
    GRADIENT_BYTES,
    OPTIMISER_BYTES,
    PARAMETER_BYTES,
    free_bytes,
    partial_bytes,
)
from seqloom.errors import SeqloomError
from seqloom.plan import Checkpoint, LayerRange, Limits
from seqloom.plan.group import even_ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from seqloom.cost.model import CostModel
    from seqloom.describe import ModelSpec
    from seqloom.plan import Group


def stage_parameters(cost: CostModel, share: LayerRange, tensor: int | None = None) -> int:
    """Parameters of a rank of a stage: its layers, the embedding on the first stage, norm and head on the last.

    A tied table is on both. All stages together have the model's parameters, a tied table counted twice. Tensor ranks
    have their part of the layers' matrices, by the cost model's tensor degree if none is given.
    """
    degree = cost.tensor if tensor is None else tensor
    model = cost.model
    context = cost.max_length or DEFAULT_CONTEXT
    table = model.head_parameters
    outside = model.parameters(context) - _layers(model, 0, model.layers, 1)
    beside = outside - table * (1 if model.tied else 2)  # final norm, and learned positions
    positions = context * model.hidden if model.learned_positions else 0
    own = _layers(model, share.first, share.stop, degree)
    own += table + positions if share.has_embedding else 0
    if share.has_head:
        own += beside - positions + (0 if share.has_embedding and model.tied else table)
    return own


@lru_cache(maxsize=1024)
def _layers(model: ModelSpec, first: int, stop: int, tensor: int) -> int:
    """Parameters of a rank of some layers."""
    return sum(model.layer_parameters(layer, tensor) for layer in range(first, stop))


def stage_overhead_ns(cost: CostModel, shares: Sequence[LayerRange], ranks: int, shard_group: int) -> tuple[int, int]:
    """(ns, of that communication) once per step on a host of `ranks` ranks that runs these stages.

    Parameters are gathered over shard groups of `shard_group` ranks, gradients scattered over them and summed over
    the host's
    shard groups, and the optimiser runs on a rank's part. Tensor ranks share with their like in other teams. Under free
    sharding the optimiser runs on an even part of the whole model; what moves depends on all stages of a plan, see
    `relaying`. Published constants have none of this.
    """
    engine = cost.engine
    if not isinstance(engine, AnalyticEngine):
        return 0, 0
    rest = engine.profile.step_us * 1e3
    if engine.memory.owners:
        rest += engine.compute.optimiser(engine.memory.parameters / engine.memory.owners)
        return int(np.rint(rest)), 0
    ranks, shard_group = max(1, ranks // cost.tensor), max(1, shard_group // cost.tensor)
    parameters = sum(stage_parameters(cost, share) for share in shares)
    layers = sum(share.stop - share.first for share in shares)
    links = engine.links
    moved = links.collective(PARAMETER_BYTES * parameters, shard_group, layers)
    moved += links.collective(GRADIENT_BYTES * parameters, shard_group, layers)
    moved += links.replica_sum(GRADIENT_BYTES * parameters, shard_group, layers, ranks)
    rest += engine.compute.optimiser(parameters / shard_group)
    return int(np.rint(moved + rest)), int(np.rint(moved))


# ---- merged: cost.stage_memory
# Memory of a rank of a stage: its state, and what a unit's tokens hold from forward to backward.
#
# State: parameters whole in bf16 and gradients whole in float32 from the first unit to the last; master and
# moments, and
# the scattered gradient, over the ranks of the shard group (free sharding: of the whole model, over all ranks). What a
# unit
# holds per token:
#
#     none        every value that backward reads, until the backward is done
#     selective, full
#                 less, see `Memory`; while a unit goes backward, one layer's ``none`` set beside it
#     stage       the stage's input; while a unit goes backward, all of the stage's ``none`` set
#     offload     nothing: what its checkpoint keeps lies in host memory; while it goes forward or backward, that
# much
#                 twice, since one unit is copied while another is worked on
#
# A backward in halves (I, W) leaves the inputs of the stage's products and the gradients of their outputs from I to
# W,
# whatever was kept before. Keys and values of a document in pieces stay for the whole document.


RECOMPUTING = (Checkpoint.SELECTIVE, Checkpoint.FULL, Checkpoint.STAGE)
KEY_BYTES = 2  # keys and values in bf16
KEY_GRADIENT_BYTES = 4  # their gradients are sums of many pieces: float32


class ActivationBytes(NamedTuple):
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
    share: LayerRange

    def state_bytes(self, shard_group: int) -> int:
        """Parameters, gradients and optimiser, sharded over `shard_group` ranks."""
        engine = self.cost.engine
        if isinstance(engine, AdditiveEngine):
            whole = engine.state_bytes * self.cost.shard_group_size
            return -(-whole * (self.share.stop - self.share.first) // (self.share.model_layers * shard_group))
        parameters = stage_parameters(self.cost, self.share)
        if engine.memory.owners:
            return (PARAMETER_BYTES + GRADIENT_BYTES) * parameters
        shard_group = max(1, shard_group // self.cost.tensor)
        sharded = OPTIMISER_BYTES + (GRADIENT_BYTES if shard_group > 1 else 0)
        return (PARAMETER_BYTES + GRADIENT_BYTES) * parameters + -(-sharded * parameters // shard_group)

    def working_bytes(self) -> int:
        """A chunk of logits on the last stage, and what the device takes: once per rank, whatever stages it has.

        Under free sharding also the rank's part of the optimiser's state, and two layers' gradients to be sent.
        """
        engine = self.cost.engine
        if isinstance(engine, AdditiveEngine):
            return 0
        logits = (
            engine.profile.head_chunk * self.cost.model.vocabulary * CHUNK_LOGIT_BYTES if self.share.has_head else 0
        )
        own = 0
        if engine.memory.owners:
            own = free_bytes(0, engine.memory.parameters, engine.memory.owners)
            layers = range(self.share.first, self.share.stop)
            packed = 2 * max(self.cost.model.layer_parameters(layer, self.cost.tensor) for layer in layers)
            own += GRADIENT_BYTES * packed if engine.memory.owners > 1 else 0
        return own + logits + int(engine.profile.workspace_gib * GIB)

    def activation_bytes(self, checkpoint: Checkpoint, offload: bool) -> ActivationBytes:
        """What a unit of this choice takes per token."""
        engine, model = self.cost.engine, self.cost.model
        if isinstance(engine, AdditiveEngine):
            each = (
                engine.constants.mib_per_token
                * 1024**2
                * (self.share.stop - self.share.first)
                / self.share.model_layers
            )
            return (
                ActivationBytes(0.0, 2 * each, 2 * each, each, 0.0)
                if offload
                else ActivationBytes(each, 0.0, 0.0, each, 0.0)
            )
        query, kv, hidden = query_width(model), kv_width(model), model.hidden
        tensor = self.cost.tensor
        layers = layer_values(model, tensor)[self.share.first : self.share.stop]
        statistics = 4 * model.heads  # log-sum-exp, float32
        whole = [2 * layer.kept + statistics for layer in layers]
        outputs = 2 * (tensor - 1) * hidden  # gradients of both halves' outputs, gathered from the team
        deferred = float(sum(2 * (layer.kept - query + outputs) for layer in layers))
        busy = 2 * 2 * (2 * query + 2 * kv) + 2 * 2 * kv * (2 + 4) + (2 * 3 * hidden if self.share.has_head else 0)
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
        return ActivationBytes(held, busy + forward + twice, busy + again + twice, deferred, split)

    def kv_cache_bytes(self, group: Group, tokens: int) -> tuple[int, int]:
        """(keys and values, their gradients) of a document of so many tokens in pieces, on each rank of its group.

        A rank has the tokens of its ring index, and the key/value heads that its query heads read.
        """
        model = self.cost.model
        shared = model.heads // model.kv_heads
        ranges = even_ranges(model.heads // self.cost.tensor, group.ulysses // self.cost.tensor)
        heads = max(-(-high // shared) - low // shared for low, high in ranges)
        values = 2 * heads * model.head_dim * -(-tokens // group.ring) * (self.share.stop - self.share.first)
        return KEY_BYTES * values, KEY_GRADIENT_BYTES * values


# ---- merged: cost.stage_limits
# What a plan of several stages must respect: how many tokens of one unit a rank can hold, by what is kept of it.


def pipeline_checkpoints(cost: CostModel) -> tuple[Checkpoint, ...]:
    """What may be kept of a unit, from the fastest choice to the one that keeps least."""
    known = {policy.checkpoint for policy in cost.engine.policies}
    if Checkpoint.PROFILE in known:
        return (Checkpoint.PROFILE,)
    return (Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL, Checkpoint.STAGE)


def pp_rank_bytes(cost: CostModel, shares: Sequence[LayerRange], shard_group: int) -> int:
    """Bytes of a rank before any token, on a host with these stages and shard groups of `shard_group` ranks."""
    stages = [StageMemory(cost, share) for share in shares]
    return sum(stage.state_bytes(shard_group) for stage in stages) + max(stage.working_bytes() for stage in stages)


def pipeline_limits(cost: CostModel, hosts: Sequence[Sequence[LayerRange]], shard_group: int) -> Limits:
    """Limits of plans whose hosts have these stages.

    The capacity of a checkpoint is what the fullest host can hold of one unit and nothing else: how many units are
    in flight is the plan's choice, and the simulator's walk checks it. SeqloomError if the state alone does not fit.

    Args:
        cost: prices and budget.
        hosts: the stages of every host.
        shard group: ranks that share parameter shards.
    """
    free = [cost.budget_bytes - pp_rank_bytes(cost, shares, shard_group) for shares in hosts]
    if min(free) <= 0:
        worst = free.index(min(free))
        need = (cost.budget_bytes - free[worst]) / GIB
        raise SeqloomError(
            f"{cost.model.name} does not fit: stage {worst} needs {need:.1f} GiB per GPU for parameters, gradients, "
            f"optimiser and buffers, the budget is {cost.budget_bytes / GIB:.1f} GiB; use more stages or more GPUs, "
            f"or raise the budget above {need:.1f} GiB"
        )
    capacity = []
    for checkpoint in pipeline_checkpoints(cost):
        fits = []
        for shares, room in zip(hosts, free, strict=True):
            for share in shares:
                own = StageMemory(cost, share).activation_bytes(checkpoint, offload=False)
                fits.append(int(room // (own.held + max(own.forward, own.backward))))
        least = min(fits) if cost.token_limit is None else min(*fits, cost.token_limit)
        least -= least % cost.pad_multiple
        if least > 0:
            capacity.append((checkpoint, least))
    if not capacity:
        raise SeqloomError(
            f"a budget of {cost.budget_bytes / GIB:.1f} GiB holds the state of {cost.model.name} but no token; "
            "use more stages or raise the budget"
        )
    return Limits(cost.ranks, cost.node_size, cost.model.heads, tuple(capacity), cost.pad_multiple)
