"""What a plan must respect, carried by the plan so that it can be checked anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from seqloom.plan.family import GroupFamily
from seqloom.plan.round import Checkpoint


class Sharding(StrEnum):
    """How far the parameters of a host's stages are sharded: over its ranks, its ranks in one node, or not at all.

    A plan of one stage has one host, the world: there full sharding is over all ranks, hybrid over a node's.

    free: masters lie in one even layout over all ranks of the world, whatever the stages. Every step brings the
    parameters from there to where its plan computes with them, where they stay for the step, and takes the gradients
    back. So plans of successive steps may have any stages.
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
        granule: every document occupies a multiple of this many tokens.
        communicators: Ulysses communicators per rank that the group family may use.
    """

    ranks: int
    node_size: int
    heads: int
    capacity: tuple[tuple[Checkpoint, int], ...]
    granule: int = 1
    communicators: int = 16

    @property
    def family(self) -> GroupFamily:
        """The blocks that may become Ulysses communicators."""
        return GroupFamily.cached(self.ranks, self.node_size, self.communicators)

    def padded(self, tokens: int) -> int:
        """Return `tokens` rounded up to the granule."""
        return -(-tokens // self.granule) * self.granule

    def islands(self, sharding: Sharding, host: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Cut a host's ranks into islands: ranks that share parameter shards, and so take part in the same rounds."""
        if sharding == Sharding.FULL:
            return (tuple(host),)
        if sharding in (Sharding.NONE, Sharding.FREE):
            return tuple((rank,) for rank in host)
        nodes: dict[int, list[int]] = {}
        for rank in host:
            nodes.setdefault(rank // self.node_size, []).append(rank)
        return tuple(map(tuple, nodes.values()))
