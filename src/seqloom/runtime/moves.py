"""How one rank's parameters and gradients move under a plan: the index work of a strategy, done once for all its steps.

Between steps and stages there are three layouts. Where no stage is gathered for every pass, the last two are one:

    the optimiser's         an even share of the rows over all ranks, for the whole run
    the step's              what a rank keeps from arrange to finish
    the passes'             what a rank computes with

A stage is gathered for every pass where its row has UNSHARD and RESHARD with a round (0UNSHARD3 0F3 0RESHARD3). Between
passes the ranks that have the same slice of its weights then keep a share of the rows each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from seqloom.comm import Transport
from seqloom.comm.relay import Relay
from seqloom.comm.relay_index import Box, boxes_of
from seqloom.errors import SeqloomError
from seqloom.plan import ActionKind, Layout, Part, Plan, Stage
from seqloom.plan.weights import EMBEDDING, Weight, bundles, columns_of, compute_layout, optimiser_layout, step_layout

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

    values: Relay
    gradients: Relay
    boxes: Mapping[int, Box]
    passes: Mapping[Part, Relay]

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
        self.bundles = bundles(weights)

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

    def _columns(self, plan: Plan, per_pass: PerPass) -> list[tuple[tuple[int, ...], Part]]:
        """Return this rank's parts that are gathered for every pass, and the ranks that share each with it."""
        found = []
        for number, index in sorted(per_pass):
            line = plan.pipelines[number]
            stage = line.stages[index]
            for column in columns_of(stage.ranks, stage.tensor):
                if self._transport.rank in column:
                    found.append((column, line.parts[index]))
        return found

    def _pass(self, moves: Moves, column: tuple[int, ...], part: Part, step: Layout, compute: Layout) -> Relay:
        wanted = [any(needs(home, part) for home in weight.home) for weight in self._weights]
        numbers = [number for number in sorted(moves.shared) if wanted[number]]
        learning = [
            [number for number in own if number in self._learning and number in numbers] for own in self.bundles
        ]
        others = [number for number in numbers if number not in self._learning]
        source, target = (_only(layout.among(column), numbers) for layout in (step, compute))
        # Not aside: the ranks of a stage run one row, so these meet the stage's other exchanges in one order. Aside
        # they could stand behind gradients that wait for ranks which wait for this stage. In one hop for the same
        # reason: two would share a stream with these.
        parts = [*filter(None, learning), others]
        return Relay(self._weights, source, target, self._transport, device=self._device, bundles=parts)

    def _relay(self, source: Layout, target: Layout, node_size: int) -> Relay:
        return Relay(
            self._weights,
            source,
            target,
            self._transport.aside,
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
            stage, groups = line.stages[action.stage], line.rounds[action.round].work[action.stage].groups
            absent = sorted(set(stage.ranks).difference(*(group.party for group in groups)))
            if absent:
                raise SeqloomError(
                    f"{action} of pipeline {number} gathers parameters for a round in which ranks {absent} have no "
                    "group: all ranks of a stage gather together; give them tokens, or keep the stage gathered for the "
                    f"step ({action.stage}UNSHARD)"
                )
            found.add((number, action.stage))
    return frozenset(found)


def needs(home: int | str, part: Part) -> bool:
    """Whether a part of the model has a home of weights."""
    if isinstance(home, int):
        return part.first <= home < part.stop
    return part.begins if home == EMBEDDING else part.ends


def _only(layout: Layout, items: Sequence[int]) -> Layout:
    """Return what a layout has of some weights."""
    chosen = np.isin(layout.item, items)
    return Layout(*(column[chosen] for column in layout.columns()))
