"""Memory of a rank: parameters, gradients and optimiser by sharding, activations by checkpointing, working buffers.

State per parameter: bf16 copy (2 bytes), float32 master (4) and two Adam moments (8), float32 gradient (4). Where
adapters alone are trained, all other parameters have neither moments nor gradient.

    plans of one stage    everything over the ranks of a shard group
    pipeline stages       copy and gradient whole from the first micro-batch to the last; master and moments, and the
                          scattered gradient, over the ranks of the shard group
    free sharding         copy and gradient of all that the rank computes with; master, moments and the gradient to be
                          applied spread over all ranks of the cluster
    expert parallelism    of the experts a rank has its EP group's share, which it shards over the ranks of its shard
                          group that have the same experts
    tensor parallelism    of the matrices of layers a rank has its TP group's share, which it shards, with all else of
                          the layers, over the ranks of its shard group that have the same share; so with embedding and
                          head, if the degree divides the vocabulary and sharding is not free
    offloaded optimiser   master and moments in host memory; in their place a bf16 copy of the rank's part of them,
                          unless that is the copy that layers compute with

Activations per token and layer, from a micro-batch's forward to its backward:

    none        every value that backward reads
    selective   the layer's input, attention output and log-sum-exp; q, k, v and the rest are recomputed
    full        the layer's input
    stage       the stage's input
    offload     nothing: the checkpoint's values lie in host memory; while the micro-batch goes forward or backward,
                those of two layers, since one layer is copied while another is worked on

Recomputing needs one layer's ``none`` set at a time on top (``stage``: that of all layers). The attention output counts
twice: with Ulysses it is kept as the kernel left it, all tokens of some heads, and as it came back, some tokens of all
heads. A backward in halves (I, W) leaves the inputs of the stage's products and the gradients of their outputs from I
to W. Tensor ranks gather hidden states of all tokens of their group, and send and receive partial sums of as many, also
around a head that they cut. The busiest rank of an EP group has more tokens in its experts than it sends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import TYPE_CHECKING, NamedTuple

from seqloom.cost.communication import ACTIVATION_BYTES, KV_GRADIENT_BYTES, share_of_tokens
from seqloom.cost.compute import LayerValues, attention_widths, kv_heads_per_rank, layer_values
from seqloom.errors import MemoryBudgetError
from seqloom.plan import Checkpoint, LayerRange, Limits, Reduce

if TYPE_CHECKING:
    from collections.abc import Sequence

    from seqloom.cost.model import CostModel
    from seqloom.cost.profile import AnalyticProfile
    from seqloom.cost.shapes import MemoryPolicy
    from seqloom.describe import ModelSpec
    from seqloom.plan import Group

GIB = 1024**3
PARAMETER_BYTES = 2
MASTER_BYTES = 4
MOMENT_BYTES = 8
OPTIMISER_BYTES = MASTER_BYTES + MOMENT_BYTES
GRADIENT_BYTES = 4
CHUNK_LOGIT_BYTES = 6  # bf16 logits turned into their gradient in place, and a float32 softmax


class ActivationBytes(NamedTuple):
    """Bytes that each token of a micro-batch takes on a rank of one stage."""

    held: float  # from the start of its F to the end of its B or I
    forward: float  # on top of that while F runs
    backward: float  # on top of that while B or I runs
    deferred: float  # from the end of its I to the end of its W
    split: float  # on top of everything while an I runs, before the held bytes are freed

    @property
    def peak(self) -> float:
        """Most bytes per token while nothing else is in flight."""
        return self.held + max(self.forward, self.backward)


class RankParameters(NamedTuple):
    """Parameters that a rank computes with."""

    common: int  # that all ranks of its shard group have
    divided: int  # of a TP group, or experts of an EP group, which has a part of each on every rank

    @property
    def total(self) -> int:
        """All of them."""
        return self.common + self.divided


@dataclass(frozen=True, slots=True)
class AnalyticMemory:
    """Bytes of a model whose weights are split over ``tensor`` ranks and sharded over ``shard_ranks`` ranks."""

    profile: AnalyticProfile
    model: ModelSpec
    context: int  # tokens of a learned position table
    shard_ranks: int
    tensor: int = 1
    owners: int = 0
    """Ranks over which free sharding spreads masters and moments; 0: sharding is not free."""
    offload_optimiser: bool = False
    """Whether masters and moments are in host memory."""
    expert: int = 1
    """Ranks of an EP group."""

    @property
    def table_ranks(self) -> int:
        """Ranks that cut embedding and head by rows of the vocabulary."""
        return 1 if self.owners or self.model.vocabulary % self.tensor else self.tensor

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return layer_parameters(self.model, self.context, self._all_layers, 1)

    @property
    def rank_parameters(self) -> RankParameters:
        """Parameters that a rank of a plan of one stage computes with."""
        return self.parameters_of(self._all_layers)

    def parameters_of(self, layers: LayerRange) -> RankParameters:
        """Parameters that a rank of a stage with these layers computes with."""
        every = layer_parameters(self.model, self.context, layers, self.tensor, tables=self.table_ranks)
        if self.table_ranks > 1:
            return RankParameters(0, every)
        if self.tensor > 1:
            divided = sum(self.model.layer_parameters(layer, self.tensor) for layer in range(layers.first, layers.stop))
            return RankParameters(every - divided, divided)
        if self.expert == 1:
            return RankParameters(every, 0)
        sparse = sum(layers.first <= layer < layers.stop for layer in self.model.moe_layers)
        experts = sparse * self.model.expert_parameters(self.model.experts)
        return RankParameters(every - experts, experts // self.expert)

    def trained_of(self, layers: LayerRange) -> RankParameters:
        """Those of them that are trained."""
        if not self.model.adapters:
            return self.parameters_of(layers)
        return RankParameters(layer_parameters(self.model, self.context, layers, self.tensor, trained=True), 0)

    def replicated_of(self, layers: LayerRange) -> int:
        """Parameters of these layers that every rank of a TP group has: norms, biases and routers."""
        count, degree = self.model.layer_parameters, self.tensor
        every = range(layers.first, layers.stop)
        return sum((degree * count(layer, degree) - count(layer)) // (degree - 1) for layer in every)

    @property
    def trained(self) -> int:
        """Parameters of the whole model that are trained."""
        return layer_parameters(self.model, self.context, self._all_layers, 1, trained=True)

    @property
    def host_bytes_per_update(self) -> float:
        """Bytes of an optimiser in host memory for every parameter that it updates; frozen ones have masters too."""
        return MASTER_BYTES * self.parameters / self.trained + MOMENT_BYTES if self.model.adapters else OPTIMISER_BYTES

    def shards(self, shard_group: int) -> tuple[int, int]:
        """Ranks over which a shard group shards common parameters, and divided ones.

        Without sharding a shard group is an EP group.
        """
        common = 1 if self.expert > 1 and self.shard_ranks == 1 else shard_group
        return common, max(1, common // (self.expert * self.tensor))

    def _sharded(self, parameters: RankParameters, shard_group: int) -> int:
        """Largest shard of so many parameters, or bytes of them."""
        return sum(-(-count // over) for count, over in zip(parameters, self.shards(shard_group), strict=True))

    @property
    def _all_layers(self) -> LayerRange:
        return LayerRange(0, self.model.layers, self.model.layers)

    @property
    def idle_bytes(self) -> int:
        """Bytes of a rank in no stage: under free sharding, its part of master, moments and gradient."""
        if not self.owners:
            return 0
        own, updated = (PARAMETER_BYTES, 0) if self.offload_optimiser else (MASTER_BYTES, MOMENT_BYTES)
        return -(-(own * self.parameters + (updated + GRADIENT_BYTES) * self.trained) // self.owners)

    def fixed_bytes(self, policy: MemoryPolicy) -> int:
        """Bytes before any token in plans of one stage: state, gathered parameters and working bytes.

        Two layers are gathered at a time (one computes, one is fetched) beside embedding and head. Reducing every
        round also holds two layers' whole gradients, reducing once per step a whole gradient.
        """
        layers, trained = self._all_layers, self.trained_of(self._all_layers)
        if self.owners or self.shard_ranks == 1:
            return self.state_bytes(layers, 1) + self.working_bytes(layers)
        master, moments = (0, 0) if self.offload_optimiser else (MASTER_BYTES, MOMENT_BYTES)
        state = (PARAMETER_BYTES + master) * self._sharded(self.rank_parameters, self.shard_ranks)
        state += (moments + GRADIENT_BYTES) * self._sharded(trained, self.shard_ranks)
        tables = self.model.head_parameters * (1 if self.model.tied else 2) // self.table_ranks
        gathered = PARAMETER_BYTES * (self._two_layers(layers) + tables)
        gradients = self._two_layers(layers, trained=True) if policy.reduce == Reduce.ROUND else trained.total
        return state + gathered + GRADIENT_BYTES * gradients + self.working_bytes(layers)

    def token_bytes(self, policy: MemoryPolicy, offloaded_layers: int = 0, lighter_layers: int = 0) -> float:
        """Bytes that each token on a rank adds in plans of one stage: activations of all layers."""
        return self.activation_bytes(self._all_layers, policy.checkpoint, offloaded_layers, lighter_layers).peak

    def state_bytes(self, layers: LayerRange, shard_ranks: int) -> int:
        """State of a pipeline stage: whole copy and gradient, the rest over the shard group unless sharding is free."""
        parameters, trained = self.parameters_of(layers), self.trained_of(layers)
        state = PARAMETER_BYTES * parameters.total + GRADIENT_BYTES * trained.total
        if self.owners:
            return state
        for count, updated, shards in zip(parameters, trained, self.shards(shard_ranks), strict=True):
            sharded = 0 if self.offload_optimiser else MASTER_BYTES * count + MOMENT_BYTES * updated
            if shards > 1:
                sharded += GRADIENT_BYTES * updated + (PARAMETER_BYTES * count if self.offload_optimiser else 0)
            state += -(-sharded // shards)
        return state

    def host_state_bytes(self, stages: Sequence[LayerRange], shard_ranks: int) -> int:
        """Master and moments in host memory, of a rank with these stages and shard groups of `shard_ranks` ranks."""
        if not self.offload_optimiser:
            return 0
        if self.owners:
            return -(-(MASTER_BYTES * self.parameters + MOMENT_BYTES * self.trained) // self.owners)
        each = [(self.parameters_of(layers), self.trained_of(layers)) for layers in stages]
        total = [
            sum(MASTER_BYTES * held[kind] + MOMENT_BYTES * trained[kind] for held, trained in each) for kind in (0, 1)
        ]  # of common parameters, and of divided ones
        return self._sharded(RankParameters(*total), shard_ranks)

    def working_bytes(self, layers: LayerRange) -> int:
        """Buffers of a rank, however many stages it has: a chunk of logits on the last, the device, communicators.

        Under free sharding also the rank's part of the optimiser's state, and two layers' gradients packed to be sent.
        """
        columns = self.model.vocabulary // self.table_ranks if layers.has_head else 0
        logits = self.profile.head_chunk * columns * CHUNK_LOGIT_BYTES
        packed = GRADIENT_BYTES * self._two_layers(layers, trained=True) if self.owners > 1 else 0
        return self.idle_bytes + packed + logits + int(self.profile.workspace_gib * GIB)

    def _two_layers(self, layers: LayerRange, *, trained: bool = False) -> int:
        """Parameters of two layers, of the largest; or those that are trained."""
        count = self.model.trained_parameters if trained else self.model.layer_parameters
        return 2 * max(count(layer, self.tensor, self.expert) for layer in range(layers.first, layers.stop))

    @property
    def _values(self) -> tuple[LayerValues, ...]:
        """What a token leaves in every layer; with the tokens that others send to this rank's experts."""
        return layer_values(self.model, self.tensor, self._imbalance)

    @property
    def _imbalance(self) -> float:
        return self.profile.expert_imbalance if self.expert * self.tensor > 1 else 1.0

    def _expert_buffers(self, layers: LayerRange) -> int:
        """Bytes per token of a layer's exchange with its EP group: rows that are sent, and rows that arrive."""
        if self.expert == 1 or not any(layers.first <= layer < layers.stop for layer in self.model.moe_layers):
            return 0
        rows = self.expert * share_of_tokens(self.model, self.expert) * (1 + self._imbalance)
        return ceil(ACTIVATION_BYTES * rows * self.model.hidden)

    def _whole(self, layers: LayerRange) -> list[int]:
        """Bytes per token that each layer stores until its backward if nothing is recomputed, with log-sum-exp."""
        values = self._values[layers.first : layers.stop]
        return [2 * layer.saved + 4 * self.model.heads for layer in values]

    def _stored(self, layers: LayerRange, checkpoint: Checkpoint, lighter_layers: int = 0) -> list[int]:
        """Bytes per token that each layer stores until its backward; of a stage that is recomputed as one, its input.

        The last `lighter_layers` layers recompute less.
        """
        hidden, (query, _), whole = 2 * self.model.hidden, attention_widths(self.model), self._whole(layers)
        if checkpoint == Checkpoint.STAGE:
            return [hidden]
        each = {Checkpoint.SELECTIVE: hidden + 2 * 2 * query + 4 * self.model.heads, Checkpoint.FULL: hidden}
        heavy, light = checkpoint, checkpoint.lighter or checkpoint
        kinds = [heavy] * (len(whole) - lighter_layers) + [light] * lighter_layers
        return [each.get(kind, alone) for kind, alone in zip(kinds, whole, strict=True)]

    def host_bytes(self, layers: LayerRange, checkpoint: Checkpoint, offloaded_layers: int) -> int:
        """Bytes per token that the first `offloaded_layers` layers of a stage have in host memory, from F to B."""
        return sum(self._stored(layers, checkpoint)[:offloaded_layers])

    def activation_bytes(
        self, layers: LayerRange, checkpoint: Checkpoint, offloaded_layers: int = 0, lighter_layers: int = 0
    ) -> ActivationBytes:
        """Activations per token of a micro-batch on a stage.

        Its first `offloaded_layers` layers store them in host memory, its last `lighter_layers` layers recompute less.
        Besides the layers: hidden state, its norm and its gradient at the head, and the exchange buffers of a layer.
        These are q, k, v and output sent and received; two K/V pairs in bf16 and two in float32 for a ring; partial
        sums of tensor ranks sent and received; and rows of an EP group sent and received.
        """
        model, tensor, hidden = self.model, self.tensor, self.model.hidden
        if layers.first == layers.stop:  # a head stage: its input, and the gradient of what the loss takes
            return ActivationBytes(2.0 * 2 * hidden, 2.0 * 3 * hidden, 2.0 * 3 * hidden, 0.0, 0.0)
        query, kv = attention_widths(model)
        values, whole = self._values[layers.first : layers.stop], self._whole(layers)
        outputs = 2 * (tensor - 1) * hidden  # gradients of both halves' outputs, gathered from the tensor ranks
        deferred = float(sum(2 * (layer.saved - query + outputs) for layer in values))
        busy = 2 * 2 * (2 * query + 2 * kv) + 2 * 2 * kv * (2 + 4) + (2 * 3 * hidden if layers.has_head else 0)
        busy += 2 * 2 * tensor * hidden if tensor > 1 else 0
        if layers.has_head and self.table_ranks > 1:  # exchanged like those of a layer, while their gradients add up
            busy += 2 * tensor * hidden
        busy += self._expert_buffers(layers)
        stored = self._stored(layers, checkpoint, lighter_layers)
        held, copied = float(sum(stored[offloaded_layers:])), 2.0 * max(stored[:offloaded_layers], default=0)
        recomputed = {Checkpoint.NONE: 0, Checkpoint.STAGE: sum(whole)}.get(checkpoint, max(whole))
        recomputes = checkpoint != Checkpoint.NONE
        forward = max(whole) if recomputes else 0  # the layer that is being run keeps its values
        split = deferred if recomputes else 0.0
        return ActivationBytes(held, busy + forward + copied, busy + recomputed + copied, deferred, split)


@dataclass(frozen=True, slots=True)
class AdditiveMemory:
    """The same of published constants: one state, so many bytes per token; stages share both by their layers."""

    state: int  # of one rank, sharded over `shard_ranks`
    shard_ranks: int
    bytes_per_token: float
    layers: int  # of the model
    idle_bytes: int = 0

    def fixed_bytes(self, policy: MemoryPolicy) -> int:
        """The state."""
        return self.state

    def token_bytes(self, policy: MemoryPolicy, offloaded_layers: int = 0, lighter_layers: int = 0) -> float:
        """Activations; no layer recomputes less than the measured ones."""
        return self.bytes_per_token * (1 + offloaded_layers / self.layers)

    def state_bytes(self, layers: LayerRange, shard_ranks: int) -> int:
        """The share of the layers, sharded anew."""
        return -(-self.state * self.shard_ranks * (layers.stop - layers.first) // (layers.model_layers * shard_ranks))

    def working_bytes(self, layers: LayerRange) -> int:
        """None."""
        return 0

    def host_state_bytes(self, stages: Sequence[LayerRange], shard_ranks: int) -> int:
        """None."""
        return 0

    def host_bytes(self, layers: LayerRange, checkpoint: Checkpoint, offloaded_layers: int) -> float:
        """The share of the layers."""
        return self.bytes_per_token * offloaded_layers / layers.model_layers

    def activation_bytes(
        self, layers: LayerRange, checkpoint: Checkpoint, offloaded_layers: int = 0, lighter_layers: int = 0
    ) -> ActivationBytes:
        """The share of the layers; nobody says what of it one layer works with, so copies take as much again."""
        each = self.bytes_per_token * (layers.stop - layers.first) / layers.model_layers
        away = self.host_bytes(layers, checkpoint, offloaded_layers)
        return ActivationBytes(each - away, 2 * away, 2 * away, each, 0.0)


MemoryModel = AnalyticMemory | AdditiveMemory
"""Bytes of a rank under either kind of profile."""


# -- pipeline stages ------------------------------------------------------------


def stage_parameters(cost: CostModel, layers: LayerRange, tensor: int | None = None, *, trained: bool = False) -> int:
    """Parameters of a rank of a stage, by the cost model's tensor parallel degree if none is given."""
    own = cost.tensor if tensor is None else tensor
    return layer_parameters(cost.model, cost.context, layers, own, trained=trained)


@lru_cache(maxsize=4096)
def layer_parameters(
    model: ModelSpec, context: int, layers: LayerRange, tensor: int, *, trained: bool = False, tables: int = 1
) -> int:
    """Parameters of a rank of some layers, with the embedding on the first stage, norm and head on the last.

    All of them, or those that are `trained`.

    A tied table is on both. All stages together have the model's parameters, a tied table counted twice. Tensor ranks
    have their part of the layers' matrices, and of embedding and head if these are cut over `tables` ranks.
    """
    if trained and model.adapters:
        return sum(model.trained_parameters(layer) for layer in range(layers.first, layers.stop))
    table = model.head_parameters
    outside = model.parameters(context) - sum(model.layer_parameters(layer) for layer in range(model.layers))
    beside = outside - table * (1 if model.tied else 2)  # final norm, and learned positions
    positions = context * model.hidden if model.learned_positions else 0
    own = sum(model.layer_parameters(layer, tensor) for layer in range(layers.first, layers.stop))
    own += table // tables + positions if layers.has_embedding else 0
    if layers.has_head:
        own += beside - positions + (0 if layers.has_embedding and model.tied else table // tables)
    return own


def kv_cache_bytes(cost: CostModel, layers: LayerRange, group: Group, tokens: int) -> tuple[int, int]:
    """(keys and values, their gradients) of a document of so many tokens in pieces, on each rank of its group.

    They stay for the whole document. A rank has the tokens of its ring index, and the key/value heads that its query
    heads read; or their latents.
    """
    model, tensor = cost.model, cost.tensor
    heads = kv_heads_per_rank(model.heads // tensor, model.kv_heads // tensor, group.ulysses // tensor)
    attending = sum(window != 0 for window in model.windows[layers.first : layers.stop])
    each = model.latent_values if group.latent else 2 * heads * model.head_dim
    values = each * -(-tokens // group.ring) * attending
    return ACTIVATION_BYTES * values, KV_GRADIENT_BYTES * values


def pipeline_checkpoints(cost: CostModel) -> tuple[Checkpoint, ...]:
    """Checkpointing choices of a micro-batch, from the fastest to the one that keeps least."""
    known = cost.engine.policies[0].checkpoint
    every = (Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL, Checkpoint.STAGE)
    return (known,) if known == Checkpoint.PROFILE else every


PIPELINE_OFFLOADED = (Checkpoint.SELECTIVE, Checkpoint.FULL, Checkpoint.STAGE, Checkpoint.PROFILE)
"""Checkpoints under which micro-batches of a pipeline may be offloaded."""


def pp_rank_bytes(cost: CostModel, stages: Sequence[LayerRange], shard_group: int) -> int:
    """Bytes of a rank before any token, with these stages and shard groups of `shard_group` ranks."""
    state = sum(cost.memory.state_bytes(layers, shard_group) for layers in stages)
    return state + max(cost.memory.working_bytes(layers) for layers in stages)


def pipeline_limits(cost: CostModel, pp_ranks: Sequence[Sequence[LayerRange]], shard_group: int) -> Limits:
    """Limits of plans whose pipeline ranks have these stages, and shard groups of `shard_group` ranks.

    The capacity of a checkpoint is what the fullest rank can hold of one micro-batch and nothing else: how many are in
    flight is the plan's choice, and the simulator checks it. Plans that offload nothing leave out the capacities for
    that. MemoryBudgetError if the state alone does not fit.
    """
    free = [cost.budget_bytes - pp_rank_bytes(cost, stages, shard_group) for stages in pp_ranks]
    budget = f"{cost.budget_bytes / GIB:.1f} GiB"
    if min(free) <= 0:
        need, parts = (cost.budget_bytes - min(free)) / GIB, "" if cost.offload_optimiser else ", optimiser"
        raise MemoryBudgetError(
            f"{cost.model.name} does not fit: stage {free.index(min(free))} needs {need:.1f} GiB per GPU for "
            f"parameters, gradients{parts} and buffers, the budget is {budget}; "
            f"{cost.optimiser_way_out}use more stages or more GPUs, or raise the budget above {need:.1f} GiB"
        )
    rooms = [(layers, room) for stages, room in zip(pp_ranks, free, strict=True) for layers in stages]

    def fits(checkpoint: Checkpoint, offload: bool) -> int:
        most = []
        for layers, room in rooms:
            offloaded = layers.stop - layers.first if offload else 0
            most.append(int(room // cost.memory.activation_bytes(layers, checkpoint, offloaded).peak))
        return cost.microbatch_capacity(min(most))

    known = pipeline_checkpoints(cost)
    capacity = [(checkpoint, tokens) for checkpoint in known if (tokens := fits(checkpoint, offload=False)) > 0]
    if not capacity:
        raise MemoryBudgetError(
            f"a budget of {budget} holds the state of {cost.model.name} but no token; "
            "use more stages or raise the budget"
        )
    offloaded = [
        (checkpoint, max(tokens, fits(checkpoint, offload=True)))
        for checkpoint, tokens in capacity
        if cost.offload is not False and checkpoint in PIPELINE_OFFLOADED
    ]
    limits = Limits(cost.ranks, cost.node_size, cost.model.heads, tuple(capacity), cost.pad_multiple)
    return replace(limits, offload_capacity=tuple(offloaded))
