"""The values of the cost room: shapes, policies, named parts of a time and the tables planners search on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from seqloom.plan import Checkpoint, Method, Reduce

if TYPE_CHECKING:
    from seqloom.plan import GroupFamily


class GroupShape(NamedTuple):
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
    def overlaps_kv(self) -> bool:
        """Whether keys and values travel behind attention: in a ring. A gather comes first."""
        return self.ring > 1 and self.method == Method.RING

    @property
    def kernel_calls(self) -> int:
        """Kernel calls that a document takes on the rank that has most of them.

        A ring takes one per step. Of gathered keys, each of a rank's two chunks takes its own causal square and all
        keys before it; only the first chunk of a document, which a ring of two has on one of its ranks, has none.
        """
        return self.ring if self.ring == 1 or self.overlaps_kv else min(self.ring + 1, 4)

    def __str__(self) -> str:
        kind = ("g" if self.method == Method.GATHER else "") + ("r" if self.routed else "")
        return f"{self.ulysses}x{self.ring}{kind}"


class MemoryPolicy(NamedTuple):
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
STREAMS: tuple[tuple[str, ...], ...] = (
    ("linear", "head", "attention", "steps", "ulysses", "kv_gather", "remap", "fixed", "tensor"),
    ("linear", "head", "ring", "ulysses", "remap", "fixed", "tensor"),
    ("gather", "reduce", "network"),
)


@dataclass(frozen=True, slots=True)
class CostBreakdown:
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
    def stream_ns(self) -> tuple[int, int, int]:
        """Nanoseconds per lane: computing, ring in place of attention (zero without a ring), network."""
        serial, ring, network = (sum(getattr(self, name) for name in lane) for lane in STREAMS)
        return (serial, ring if self.ring else 0, network)

    @property
    def total_ns(self) -> int:
        """Time of the group: its longest lane."""
        return max(self.stream_ns)

    def as_dict(self) -> dict[str, int]:
        """Name to nanoseconds, in the order of the fields."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


@dataclass(frozen=True, slots=True, eq=False)
class CostTables:
    """Everything a planner compares, for ``n`` documents, ``S`` shapes, ``L = 3`` lanes. int64 ns.

    Time of a group of shape ``s`` = max over lanes ``l`` of ``fixed[l, s] + sum_k cost[l, s, k]``.
    """

    shapes: tuple[GroupShape, ...]
    degree: np.ndarray  # int64[S]
    cost: np.ndarray  # int64[L, S, n] ns that document k adds to lane l
    fixed: np.ndarray  # int64[L, S] ns before any document
    tokens: np.ndarray  # int64[n] tokens a document occupies
    capacity: int  # tokens per rank in one round

    def group_ns(self, shape: int, documents: np.ndarray) -> int:
        """Time of one group of shape index ``shape`` holding these document indices. The plain oracle."""
        return int((self.fixed[:, shape] + self.cost[:, shape, documents].sum(axis=1)).max())


# ---- merged: cost.shapes
# Which shapes planners may choose from: a handful per degree, of those only the ones that can be fastest.


PROBES = tuple(2**power for power in range(7, 23))  # document lengths at which shapes are compared
PROBED = 8192  # tokens of a rank where no policy says how many it holds
NEAR_PERCENT = 103


def candidate_shapes(
    family: GroupFamily, heads: int, kv_heads: int, tensor: int = 1, within: GroupFamily | None = None
) -> tuple[GroupShape, ...]:
    """Shapes by degree ascending, then Ulysses descending.

    Per degree: the widest Ulysses that the heads allow, a whole node of Ulysses, one kv head per Ulysses
    rank (the widest that needs no replication), and a pure ring.

    Args:
        family: of the ranks.
        heads: query heads of the model.
        kv_heads: its key/value heads.
        tensor: ranks of a team; Ulysses is a multiple of it.
        within: family of the cluster that these ranks are a part of, if they are one: then groups have sizes that
            divide the part and that the cluster knows, so that the part may lie at any multiple of its own size.
    """
    shapes = []
    sizes = [size for size in family.sizes if size % tensor == 0]
    if within is not None:
        sizes = [size for size in sizes if family.ranks % size == 0 and size in within.sizes]
    for degree in sizes:
        legal = [size for size in sizes if size <= heads and _fits(size, degree, family.node_size)]
        if tensor not in legal:
            continue
        wanted = {max(legal), tensor}
        wanted.update(size for size in (family.node_size,) if size in legal)
        unreplicated = [size for size in legal if kv_heads % size == 0]
        wanted.add(max(unreplicated))
        shapes += [GroupShape(size, degree // size) for size in sorted(wanted, reverse=True)]
    return tuple(shapes)


def with_methods(shapes: Iterable[GroupShape], node_size: int, cards: int) -> tuple[GroupShape, ...]:
    """The shapes in every way of sharing keys and values: ring and gather, and routed where they leave a node.

    Args:
        shapes: plain rings.
        node_size: ranks of a node.
        cards: NICs of a node that have a GPU near them; one alone gives a route nothing to spread over.
    """
    every = []
    for plain in shapes:
        every.append(plain)
        if plain.ring > 1:
            every.append(plain._replace(method=Method.GATHER))
            if plain.degree > node_size and cards > 1:
                every += [plain._replace(method=method, routed=True) for method in Method]
    return tuple(every)


def _fits(ulysses: int, degree: int, node_size: int) -> bool:
    """Whether every Ulysses subgroup of an aligned block is itself an aligned block."""
    if degree % ulysses:
        return False
    return degree <= node_size or node_size % ulysses == 0 or ulysses % node_size == 0


def useful_shapes(tables: Callable[[np.ndarray], CostTables]) -> tuple[GroupShape, ...]:
    """Of every degree as few shapes as possible, such that one is within 3 % of the fastest for any document.

    Documents of every length are tried, alone and in a full pack of their like.

    Args:
        tables: prices all candidate shapes for given lengths.
    """
    priced = tables(np.array(PROBES, dtype=np.int64))
    keep: list[GroupShape] = []
    for degree in dict.fromkeys(int(d) for d in priced.degree):
        rows = np.flatnonzero(priced.degree == degree)
        keep += [priced.shapes[rows[i]] for i in _cover(_probe(priced, rows, degree * (priced.capacity or PROBED)))]
    return ordered(keep)


def _probe(priced: CostTables, rows: np.ndarray, room: int) -> np.ndarray:
    """int64[shapes, probes] ns of one document and of a full pack, for each length that fits ``room``."""
    columns = []
    for k, tokens in enumerate(int(t) for t in priced.tokens):
        copies = room // tokens
        if copies == 0 and columns:
            break
        for count in {1, max(1, copies)}:
            columns.append((priced.fixed[:, rows] + count * priced.cost[:, rows, k]).max(axis=0))
    return np.stack(columns, axis=1)


def _cover(times: np.ndarray) -> list[int]:
    """Greedily pick rows until the best picked one is near the best of all in every column."""
    best = times.min(axis=0)
    picked: list[int] = []
    reached = np.full(times.shape[1], np.iinfo(np.int64).max // 128)
    while np.any(reached * 100 > best * NEAR_PERCENT) if picked else True:
        near = [int(np.count_nonzero(np.minimum(reached, row) * 100 <= best * NEAR_PERCENT)) for row in times]
        choice = int(np.argmax(near))  # the first of equals: the widest Ulysses
        picked.append(choice)
        reached = np.minimum(reached, times[choice])
    return picked


def ordered(shapes: Iterable[GroupShape]) -> tuple[GroupShape, ...]:
    """Each once, by degree ascending, then Ulysses descending, rings before gathers, direct before routed."""
    gather = Method.GATHER
    return tuple(sorted(set(shapes), key=lambda s: (s.degree, -s.ulysses, s.method == gather, s.routed)))
