"""Parameters and gradients under way between the optimiser's layout and that of a plan, while layers compute.

Parameters leave all at once, the embedding's first; a layer waits for its own bundle only. Gradients leave as soon as a
layer has had its last backward, the head's first. All ranks start bundles in these orders, whatever they hold of them:

    parameters    embedding, layer 0, layer 1, .. norm and head
    gradients     norm and head, .. layer 1, layer 0, embedding

Where a bundle goes in two hops (see `comm.pending`) and this rank has to begin the second, other ranks of its node wait
for that. So it must not wait for anything of theirs before: second hops of parameters begin before the first layer
runs, those of gradients after the last one has gone back. Of each way the hop inside the node is what computing hides
then; on streams of a GPU, it hides both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from seqloom.comm.relay import Pending, Relay
from seqloom.plan import Part

Tensors = Mapping[int, torch.Tensor]
Take = Callable[[Iterable[int]], Tensors]


class Arrivals:
    """The parameters of one step on their way to this rank's copies."""

    def __init__(self) -> None:
        """Start with nothing under way."""
        self._open: dict[int, Pending] = {}

    def start(self, relay: Relay, rows: Tensors, dtype: torch.dtype, room: Tensors) -> None:
        """Send this rank's rows to all who need them, and receive what this one needs into `room`.

        Returns at once, but waits for first hops where this rank has to begin the second ones.
        """
        for bundle in range(len(relay.bundles)):
            self._open[bundle] = relay.start(bundle, rows, dtype, into=room)
        for pending in self._open.values():
            pending.go_on()

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


class Departures:
    """The gradients of one step on their way from this rank's copies to the optimiser's rows."""

    def __init__(self, relay: Relay, take: Take, dtype: torch.dtype, needs: Mapping[Part, frozenset[int]]) -> None:
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
        self._started: list[Pending] = []

    def add(self, number: int) -> None:
        """Note that a weight has its whole gradient."""
        lacking = self._lacking[self._bundle_of[number]]
        lacking.discard(number)
        if not lacking:
            self._go()

    def end_part(self, part: Part) -> None:
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
            pending.go_on()
        for pending in self._started:
            sums |= pending.wait()
        return sums

    def _go(self) -> None:
        """Start what is complete, from the last bundle on."""
        while self._left and not self._lacking[self._left[-1]]:
            bundle = self._left.pop()
            self._started.append(self._relay.start_sum(bundle, self._take(self._held[bundle]), self._dtype))
