"""The values of the cost room: shapes, variants, named parts of a time and the tables planners search on."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from seqloom.plan import Checkpoint, Method, Reduce


class Shape(NamedTuple):
    """How a group spreads a document: ``ulysses`` over heads (inner axis) times ``ring`` over positions.

    ``method`` says how ring indices share keys and values, ``routed`` whether these cross nodes through all cards.
    """

    ulysses: int
    ring: int
    method: Method = Method.RING
    routed: bool = False

    @property
    def degree(self) -> int:
        """Ranks in a group of this shape."""
        return self.ulysses * self.ring

    def __str__(self) -> str:
        kind = ("g" if self.method == Method.GATHER else "") + ("r" if self.routed else "")
        return f"{self.ulysses}x{self.ring}{kind}"


class Variant(NamedTuple):
    """What a whole step decides once: which activations are kept, and when gradients are reduced."""

    checkpoint: Checkpoint
    reduce: Reduce

    def __str__(self) -> str:
        return f"{self.checkpoint.value}/{self.reduce.value}"


# Which part counts in which lane. A group takes as long as its longest lane, so parts that run side by side
# (a ring's messages behind its attention, parameter gathers behind everything) stand in different lanes.
LANES: tuple[tuple[str, ...], ...] = (
    ("linear", "head", "attention", "steps", "ulysses", "fixed"),
    ("linear", "head", "ring", "ulysses", "fixed"),
    ("gather", "reduce", "network"),
)


@dataclass(frozen=True, slots=True)
class Parts:
    """One group's forward and backward, split by cause. Integer nanoseconds.

    ``network`` is the share of ``ulysses`` and ``ring`` traffic that leaves a node, seen as occupancy of
    the NIC. ``kv_gather`` is what an all-gather of keys and values would cost in place of the ring; it is
    in no lane.
    """

    linear: int = 0  # matrix products and elementwise work of the layers, with recomputation
    head: int = 0  # vocabulary projection and loss
    attention: int = 0  # attention kernels, with recomputation
    steps: int = 0  # launching and merging the kernels of a ring's further steps
    ulysses: int = 0  # head exchange, exposed
    ring: int = 0  # key/value rotation, hidden behind attention
    gather: int = 0  # parameter all-gathers of the round
    reduce: int = 0  # gradient reduce-scatter of the round
    network: int = 0
    fixed: int = 0  # launches and whatever else a round costs without tokens
    kv_gather: int = 0

    @property
    def lanes(self) -> tuple[int, int, int]:
        """Nanoseconds per lane: computing, ring in place of attention (zero without a ring), network."""
        serial, ring, network = (sum(getattr(self, name) for name in lane) for lane in LANES)
        return (serial, ring if self.ring else 0, network)

    @property
    def total_ns(self) -> int:
        """Time of the group: its longest lane."""
        return max(self.lanes)

    @property
    def cheaper(self) -> str:
        """``"ring"`` or ``"all-gather"``: which way of sharing keys and values is faster for this group.

        The ring hides behind attention, the all-gather does not, but it is one call instead of many steps.
        """
        ring = max(self.attention + self.steps, self.ring)
        return "all-gather" if self.attention + self.kv_gather < ring else "ring"

    def as_dict(self) -> dict[str, int]:
        """Name to nanoseconds, in the order of the fields."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True, eq=False)
class CostTables:
    """Everything a planner compares, for ``n`` documents, ``S`` shapes, ``L = 3`` lanes. int64 ns.

    Time of a group of shape ``s`` = max over lanes ``l`` of ``fixed[l, s] + sum_k cost[l, s, k]``.
    """

    shapes: tuple[Shape, ...]
    degree: np.ndarray  # int64[S]
    cost: np.ndarray  # int64[L, S, n] ns that document k adds to lane l
    fixed: np.ndarray  # int64[L, S] ns before any document
    tokens: np.ndarray  # int64[n] tokens a document occupies
    capacity: int  # tokens per rank in one round

    def group_ns(self, shape: int, documents: np.ndarray) -> int:
        """Time of one group of shape index ``shape`` holding these document indices. The plain oracle."""
        return int((self.fixed[:, shape] + self.cost[:, shape, documents].sum(axis=1)).max())
