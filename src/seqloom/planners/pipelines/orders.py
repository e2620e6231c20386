"""Orders to choose from: the strict ones, those with split backwards, and the list schedule under the memory cap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from seqloom.errors import unknown
from seqloom.plan import Action, ActionKind, PlanError
from seqloom.plan.schedules import NAMES, Schedule, Times, schedule_of
from seqloom.plan.schedules.balanced import balanced
from seqloom.planners.pipelines.ledger import Choice, Ledger

B, W = ActionKind.B, ActionKind.W
I = ActionKind.I  # noqa: E741 - the field's name for the input half of a backward
FOLDED = ("zb-v", "v-half", "v-min")
"""Orders whose stages go down the hosts and up again; they run whole micro-batches only."""
WHOLE = ("gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-h2", *FOLDED)
"""Orders that cut no document unless memory asks for it."""
PIECEWISE = ("seq1f1b", "seq1f1b-i")
"""What the orders of whole documents are called when these come in pieces."""
ALL_NAMES = tuple(dict.fromkeys((*NAMES, "balanced")))


def names_of(schedule: str, chunks: int) -> tuple[str, ...]:
    """The orders that are tried when a run asks for this one: all that suit the chunks, or the one it names."""
    if schedule not in ("auto", *ALL_NAMES):
        raise unknown("schedule", schedule, ("auto", *ALL_NAMES))
    if schedule != "auto":
        return (schedule,)
    if chunks == 1:
        return ("1f1b", "seq1f1b", "balanced", "seq1f1b-zb")
    return ("interleaved", "seq1f1b-i", "balanced")


def order_of(
    name: str, places: Sequence[int], times: Times, ledger: Ledger, choice: Choice, budget: int
) -> Schedule | None:
    """The order of that name for these units; None where it cannot hold them.

    Args:
        name: one of `ALL_NAMES`.
        places: the host of every stage.
        times: of the units.
        ledger: what they are and what they hold.
        choice: which level they hold it at.
        budget: list schedules to try.
    """
    hosts, prices = max(places) + 1, ledger.prices
    units = prices.draft.units
    if name == "balanced":
        whole = ledger.whole(choice)
        try:
            held, caps = ledger.held(choice), ledger.caps(choice)
            found = balanced(places, units, fused(times, whole), held, caps, message=prices.message, budget=budget)
        except PlanError:
            return None
        return joined(found, whole)
    counts = [unit.pieces for unit in units if unit.piece == 0]
    if name in FOLDED and max(counts) > 1:
        return None
    return schedule_of(name, hosts, len(counts), counts, len(places) // hosts, times)


def fused(times: Times, whole: np.ndarray) -> Times:
    """The same work with nothing left for the weight half where backwards shall be whole, bool[stages, units]."""
    late = np.where(whole, times.weights, 0)
    return Times(times.forward, times.backward + late, times.weights - late, np.where(whole, 0, times.apart))


def joined(order: Schedule, whole: np.ndarray) -> Schedule:
    """The order with whole backwards in place of their halves, where the input half is."""
    if not whole.any():
        return order
    table = whole.tolist()
    rows = []
    for row in order.rows:
        kept = [a for a in row if a.kind is not W or not table[a.stage][a.round or 0]]
        rows.append(
            tuple(Action(a.stage, B, a.round) if a.kind is I and table[a.stage][a.round or 0] else a for a in kept)
        )
    return replace(order, rows=tuple(rows))


def require_order(name: str, hosts: int, chunks: int) -> None:
    """Refuse a named order that such a pipeline cannot have, before any planning."""
    if name not in ("auto", "balanced"):
        schedule_of(name, hosts, 1, 1, chunks)
