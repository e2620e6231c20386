"""Memory of an order: how much every host holds at most, and which units must keep less where that is too much.

A host's row is walked once. Where it holds more than it may, the cheapest way out among the units that it holds is
taken: the one that costs the least time per byte. Keeping less never asks for more room elsewhere in the row than
what a unit needs while it is worked on, which the next walk sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from seqloom.cost.stages import pp_rank_bytes
from seqloom.plan import Action, ActionKind, Limits
from seqloom.planners.pipeline.placement import Level
from seqloom.planners.pipeline.prices import UnitPrices
from seqloom.planners.pipeline.stage_layout import shard_group_of
from seqloom.schedules import Schedule, Times

WALKS = 8
"""Walks along a row before it is given up."""

Row = Sequence[Action]
Table = Sequence[list[list[int]]]
"""By level, stage and unit."""
Choice = np.ndarray
"""int64[stages, units]: index of the level of every unit on every stage."""


class Ledger:
    """What units hold under every level, bytes on the fullest rank."""

    def __init__(self, prices: UnitPrices, levels: Sequence[Level], limits: Limits) -> None:
        """Price the memory of all levels.

        Args:
            prices: of the units.
            levels: from the one that keeps most.
            limits: how many tokens of a unit a rank may hold at each of them.
        """
        self.prices, self.levels = prices, tuple(levels)
        cost, line = prices.cost, prices.line
        shard_group = shard_group_of(cost, line)
        self.free = [cost.budget_bytes - pp_rank_bytes(cost, shares, shard_group) for shares in line.of_hosts]
        tokens = prices.tokens
        most = dict(limits.capacity)
        self._open = [(tokens <= most[level.checkpoint]).tolist() for level in self.levels]  # [level][unit]
        holdings = [prices.holding(level) for level in self.levels]
        shape = (len(self.levels), len(line.shares), len(tokens))
        # [kind of holding][level][stage][unit]
        self._bytes = [
            np.array([[np.ceil(own[kind] * tokens) for own in stages] for stages in holdings]).reshape(shape).tolist()
            for kind in range(5)
        ]
        self._carry = [column.tolist() for column in prices.carry]

    def held(self, choice: Choice) -> np.ndarray:
        """int64[stages, units]: what a unit holds from F to backward; keys and values by its part of the document."""
        return self._at(0, choice).astype(np.int64) + self._keys_by_unit()

    def caps(self, choice: Choice) -> list[int]:
        """What units may hold on every host when one of them is worked on, and a document's gradients return.

        A backward in halves needs nothing more, unless `whole` says that it should be whole.
        """
        transient = np.maximum(self._at(1, choice), self._at(2, choice))
        returning = np.array(self._carry[1])
        most = transient.max(axis=1) + returning.max(axis=1)
        places = self.prices.line.places
        return [
            int(free - max(most[s] for s, place in enumerate(places) if place == host))
            for host, free in enumerate(self.free)
        ]

    def whole(self, choice: Choice) -> np.ndarray:
        """bool[stages, units]: whether a backward in halves would hold more from I to W than the unit held before."""
        return self._at(3, choice) > self._at(0, choice)

    def _at(self, kind: int, choice: Choice) -> np.ndarray:
        """float64[stages, units]: one kind of holding, every unit at its own level."""
        return np.take_along_axis(np.array(self._bytes[kind]), choice[None], axis=0)[0]

    def _keys_by_unit(self) -> np.ndarray:
        """int64[stages, units]: keys and values of a document, over its pieces by their tokens, rounded up."""
        units, tokens = self.prices.draft.units, self.prices.tokens
        begun = np.array(self._carry[0], dtype=np.int64)
        spread = np.zeros_like(begun)
        chains: dict[int, list[int]] = {}
        for number, unit in enumerate(units):
            chains.setdefault(unit.sequence, []).append(number)
        for members in chains.values():
            total = max(1, int(tokens[members].sum()))
            keys = begun[:, members].sum(axis=1)
            spread[:, members] = -(-keys[:, None] * tokens[members][None, :] // total)
        return spread

    def peaks(self, order: Schedule, choice: Choice) -> list[float]:
        """The most that units hold on every host, bytes beyond its state."""
        chosen = choice.tolist()
        return [self._walk(row, chosen) for row in order.rows]

    def fitted(self, order: Schedule, choice: Choice, times: Sequence[Times]) -> Choice | None:
        """The choice with as much less kept as every host needs; None where nothing is enough.

        Host memory is used only where recomputing is not enough.

        Args:
            order: computation of every host.
            choice: to begin with; only levels after it are taken.
            times: under every level.
        """
        total = [(each.forward + each.backward + each.weights).tolist() for each in times]
        chosen = choice.tolist()
        here = sum(not level.offload for level in self.levels)
        for host, row in enumerate(order.rows):
            if not any(self._fit(row, chosen, self.free[host], total[:count]) for count in (here, len(total))):
                return None
        return np.array(chosen, dtype=np.int64)

    def _fit(self, row: Row, chosen: list[list[int]], free: int, total: Table) -> bool:
        """Let units of one host keep less until they fit, by the levels that have times; whether they do."""
        for _ in range(WALKS):
            if self._walk(row, chosen) <= free:
                return True
            if not self._lower(row, chosen, free, total):
                return False
        return False

    def _walk(self, row: Row, chosen: list[list[int]]) -> float:
        live = most = 0.0
        for action in row:
            live, peak = self._step(action, chosen, live)
            most = max(most, peak)
        return most

    def _step(self, action: Action, chosen: list[list[int]], live: float) -> tuple[float, float]:
        """(what is held after an action, the most while it runs)."""
        s, u = action.stage, action.round or 0
        level = chosen[s][u]
        held, forward, backward, deferred, split = (kind[level][s][u] for kind in self._bytes)
        if action.kind is ActionKind.F:
            live += held + self._carry[0][s][u]
            return live, live + forward
        if action.kind is ActionKind.W:
            return live - deferred, live
        live += self._carry[1][s][u]
        halves = action.kind is ActionKind.I
        peak = live + backward + (split if halves else 0)
        live += (deferred if halves else 0) - held - self._carry[2][s][u]
        return live, max(peak, live)

    def _lower(self, row: Row, chosen: list[list[int]], free: int, total: Table) -> bool:
        """Walk a row; wherever it holds too much, let units keep less. Whether any did."""
        live: float = 0
        inside: dict[tuple[int, int], None] = {}
        changed = False
        for action in row:
            key = action.stage, action.round or 0
            live, peak = self._step(action, chosen, live)
            if action.kind is ActionKind.F:
                inside[key] = None
            while peak > free:
                saved = self._cheapest(inside, chosen, total)
                if saved is None:
                    return changed
                s, u, level, less = saved
                chosen[s][u] = level
                changed = True
                live, peak = live - less, peak - less
            if action.kind in (ActionKind.B, ActionKind.I):
                inside.pop(key, None)
        return changed

    def _cheapest(
        self, inside: Iterable[tuple[int, int]], chosen: list[list[int]], total: Table
    ) -> tuple[int, int, int, float] | None:
        """(stage, unit, level, bytes saved) of what costs the least time per byte that it saves."""
        best: tuple[float, tuple[int, int, int, float]] | None = None
        for s, u in inside:
            now = chosen[s][u]
            for level in range(now + 1, len(total)):
                less = self._bytes[0][now][s][u] - self._bytes[0][level][s][u]
                if less <= 0 or not self._open[level][u]:
                    continue
                price = max(0, total[level][s][u] - total[now][s][u]) / less
                if best is None or price < best[0]:
                    best = price, (s, u, level, less)
        return None if best is None else best[1]
