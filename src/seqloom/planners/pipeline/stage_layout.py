"""The line that units flow along: hosts of equal size, the stages on them, and how many layers each stage has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from seqloom.cost import CostModel, GroupShape, MemoryPolicy
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.plan import Group, LayerRange, Reduce, Sharding, Stage

TYPICAL_LENGTH = 8192
"""Tokens of the document by whose times the layers are levelled when a run does not say how long its documents are."""


@dataclass(frozen=True, slots=True)
class Line:
    """`hosts` hosts of `width` ranks each, in order of ranks, and the stages in the order in which units meet them."""

    hosts: int
    width: int
    places: tuple[int, ...]
    """The host of every stage."""
    layers: tuple[int, ...]
    """Layers of every stage."""
    tensor: int = 1
    """Ranks of a team that splits a stage's weights."""

    @property
    def shares(self) -> tuple[LayerRange, ...]:
        """What every stage has of the model."""
        edges = pairwise(accumulate(self.layers, initial=0))
        return tuple(LayerRange(first, stop, sum(self.layers)) for first, stop in edges)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages as a plan lists them."""
        return tuple(
            Stage(self.ranks(host), (share.first, share.stop), self.tensor)
            for host, share in zip(self.places, self.shares, strict=True)
        )

    @property
    def of_hosts(self) -> tuple[tuple[LayerRange, ...], ...]:
        """What every host has of the model, stage by stage."""
        shares = self.shares
        return tuple(
            tuple(share for share, place in zip(shares, self.places, strict=True) if place == host)
            for host in range(self.hosts)
        )

    def ranks(self, host: int) -> tuple[int, ...]:
        """Ranks of a host."""
        return tuple(range(host * self.width, (host + 1) * self.width))


def line_of(
    cost: CostModel, hosts: int, chunks: int = 1, layers: Sequence[int] | None = None, *, folded: bool = False
) -> Line:
    """Cut the ranks into hosts and the layers into stages; SeqloomError if that cannot be.

    Args:
        cost: prices the layers.
        hosts: stages that work side by side.
        chunks: stages of every host; they take turns, 0 1 0 1.
        layers: of every stage; None levels the stages' times.
        folded: whether two stages per host go down the hosts and up again, 0 1 1 0.
    """
    check_stages(cost, hosts, chunks)
    row = tuple(range(hosts))
    places = row + row[::-1] if folded and chunks == 2 else row * chunks
    levelled = stage_layers(cost, hosts, chunks, places) if layers is None else tuple(layers)
    if len(levelled) != hosts * chunks or min(levelled) < 1 or sum(levelled) != cost.model.layers:
        raise SeqloomError(
            f"layers per stage {list(levelled)}: {hosts} hosts x {chunks} stages need {hosts * chunks} numbers of at "
            f"least 1 that add up to the {cost.model.layers} layers of {cost.model.name}; leave them out to level them"
        )
    return Line(hosts, cost.ranks // hosts, places, levelled, cost.tensor)


def shard_group_of(cost: CostModel, line: Line) -> int:
    """Ranks that share parameter shards: of the host's smallest shard group."""
    if cost.sharding in (Sharding.NONE, Sharding.FREE):
        return 1
    if cost.sharding == Sharding.FULL:
        return line.width
    nodes = [Counter(rank // cost.node_size for rank in line.ranks(host)) for host in range(line.hosts)]
    return min(min(counts.values()) for counts in nodes)


def check_stages(cost: CostModel, hosts: int, chunks: int) -> None:
    """Refuse a number of stages that the layers or the ranks do not allow."""
    layers, ranks = cost.model.layers, cost.ranks
    if hosts < 1 or chunks < 1:
        raise SeqloomError(f"{hosts} stages with {chunks} chunks each; give 1 or more of both")
    if hosts * chunks > layers:
        name = f"{hosts} stages" + (f" of {chunks} chunks" if chunks > 1 else "")
        raise SeqloomError(
            f"{name} for the {layers} layers of {cost.model.name}: every stage needs a layer; "
            f"use at most {max(1, layers // chunks)} stages" + (f" or {max(1, layers // hosts)} chunks" * (chunks > 1))
        )
    if ranks % (hosts * cost.tensor):
        teams = ranks // cost.tensor
        legal = [count for count in range(1, teams + 1) if teams % count == 0 and count * chunks <= layers]
        nearest = min(legal, key=lambda count: (abs(count - hosts), count))
        whole = f", in whole teams of {cost.tensor}" if cost.tensor > 1 else ""
        raise SeqloomError(
            f"{hosts} stages on {ranks} ranks: every stage has as many ranks as the others{whole}; use {nearest} stages"
        )


def stage_layers(
    cost: CostModel,
    hosts: int,
    chunks: int = 1,
    places: Sequence[int] | None = None,
    length: int | None = None,
) -> tuple[int, ...]:
    """Layers of every stage such that the slowest host is as fast as can be: the last stage has the head too.

    They depend on no batch, because a run keeps its layers where they are. The longer documents are, the fewer layers
    the vocabulary projection is worth.

    Args:
        cost: prices the layers.
        hosts: stages that work side by side.
        chunks: stages of every host.
        places: the host of every stage; None: in turns, 0 1 0 1.
        length: tokens of a typical document of the run; None: 8K, or the longest length if that is shorter.
    """
    check_stages(cost, hosts, chunks)
    places = tuple(range(hosts)) * chunks if places is None else tuple(places)
    typical = min(cost.max_length or TYPICAL_LENGTH, TYPICAL_LENGTH) if length is None else length
    policy = MemoryPolicy(cost.engine.policies[0].checkpoint, Reduce.STEP, resident=True)
    team = Group(tuple(range(cost.tensor)), cost.tensor, 1, (Span(0, 0, typical),))
    parts = cost.group_cost(team, policy)
    layer = max(parts.total_ns - parts.head, 1)  # of all layers: loads are in units of 1 / layers
    stages = hosts * chunks
    counts = [1] * stages
    load = [layer * chunks] * hosts
    load[places[-1]] += parts.head * cost.model.layers
    for _ in range(cost.model.layers - stages):
        host = min(range(hosts), key=lambda h: (load[h], -h))  # late hosts hold fewer units at a time
        stage = min((s for s in range(stages) if places[s] == host), key=lambda s: (counts[s], s))
        counts[stage] += 1
        load[host] += layer
    return tuple(counts)


def host_shapes(cost: CostModel, line: Line) -> dict[GroupShape, tuple[int, ...]]:
    """Shapes that fit in every host, with the offsets in the host at which their groups may begin.

    Groups lie on blocks of the group family. Keys and values stay inside the host: no routes. Beside the shapes that
    the cost model finds useful for whole documents there is Ulysses of every degree: a document in pieces would send
    the keys and values of its prefix round a ring again with every piece.
    """
    shapes: dict[GroupShape, tuple[int, ...]] = {}
    heads = [size for size in cost.family.sizes if size <= min(line.width, cost.model.heads)]
    plain = [shape for shape in (GroupShape(size, 1) for size in heads) if shape in cost.engine.shapes]
    for shape in dict.fromkeys((*cost.shapes, *plain)):
        starts = [
            offset
            for offset in range(0, line.width - shape.degree + 1)
            if all(_fits(cost, host * line.width + offset, shape) for host in range(line.hosts))
        ]
        apart: list[int] = []
        for start in starts:
            if not apart or start >= apart[-1] + shape.degree:
                apart.append(start)
        if apart and not shape.routed:
            shapes[shape] = tuple(apart)
    return shapes


def _fits(cost: CostModel, start: int, shape: GroupShape) -> bool:
    return shape.degree == 1 or cost.family.contains(start, shape.degree)
