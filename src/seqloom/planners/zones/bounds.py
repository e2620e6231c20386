"""From which length on a document may be cut inside a node, and across nodes: from prices, never from constants.

A cut costs rank-time: exchanges, shorter kernels, more launches. It *pays* where that is no more than the break-even,
the share of rank-time that would otherwise be lost; it is *forced* where one rank (or one node) has not enough memory,
or would still be at work when the round ends. Routed shapes are in the tables: a faster network lowers the bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from seqloom.cost import CostModel, CostTables, Variant

SHORTEST, OCTAVES, STEPS = 128, 14, 16
"""Lengths at which prices are compared: so many steps per octave."""


@dataclass(frozen=True, slots=True)
class ZoneBounds:
    """Bounds in tokens; None where no document on this cluster may be, or has to be, cut that far."""

    break_even: float
    """What a cut may cost, as a share of the uncut document's rank-time."""
    intra_pays: int | None
    intra_forced: int | None
    inter_pays: int | None
    inter_forced: int | None

    def as_dict(self) -> dict[str, Any]:
        """The bounds for a report in JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def zone_bounds(cost: CostModel, variant: Variant, round_ns: int, break_even: float) -> ZoneBounds:
    """The bounds of one cost model and variant.

    Args:
        round_ns: when the round ends.
        break_even: share of the rank-time of an uncut document that a cut may cost.
    """
    steps = SHORTEST * 2 ** (np.arange(OCTAVES * STEPS) / STEPS)
    lengths = np.unique(cost.tokens(np.rint(steps).astype(np.int64)))
    tables = cost.tables(lengths, variant)
    local = tables.degree == 1
    inside = (tables.degree > 1) & (tables.degree <= cost.node_size)
    across = tables.degree > cost.node_size
    narrow = local | inside
    return ZoneBounds(
        break_even=break_even,
        intra_pays=_pays(tables, inside, local, break_even),
        intra_forced=_forced(tables, local, round_ns) if inside.any() else None,
        inter_pays=_pays(tables, across, narrow, break_even),
        inter_forced=_forced(tables, narrow, round_ns) if across.any() else None,
    )


def _pays(tables: CostTables, wide: np.ndarray, narrow: np.ndarray, break_even: float) -> int | None:
    """The shortest length whose cheapest wide shape costs no more than the break-even above its cheapest narrow one."""
    if not wide.any():
        return None
    spent = tables.cost[:2].max(axis=0) * tables.degree[:, None]
    pays = spent[wide].min(axis=0) <= (1 + break_even) * spent[narrow].min(axis=0)
    return int(tables.tokens[pays.argmax()]) if pays.any() else None


def _forced(tables: CostTables, narrow: np.ndarray, round_ns: int) -> int | None:
    """The shortest length that no narrow shape holds, or ends in time."""
    fits = tables.tokens[None, :] <= tables.degree[:, None] * tables.capacity
    ends = (tables.cost[:2] + tables.fixed[:2, :, None]).max(axis=0) <= round_ns
    held = (fits & ends)[narrow].any(axis=0)
    return None if held.all() else int(tables.tokens[(~held).argmax()])
