"""Stages that differ only in their ranks: priced once, moved to the others.

Hosts of a pipeline are mostly alike: as many ranks each, at the same places of their nodes. A unit that sits on every
host in the same way takes as long on two stages with as many layers.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel
from seqloom.cost.passes import priced_passes
from seqloom.plan import Part, Pipeline, Plan, Work
from seqloom.simulate.window import Window


class Place(NamedTuple):
    """Where in a plan."""

    pipeline: int
    stage: int
    round: int


def stage_shares(pipeline: Pipeline) -> list[Part | None]:
    """What every stage has of the model; None: all of it."""
    return [None] if len(pipeline.stages) == 1 else [*pipeline.parts]


@dataclass(frozen=True, slots=True)
class Twins:
    """Which stages of a pipeline are alike."""

    shares: tuple[Part | None, ...]
    first: tuple[int, ...]
    """First rank of every stage's host."""
    islands: tuple[int, ...]
    """First island of every stage's host."""
    tensors: tuple[int, ...]
    """Tensor degree of every stage."""
    node_size: int
    alike: bool
    """Whether all hosts lie in their nodes in the same way."""
    together: frozenset[int]
    """Stages that are gathered for every pass."""

    @classmethod
    def of(cls, plan: Plan, cost: CostModel, number: int) -> Twins:
        """Look at the hosts of one pipeline of a plan."""
        pipeline, size = plan.pipelines[number], cost.node_size
        hosts = pipeline.hosts
        width, start = len(hosts[0]), hosts[0][0]
        even = all(host == tuple(range(start + h * width, start + (h + 1) * width)) for h, host in enumerate(hosts))
        alike = even and start % width == 0 and (size % width == 0 or width % size == 0)
        home = {rank: i for i, island in enumerate(plan.islands) for rank in island}
        own = [hosts[pipeline.host_of(stage)][0] for stage in range(len(pipeline.stages))]
        return cls(
            shares=tuple(stage_shares(pipeline)),
            first=tuple(own),
            islands=tuple(home[rank] for rank in own),
            tensors=tuple(stage.tensor for stage in pipeline.stages),
            node_size=size,
            alike=alike,
            together=frozenset(priced_passes(cost, pipeline)),
        )

    def key(self, place: Place, work: Work) -> Hashable:
        """What two works of a round have in common if they take as long."""
        share = self.shares[place.stage]
        plain = work.linear is None and all(group.route is None for group in work.groups)
        if not self.alike or share is None or not plain:
            return place
        first = self.first[place.stage]
        groups = tuple(
            (group.ranks[0] - first, group.ranks[-1] - first, group.ulysses, group.ring, group.method, group.spans)
            for group in work.groups
        )
        joined = place.stage in self.together
        return share.stop - share.first, share.ends, self.tensors[place.stage], work.offload, joined, groups

    def moved(self, window: Window, stage: int, other: int) -> Window:
        """The window of a stage on the ranks of another one that is alike."""
        ranks, islands = self.first[other] - self.first[stage], self.islands[other] - self.islands[stage]
        if not ranks:
            return window
        return replace(
            window,
            rank=window.rank + ranks,
            islands=tuple(tuple(island + islands for island in joined) for joined in window.islands),
            nic=np.roll(window.nic, ranks // self.node_size, axis=0),
            link=np.roll(window.link, ranks),
        )
