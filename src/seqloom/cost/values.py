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

    @property
    def hides(self) -> bool:
        """Whether keys and values travel behind attention: in a ring. A gather comes first."""
        return self.ring > 1 and self.method == Method.RING

    @property
    def kernels(self) -> int:
        """Kernel calls that a document takes on the rank that has most of them.

        A ring takes one per step. Of gathered keys, each of a rank's two chunks takes its own causal square and all
        keys before it; only the first chunk of a document, which a ring of two has on one of its ranks, has none.
        """
        return self.ring if self.ring == 1 or self.hides else min(self.ring + 1, 4)

    def __str__(self) -> str:
        kind = ("g" if self.method == Method.GATHER else "") + ("r" if self.routed else "")
        return f"{self.ulysses}x{self.ring}{kind}"


class Variant(NamedTuple):
    """What a whole step decides once: which activations are kept, and when gradients are reduced.

    ``resident``: parameters stay gathered and gradients whole from the first round to the last, as in pipelines of
    several stages; rounds then neither gather nor reduce.
    """

    checkpoint: Checkpoint
    reduce: Reduce
    resident: bool = False

    def __str__(self) -> str:
        return f"{self.checkpoint.value}/{self.reduce.value}" + ("/resident" if self.resident else "")


# Which part counts in which lane. A group takes as long as its longest lane, so parts that run side by side
# (a ring's messages behind its attention, parameter gathers behind everything) stand in different lanes.
LANES: tuple[tuple[str, ...], ...] = (
    ("linear", "head", "attention", "steps", "ulysses", "kv_gather", "remap", "fixed", "tensor"),
    ("linear", "head", "ring", "ulysses", "remap", "fixed", "tensor"),
    ("gather", "reduce", "network"),
)


@dataclass(frozen=True, slots=True)
class Parts:
    """One group's forward and backward, split by cause. Integer nanoseconds.

    A group shares keys and values by ``ring`` (with ``steps``) or by ``kv_gather``; the other is 0. ``network`` and
    ``link`` are occupancies: how long the group's traffic takes the busiest NIC and NVLink port.
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
    kv_gather: int = 0  # keys and values sent to all ring indices at once, exposed
    remap: int = 0  # tokens to the layout of the linear layers and back, exposed; of a round, not of a group
    link: int = 0
    tensor: int = 0  # hidden states gathered from the team and partial sums sent back to it, exposed

    @property
    def lanes(self) -> tuple[int, int, int]:
        """Nanoseconds per lane: computing, ring in place of attention (zero without a ring), network."""
        serial, ring, network = (sum(getattr(self, name) for name in lane) for lane in LANES)
        return (serial, ring if self.ring else 0, network)

    @property
    def total_ns(self) -> int:
        """Time of the group: its longest lane."""
        return max(self.lanes)

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
