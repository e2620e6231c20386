"""Limits that a plan must respect, carried by the plan so that it can be checked anywhere.

`GroupFamily` is the fixed list of rank blocks that may become a Ulysses communicator. Communicators cost memory and
start-up time, so none is made on demand: a planner chooses among the blocks of the family, all of which exist before
the first step. Blocks are contiguous and aligned:

    in a node    ranks start..start+size of one node, start (counted in the node) a multiple of size
    over nodes   a whole number of nodes, the index of the first a multiple of that number

A rank is in at most one block of each size, so a budget of communicators per rank is a budget of sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from seqloom.errors import PlanError
from seqloom.plan.round import Checkpoint


@dataclass(frozen=True, slots=True)
class GroupFamily:
    """Blocks of `ranks` ranks in nodes of `node_size`, `budget` communicators per rank (size 1 is free)."""

    ranks: int
    node_size: int
    budget: int = 16
    sizes: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.node_size < 1 or self.ranks % self.node_size:
            raise PlanError(
                f"{self.ranks} ranks in nodes of {self.node_size}: ranks must be a whole number of nodes; "
                f"choose {max(1, round(self.ranks / max(1, self.node_size))) * max(1, self.node_size)} ranks"
            )
        if self.budget < 0:
            raise PlanError(f"a budget of {self.budget} communicators: it must not be negative; choose 0 or more")
        admitted = _sizes_by_preference(self.ranks, self.node_size)[: self.budget]
        object.__setattr__(self, "sizes", (1, *sorted(admitted)))

    @classmethod
    @lru_cache(maxsize=64)
    def cached(cls, ranks: int, node_size: int, budget: int = 16) -> GroupFamily:
        """Return the family of these numbers, built once per process."""
        return cls(ranks, node_size, budget)

    def blocks(self, size: int) -> tuple[range, ...]:
        """Return all blocks of one size, in ascending order; none when the size is not in the family."""
        if size not in self.sizes:
            return ()
        if size >= self.node_size:
            return tuple(range(start, start + size) for start in range(0, self.ranks - size + 1, size))
        per_node = range(0, self.node_size - size + 1, size)
        nodes = range(0, self.ranks, self.node_size)
        return tuple(range(node + start, node + start + size) for node in nodes for start in per_node)

    def contains(self, start: int, size: int) -> bool:
        """Say whether the `size` ranks from `start` are a block of the family."""
        if size not in self.sizes or start < 0 or start + size > self.ranks:
            return False
        inner = start % self.node_size
        if size < self.node_size:
            return inner % size == 0 and inner + size <= self.node_size
        return start % size == 0

    def communicators(self) -> Iterator[range]:
        """List every block that needs a communicator, by size and then by start."""
        for size in self.sizes[1:]:
            yield from self.blocks(size)

    def nearest(self, start: int, size: int) -> range:
        """Return the block nearest to the one asked for: by size (the smaller of two), then by start."""
        best = min(self.sizes, key=lambda candidate: (abs(candidate - size), candidate))
        return min(self.blocks(best), key=lambda block: (abs(block.start - start), block.start))


def _sizes_by_preference(ranks: int, node_size: int) -> list[int]:
    """Return all possible sizes above 1, the ones to admit first at the front."""
    nodes = ranks // node_size
    divisors = [size for size in range(1, node_size + 1) if node_size % size == 0]
    doubled = [node_size << power for power in range(nodes.bit_length()) if node_size << power <= ranks]
    powers = sorted({size for size in divisors if size & (size - 1) == 0} | set(doubled))
    order = (*powers, *divisors, ranks, *range(node_size, ranks + 1, node_size), *range(2, node_size))
    return [size for size in dict.fromkeys(order) if size > 1]


class Sharding(StrEnum):
    """How far the parameters of a pipeline rank's stages are sharded: over its ranks, over those in one node, or not.

    A plan of one stage has one pipeline rank, the world: there full sharding is over all ranks, hybrid over a node's.

    free: the optimiser's masters are in one even layout over all ranks of the world, whatever the stages. Every step
    moves the parameters from there to where its plan computes with them, where they stay for the step, and moves the
    gradients back. So plans of successive steps may have any stages.
    """

    FULL = "full"
    HYBRID = "hybrid"
    NONE = "none"
    FREE = "free"


class Reduce(StrEnum):
    """When gradients are reduced inside the shard group: after every round, or once per step."""

    ROUND = "round"
    STEP = "step"


@dataclass(frozen=True, slots=True)
class Limits:
    """Numbers of the cluster, the model and the memory budget that bound a plan.

    Attributes:
        ranks: ranks of the world.
        node_size: ranks per node.
        heads: query heads of the model; a Ulysses rank needs at least one.
        capacity: (checkpoint, tokens per rank in one round) for every checkpoint that the plan may use.
        offload_capacity: the same where all layers are offloaded, for checkpoints of which the plan offloads layers.
        pad_multiple: every document occupies a multiple of this many tokens.
        communicators: Ulysses communicators per rank that the group family may use.
    """

    ranks: int
    node_size: int
    heads: int
    capacity: tuple[tuple[Checkpoint, int], ...]
    pad_multiple: int = 1
    communicators: int = 16
    offload_capacity: tuple[tuple[Checkpoint, int], ...] = ()

    @property
    def family(self) -> GroupFamily:
        """The blocks that may become Ulysses communicators."""
        return GroupFamily.cached(self.ranks, self.node_size, self.communicators)

    def padded(self, tokens: int) -> int:
        """Return `tokens` rounded up to the `pad_multiple`."""
        return -(-tokens // self.pad_multiple) * self.pad_multiple

    def shard_groups(self, sharding: Sharding, ranks: Sequence[int], expert: int = 1) -> tuple[tuple[int, ...], ...]:
        """Cut the ranks of a pipeline rank into shard groups: those that share parameter shards.

        Where parameters are not sharded, these are the EP groups: ranks that divide the experts among them.
        """
        if sharding == Sharding.FULL:
            return (tuple(ranks),)
        if sharding in (Sharding.NONE, Sharding.FREE):
            return tuple(tuple(ranks[k : k + expert]) for k in range(0, len(ranks), expert))
        nodes: dict[int, list[int]] = {}
        for rank in ranks:
            nodes.setdefault(rank // self.node_size, []).append(rank)
        return tuple(map(tuple, nodes.values()))


def mixed_capacity(most: int, other: int, others: int, layers: int) -> int:
    """Return how many tokens a rank holds if some layers have another checkpoint than most, or are offloaded.

    A token takes the memory of both kinds in proportion, so capacities mix by their inverses. Memory may hold fewer:
    recomputing a layer, or copying one, takes as much, however few layers do it.

    Args:
        most, other: tokens that it holds if all layers are of the one kind, or of the other.
        others: layers of the other kind, of so many `layers`.
    """
    if most == other:
        return most
    return layers * most * other // ((layers - others) * other + others * most)
