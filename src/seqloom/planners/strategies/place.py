"""Which ranks a pipeline gets: blocks inside a node, or whole nodes, aligned so that its groups are of the family.

A pipeline that is smaller than a node divides it, and begins at a multiple of its size. A larger one has whole nodes;
where a stage is wider than a node it has 2, 4, 8... of them, and begins at a multiple of its width. So every block that
the family allows inside the pipeline is one that the cluster's family has too, and tensor ranks never leave a node
unless they are wider than it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from seqloom.errors import SeqloomError
from seqloom.planners.strategies.price import SchemeCosts
from seqloom.planners.strategies.values import Pipe, Scheme, Strategy


def fits_nodes(scheme: Scheme, ranks: int, node_size: int) -> bool:
    """Whether a pipeline of this scheme has a place on a cluster."""
    if scheme.ranks > ranks:
        return False
    if scheme.ranks <= node_size:
        return node_size % scheme.ranks == 0
    if scheme.ranks % node_size:
        return False
    if scheme.width <= node_size:
        return node_size % scheme.width == 0
    nodes = scheme.width // node_size
    return scheme.width == ranks or (scheme.width % node_size == 0 and nodes & (nodes - 1) == 0)


def alignment(scheme: Scheme, node_size: int) -> int:
    """Multiples of this many ranks are where a pipeline of the scheme may begin."""
    return scheme.ranks if scheme.ranks <= node_size else max(scheme.width, node_size)


def placed(schemes: Iterable[Scheme], costs: SchemeCosts, ranks: int, node_size: int) -> Strategy | None:
    """The strategy of these schemes, each on the first free ranks that suit it; None if one finds no place.

    Those with the widest stages choose first. Pipelines are listed by longest document, falling.
    """
    free = [True] * ranks
    pipes = []
    for scheme in sorted(schemes, key=lambda s: (-alignment(s, node_size), -s.ranks, s)):
        start = _first_free(scheme, free, node_size)
        if start is None:
            return None
        own = range(start, start + scheme.ranks)
        for rank in own:
            free[rank] = False
        pipes.append(Pipe(scheme, tuple(own), costs[scheme].longest))
    return Strategy(tuple(sorted(pipes, key=lambda pipe: (-pipe.longest, pipe.ranks))))


def _first_free(scheme: Scheme, free: Sequence[bool], node_size: int) -> int | None:
    if not fits_nodes(scheme, len(free), node_size):
        return None
    step = alignment(scheme, node_size)
    for start in range(0, len(free) - scheme.ranks + 1, step):
        if all(free[start : start + scheme.ranks]):
            return start
    return None


def check_placement(strategy: Strategy, ranks: int, node_size: int) -> None:
    """Refuse a strategy that leaves ranks out or has a pipeline where its groups cannot be."""
    missing = sorted(set(range(ranks)) - set(strategy.ranks))
    strange = sorted(set(strategy.ranks) - set(range(ranks)))
    if missing or strange:
        what = f"leaves out rank {missing[0]}" if missing else f"names rank {strange[0]}"
        raise SeqloomError(
            f"strategy {strategy} {what}: its pipelines have {len(strategy.ranks)} of {ranks} ranks; "
            f"a strategy covers ranks 0 to {ranks - 1}, each once (a pipeline may get no documents); propose it anew"
        )
    for pipe in strategy.pipelines:
        first, size = pipe.ranks[0], len(pipe.ranks)
        step = alignment(pipe.scheme, node_size)
        if not fits_nodes(pipe.scheme, ranks, node_size):
            raise SeqloomError(
                f"pipeline {pipe.scheme} has {size} ranks in nodes of {node_size}: it divides a node, or has whole "
                f"nodes (stages wider than a node 2, 4, 8... of them); propose strategies for this cluster"
            )
        if pipe.ranks != tuple(range(first, first + size)) or first % step:
            raise SeqloomError(
                f"pipeline {pipe.scheme} is on ranks {list(pipe.ranks)}: they follow each other from a multiple of "
                f"{step}; the nearest place is {first // step * step} to {first // step * step + size - 1}"
            )
