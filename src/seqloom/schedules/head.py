"""Head stages in a schedule: every pipeline rank computes the loss of a part of every unit, between its other actions.

The last stage with layers sends the hidden states of a unit to all pipeline ranks in equal parts. Each computes norm,
vocabulary projection and loss of its part, with their gradients (F and B of its head stage), and sends the gradient
back. The last stage's backward waits for all of them:

    pp_rank 0 |  F   F   F  h0   B   F  h1   B
    pp_rank 1 |      F   F  h0   F   B  h1   B
    pp_rank 2 |          F  h0   F   F  h1   B      h0: what every pipeline rank has of the head of unit 0

So the backwards of an order begin `lead` units later than they would without: it is built for so many pipeline ranks
more, which stand for the head, and these are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from seqloom.plan.action import Action, B, F, W
from seqloom.schedules.schedule import Rows, Schedule, Unit
from seqloom.schedules.timing import Times

LEADS = (1, 2)
"""Units by which backwards begin later, to try: a part of the head waits for the action that its rank is at."""


def times_with_lead(times: Times, pp_size: int, lead: int) -> Times:
    """Return times for an order on `lead` pipeline ranks more, in the place of head stages, int64[stages, units] each.

    The first of them takes a part of the head and half a backward, for which it waits; backwards take none.
    """
    head = np.max(times.forward[pp_size:] + times.backward_input[pp_size:], axis=0)
    backward = times.backward_input[:pp_size] + times.backward_weight[:pp_size]
    rest = np.zeros((lead - 1, len(head)), dtype=np.int64)
    forward = np.concatenate([times.forward[:pp_size], head[None] + int(backward.mean()) // 2, rest])
    nothing = np.zeros((lead, len(head)), dtype=np.int64)
    inputs, weights = (np.concatenate([each[:pp_size], nothing]) for each in times[1:3])
    overhead = np.broadcast_to(times.split_overhead, times.forward.shape)[:pp_size]
    return Times(forward, inputs, weights, np.concatenate([overhead, nothing]))


def schedule_head(name: str, rows: Rows, units: Sequence[Unit], times: Times, message: int = 0) -> Schedule:
    """Put the actions of head stages into rows of one stage each, in the order of time.

    A pipeline rank computes its part of a head as soon as it is free and has it: the last stage waits for it.

    Args:
        rows: F and B, or F, I and W, of stages 0, 1, .., one on every pipeline rank.
        times: of these stages and behind them of as many head stages, int64[2 * stages, units].
        message: time from the end of an action to its result being on another pipeline rank.
    """
    run = _Run(rows, len(units), times, message)
    pp_ranks = tuple(range(len(rows)))
    return Schedule(name, (*pp_ranks, *pp_ranks), tuple(units), run.rows(), heads=len(rows))


class _Run:
    """Rows that are run in time, with the parts of heads between their actions."""

    def __init__(self, rows: Rows, units: int, times: Times, message: int) -> None:
        self._given, self._message, self._last = rows, message, len(rows) - 1
        forward, inputs, weights, late = (column.tolist() for column in (*times[:3], times.split_weight))
        self._forward, self._inputs, self._weights, self._late = forward, inputs, weights, late
        self._at = [0] * len(rows)
        self._free = [0] * len(rows)  # when every pipeline rank ends what it runs
        self._arrived: list[list[tuple[int, int]]] = [[] for _ in rows]  # (time, unit) of parts of heads
        self._ready: dict[tuple[int, bool, int], int] = {(0, True, u): 0 for u in range(units)}  # stage, forward, unit
        self._missing = [len(rows)] * units  # parts of a unit's head
        self._returned = [0] * units
        self._wake: list[tuple[int, int]] = []

    def rows(self) -> Rows:
        made: list[list[Action]] = [[] for _ in self._given]
        self._wake = [(0, pp_rank) for pp_rank in range(len(made))]
        while self._wake:
            now, pp_rank = heappop(self._wake)
            if self._free[pp_rank] <= now:
                made[pp_rank] += self._start(pp_rank, now)
        return tuple(map(tuple, made))

    def _start(self, pp_rank: int, now: int) -> list[Action]:
        """Start what a free pipeline rank may run, and return it."""
        if self._arrived[pp_rank] and self._arrived[pp_rank][0][0] <= now:
            return self._start_head(pp_rank, heappop(self._arrived[pp_rank])[1], now)
        if self._at[pp_rank] == len(self._given[pp_rank]):
            return []
        action = self._given[pp_rank][self._at[pp_rank]]
        s, u = action.stage, action.round
        assert u is not None
        if action.kind is not W and self._ready.get((s, action.kind is F, u), now + 1) > now:
            return []
        self._at[pp_rank] += 1
        if action.kind is F:
            end = now + self._forward[s][u]
            if s < self._last:
                self._hand_over((s + 1, True, u), end + self._message, s + 1)
            else:
                for other, arrived in enumerate(self._arrived):
                    time = end + self._message * (other != s)
                    heappush(arrived, (time, u))
                    heappush(self._wake, (time, other))
        elif action.kind is W:
            end = now + self._late[s][u]
        else:
            end = now + self._inputs[s][u] + (self._weights[s][u] if action.kind is B else 0)
            if s:
                self._hand_over((s - 1, False, u), end + self._message, s - 1)
        self._run_until(pp_rank, end)
        return [action]

    def _start_head(self, pp_rank: int, unit: int, now: int) -> list[Action]:
        stage = len(self._given) + pp_rank
        end = now + self._forward[stage][unit] + self._inputs[stage][unit] + self._weights[stage][unit]
        self._missing[unit] -= 1
        self._returned[unit] = max(self._returned[unit], end + self._message * (pp_rank != self._last))
        if not self._missing[unit]:
            self._hand_over((self._last, False, unit), self._returned[unit], self._last)
        self._run_until(pp_rank, end)
        return [Action(stage, F, unit), Action(stage, B, unit)]

    def _hand_over(self, key: tuple[int, bool, int], time: int, pp_rank: int) -> None:
        self._ready[key] = time
        heappush(self._wake, (time, pp_rank))

    def _run_until(self, pp_rank: int, end: int) -> None:
        self._free[pp_rank] = end
        heappush(self._wake, (end, pp_rank))
