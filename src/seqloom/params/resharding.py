"""How one rank's parameters and gradients move under a plan: the index work of a strategy, done once for all its steps.

Between steps and stages there are three layouts. Where no stage is gathered for every pass, the last two are one:

    the optimiser's         an even share of the rows over all ranks, for the whole run
    the step's              what a rank keeps from arrange to finish
    the passes'             what a rank computes with

A stage is gathered for every pass where its row has UNSHARD and RESHARD with a round (0UNSHARD3 0F3 0RESHARD3). Between
passes the ranks that have the same slice of its weights then keep a share of the rows each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from seqloom.attention.lse import sum_dtype
from seqloom.dist import Context, Transport
from seqloom.dist.resharding import Box, InFlight, Resharder, boxes_of
from seqloom.errors import SeqloomError
from seqloom.layout import Layout
from seqloom.models.adapter import ModelAdapter, ModelWithLoss
from seqloom.models.loss import CHUNK, HeadGradients
from seqloom.models.split_backward import WeightGradients
from seqloom.params.fsdp import device_of, reduce_dtype
from seqloom.params.shards import ComputeCopies, OptimizerShards, weights_of
from seqloom.plan import ActionKind, LayerRange, Plan, Sharding, Stage
from seqloom.plan.parameter_layout import (
    EMBEDDING,
    HEAD,
    Weight,
    compute_layout,
    dp_groups,
    layer_buckets,
    optimiser_layout,
    step_layout,
)

PerPass = frozenset[tuple[int, int]]
"""(pipeline, stage) of the stages that are gathered for every pass."""
Strategy = tuple[tuple[tuple[Stage, ...], ...], PerPass, int]
"""The stages of every pipeline, which are gathered for every pass, and ranks per node: what moves depend on."""


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """The moves of one rank.

    Attributes:
        values: from the optimiser's layout to the step's.
        gradients: the same for weights that learn; run the other way.
        boxes: what this rank computes with, by weight.
        passes: for every part of this rank that is gathered for every pass: from the step's layout to what it computes
            with, of the weights that are in shares. Those that learn are in bundles layer by layer, so that what is
            packed is small; the last bundle has the others.
    """

    values: Resharder
    gradients: Resharder
    boxes: Mapping[int, Box]
    passes: Mapping[LayerRange, Resharder]

    @property
    def shared(self) -> frozenset[int]:
        """Weights that are gathered for every pass."""
        return frozenset(number for number, box in self.boxes.items() if self.values.target.get(number) != box)


class MoveMaker:
    """Makes the moves of one rank for any strategy."""

    def __init__(
        self, weights: Sequence[Weight], learning: Iterable[int], transport: Transport, device: torch.device
    ) -> None:
        """Keep what all strategies have in common.

        Args:
            weights: of the model.
            learning: numbers of those with a gradient.
            transport: this rank's. What is under way for a whole step goes aside.
            device: of all tensors.
        """
        self._weights, self._learning = weights, sorted(learning)
        self._transport, self._device = transport, device
        self._home = optimiser_layout(weights, transport.ranks)
        self.bundles = layer_buckets(weights)

    def make(self, plan: Plan, per_pass: PerPass) -> Moves:
        """Do the index work of a plan's strategy."""
        compute = compute_layout(self._weights, plan.pipelines)
        step = step_layout(self._weights, plan.pipelines, per_pass) if per_pass else compute
        node_size = plan.limits.node_size
        values = self._relay(self._home, step, node_size)
        gradients = values
        if len(self._learning) < len(self._weights):
            gradients = self._relay(_only(self._home, self._learning), _only(step, self._learning), node_size)
        moves = Moves(values, gradients, boxes_of(compute, self._transport.rank), {})
        columns = self._columns(plan, per_pass)
        return replace(moves, passes={part: self._pass(moves, own, part, step, compute) for own, part in columns})

    def _columns(self, plan: Plan, per_pass: PerPass) -> list[tuple[tuple[int, ...], LayerRange]]:
        """Return this rank's parts that are gathered for every pass, and the ranks that share each with it."""
        found = []
        for number, index in sorted(per_pass):
            line = plan.pipelines[number]
            stage = line.stages[index]
            for column in dp_groups(stage.ranks, stage.tensor):
                if self._transport.rank in column:
                    found.append((column, line.layer_ranges[index]))
        return found

    def _pass(
        self, moves: Moves, column: tuple[int, ...], part: LayerRange, step: Layout, compute: Layout
    ) -> Resharder:
        wanted = [any(needs(home, part) for home in weight.used_by) for weight in self._weights]
        numbers = [number for number in sorted(moves.shared) if wanted[number]]
        learning = [
            [number for number in own if number in self._learning and number in numbers] for own in self.bundles
        ]
        others = [number for number in numbers if number not in self._learning]
        source, target = (_only(layout.restrict(column), numbers) for layout in (step, compute))
        # Not aside: the ranks of a stage run one row, so these meet the stage's other exchanges in one order. Aside
        # they could stand behind gradients that wait for ranks which wait for this stage. In one hop for the same
        # reason: two would share a stream with these.
        parts = [*filter(None, learning), others]
        return Resharder(self._weights, source, target, self._transport, device=self._device, bundles=parts)

    def _relay(self, source: Layout, target: Layout, node_size: int) -> Resharder:
        return Resharder(
            self._weights,
            source,
            target,
            self._transport.background,
            device=self._device,
            node_size=node_size,
            bundles=self.bundles,
        )


def gathered_per_pass(plan: Plan) -> PerPass:
    """Return the stages that a plan gathers for every pass.

    Raises:
        SeqloomError: some ranks of such a stage take no part in one of its passes, and would not meet the others.
    """
    found = set()
    for number, line in enumerate(plan.pipelines):
        for action in (action for row in line.actions for action in row):
            if action.kind != ActionKind.UNSHARD or action.round is None:
                continue
            stage, groups = line.stages[action.stage], line.rounds[action.round].by_stage[action.stage].groups
            absent = sorted(set(stage.ranks).difference(*(group.participants for group in groups)))
            if absent:
                raise SeqloomError(
                    f"{action} of pipeline {number} gathers parameters for a round in which ranks {absent} have no "
                    "group: all ranks of a stage gather together; give them tokens, or keep the stage gathered for the "
                    f"step ({action.stage}UNSHARD)"
                )
            found.add((number, action.stage))
    return frozenset(found)


def needs(home: int | str, part: LayerRange) -> bool:
    """Whether a part of the model has a home of weights."""
    if isinstance(home, int):
        return part.first <= home < part.stop
    return part.has_embedding if home == EMBEDDING else part.has_head


def _only(layout: Layout, items: Sequence[int]) -> Layout:
    """Return what a layout has of some weights."""
    chosen = np.isin(layout.item, items)
    return Layout(*(column[chosen] for column in layout.columns()))


# ---- merged: runtime.under_way
# Parameters and gradients under way between the optimiser's layout and that of a plan, while layers compute.
#
# Parameters leave all at once, the embedding's first; a layer waits for its own bundle only. Gradients leave as
# soon as a
# layer has had its last backward, the head's first. All ranks start bundles in these orders, whatever they hold of
# them:
#
#     parameters    embedding, layer 0, layer 1, .. norm and head
#     gradients     norm and head, .. layer 1, layer 0, embedding
#
# Where a bundle goes in two hops (see `comm.pending`) and this rank has to begin the second, other ranks of its
# node wait
# for that. So it must not wait for anything of theirs before: second hops of parameters begin before the first
# layer
# runs, those of gradients after the last one has gone back. Of each way the hop inside the node is what computing
# hides
# then; on streams of a GPU, it hides both.


Tensors = Mapping[int, torch.Tensor]
Take = Callable[[Iterable[int]], Tensors]


class ParamPrefetch:
    """The parameters of one step on their way to this rank's copies."""

    def __init__(self) -> None:
        """Start with nothing under way."""
        self._open: dict[int, InFlight] = {}

    def start(self, relay: Resharder, rows: Tensors, dtype: torch.dtype, room: Tensors) -> None:
        """Send this rank's rows to all who need them, and receive what this one needs into `room`.

        Returns at once, but waits for first hops where this rank has to begin the second ones.
        """
        for bundle in range(len(relay.bundles)):
            self._open[bundle] = relay.start_copy(bundle, rows, dtype, into=room)
        for pending in self._open.values():
            pending.start_second_hop()

    def wait(self, bundles: Iterable[int]) -> None:
        """Return when these are there."""
        for bundle in bundles:
            if bundle in self._open:
                self._open.pop(bundle).wait()

    def wait_for_all(self) -> None:
        """Return when nothing is under way, also what this rank only sends."""
        self.wait(list(self._open))

    def missing(self, bundles: Iterable[int]) -> list[int]:
        """Return which of these nobody has waited for."""
        return sorted(set(bundles) & self._open.keys())


class GradReduce:
    """The gradients of one step on their way from this rank's copies to the optimiser's rows."""

    def __init__(
        self, relay: Resharder, take: Take, dtype: torch.dtype, needs: Mapping[LayerRange, frozenset[int]]
    ) -> None:
        """Start a step.

        Args:
            relay: of the weights that learn.
            take: gives up the gradients of some weights, by number; one that nobody has made is not there.
            dtype: in which they travel.
            needs: the bundles that each part of this rank computes with.
        """
        self._relay, self._take, self._dtype = relay, take, dtype
        self._held = [frozenset(bundle) & relay.target.keys() for bundle in relay.bundles]
        self._bundle_of = {number: bundle for bundle, held in enumerate(self._held) for number in held}
        self._parts = {
            bundle: {part for part, bundles in needs.items() if bundle in bundles} for bundle in range(len(self._held))
        }
        self._lacking = [set(held) for held in self._held]
        self._left = list(range(len(self._held)))
        self._started: list[InFlight] = []

    def add(self, number: int) -> None:
        """Note that a weight has its whole gradient."""
        lacking = self._lacking[self._bundle_of[number]]
        lacking.discard(number)
        if not lacking:
            self._go()

    def end_part(self, part: LayerRange) -> None:
        """Note that all backwards of a part have run; what other parts of this rank need too waits for these."""
        for bundle, parts in self._parts.items():
            if part in parts:
                parts.discard(part)
                if not parts:
                    self._lacking[bundle].clear()
        self._go()

    def end(self) -> None:
        """Note that all backwards of this rank have run."""
        for lacking in self._lacking:
            lacking.clear()
        self._go()

    def wait(self) -> dict[int, torch.Tensor]:
        """Return the sums over all ranks of this rank's rows, [rows, columns] by number."""
        self.end()
        sums: dict[int, torch.Tensor] = {}
        for pending in self._started:
            pending.start_second_hop()
        for pending in self._started:
            sums |= pending.wait()
        return sums

    def _go(self) -> None:
        """Start what is complete, from the last bundle on."""
        while self._left and not self._lacking[self._left[-1]]:
            bundle = self._left.pop()
            self._started.append(self._relay.start_reduce(bundle, self._take(self._held[bundle]), self._dtype))


# ---- merged: runtime.passes
# Parameters of stages that are gathered for every pass, and their gradients: in shares of the rows between passes.
#
#     UNSHARD     the ranks of a stage with the same slice of the weights bring their shares together
#     backward    as soon as a layer is done, its gradients are summed into those of the shares
#     RESHARD     the copies lose their memory; after a backward, what is left of their gradients goes the same way
# first
#
# Autograd has kept the copies, or views of them, for a backward to come. So the memory goes and comes, the tensors
# stay.


class Passes:
    """The shares of one rank in one step."""

    def __init__(
        self, relays: Mapping[LayerRange, Resharder], shares: dict[int, torch.Tensor], copies: ComputeCopies
    ) -> None:
        """Start with nothing gathered.

        Args:
            relays: see `Moves.passes`.
            shares: this rank's rows, by weight; to be filled before the first pass.
            copies: what is computed with.
        """
        self._relays, self._shares, self._copies = relays, shares, copies
        self._gradients: dict[int, torch.Tensor] = {}
        self._there: set[LayerRange] = set()
        self._summed: set[tuple[LayerRange, int]] = set()  # bundles that the backward under way is done with
        self._owed: dict[LayerRange, set[int]] = {}  # bundles with gradients that are not in the shares' yet
        self._settled: set[LayerRange] = set()  # will have none any more

    @property
    def numbers(self) -> set[int]:
        """Weights that are in shares."""
        return {number for part in self._relays for number in self._numbers(part)}

    def __contains__(self, part: object) -> bool:
        """Whether a part is gathered for every pass."""
        return part in self._relays

    def __len__(self) -> int:
        """Return the number of such parts."""
        return len(self._relays)

    def acquire(self, part: LayerRange) -> None:
        """Gather a part that is in shares; return when it is there."""
        if part not in self._relays or part in self._there:
            return
        relay = self._relays[part]
        room = {number: self._copies.give_memory(number) for number in self._numbers(part) - self._in_use()}
        for bundle in range(len(relay.bundles)):  # one at a time: what is packed stays small
            relay.start_copy(bundle, self._shares, self._copies.dtype, into=room).wait()
        self._there.add(part)

    def layer_went_back(self, numbers: Set[int]) -> None:
        """Sum the gradients of a layer, which has these weights, into those of the shares.

        All ranks that share it call it, between the same two exchanges of a backward.
        """
        for part in self._there:
            for bundle, own in self._learning(part):
                if own and set(own) <= numbers:
                    self._sum(part, bundle)
                    self._summed.add((part, bundle))

    def went_back(self) -> None:
        """Note that a backward is over: gathered parts may have gradients, of all but the layers that are done."""
        for part in self._there:
            left = {bundle for bundle, _ in self._learning(part) if (part, bundle) not in self._summed}
            self._owed[part] = self._owed.get(part, set()) | left
        self._summed.clear()

    def release(self, part: LayerRange) -> None:
        """Sum the gradients of a backward into those of the shares, and drop the copies."""
        if part in self._there:
            self.flush(part)
            self._there.discard(part)
            for number in self._numbers(part) - self._in_use():
                self._copies.free(number)

    def flush(self, part: LayerRange, *, late: bool = False) -> None:
        """Sum what a part has of gradients into those of the shares. All ranks that share it call it.

        Args:
            part: of this rank.
            late: weights may have got gradients after the backward.
        """
        if part not in self._relays or not (late or part in self._owed):
            return
        owed = self._owed.pop(part, set())
        if late:
            self._settled.add(part)
        for bundle, _ in self._learning(part):
            if late or bundle in owed:
                self._sum(part, bundle)

    def finish(self, *, late: bool) -> None:
        """Sum what is left, of all parts; arguments as in `flush`."""
        for part in self._relays:
            self.flush(part, late=late and part not in self._settled)

    def take_gradients(self, numbers: Iterable[int]) -> dict[int, torch.Tensor]:
        """Return the gradients of shares, and forget them."""
        return {number: self._gradients.pop(number) for number in numbers if number in self._gradients}

    def _learning(self, part: LayerRange) -> list[tuple[int, tuple[int, ...]]]:
        """Return the bundles of a part with weights that learn; the last has the others."""
        return list(enumerate(self._relays[part].bundles[:-1]))

    def _sum(self, part: LayerRange, bundle: int) -> None:
        relay, wide = self._relays[part], sum_dtype(self._copies.dtype)
        found = self._copies.take_gradients(relay.bundles[bundle])
        self._gradients |= relay.start_reduce(bundle, found, wide, into=self._gradients).wait()

    def _numbers(self, part: LayerRange) -> set[int]:
        return {number for bundle in self._relays[part].bundles for number in bundle}

    def _in_use(self) -> set[int]:
        return {number for part in self._there for number in self._numbers(part)}


# ---- merged: runtime.free_layout
# Parameters with a free compute layout: the optimiser's rows never move, and every step computes where its plan
# says.
#
#     arrange       rows go from the optimiser's layout to the ranks of the plan's stages, layer by layer
#     run           a layer waits for its own parameters only
#     backward      after the last one of a layer its gradients go back, summed over all ranks that have computed
# some
#     finish        waits for the rest: every rank has the gradients of its rows
#
# So the next step may have other stages, pipelines and tensor degrees, and no state of the optimiser moves. An
# element's
# gradient is the sum over all ranks that have a copy of it: this covers replicas, teams, pipelines side by side and
# a
# table of tokens that is also the head.


KEPT = 64
"""Strategies whose index work is kept."""


class ReshardingParameters:
    """The parameters of a network. Every rank makes one, with the same values.

    Masters are the parameters that were given, in their dtype (float32 for training), cut along their first axis over
    all ranks.
    """

    def __init__(
        self, adapter: ModelAdapter, transport: Transport, *, param_dtype: torch.dtype | None = None, chunk: int = CHUNK
    ) -> None:
        """Cut the network in place: between steps its module has shapes and values of the last plan only.

        Args:
            network: the model, on the device where it will run, with all its values, or with `values`, one at a time.
            transport: this rank's; where torch.distributed runs, all ranks of the job.
            param_dtype: dtype of parameters and activations in the model; None: that of the masters. Gradients are
                added up and summed over ranks in float32 or wider.
            chunk: as in `summed_loss`.
        """
        parameters = list(adapter.module.parameters())
        self._device = device_of(adapter, parameters)
        _check_dtypes(parameters, param_dtype)
        self._adapter, self._transport = adapter, transport
        self._hidden = cast("torch.Tensor", adapter.head.weight).shape[1]
        self._weights = weights_of(adapter)
        learning = (number for number, each in enumerate(parameters) if each.requires_grad)
        self._maker = MoveMaker(self._weights, learning, transport, self._device)
        self._bundles = self._maker.bundles
        self._wants = {home: self._bundles_at(home) for home in (EMBEDDING, *range(len(adapter.layers)), HEAD)}
        self._masters = OptimizerShards(adapter, transport, self._device)
        self._copies = ComputeCopies(adapter.module, param_dtype, self._masters.shapes)
        self._moves: dict[Strategy, Moves] = {}
        self._arrivals, self._passes = ParamPrefetch(), Passes({}, {}, self._copies)
        self._departures: GradReduce | None = None
        self._last = False  # inside the last backward of the step
        self._head = HeadGradients()
        self._loss = ModelWithLoss(adapter, chunk, self._head)
        self._watch()

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        """This rank alone: copies are whole."""
        return (self._transport.rank,)

    @property
    def weight_gradients(self) -> WeightGradients:
        """See `Parameters.weight_gradients`."""
        return self._adapter.weight_gradients

    def empty_hidden_states(self, tokens: int) -> torch.Tensor:
        """See `Parameters.empty_hidden_states`."""
        return torch.empty((tokens, self._hidden), dtype=self._copies.dtype, device=self._device)

    def prefetch(self, plan: Plan) -> None:
        """See `Parameters.prefetch`. Layers wait for what they need, see `Arrivals.start`."""
        self._check(plan)
        self.wait_prefetch()
        rank, moves, rows = self._transport.rank, self._moves_of(plan), self._masters.rows
        dtype, held, shared = self._copies.dtype, moves.values.target, moves.shared
        same = moves.values.source.items() & held.items()
        borrowed = {number: rows[number] for number, _ in same if rows[number].dtype == dtype and number not in shared}
        room = self._copies.arrange(moves.boxes, borrowed, shared)
        shares = {number: self._copies.new(held[number]) for number in shared & held.keys()}
        self._passes = Passes(moves.passes, shares, self._copies)
        self._arrivals.start(moves.values, rows, dtype, room | shares)
        stages = [pair for line in plan.pipelines for pair in zip(line.stages, line.layer_ranges, strict=True)]
        parts = {part: self._bundles_of(part) for stage, part in stages if rank in stage.ranks}
        self._departures = GradReduce(moves.gradients, self._taken, sum_dtype(dtype), parts)
        self._last = False

    def wait_prefetch(self) -> None:
        """See `Parameters.wait_prefetch`."""
        self._arrivals.wait_for_all()

    def unshard(self, part: LayerRange) -> None:
        """See `Parameters.unshard`; `arrange` has brought the parameters, or shares to be gathered."""
        if part in self._passes:
            self._arrivals.wait(self._bundles_of(part))
            self._passes.acquire(part)

    def forward(
        self, part: LayerRange, given: torch.Tensor, labels: torch.Tensor | None, context: Context
    ) -> torch.Tensor:
        """See `Parameters.forward`."""
        if part.has_embedding:
            self._arrivals.wait(self._wants[EMBEDDING])
        if part.has_head and self._adapter.norm is None:
            self._arrivals.wait(self._wants[HEAD])
        output = self._loss(given, labels, context, part)
        missing = self._arrivals.missing(self._bundles_of(part))
        if missing:
            name = self._weights[self._bundles[missing[0]][0]].name
            raise SeqloomError(
                f"layers {part.first} to {part.stop - 1} have run before {name} was there: a network's layers and its "
                "final norm are called as modules, which is when their parameters are waited for; call them so"
            )
        return output

    def backward(self, output: torch.Tensor | GradientEdge, gradient: torch.Tensor | None, *, reduce: bool) -> None:
        """See `Parameters.backward`. Where no weights' gradients come later, the last one sends layer by layer."""
        self._last = reduce and not self.weight_gradients.enabled and not self._passes
        torch.autograd.backward((cast("torch.Tensor", output),), (gradient,))
        self._passes.went_back()
        if self._last:
            self._last = False
            self._leaving().end()

    def reduce(self, part: LayerRange) -> None:
        """See `Parameters.reduce`."""
        self._passes.flush(part, late=self.weight_gradients.enabled)
        self._leaving().end_part(part)

    def reshard(self, part: LayerRange) -> None:
        """See `Parameters.reshard`; what is not in shares stays until the next plan, which often has the same."""
        self._passes.release(part)

    def finish_gradients(self) -> None:
        """See `Parameters.finish_gradients`."""
        self.wait_prefetch()
        self._passes.finish(late=self.weight_gradients.enabled)
        self._masters.put_gradients(self._leaving().wait())
        self._departures = None

    def gradient_norm(self) -> torch.Tensor:
        """See `Parameters.gradient_norm`."""
        return self._masters.squared_norm().sqrt()

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Parameters.full_gradients`; each is gathered when its turn comes."""
        yield from self._masters.gradients()

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Parameters.full_parameters`; each is gathered when its turn comes."""
        yield from self._masters.values()

    def master_weights(self) -> dict[str, nn.Parameter]:
        """See `Parameters.master_weights`; distributed tensors where torch.distributed runs."""
        return self._masters.trained()

    def compute_weights(self) -> Iterator[torch.Tensor]:
        """See `Parameters.compute_weights`."""
        yield from self._copies.held()

    def zero_grad(self) -> None:
        """See `Parameters.zero_grad`."""
        self._head.clear()
        self._copies.clear()
        for master in self._masters.parameters:
            master.grad = None

    def _leaving(self) -> GradReduce:
        if self._departures is None:
            raise SeqloomError("gradients of parameters that no plan was arranged for; call prefetch(plan) first")
        return self._departures

    def _watch(self) -> None:
        """Let modules wait for their parameters, and gradients say when they are complete. Once for all steps."""
        homes = [*enumerate(self._adapter.layers), (HEAD, self._adapter.norm)]
        for home, module in homes:
            if module is not None:
                module.register_forward_pre_hook(partial(self._before, self._wants[home]))
        for layer, module in enumerate(self._adapter.layers):
            module.register_forward_pre_hook(partial(self._passing, frozenset(self._bundles[layer + 1])))
        for number, copy in enumerate(self._copies.all):
            if copy.requires_grad:
                copy.register_post_accumulate_grad_hook(partial(self._accumulated, number))

    def _before(self, wanted: frozenset[int], module: nn.Module, args: object) -> None:
        self._arrivals.wait(wanted)

    def _passing(self, numbers: frozenset[int], module: nn.Module, args: tuple[object, ...]) -> None:
        """Let a layer say when it has gone backward: then its input has its gradient, and all its weights have theirs.

        Weights whose gradients come later, in halves of a backward, wait for the REDUCE.
        """
        states = args[0] if args else None
        wanted = bool(self._passes) and torch.is_grad_enabled() and not self.weight_gradients.enabled
        if wanted and isinstance(states, torch.Tensor) and states.requires_grad:
            states.register_hook(lambda _: self._passes.layer_went_back(numbers))

    def _accumulated(self, number: int, copy: torch.Tensor) -> None:
        if self._last:
            self._leaving().add(number)

    def _bundles_at(self, home: int | str) -> frozenset[int]:
        """Return the bundles with weights that a home needs."""
        homes = [{each for number in own for each in self._weights[number].used_by} for own in self._bundles]
        return frozenset(bundle for bundle, own in enumerate(homes) if home in own)

    def _bundles_of(self, part: LayerRange) -> frozenset[int]:
        """Return the bundles with weights that a part of the model needs."""
        return frozenset[int]().union(*(wanted for home, wanted in self._wants.items() if needs(home, part)))

    def _moves_of(self, plan: Plan) -> Moves:
        per_pass = gathered_per_pass(plan)
        strategy = (tuple(line.stages for line in plan.pipelines), per_pass, plan.limits.node_size)
        if strategy not in self._moves:
            if len(self._moves) == KEPT:
                del self._moves[next(iter(self._moves))]
            self._moves[strategy] = self._maker.make(plan, per_pass)
        return self._moves[strategy]

    def _taken(self, numbers: Iterable[int]) -> dict[int, torch.Tensor]:
        """Return the gradients of some weights, of copies or of shares, and forget them."""
        own = set(numbers)
        shared = own & self._passes.numbers
        return self._copies.take_gradients(own - shared) | self._passes.take_gradients(shared)

    def _check(self, plan: Plan) -> None:
        if plan.sharding != Sharding.FREE:
            raise SeqloomError(
                f"a plan with {plan.sharding} sharding for parameters with a free layout; plan with sharding "
                f'"{Sharding.FREE}", or use Sharded or StageSharded'
            )
        for line in plan.pipelines:
            layers = line.stages[-1].layers[1]
            if layers != len(self._adapter.layers):
                raise SeqloomError(
                    f"a plan for {layers} layers and a model with {len(self._adapter.layers)}; make the plan for this "
                    "model"
                )
        for tensor in sorted({stage.tensor for line in plan.pipelines for stage in line.stages}):
            if tensor > 1:
                self._adapter.check_tp_degree(tensor)


def _check_dtypes(parameters: Sequence[nn.Parameter], compute: torch.dtype | None) -> None:
    """Refuse gradients that would be added up in several dtypes, and layers that would compute in several."""
    reduce_dtype(parameters)
    dtypes = sorted({str(parameter.dtype) for parameter in parameters})
    if compute is None and len(dtypes) > 1:
        raise SeqloomError(
            f"parameters in {', '.join(dtypes)}: copies of a free layout have one dtype; say which, as param_dtype="
        )
