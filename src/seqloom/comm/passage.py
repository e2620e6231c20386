"""What one rank does in a routed move: in every stage, which elements it sends from where, and receives to where.

A message lies in its sender's tensor, in the room of its receiver, and meanwhile in parts on the ranks that pass it on.
All of this is index work on the host, done once for all layers; `route.py` runs it.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from seqloom.plan import Move, Route
from seqloom.plan.route import staged


class Store(IntEnum):
    """Where a rank has elements of a message: in one of its own, in one for it, or in the buffer for passing on."""

    SENT = 0
    WANTED = 1
    RELAY = 2


class Place(NamedTuple):
    """Elements `start .. stop - 1` of a store; `item` is the message (0 in the buffer for passing on)."""

    store: Store
    item: int
    start: int
    stop: int


class Load(NamedTuple):
    """What goes to, or comes from, one rank in a stage: places one after the other."""

    peer: int
    places: tuple[Place, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return sum(place.stop - place.start for place in self.places)


class Stage(NamedTuple):
    """One exchange as a rank sees it."""

    sends: tuple[Load, ...]
    receives: tuple[Load, ...]


@dataclass(frozen=True, slots=True)
class Passage:
    """One rank's part of a routed move: index work, done once and run by every layer.

    Attributes:
        stages: those in which it sends or receives.
        relayed: elements it only passes on.
    """

    stages: tuple[Stage, ...]
    relayed: int

    @classmethod
    def of(cls, move: Move, route: Route, node_size: int, rank: int) -> Passage:
        """Work out what `rank` does in a move; all ranks give the same move, route and node size.

        Args:
            move: one axis; an item is a message, of one sender.
            route: how it crosses nodes.
            node_size: ranks per node.
            rank: the one asked for.
        """
        holdings, stages = _Holdings(move, rank), []
        for stage in staged(move, route, node_size):
            sends = _loads(stage, stage.sender == rank, stage.receiver, holdings.find)
            receives = _loads(stage, stage.receiver == rank, stage.sender, holdings.take_in)
            if sends or receives:
                stages.append(Stage(sends, receives))
        return cls(tuple(stages), holdings.relayed)

    @property
    def arriving(self) -> int:
        """Elements that this rank receives, for itself or for others."""
        return sum(load.size for stage in self.stages for load in stage.receives)


class _Run(NamedTuple):
    """Elements `start .. stop - 1` of a message that lie at `at` of a store."""

    start: int
    stop: int
    store: Store
    at: int


class _Holdings:
    """What a rank holds of which message, while a move goes on."""

    def __init__(self, move: Move, rank: int) -> None:
        self.relayed = 0
        self._runs: dict[int, list[_Run]] = {}
        self._wanted: dict[int, list[_Run]] = {}
        boxes = zip(*(column.tolist() for column in move.columns()), strict=True)
        for sender, receiver, item, start, stop in boxes:
            if sender == rank and item not in self._runs:
                self._runs[item] = [_Run(0, int(move.stop.max()), Store.SENT, 0)]
            if receiver == rank:
                wanted = self._wanted.setdefault(item, [])
                at = wanted[-1].at + wanted[-1].stop - wanted[-1].start if wanted else 0
                wanted.append(_Run(start, stop, Store.WANTED, at))

    def find(self, item: int, start: int, stop: int) -> list[Place]:
        """Return where elements of a message lie."""
        runs, found = self._runs[item], []
        for run in runs[bisect_right(runs, start, key=lambda run: run.start) - 1 :]:
            if run.start >= stop:
                break
            low, high = max(run.start, start), min(run.stop, stop)
            shift = run.at - run.start
            found.append(Place(run.store, 0 if run.store == Store.RELAY else item, low + shift, high + shift))
        return found

    def take_in(self, item: int, start: int, stop: int) -> list[Place]:
        """Make room for elements of a message, where this rank wants them or for passing on; return where."""
        edge = start
        for run in self._wanted.get(item, ()):
            low, high = max(run.start, start), min(run.stop, stop)
            if low < high:
                self._set_aside(item, edge, low)
                self._hold(item, _Run(low, high, Store.WANTED, run.at + low - run.start))
                edge = high
        self._set_aside(item, edge, stop)
        return self.find(item, start, stop)

    def _set_aside(self, item: int, start: int, stop: int) -> None:
        if stop > start:
            self._hold(item, _Run(start, stop, Store.RELAY, self.relayed))
            self.relayed += stop - start

    def _hold(self, item: int, run: _Run) -> None:
        insort(self._runs.setdefault(item, []), run)


def _loads(
    move: Move, chosen: np.ndarray, peer: np.ndarray, places: Callable[[int, int, int], list[Place]]
) -> tuple[Load, ...]:
    """Return the chosen boxes of a stage by peer, in the order of the move: both sides find the same one."""
    boxes = zip(*(column[chosen].tolist() for column in (peer, move.item, move.start, move.stop)), strict=True)
    by_peer = groupby(boxes, key=itemgetter(0))
    return tuple(Load(rank, _touching(place for _, *box in own for place in places(*box))) for rank, own in by_peer)


def _touching(places: Iterable[Place]) -> tuple[Place, ...]:
    """Join places that follow each other."""
    joined: list[Place] = []
    for place in places:
        if joined and joined[-1][:2] == place[:2] and joined[-1].stop == place.start:
            joined[-1] = joined[-1]._replace(stop=place.stop)
        else:
            joined.append(place)
    return tuple(joined)
