"""What of a strategy is planned together."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import NamedTuple

from seqloom.planners.strategies.place import fits_nodes
from seqloom.planners.strategies.values import Pipe, Scheme, Strategy


class Block(NamedTuple):
    """Ranks that are planned together: one pipeline of several stages, or one-stage pipelines that are neighbours."""

    start: int
    ranks: int
    scheme: Scheme
    pipelines: tuple[int, ...]
    """Indices in the strategy."""

    @property
    def planned_like(self) -> Hashable:
        """What the plan of a block depends on, beside its documents."""
        scheme = self.scheme
        return self.start, self.ranks, scheme if scheme.gathered else (scheme.stages, scheme.tensor)


def blocks(strategy: Strategy, ranks: int, node_size: int) -> Iterator[Block]:
    """Cut a strategy into what is planned together.

    Neighbours of one stage and one tensor degree hold the same parameters. Planned together they may share a long
    document, and nothing is lost.
    """
    pipes = sorted(enumerate(strategy.pipelines), key=lambda entry: entry[1].ranks)
    at = 0
    while at < len(pipes):
        last = at
        for stop in range(at + 1, len(pipes)):
            if not _alike(pipes[at][1], pipes[stop][1]):
                break
            start, size = pipes[at][1].ranks[0], pipes[stop][1].ranks[-1] + 1 - pipes[at][1].ranks[0]
            wide = Scheme(1, pipes[at][1].scheme.tensor, size // pipes[at][1].scheme.tensor)
            if start % size == 0 and fits_nodes(wide, ranks, node_size):
                last = stop
        first, end = pipes[at][1].ranks[0], pipes[last][1].ranks[-1] + 1
        yield Block(first, end - first, pipes[at][1].scheme, tuple(index for index, _ in pipes[at : last + 1]))
        at = last + 1


def _alike(one: Pipe, other: Pipe) -> bool:
    """Whether two pipelines may be planned together."""
    schemes = one.scheme, other.scheme
    return all(each.stages == 1 and not each.gathered for each in schemes) and schemes[0].tensor == schemes[1].tensor
