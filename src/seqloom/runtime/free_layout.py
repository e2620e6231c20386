"""Parameters with a free compute layout: the optimiser's rows never move, and every step computes where its plan says.

    arrange       rows go from the optimiser's layout to the ranks of the plan's stages, layer by layer
    run           a layer waits for its own parameters only
    backward      after the last one of a layer its gradients go back, summed over all ranks that have computed some
    finish        waits for the rest: every rank has the gradients of its rows

So the next step may have other stages, pipelines and tensor degrees, and no state of the optimiser moves. An element's
gradient is the sum over all ranks that have a copy of it: this covers replicas, teams, pipelines side by side and a
table of tokens that is also the head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import cast

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from seqloom.attention.merge import sum_dtype
from seqloom.comm import Context, Transport
from seqloom.errors import SeqloomError
from seqloom.plan import Part, Plan, Sharding
from seqloom.plan.weights import EMBEDDING, HEAD
from seqloom.runtime.copies import Copies, weights_of
from seqloom.runtime.fsdp import device_of, reduce_dtype
from seqloom.runtime.loss import CHUNK, HeadGradients
from seqloom.runtime.masters import Masters
from seqloom.runtime.moves import MoveMaker, Moves, Strategy, gathered_per_pass, needs
from seqloom.runtime.network import LossOf, Network
from seqloom.runtime.passes import Passes
from seqloom.runtime.split_backward import WeightGradients
from seqloom.runtime.under_way import Arrivals, Departures

KEPT = 64
"""Strategies whose index work is kept."""


class FreeLayout:
    """The parameters of a network. Every rank makes one, with the same values.

    Masters are the parameters that were given, in their dtype (float32 for training), cut along their first axis over
    all ranks.
    """

    def __init__(
        self, network: Network, transport: Transport, *, compute: torch.dtype | None = None, chunk: int = CHUNK
    ) -> None:
        """Cut the network in place: between steps its module has shapes and values of the last plan only.

        Args:
            network: the model, on the device where it will run, with all its values, or with `values`, one at a time.
            transport: this rank's; where torch.distributed runs, all ranks of the job.
            compute: dtype of parameters and activations in the model; None: that of the masters. Gradients are
                added up and summed over ranks in float32 or wider.
            chunk: as in `summed_loss`.
        """
        parameters = list(network.module.parameters())
        self._device = device_of(network, parameters)
        _check_dtypes(parameters, compute)
        self._network, self._transport = network, transport
        self._hidden = cast("torch.Tensor", network.head.weight).shape[1]
        self._weights = weights_of(network)
        learning = (number for number, each in enumerate(parameters) if each.requires_grad)
        self._maker = MoveMaker(self._weights, learning, transport, self._device)
        self._bundles = self._maker.bundles
        self._wants = {home: self._bundles_at(home) for home in (EMBEDDING, *range(len(network.layers)), HEAD)}
        self._masters = Masters(network, transport, self._device)
        self._copies = Copies(network.module, compute, self._masters.shapes)
        self._moves: dict[Strategy, Moves] = {}
        self._arrivals, self._passes = Arrivals(), Passes({}, {}, self._copies)
        self._departures: Departures | None = None
        self._last = False  # inside the last backward of the step
        self._head = HeadGradients()
        self._loss = LossOf(network, chunk, self._head)
        self._watch()

    @property
    def sharers(self) -> tuple[int, ...]:
        """This rank alone: copies are whole."""
        return (self._transport.rank,)

    @property
    def weights(self) -> WeightGradients:
        """See `Parameters.weights`."""
        return self._network.weights

    def room(self, tokens: int) -> torch.Tensor:
        """See `Parameters.room`."""
        return torch.empty((tokens, self._hidden), dtype=self._copies.dtype, device=self._device)

    def arrange(self, plan: Plan) -> None:
        """See `Parameters.arrange`. Layers wait for what they need, see `Arrivals.start`."""
        self._check(plan)
        self.settle()
        rank, moves, rows = self._transport.rank, self._moves_of(plan), self._masters.rows
        dtype, held, shared = self._copies.dtype, moves.values.target, moves.shared
        same = moves.values.source.items() & held.items()
        borrowed = {number: rows[number] for number, _ in same if rows[number].dtype == dtype and number not in shared}
        room = self._copies.arrange(moves.boxes, borrowed, shared)
        shares = {number: self._copies.new(held[number]) for number in shared & held.keys()}
        self._passes = Passes(moves.passes, shares, self._copies)
        self._arrivals.start(moves.values, rows, dtype, room | shares)
        stages = [pair for line in plan.pipelines for pair in zip(line.stages, line.parts, strict=True)]
        parts = {part: self._bundles_of(part) for stage, part in stages if rank in stage.ranks}
        self._departures = Departures(moves.gradients, self._taken, sum_dtype(dtype), parts)
        self._last = False

    def settle(self) -> None:
        """See `Parameters.settle`."""
        self._arrivals.wait_for_all()

    def acquire(self, part: Part) -> None:
        """See `Parameters.acquire`; `arrange` has brought the parameters, or shares to be gathered."""
        if part in self._passes:
            self._arrivals.wait(self._bundles_of(part))
            self._passes.acquire(part)

    def run(self, part: Part, given: torch.Tensor, labels: torch.Tensor | None, context: Context) -> torch.Tensor:
        """See `Parameters.run`."""
        if part.begins:
            self._arrivals.wait(self._wants[EMBEDDING])
        if part.ends and self._network.norm is None:
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
        self._last = reduce and not self.weights.wanted and not self._passes
        torch.autograd.backward((cast("torch.Tensor", output),), (gradient,))
        self._passes.went_back()
        if self._last:
            self._last = False
            self._leaving().end()

    def reduce(self, part: Part) -> None:
        """See `Parameters.reduce`."""
        self._passes.flush(part, late=self.weights.wanted)
        self._leaving().end_part(part)

    def release(self, part: Part) -> None:
        """See `Parameters.release`; what is not in shares stays until the next plan, which often has the same."""
        self._passes.release(part)

    def finish(self) -> None:
        """See `Parameters.finish`."""
        self.settle()
        self._passes.finish(late=self.weights.wanted)
        self._masters.put_gradients(self._leaving().wait())
        self._departures = None

    def gradient_norm(self) -> torch.Tensor:
        """See `Parameters.gradient_norm`."""
        return self._masters.squared_norm().sqrt()

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Parameters.gradients`; each is gathered when its turn comes."""
        yield from self._masters.gradients()

    def values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Parameters.values`; each is gathered when its turn comes."""
        yield from self._masters.values()

    def masters(self) -> dict[str, nn.Parameter]:
        """See `Parameters.masters`; distributed tensors where torch.distributed runs."""
        return self._masters.trained()

    def computing(self) -> Iterator[torch.Tensor]:
        """See `Parameters.computing`."""
        yield from self._copies.held()

    def clear(self) -> None:
        """See `Parameters.clear`."""
        self._head.clear()
        self._copies.clear()
        for master in self._masters.parameters:
            master.grad = None

    def _leaving(self) -> Departures:
        if self._departures is None:
            raise SeqloomError("gradients of parameters that no plan was arranged for; call arrange(plan) first")
        return self._departures

    def _watch(self) -> None:
        """Let modules wait for their parameters, and gradients say when they are complete. Once for all steps."""
        homes = [*enumerate(self._network.layers), (HEAD, self._network.norm)]
        for home, module in homes:
            if module is not None:
                module.register_forward_pre_hook(partial(self._before, self._wants[home]))
        for layer, module in enumerate(self._network.layers):
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
        wanted = bool(self._passes) and torch.is_grad_enabled() and not self.weights.wanted
        if wanted and isinstance(states, torch.Tensor) and states.requires_grad:
            states.register_hook(lambda _: self._passes.layer_went_back(numbers))

    def _accumulated(self, number: int, copy: torch.Tensor) -> None:
        if self._last:
            self._leaving().add(number)

    def _bundles_at(self, home: int | str) -> frozenset[int]:
        """Return the bundles with weights that a home needs."""
        homes = [{each for number in own for each in self._weights[number].home} for own in self._bundles]
        return frozenset(bundle for bundle, own in enumerate(homes) if home in own)

    def _bundles_of(self, part: Part) -> frozenset[int]:
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
            if layers != len(self._network.layers):
                raise SeqloomError(
                    f"a plan for {layers} layers and a model with {len(self._network.layers)}; make the plan for this "
                    "model"
                )
        for tensor in sorted({stage.tensor for line in plan.pipelines for stage in line.stages}):
            if tensor > 1:
                self._network.check_tensor(tensor)


def _check_dtypes(parameters: Sequence[nn.Parameter], compute: torch.dtype | None) -> None:
    """Refuse gradients that would be added up in several dtypes, and layers that would compute in several."""
    reduce_dtype(parameters)
    dtypes = sorted({str(parameter.dtype) for parameter in parameters})
    if compute is None and len(dtypes) > 1:
        raise SeqloomError(
            f"parameters in {', '.join(dtypes)}: copies of a free layout have one dtype; say which, as compute="
        )
