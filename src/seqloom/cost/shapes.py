"""What planners choose and compare: shapes of groups, memory policies, cost breakdowns and cost tables.

A group shape is USP's two-dimensional mesh (Ulysses x ring). Of the shapes that a model and a cluster allow, planners
see a handful per degree, and of those only the ones that are fastest for some document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from seqloom.plan import Checkpoint, Method, Reduce

if TYPE_CHECKING:
    from seqloom.plan import Group, GroupFamily


class GroupShape(NamedTuple):
    """How a group spreads a document: ``ulysses`` ranks over heads (inner axis) times ``ring`` ranks over positions."""

    ulysses: int
    ring: int
    method: Method = Method.RING  # how ring ranks share keys and values
    routed: bool = False  # whether keys and values cross nodes through all NICs
    latent: bool = False  # whether latents travel in the place of keys and values (MLA), and every rank expands them
    states: bool = False  # whether scans pass states from rank to rank, instead of exchanging tokens for heads

    @classmethod
    def of(cls, group: Group) -> GroupShape:
        """The shape of a group."""
        return cls(group.ulysses, group.ring, group.method, group.route is not None, group.latent, group.states)

    @property
    def degree(self) -> int:
        """Ranks in a group of this shape."""
        return self.ulysses * self.ring

    @property
    def overlaps_kv(self) -> bool:
        """Whether keys and values travel behind attention: in a ring. An all-gather of them comes first."""
        return self.ring > 1 and self.method == Method.RING

    @property
    def runs_per_rank(self) -> int:
        """Runs of a document's tokens that a rank holds, at most.

        A ring index has two of them, which an even number of Ulysses ranks share without cutting one.
        """
        return 2 if self.ring > 1 and self.ulysses % 2 else 1

    @property
    def kernel_calls(self) -> int:
        """Attention kernel calls per document on the rank that makes most of them.

        A ring makes one per step. Of gathered keys, each of a rank's two zigzag chunks takes its own causal square and
        all keys before it; only the first chunk of a document, which a ring of two has on one of its ranks, has none.
        """
        return self.ring if self.ring == 1 or self.overlaps_kv else min(self.ring + 1, 4)

    def __str__(self) -> str:
        """Ulysses, then ring or gather, then what else holds: ``u2r4``, ``u2g4 routed``, ``u8r1 states``."""
        kinds = {"routed": self.routed, "latent": self.latent, "states": self.states}
        way = "g" if self.method == Method.GATHER else "r"
        return " ".join([f"u{self.ulysses}{way}{self.ring}", *(kind for kind, holds in kinds.items() if holds)])


class MemoryPolicy(NamedTuple):
    """How a step trades memory for time: activation checkpointing, gradient reduction, resident parameters."""

    checkpoint: Checkpoint
    reduce: Reduce
    resident: bool = False
    """Parameters stay gathered and gradients whole over all rounds, as in pipelines of several stages: rounds neither
    gather nor reduce."""

    def __str__(self) -> str:
        return f"{self.checkpoint.value}/{self.reduce.value}" + ("/resident" if self.resident else "")


STREAMS: tuple[tuple[str, ...], ...] = (
    (
        *("linear", "head", "attention", "steps", "ulysses", "kv_gather", "remap", "fixed", "tensor"),
        *("routed", "expert", "expert_latency"),
    ),
    ("linear", "head", "ring", "ulysses", "remap", "fixed", "tensor", "routed", "expert", "expert_latency"),
    ("gather", "reduce", "network", "expert_network"),
)
"""Which parts of a `CostBreakdown` follow each other on which stream: compute, ring communication (a ring's messages in
the place of its attention), network. Streams run side by side: a group takes as long as its longest one."""


class CostBreakdown(NamedTuple):
    """One group's forward and backward, split by cause. Integer nanoseconds.

    A group shares keys and values by ``ring`` (with ``steps``) or by ``kv_gather``; the other is 0.
    """

    linear: int = 0  # matrix products and elementwise work of the layers but for experts, with recomputation
    head: int = 0  # vocabulary projection and loss
    attention: int = 0  # attention kernels, with recomputation
    steps: int = 0  # launching and merging the kernels of a ring's further steps
    ulysses: int = 0  # all-to-all of heads, exposed
    ring: int = 0  # key/value rotation, hidden behind attention
    gather: int = 0  # parameter all-gathers of the round
    reduce: int = 0  # gradient reduce-scatter of the round
    network: int = 0  # how long the group's traffic occupies the busiest NIC
    fixed: int = 0  # launches and whatever else a round costs without tokens
    kv_gather: int = 0  # all-gather of keys and values over the ring ranks, exposed
    remap: int = 0  # tokens to the layout of the linear layers and back, exposed; of a round, not of a group
    link: int = 0  # how long the group's traffic occupies the busiest NVLink port
    tensor: int = 0  # tensor parallel all-gathers of hidden states and reductions of partial sums, exposed
    expert: int = 0  # tokens to the experts of an EP group and back, exposed
    expert_latency: int = 0  # of these exchanges, once in a round, however many groups a rank is in
    expert_network: int = 0  # how long a rank's own tokens for experts of other nodes occupy its NIC
    routed: int = 0  # experts that the router chose for the group's tokens, on the rank that has the tokens

    @property
    def stream_ns(self) -> tuple[int, int, int]:
        """Nanoseconds on each of the `STREAMS`; 0 for ring communication where there is no ring."""
        compute, ring, network = (sum(getattr(self, name) for name in stream) for stream in STREAMS)
        return (compute, ring if self.ring else 0, network)

    @property
    def total_ns(self) -> int:
        """Time of the group: its longest stream."""
        return max(self.stream_ns)


BY_SPEED = ("linear", "head", "attention")
"""Parts that take less on a faster rank (`speeds`), the slowest of a group; so do ``routed`` experts, by the rank that
has them."""
COST_COLUMNS = CostBreakdown._fields
"""Columns of a table of costs: row by row a `CostBreakdown`."""


def columns(names: Iterable[str]) -> list[int]:
    """Columns of these parts in a table of costs."""
    return [COST_COLUMNS.index(name) for name in names]


@dataclass(frozen=True, slots=True, eq=False)
class CostTables:
    """Everything a planner compares, for ``n`` documents, ``S`` shapes, ``L = 3`` streams. int64 ns.

    Time of a group of shape ``s`` = max over streams ``l`` of ``fixed[l, s] + sum_k cost[l, s, k]``.
    """

    shapes: tuple[GroupShape, ...]
    degree: np.ndarray  # int64[S]
    cost: np.ndarray  # int64[L, S, n] ns that document k adds to stream l
    fixed: np.ndarray  # int64[L, S] ns before any document
    tokens: np.ndarray  # int64[n] tokens a document occupies
    capacity: int  # tokens per rank in one round

    def group_ns(self, shape: int, documents: np.ndarray) -> int:
        """Time of one group of shape index ``shape`` with these document indices. The plain oracle."""
        return int((self.fixed[:, shape] + self.cost[:, shape, documents].sum(axis=1)).max())


# -- which shapes planners choose from ------------------------------------------

PROBE_LENGTHS = tuple(2**power for power in range(7, 23))  # document lengths at which shapes are compared
PROBE_CAPACITY = 8192  # tokens per rank where no memory policy says how many it holds
NEAR_PERCENT = 103


def candidate_shapes(
    family: GroupFamily, heads: int, kv_heads: int, tensor: int = 1, cluster_family: GroupFamily | None = None
) -> tuple[GroupShape, ...]:
    """List plain rings by degree ascending, then Ulysses descending.

    Per degree: the widest Ulysses that the heads allow, a whole node of Ulysses, one key/value head per Ulysses rank
    (the widest that replicates none), and a pure ring. Ulysses is a multiple of the tensor parallel degree.

    Where the ranks are a submesh of a cluster, groups have sizes that divide the submesh and that the cluster's family
    has, so that it may lie at any multiple of its own size.
    """
    shapes = []
    sizes = [size for size in family.sizes if size % tensor == 0]
    if cluster_family is not None:
        sizes = [size for size in sizes if family.ranks % size == 0 and size in cluster_family.sizes]
    for degree in sizes:
        legal = [size for size in sizes if size <= heads and _nests(size, degree, family.node_size)]
        if tensor in legal:
            unreplicated = max(size for size in legal if kv_heads % size == 0)
            wanted = {max(legal), tensor, unreplicated} | ({family.node_size} & set(legal))
            shapes += [GroupShape(size, degree // size) for size in sorted(wanted, reverse=True)]
    return tuple(shapes)


def _nests(ulysses: int, degree: int, node_size: int) -> bool:
    """Whether every Ulysses subgroup of an aligned block is itself an aligned block."""
    if degree % ulysses:
        return False
    return degree <= node_size or node_size % ulysses == 0 or ulysses % node_size == 0


def with_methods(
    shapes: Iterable[GroupShape], node_size: int, nics: int, latent: bool = False, states: bool = False
) -> tuple[GroupShape, ...]:
    """Add to plain rings every other way to share keys and values: gathers, and routed ones where they leave a node.

    With one NIC near the GPUs of a node there is nothing to spread a route over. Of a model with latents, all of them
    once more with these, one rank included: there it is what a document in pieces leaves for later ones. Of a model
    whose scans can pass states, those of several ranks once more so.
    """
    every = []
    for plain in shapes:
        every.append(plain)
        if plain.ring > 1:
            every.append(plain._replace(method=Method.GATHER))
            if plain.degree > node_size and nics > 1:
                every += [plain._replace(method=method, routed=True) for method in Method]
    every += [shape._replace(latent=True) for shape in every if latent]
    return (*every, *(shape._replace(states=True) for shape in every if states and shape.degree > 1))


def useful_shapes(tables: Callable[[np.ndarray], CostTables]) -> tuple[GroupShape, ...]:
    """Pick of every degree as few shapes as possible, such that one is within 3 % of the fastest for any document.

    Documents of every length are tried, one by itself and a full pack of equal ones. `tables` prices all candidates.
    """
    priced = tables(np.array(PROBE_LENGTHS, dtype=np.int64))
    useful: list[GroupShape] = []
    for degree in dict.fromkeys(priced.degree.tolist()):
        rows = np.flatnonzero(priced.degree == degree)
        times = _probe(priced, rows, degree * (priced.capacity or PROBE_CAPACITY))
        useful += [priced.shapes[rows[i]] for i in _cover(times)]
    return ordered(useful)


def _probe(priced: CostTables, rows: np.ndarray, capacity: int) -> np.ndarray:
    """int64[shapes, probes] ns of one document and of a full pack, for each length that fits the capacity."""
    columns = []
    for k, tokens in enumerate(priced.tokens.tolist()):
        copies = capacity // tokens
        if copies == 0 and columns:
            break
        for count in {1, max(1, copies)}:
            columns.append((priced.fixed[:, rows] + count * priced.cost[:, rows, k]).max(axis=0))
    return np.stack(columns, axis=1)


def _cover(times: np.ndarray) -> list[int]:
    """Pick rows greedily until the best picked one is near the best of all in every column."""
    best = times.min(axis=0)
    picked: list[int] = []
    reached = np.full(times.shape[1], np.iinfo(np.int64).max // 128)
    while not picked or (len(picked) < len(times) and np.any(reached * 100 > best * NEAR_PERCENT)):
        near = [int(np.count_nonzero(np.minimum(reached, row) * 100 <= best * NEAR_PERCENT)) for row in times]
        picked.append(int(np.argmax(near)))  # the first of equals: the widest Ulysses
        reached = np.minimum(reached, times[picked[-1]])
    return picked


def ordered(shapes: Iterable[GroupShape]) -> tuple[GroupShape, ...]:
    """Sort shapes, each once: degree ascending, Ulysses descending, then rings, direct ones, no latents, no states."""

    def key(shape: GroupShape) -> tuple[int | bool, ...]:
        return shape.degree, -shape.ulysses, shape.method == Method.GATHER, *shape[3:]

    return tuple(sorted(set(shapes), key=key))
