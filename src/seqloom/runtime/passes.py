"""Parameters of stages that are gathered for every pass, and their gradients: in shares of the rows between passes.

    UNSHARD     the ranks of a stage with the same slice of the weights bring their shares together
    backward    as soon as a layer is done, its gradients are summed into those of the shares
    RESHARD     the copies lose their memory; after a backward, what is left of their gradients goes the same way first

Autograd has kept the copies, or views of them, for a backward to come. So the memory goes and comes, the tensors stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

import torch

from seqloom.attention.merge import sum_dtype
from seqloom.comm.relay import Relay
from seqloom.plan import Part
from seqloom.runtime.copies import Copies


class Passes:
    """The shares of one rank in one step."""

    def __init__(self, relays: Mapping[Part, Relay], shares: dict[int, torch.Tensor], copies: Copies) -> None:
        """Start with nothing gathered.

        Args:
            relays: see `Moves.passes`.
            shares: this rank's rows, by weight; to be filled before the first pass.
            copies: what is computed with.
        """
        self._relays, self._shares, self._copies = relays, shares, copies
        self._gradients: dict[int, torch.Tensor] = {}
        self._there: set[Part] = set()
        self._summed: set[tuple[Part, int]] = set()  # bundles that the backward under way is done with
        self._owed: dict[Part, set[int]] = {}  # bundles with gradients that are not in the shares' yet
        self._settled: set[Part] = set()  # will have none any more

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

    def acquire(self, part: Part) -> None:
        """Gather a part that is in shares; return when it is there."""
        if part not in self._relays or part in self._there:
            return
        relay = self._relays[part]
        room = {number: self._copies.give_memory(number) for number in self._numbers(part) - self._in_use()}
        for bundle in range(len(relay.bundles)):  # one at a time: what is packed stays small
            relay.start(bundle, self._shares, self._copies.dtype, into=room).wait()
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

    def release(self, part: Part) -> None:
        """Sum the gradients of a backward into those of the shares, and drop the copies."""
        if part in self._there:
            self.flush(part)
            self._there.discard(part)
            for number in self._numbers(part) - self._in_use():
                self._copies.free(number)

    def flush(self, part: Part, *, late: bool = False) -> None:
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

    def _learning(self, part: Part) -> list[tuple[int, tuple[int, ...]]]:
        """Return the bundles of a part with weights that learn; the last has the others."""
        return list(enumerate(self._relays[part].bundles[:-1]))

    def _sum(self, part: Part, bundle: int) -> None:
        relay, wide = self._relays[part], sum_dtype(self._copies.dtype)
        found = self._copies.take_gradients(relay.bundles[bundle])
        self._gradients |= relay.start_sum(bundle, found, wide, into=self._gradients).wait()

    def _numbers(self, part: Part) -> set[int]:
        return {number for bundle in self._relays[part].bundles for number in bundle}

    def _in_use(self) -> set[int]:
        return {number for part in self._there for number in self._numbers(part)}
