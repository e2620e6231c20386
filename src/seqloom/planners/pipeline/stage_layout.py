"""Stages of a pipeline: their ranks, their layers (balanced for equal times) and the group shapes that fit in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product

import numpy as np

from seqloom.cost import CostModel, GroupShape, MemoryPolicy
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.plan import Group, LayerRange, Reduce, Sharding, Stage

TYPICAL_LENGTH = 8192
"""Tokens of the document that layers are balanced for if a run does not tell the length of its documents."""


@dataclass(frozen=True, slots=True)
class StageLayout:
    """`pp_size` pp_ranks of `ranks_per_stage` consecutive ranks each, and the stages that they run."""

    pp_size: int
    ranks_per_stage: int
    pp_rank_of_stage: tuple[int, ...]  # in the order of a forward pass, with head stages behind
    layers: tuple[int, ...]  # number of layers of every stage; 0: a head stage
    tensor: int = 1  # tensor-parallel degree
    expert: int = 1  # expert-parallel degree

    @classmethod
    def of(
        cls,
        cost: CostModel,
        pp_size: int,
        chunks: int = 1,
        layers: Sequence[int] | None = None,
        *,
        v_shape: bool = False,
        head_stages: bool = False,
    ) -> StageLayout:
        """Divide the ranks into pp_ranks and the layers into stages; SeqloomError if that is impossible.

        Args:
            chunks: stages of every pp_rank, in the order 0 1 0 1.
            layers: of every stage; None balances the stages' times.
            v_shape: whether two stages per pp_rank go down the pp_ranks and up again, 0 1 1 0.
            head_stages: whether every pp_rank also has a head stage, of a part of all tokens.
        """
        check_stages(cost, pp_size, chunks)
        if head_stages:
            check_head_stages(cost, pp_size, chunks)
        down = tuple(range(pp_size))
        pp_ranks = down + down[::-1] if v_shape and chunks == 2 else down * chunks
        own = {"head_stages": head_stages}
        counts = stage_layers(cost, pp_size, chunks, pp_ranks, **own) if layers is None else tuple(layers)
        if len(counts) != pp_size * chunks or min(counts) < 1 or sum(counts) != cost.model.layers:
            raise SeqloomError(
                f"layers per stage {list(counts)}: {pp_size} pp_ranks x {chunks} stages need {pp_size * chunks} "
                f"numbers of at least 1 that add up to the {cost.model.layers} layers of {cost.model.name}; leave them "
                "out to balance them"
            )
        heads = down if head_stages else ()
        every = (*counts, *(0 for _ in heads))
        return cls(pp_size, cost.ranks // pp_size, (*pp_ranks, *heads), every, cost.tensor, cost.expert)

    @property
    def layer_ranges(self) -> tuple[LayerRange, ...]:
        """Layers of every stage."""
        edges = pairwise(accumulate(self.layers, initial=0))
        return tuple(LayerRange(first, stop, sum(self.layers), self.heads) for first, stop in edges)

    @property
    def heads(self) -> int:
        """Number of head stages, the last ones; 0: the last stage has the head."""
        return self.layers.count(0)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages as a plan lists them."""
        return tuple(
            Stage(self.ranks(pp_rank), (layers.first, layers.stop), self.tensor, self.expert)
            for pp_rank, layers in zip(self.pp_rank_of_stage, self.layer_ranges, strict=True)
        )

    @property
    def ranges_by_pp_rank(self) -> tuple[tuple[LayerRange, ...], ...]:
        """Layers of every pp_rank, stage by stage."""
        stages = list(zip(self.layer_ranges, self.pp_rank_of_stage, strict=True))
        return tuple(tuple(layers for layers, own in stages if own == pp_rank) for pp_rank in range(self.pp_size))

    def ranks(self, pp_rank: int) -> tuple[int, ...]:
        """Ranks of the cluster that run the stages of a pp_rank."""
        return tuple(range(pp_rank * self.ranks_per_stage, (pp_rank + 1) * self.ranks_per_stage))

    def shard_group_size(self, cost: CostModel) -> int:
        """Ranks of the smallest shard group of any pp_rank."""
        if cost.sharding in (Sharding.NONE, Sharding.FREE):
            return 1
        if cost.sharding == Sharding.FULL:
            return self.ranks_per_stage
        nodes = [Counter(rank // cost.node_size for rank in self.ranks(pp_rank)) for pp_rank in range(self.pp_size)]
        return min(min(counts.values()) for counts in nodes)


def check_stages(cost: CostModel, pp_size: int, chunks: int) -> None:
    """Refuse a number of stages that the layers or the ranks do not allow."""
    layers, ranks = cost.model.layers, cost.ranks
    if pp_size < 1 or chunks < 1:
        raise SeqloomError(f"{pp_size} stages with {chunks} chunks each; give 1 or more of both")
    if pp_size * chunks > layers:
        name = f"{pp_size} stages" + (f" of {chunks} chunks" if chunks > 1 else "")
        raise SeqloomError(
            f"{name} for the {layers} layers of {cost.model.name}: every stage needs a layer; use at most "
            f"{max(1, layers // chunks)} stages" + (f" or {max(1, layers // pp_size)} chunks" * (chunks > 1))
        )
    size = max(cost.tensor, cost.expert)
    if ranks % (pp_size * size):
        groups, kind = ranks // size, "tensor" if cost.tensor > 1 else "EP"
        legal = [count for count in range(1, groups + 1) if groups % count == 0 and count * chunks <= layers]
        nearest = min(legal, key=lambda count: (abs(count - pp_size), count))
        whole = f", in whole {kind} groups of {size}" if size > 1 else ""
        raise SeqloomError(
            f"{pp_size} stages on {ranks} ranks: every stage has as many ranks as the others{whole}; use {nearest} "
            "stages"
        )


def check_head_stages(cost: CostModel, pp_size: int, chunks: int) -> None:
    """Refuse head stages where there are no equal parts of the head to deal out."""
    way_out = "leave the head on the last stage (pipeline.head = 'last')"
    if pp_size < 2 or chunks > 1:
        value = f"{pp_size} stages" + (f" of {chunks} chunks" if chunks > 1 else "")
        raise SeqloomError(f"a head on all stages with {value}: it needs several of one chunk each; {way_out}")
    if cost.tensor > 1 or cost.sharding == Sharding.FREE or cost.engine.links is None:
        what = f"tensor degree {cost.tensor}" if cost.tensor > 1 else f"sharding {cost.sharding}"
        what = what if cost.engine.links is not None else f"profile {cost.profile.name}, which has no price for it"
        raise SeqloomError(f"a head on all stages with {what}: every stage holds a whole copy of it; {way_out}")


def stage_layers(
    cost: CostModel,
    pp_size: int,
    chunks: int = 1,
    pp_rank_of_stage: Sequence[int] | None = None,
    length: int | None = None,
    *,
    head_stages: bool = False,
) -> tuple[int, ...]:
    """Balance layers over stages: the time of the slowest pp_rank is least, with the head on the last stage.

    Layers that differ (windows, experts, scans) count with the time that each takes. The layers do not depend on a
    batch, since a run keeps them in place. The longer documents are, the fewer layers the vocabulary projection is
    worth, and the more layers with a window one without it.

    Args:
        chunks: stages of every pp_rank; without ``pp_rank_of_stage`` in the order 0 1 0 1.
        length: tokens of a typical document of the run; None: 8K, or the longest length if that is shorter.
        head_stages: whether all pp_ranks share the head, so that it counts on none.
    """
    check_stages(cost, pp_size, chunks)
    stages = pp_size * chunks
    pp_ranks = tuple(range(pp_size)) * chunks if pp_rank_of_stage is None else tuple(pp_rank_of_stage)
    typical = min(cost.max_length or TYPICAL_LENGTH, TYPICAL_LENGTH) if length is None else length
    policy = MemoryPolicy(cost.engine.policies[0].checkpoint, Reduce.STEP, resident=True)
    tp_group = Group(tuple(range(cost.tensor)), cost.tensor, 1, (Span(0, 0, typical),))
    parts = cost.group_cost(tp_group, policy)
    kinds = cost.model.layer_kinds
    if len(set(kinds)) > 1:
        group = typical_group(cost, cost.ranks // pp_size, typical, policy)
        of_kind = {kind: LayerRange(layer, layer + 1, len(kinds), 1) for layer, kind in enumerate(kinds)}
        ns = {kind: cost.for_layers(layer).group_cost(group, policy) for kind, layer in of_kind.items()}
        head = 0 if head_stages else cost.group_cost(group, policy).head
        return level_layers([max(ns[kind].total_ns - ns[kind].head, 1) for kind in kinds], pp_ranks, head)
    layer = max(parts.total_ns - parts.head, 1)  # of all layers: loads are in units of 1 / layers
    counts = [1] * stages
    load = [layer * chunks] * pp_size
    load[pp_ranks[-1]] += 0 if head_stages else parts.head * cost.model.layers
    for _ in range(cost.model.layers - stages):
        pp_rank = min(range(pp_size), key=lambda p: (load[p], -p))  # later pp_ranks have fewer micro-batches in flight
        stage = min((s for s in range(stages) if pp_ranks[s] == pp_rank), key=lambda s: (counts[s], s))
        counts[stage] += 1
        load[pp_rank] += layer
    return tuple(counts)


def typical_group(cost: CostModel, width: int, length: int, policy: MemoryPolicy) -> Group:
    """The fastest group of a document in a stage of `width` ranks, with about `TYPICAL_LENGTH` tokens on each rank.

    Exchanges count with the layers that need them: with 64K tokens over eight ranks a layer that scans exchanges more
    values than one that attends.
    """
    wanted = min(width, max(cost.tensor, -(-length // TYPICAL_LENGTH)))
    degree = min((s.degree for s in cost.engine.shapes if wanted <= s.degree <= width), default=cost.tensor)
    shapes = tuple(shape for shape in cost.engine.shapes if shape.degree == degree and not shape.routed)
    time = cost.tables([length], policy, shapes).cost[:, :, 0].max(axis=0)
    return cost.group(shapes[int(time.argmin())], range(degree), (Span(0, 0, length),))


def level_layers(layer_ns: Sequence[int], pp_rank_of_stage: Sequence[int], head_ns: int = 0) -> tuple[int, ...]:
    """Cut layers of these times into stages: how many each has, in order, such that the slowest pp_rank is fastest.

    Of cuts with the same slowest an even one, with more layers behind, where fewer micro-batches are in flight. With
    one stage per pp_rank no cut is better; with several, stages are cut evenly and then moved layer by layer as long
    as that helps.
    """
    stages, total = len(pp_rank_of_stage), [0, *accumulate(layer_ns)]
    edges = _even_edges(np.array(total), stages, head_ns)
    pp_ranks = max(pp_rank_of_stage) + 1

    def loads(edges: Sequence[int]) -> list[int]:
        found = [0] * pp_ranks
        for pp_rank, (first, stop) in zip(pp_rank_of_stage, pairwise(edges), strict=True):
            found[pp_rank] += total[stop] - total[first]
        found[pp_rank_of_stage[-1]] += head_ns
        return sorted(found, reverse=True)

    best, improved = loads(edges), pp_ranks < stages
    while improved:
        improved = False
        for stage, step in product(range(1, stages), (-1, 1)):
            moved = [*edges[:stage], edges[stage] + step, *edges[stage + 1 :]]
            if min(stop - first for first, stop in pairwise(moved)) > 0 and (found := loads(moved)) < best:
                edges, best, improved = moved, found, True
    return tuple(stop - first for first, stop in pairwise(edges))


def _even_edges(total: np.ndarray, stages: int, head_ns: int) -> list[int]:
    """First layers of the stages, and the number of layers, by the time of all layers before each, int64[layers + 1].

    Stage by stage, for every number of layers so far, take the cut whose slowest stage is fastest, and of these the one
    with the least sum of squares.
    """
    layers = len(total) - 1
    slowest = total - total[0]
    squares = slowest.astype(np.float64) ** 2
    first = np.zeros((stages, layers + 1), dtype=np.int64)  # of the last of so many stages, by the layers of all
    for stage in range(1, stages):
        own_slowest, own_squares = slowest.copy(), squares.copy()
        for stop in range(stage + 1, layers + 1):
            last = total[stop] - total[stage:stop] + (head_ns if stage == stages - 1 else 0)
            most = np.maximum(slowest[stage:stop], last)
            even = squares[stage:stop] + last.astype(np.float64) ** 2
            at = int(np.where(most == most.min(), even, np.inf).argmin())  # the first of equals: most layers behind
            first[stage, stop], own_slowest[stop], own_squares[stop] = stage + at, most[at], even[at]
        slowest, squares = own_slowest, own_squares
    edges = [layers]
    for stage in reversed(range(1, stages)):
        edges.append(int(first[stage, edges[-1]]))
    return [0, *reversed(edges)]


def stage_group_shapes(cost: CostModel, layout: StageLayout) -> dict[GroupShape, tuple[int, ...]]:
    """Group shapes that fit in every pp_rank, with the offsets there at which such groups may begin.

    Groups lie on blocks of the group family, without routes: keys and values stay inside the pp_rank. The shapes are
    those that the cost model proposes for whole documents, and Ulysses of every degree: a document in pieces would send
    the keys and values of its prefix round a ring again with every piece. Of a model with latents, also Ulysses that
    keeps these of earlier pieces.
    """
    width = layout.ranks_per_stage
    heads = [size for size in cost.family.sizes if size <= min(width, cost.model.heads)]
    plain = [GroupShape(size, 1) for size in heads]
    every = (*plain, *(shape._replace(latent=True) for shape in plain))
    ulysses = [shape for shape in every if shape in cost.engine.shapes]
    shapes: dict[GroupShape, tuple[int, ...]] = {}
    for shape in dict.fromkeys((*cost.shapes, *ulysses)):
        degree = shape.degree
        offsets: list[int] = []
        for offset in range(0, width - degree + 1):
            disjoint = not offsets or offset >= offsets[-1] + degree
            starts = range(offset, layout.pp_size * width, width)
            if disjoint and (degree == 1 or all(cost.family.contains(start, degree) for start in starts)):
                offsets.append(offset)
        if offsets and not shape.routed:
            shapes[shape] = tuple(offsets)
    return shapes
