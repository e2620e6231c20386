"""Parameters that every step's plan places anew, over an optimiser layout that never changes (Hydraulis).

    prefetch            rows go from the optimiser's layout to the ranks of the plan's stages, layer by layer
    forward             a layer waits for its own parameters only
    backward            after a layer's last one its gradients go back, summed over all ranks that computed some
    finish_gradients    waits for the rest: every rank has the gradients of its rows

So the next step may have other stages, pipelines and tensor degrees, and no optimiser state moves. An element's
gradient is the sum over all ranks with a copy of it: replicas, TP groups, pipelines side by side, and both ends of a
tied embedding.

There are three layouts; without stages that reshard every round, the last two are one:

    optimiser layout    an even share of the rows over all ranks, for the whole run
    step layout         what a rank holds from `prefetch` to `finish_gradients`
    compute layout      what a rank computes with

A stage reshards every round where its row has UNSHARD and RESHARD with a round (0UNSHARD3 0F3 0RESHARD3). Between
rounds each of the ranks with the same slice of its weights keeps an even share of the rows.

Parameters and gradients travel in buckets, one per layer. All ranks start buckets in one order, whatever they hold:

    parameters    embedding, layer 0, layer 1, .. norm and head
    gradients     norm and head, .. layer 1, layer 0, embedding

A rank sends gradients while its last backward computes if all ranks that it computes with do so too: otherwise they
might wait for this rank's part of a layer while it waits for them to start a bucket. See `RankPlan.gradients_leave_in`.

Where a bucket goes in two hops (see `dist.resharding`), ranks of the node wait until this one starts the second hop. So
it must not wait for them before that: second hops of parameters start before the first layer runs, those of gradients
after the last backward. The computation then hides the hop inside the node; on CUDA streams it hides both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from seqloom.attention.merge import sum_dtype
from seqloom.dist import Channel, Context, Transport
from seqloom.dist.resharding import InFlight, Resharder, boxes_of
from seqloom.errors import SeqloomError
from seqloom.layout import Layout
from seqloom.models.adapter import ModelAdapter
from seqloom.models.loss import CHUNK, HeadGradients
from seqloom.params.interface import Parameters, ParameterShard, device_of, local_tensor, reduce_dtype, squared_norm
from seqloom.params.shards import ComputeCopies, OptimizerShards, shard_rows, weights_of
from seqloom.plan import ActionKind, LayerRange, Plan, Sharding, Stage
from seqloom.plan.parameter_layout import (
    EMBEDDING,
    HEAD,
    Weight,
    compute_layout,
    dp_groups,
    layer_buckets,
    optimiser_layout,
)

Tensors = Mapping[int, torch.Tensor]
"""{weight: tensor}."""
StageIndices = frozenset[tuple[int, int]]
"""(pipeline, stage)."""
CACHED_RESHARDERS = 64
"""Sets of stages whose index work is kept."""


class ReshardingParameters(Parameters):
    """The parameters of a model that plans place anew in every step. Every rank makes one, with the same values.

    Master weights are the given parameters, in their dtype (float32 for training), sharded along their first axis over
    all ranks.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        transport: Transport,
        *,
        param_dtype: torch.dtype | None = None,
        offload_optimiser: bool = False,
        chunk: int = CHUNK,
    ) -> None:
        """Shard the model in place: between steps its module has what the last plan needed here.

        Args:
            adapter: of the model, on the device where it will run, or with `deferred` values, read one at a time.
            transport: this rank's; where torch.distributed runs, all ranks of the job.
            param_dtype: dtype of parameters and activations in the model; None: that of the master weights. Gradients
                are summed in float32 or wider.
            offload_optimiser: keep master weights in host memory.
        """
        parameters = list(adapter.module.parameters())
        device = device_of(adapter, parameters)
        _check_dtypes(parameters, param_dtype)
        super().__init__(adapter, param_dtype or parameters[0].dtype, device, chunk, HeadGradients())
        self._transport, self._weights = transport, weights_of(adapter)
        self._trained = [weight for weight, each in enumerate(parameters) if each.requires_grad]
        del parameters
        self._buckets = layer_buckets(self._weights)
        users = [{user for weight in bucket for user in self._weights[weight].used_by} for bucket in self._buckets]
        self._buckets_by_user = {
            user: frozenset(bucket for bucket, found in enumerate(users) if user in found)
            for user in (EMBEDDING, *range(len(adapter.layers)), HEAD)
        }
        offload_dtype = self._dtype if offload_optimiser else None
        self._masters = OptimizerShards(adapter, transport, device, offload_dtype=offload_dtype)
        self._copies = ComputeCopies(adapter.module, param_dtype, self._masters.shapes, device)
        self._resharders: dict[tuple[tuple[tuple[Stage, ...], ...], StageIndices, int], PlanResharders] = {}
        self._in_flight: dict[int, InFlight] = {}  # buckets of parameters on their way to the copies
        self._resharded = ReshardedStages({}, {}, self._copies)
        self._grad_reduce: GradReduce | None = None
        self._sends_gradients = False  # inside the last backward of the step
        self._register_hooks()

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        """This rank: its copies are not sharded."""
        return (self._transport.rank,)

    def prefetch(self, plan: Plan) -> None:
        """See `Parameters.prefetch`. Layers wait for what they need."""
        self._check(plan)
        self.wait_prefetch()
        resharders, rows, dtype = self._resharders_of(plan), self._masters.rows, self._dtype
        held, resharded = resharders.values.target, resharders.resharded
        unmoved = {weight for weight, _ in resharders.values.source.items() & held.items()} - resharded
        aliases = {weight: rows[weight] for weight in unmoved if rows[weight].dtype == dtype}
        to_fill = self._copies.allocate_all(resharders.boxes, aliases, resharded)
        shards = {
            weight: torch.empty((held[weight].rows, held[weight].columns), dtype=dtype, device=self._device)
            for weight in resharded & held.keys()
        }
        self._resharded = ReshardedStages(resharders.by_stage, shards, self._copies)
        for bucket in range(len(self._buckets)):
            self._in_flight[bucket] = resharders.values.start_copy(bucket, rows, dtype, into=to_fill | shards)
        for transfer in self._in_flight.values():
            transfer.start_second_hop()
        stages = [pair for each in plan.pipelines for pair in zip(each.stages, each.layer_ranges, strict=True)]
        mine = {layers: self._buckets_of(layers) for stage, layers in stages if self._transport.rank in stage.ranks}
        self._grad_reduce = GradReduce(resharders.gradients, self._pop_gradients, sum_dtype(dtype), mine)
        self._sends_gradients = False

    def wait_prefetch(self) -> None:
        """See `Parameters.wait_prefetch`."""
        self._wait(tuple(self._in_flight))

    def unshard(self, layers: LayerRange) -> None:
        """See `Parameters.unshard`. Only stages that reshard every round have anything to gather."""
        if layers in self._resharded:
            self._wait(self._buckets_of(layers))
            self._resharded.unshard(layers)

    def forward(
        self, layers: LayerRange, inputs: torch.Tensor, labels: torch.Tensor | None, context: Context
    ) -> torch.Tensor:
        """See `Parameters.forward`."""
        if layers.has_embedding:
            self._wait(self._buckets_by_user[EMBEDDING])
        if layers.has_head and self._adapter.norm is None:
            self._wait(self._buckets_by_user[HEAD])
        output = super().forward(layers, inputs, labels, context)
        missing = sorted(self._buckets_of(layers) & self._in_flight.keys())
        if missing:
            name = self._weights[self._buckets[missing[0]][0]].name
            raise SeqloomError(
                f"layers {layers.first} to {layers.stop - 1} have run before {name} was there: hooks of the layers and "
                "of the final norm wait for their parameters; call these as modules"
            )
        return output

    def backward(self, output: torch.Tensor | GradientEdge, gradient: torch.Tensor | None, *, reduce: bool) -> None:
        """See `Parameters.backward`. The last one sends gradients layer by layer, if it has all of them."""
        self._sends_gradients = reduce and not self.weight_gradients.enabled and not self._resharded
        super().backward(output, gradient, reduce=reduce)
        self._resharded.end_backward()
        if self._sends_gradients:
            self._sends_gradients = False
            self._reducer().end()

    def reduce(self, layers: LayerRange) -> None:
        """See `Parameters.reduce`."""
        self._resharded.reduce(layers, deferred=self.weight_gradients.enabled)
        self._reducer().end_stage(layers)

    def reshard(self, layers: LayerRange) -> None:
        """See `Parameters.reshard`. Other stages keep their copies until the next plan, which often has the same."""
        self._resharded.reshard(layers)

    def finish_gradients(self) -> None:
        """See `Parameters.finish_gradients`."""
        self.wait_prefetch()
        self._resharded.reduce_all(deferred=self.weight_gradients.enabled)
        self._masters.set_gradients(self._reducer().wait())
        self._grad_reduce = None

    def gradient_norm(self) -> torch.Tensor:
        """See `Parameters.gradient_norm`."""
        squares = squared_norm(self.device_shards().values(), self._device)
        self._transport.all_reduce(squares, tuple(range(self._transport.ranks)))
        return squares.sqrt()

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Parameters.full_gradients`."""
        for index, parameter in enumerate(self._masters.parameters):
            if parameter.grad is not None:
                yield self._masters.names[index], self._masters.gather(index, local_tensor(parameter.grad))

    def shards(self) -> Iterator[tuple[str, ParameterShard]]:
        """See `Parameters.shards`; every rank has its rows."""
        rank, ranks, masters = self._transport.rank, self._transport.ranks, self._masters
        for name, shape, master in zip(masters.names, masters.shapes, masters.masters, strict=True):
            rows = local_tensor(master.detach()).to(self._device)
            offset = (shard_rows(shape[0], rank, ranks).start, *(0 for _ in shape[1:]))
            yield name, ParameterShard(shape, rows.dtype, offset, rows if len(rows) else None)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Parameters.full_parameters`."""
        for index, master in enumerate(self._masters.masters):
            rows = local_tensor(master.detach()).to(self._device)
            yield self._masters.names[index], self._masters.gather(index, rows)

    def master_weights(self) -> dict[str, nn.Parameter]:
        """See `Parameters.master_weights`; DTensors where torch.distributed runs."""
        return self._masters.trained(self._masters.masters)

    def device_shards(self) -> dict[str, nn.Parameter]:
        """See `Parameters.device_shards`."""
        return self._masters.trained(self._masters.parameters)

    def compute_weights(self) -> Iterator[torch.Tensor]:
        """See `Parameters.compute_weights`."""
        yield from self._copies.allocated()

    def zero_grad(self) -> None:
        """See `Parameters.zero_grad`."""
        super().zero_grad()
        for copy in self._copies.parameters:
            copy.grad = None

    def _wait(self, buckets: Iterable[int]) -> None:
        """Return when the parameters of these buckets are there."""
        for bucket in buckets:
            if bucket in self._in_flight:
                self._in_flight.pop(bucket).wait()

    def _reducer(self) -> GradReduce:
        if self._grad_reduce is None:
            raise SeqloomError("gradients of parameters without a plan; call prefetch(plan) first")
        return self._grad_reduce

    def _register_hooks(self) -> None:
        """Let modules wait for their parameters, and send gradients when they are complete. Once for all steps."""
        for user, module in [*enumerate(self._adapter.layers), (HEAD, self._adapter.norm)]:
            if module is not None:
                module.register_forward_pre_hook(lambda *_, wanted=self._buckets_by_user[user]: self._wait(wanted))
        for bucket, module in enumerate([*self._adapter.layers, self._adapter.norm], 1):
            if module is not None:
                module.register_forward_pre_hook(partial(self._reduce_after_backward, bucket))

    def _reduce_after_backward(self, bucket: int, module: nn.Module, args: tuple[object, ...]) -> None:
        """Have a layer's gradients reduced once its input has a gradient: then its weights have.

        All ranks that share the layer's tokens do so between the same two exchanges. Weight gradients of a split
        backward come later and wait for the REDUCE.
        """
        hidden = args[0] if args else None
        wanted = torch.is_grad_enabled() and not self.weight_gradients.enabled
        if wanted and isinstance(hidden, torch.Tensor) and hidden.requires_grad:
            hidden.register_hook(lambda _: self._end_layer(bucket))

    def _end_layer(self, bucket: int) -> None:
        if self._resharded:
            self._resharded.reduce_layer(frozenset(self._buckets[bucket]))
        elif self._sends_gradients:
            self._reducer().end(bucket)

    def _buckets_of(self, layers: LayerRange) -> frozenset[int]:
        """Return the buckets with weights of a stage."""
        users = (buckets for user, buckets in self._buckets_by_user.items() if _runs(layers, user))
        return frozenset[int]().union(*users)

    def _resharders_of(self, plan: Plan) -> PlanResharders:
        resharded = resharded_stages(plan)
        key = (tuple(pipeline.stages for pipeline in plan.pipelines), resharded, plan.limits.node_size)
        if key not in self._resharders:
            if len(self._resharders) == CACHED_RESHARDERS:
                del self._resharders[next(iter(self._resharders))]
            self._resharders[key] = PlanResharders(
                plan, resharded, self._weights, self._trained, self._transport, self._device
            )
        return self._resharders[key]

    def _pop_gradients(self, weights: Iterable[int]) -> Tensors:
        """Return the gradients of weights, from copies or from shards, and drop them."""
        wanted = set(weights)
        resharded = wanted & self._resharded.weights
        return self._copies.pop_gradients(wanted - resharded) | self._resharded.pop_gradients(resharded)

    def _check(self, plan: Plan) -> None:
        if plan.sharding != Sharding.FREE:
            raise SeqloomError(
                f"a plan with {plan.sharding} sharding for ReshardingParameters; plan with sharding "
                f'"{Sharding.FREE}", or use FSDPParameters or PipelineFSDP'
            )
        for pipeline in plan.pipelines:
            layers = pipeline.stages[-1].layers[1]
            if layers != len(self._adapter.layers):
                raise SeqloomError(
                    f"a plan for {layers} layers and a model with {len(self._adapter.layers)}; make the plan for this "
                    "model"
                )
        for degree in sorted({stage.tensor for pipeline in plan.pipelines for stage in pipeline.stages}):
            if degree > 1:
                self._adapter.check_tp_degree(degree)
        for degree in sorted({stage.expert for pipeline in plan.pipelines for stage in pipeline.stages}):
            self._adapter.check_expert_degree(degree)


class GradReduce:
    """The gradients of one step on their way from this rank's copies to the optimiser's rows."""

    def __init__(
        self,
        resharder: Resharder,
        pop_gradients: Callable[[Iterable[int]], Tensors],
        dtype: torch.dtype,
        buckets_by_stage: Mapping[LayerRange, frozenset[int]],
    ) -> None:
        """Start a step.

        Args:
            pop_gradients: hands over the gradients of weights; those without one are left out.
            buckets_by_stage: with weights of each stage of this rank.
        """
        self._resharder, self._pop_gradients, self._dtype = resharder, pop_gradients, dtype
        self._held = [frozenset(bucket) & resharder.target.keys() for bucket in resharder.buckets]
        self._open_stages = [
            {layers for layers, buckets in buckets_by_stage.items() if bucket in buckets}
            for bucket in range(len(self._held))
        ]
        self._not_started = list(range(len(self._held)))
        self._in_flight: list[InFlight] = []

    def end_stage(self, layers: LayerRange) -> None:
        """Note that all backwards of a stage have run; buckets of other stages of this rank wait for those too."""
        for stages in self._open_stages:
            stages.discard(layers)
        self._start_complete()

    def end(self, first: int = 0) -> None:
        """Note that the gradients of buckets from this one on are complete: all backwards of this rank have run."""
        for stages in self._open_stages[first:]:
            stages.clear()
        self._start_complete()

    def wait(self) -> dict[int, torch.Tensor]:
        """Return the sums over all ranks of this rank's rows, {weight: [rows, columns]}."""
        self.end()
        sums: dict[int, torch.Tensor] = {}
        for transfer in self._in_flight:
            transfer.start_second_hop()
        for transfer in self._in_flight:
            sums |= transfer.wait()
        return sums

    def _start_complete(self) -> None:
        """Start complete buckets, from the last one on."""
        while self._not_started and not self._open_stages[self._not_started[-1]]:
            bucket = self._not_started.pop()
            gradients = self._pop_gradients(self._held[bucket])
            self._in_flight.append(self._resharder.start_reduce(bucket, gradients, self._dtype))


class ReshardedStages:
    """The stages of one rank that reshard every round of a step.

    UNSHARD    the ranks with the same slice of the stage's weights gather their shards
    backward   as soon as a layer is done, its gradients are summed into those of the shards
    RESHARD    frees the copies; after a backward, reduces the gradients that are left first

    Autograd keeps the copies, or views of them, for a later backward. So their memory goes and comes, the tensors stay.
    """

    def __init__(
        self, resharders: Mapping[LayerRange, Resharder], shards: dict[int, torch.Tensor], copies: ComputeCopies
    ) -> None:
        """Start with nothing gathered.

        Args:
            resharders: see `PlanResharders.by_stage`.
            shards: this rank's rows, by weight; to be filled before the first round.
        """
        self._resharders, self._shards, self._copies = resharders, shards, copies
        self._weights_of = {
            layers: {weight for bucket in each.buckets for weight in bucket} for layers, each in resharders.items()
        }
        self._gradients: dict[int, torch.Tensor] = {}
        self._unsharded: set[LayerRange] = set()
        self._reduced_layers: set[tuple[LayerRange, int]] = set()  # (stage, bucket) of the backward that runs
        self._unreduced: dict[LayerRange, set[int]] = {}  # buckets with gradients that are not in the shards' yet
        self._finished: set[LayerRange] = set()  # no more gradients will come

    @property
    def weights(self) -> set[int]:
        """Weights of these stages."""
        return set[int]().union(*self._weights_of.values())

    def __contains__(self, layers: object) -> bool:
        return layers in self._resharders

    def __len__(self) -> int:
        return len(self._resharders)

    def unshard(self, layers: LayerRange) -> None:
        """Gather a stage; return when it is there."""
        if layers in self._unsharded:
            return
        resharder = self._resharders[layers]
        into = {weight: self._copies.allocate(weight) for weight in self._weights_of[layers] - self._in_use()}
        for bucket in range(len(resharder.buckets)):  # one at a time: the packed buffer stays small
            resharder.start_copy(bucket, self._shards, self._copies.dtype, into=into).wait()
        self._unsharded.add(layers)

    def reduce_layer(self, weights: Set[int]) -> None:
        """Sum the gradients of a layer with these weights into those of the shards.

        All ranks that share it call it, between the same two exchanges of a backward.
        """
        for layers in self._unsharded:
            for index, bucket in self._trained_buckets(layers):
                if bucket and set(bucket) <= weights:
                    self._reduce_bucket(layers, index)
                    self._reduced_layers.add((layers, index))

    def end_backward(self) -> None:
        """Note that a backward has ended: gathered stages may have gradients of all but the reduced layers."""
        for layers in self._unsharded:
            left = {index for index, _ in self._trained_buckets(layers) if (layers, index) not in self._reduced_layers}
            self._unreduced[layers] = self._unreduced.get(layers, set()) | left
        self._reduced_layers.clear()

    def reshard(self, layers: LayerRange) -> None:
        """Reduce the gradients of a backward, and free the copies."""
        if layers in self._unsharded:
            self.reduce(layers)
            self._unsharded.discard(layers)
            for weight in self._weights_of[layers] - self._in_use():
                self._copies.free(weight)

    def reduce(self, layers: LayerRange, *, deferred: bool = False) -> None:
        """Sum what a stage has of gradients into those of the shards. All ranks that share it call it.

        Args:
            deferred: weights may have got gradients after the backward.
        """
        if layers not in self._resharders or not (deferred or layers in self._unreduced):
            return
        unreduced = self._unreduced.pop(layers, set())
        if deferred:
            self._finished.add(layers)
        for index, _ in self._trained_buckets(layers):
            if deferred or index in unreduced:
                self._reduce_bucket(layers, index)

    def reduce_all(self, *, deferred: bool) -> None:
        """Reduce what is left, of all stages; see `reduce`."""
        for layers in self._resharders:
            self.reduce(layers, deferred=deferred and layers not in self._finished)

    def pop_gradients(self, weights: Iterable[int]) -> dict[int, torch.Tensor]:
        """Return the gradients of shards and drop them."""
        return {weight: self._gradients.pop(weight) for weight in weights if weight in self._gradients}

    def _trained_buckets(self, layers: LayerRange) -> list[tuple[int, tuple[int, ...]]]:
        return list(enumerate(self._resharders[layers].buckets[:-1]))

    def _reduce_bucket(self, layers: LayerRange, bucket: int) -> None:
        resharder, wide = self._resharders[layers], sum_dtype(self._copies.dtype)
        gradients = self._copies.pop_gradients(resharder.buckets[bucket])
        self._gradients |= resharder.start_reduce(bucket, gradients, wide, into=self._gradients).wait()

    def _in_use(self) -> set[int]:
        return set[int]().union(*(self._weights_of[layers] for layers in self._unsharded))


class PlanResharders:
    """One rank's index work for the stages of a plan, reused by all plans with the same stages.

    Attributes:
        values: from the optimiser layout to the step layout.
        gradients: the same for trained weights; used backwards.
        boxes: what this rank computes with, by weight.
        resharded: weights of which this rank holds only a shard between rounds.
        by_stage: for every stage of this rank that reshards every round: from the step layout to the compute layout, of
            the weights that it reshards. Trained ones are in one bucket per layer, so that packed buffers stay small;
            the last bucket has the others.
    """

    def __init__(
        self,
        plan: Plan,
        resharded: StageIndices,
        weights: Sequence[Weight],
        trained: Sequence[int],
        transport: Transport,
        device: torch.device,
    ) -> None:
        """Do the index work of a plan's stages; those of `resharded` reshard every round.

        What is in flight for a whole step has a channel of its own.
        """
        home = optimiser_layout(weights, transport.ranks)
        compute = compute_layout(weights, plan.pipelines)
        step = compute_layout(weights, plan.pipelines, resharded) if resharded else compute
        new = partial(Resharder, weights, device=device)
        background = partial(new, transport=transport.on(Channel.PARAMETERS), node_size=plan.limits.node_size)
        self.values = self.gradients = background(home, step)
        if len(trained) < len(weights):
            self.gradients = background(_select(home, trained), _select(step, trained))
        self.boxes = boxes_of(compute, transport.rank)
        moved = [weight for weight, box in sorted(self.boxes.items()) if self.values.target.get(weight) != box]
        self.resharded, self.by_stage = frozenset(moved), dict[LayerRange, Resharder]()
        for ranks, layers in _dp_groups_of(plan, resharded, transport.rank):
            chosen = [weight for weight in moved if any(_runs(layers, user) for user in weights[weight].used_by)]
            by_layer = [[w for w in bucket if w in chosen and w in trained] for bucket in layer_buckets(weights)]
            buckets = [*filter(None, by_layer), [weight for weight in chosen if weight not in trained]]
            source, target = (_select(layout.restrict(ranks), chosen) for layout in (step, compute))
            # On the channel of the layers: the ranks of a stage run one row, so these meet the stage's other exchanges
            # in one order. On the other channel they could queue behind gradients that wait for ranks which wait for
            # this stage. In one hop for the same reason: two would share a stream with those.
            self.by_stage[layers] = new(source, target, transport, buckets=buckets)


def resharded_stages(plan: Plan) -> StageIndices:
    """Return the stages of a plan that reshard every round.

    Raises:
        SeqloomError: some ranks of such a stage take no part in one of its rounds, and would not meet the others.
    """
    found = set()
    for index, pipeline in enumerate(plan.pipelines):
        for action in (action for row in pipeline.actions for action in row):
            if action.kind != ActionKind.UNSHARD or action.round is None:
                continue
            groups = pipeline.rounds[action.round].by_stage[action.stage].groups
            absent = sorted({*pipeline.stages[action.stage].ranks}.difference(*(each.participants for each in groups)))
            if absent:
                raise SeqloomError(
                    f"{action} of pipeline {index} gathers parameters for a round in which ranks {absent} have no "
                    "group: all ranks of a stage gather together; give them tokens, or keep the stage gathered for the "
                    f"step ({action.stage}UNSHARD)"
                )
            found.add((index, action.stage))
    return frozenset(found)


def _dp_groups_of(plan: Plan, stages: StageIndices, rank: int) -> Iterator[tuple[tuple[int, ...], LayerRange]]:
    """Yield the ranks with the same slice of weights as `rank` in each of these stages, and the stage's layers."""
    for index, number in sorted(stages):
        pipeline = plan.pipelines[index]
        stage = pipeline.stages[number]
        for ranks in dp_groups(stage.ranks, stage.tensor):
            if rank in ranks:
                yield ranks, pipeline.layer_ranges[number]


def _runs(layers: LayerRange, user: int | str) -> bool:
    """Whether a stage runs a layer, the embedding or the head."""
    if isinstance(user, int):
        return layers.first <= user < layers.stop
    return layers.has_embedding if user == EMBEDDING else layers.has_head


def _select(layout: Layout, weights: Sequence[int]) -> Layout:
    chosen = np.isin(layout.item, weights)
    return Layout(*(column[chosen] for column in layout.columns()))


def _check_dtypes(parameters: Sequence[nn.Parameter], param_dtype: torch.dtype | None) -> None:
    """Refuse gradients that would be summed in several dtypes, and layers that would compute in several."""
    reduce_dtype(parameters)
    dtypes = sorted({str(parameter.dtype) for parameter in parameters})
    if param_dtype is None and len(dtypes) > 1:
        raise SeqloomError(
            f"parameters in {', '.join(dtypes)}: layers compute in one dtype; say which, as param_dtype="
        )
