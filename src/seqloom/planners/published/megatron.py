"""Rival ``megatron``: dynamic context parallelism of Megatron-LM, the packing-aware scheduler of its dev branch.

Published (code), per micro-batch, longest document first: sizes of groups are powers of two; a document's work on
``c`` ranks is ``s^2 / c``. The longest opens a group of the least size that holds it, and no rank may get more work
than ``1.05 x longest x capacity``. Every other document tries each size from its least up to all ranks: to join an
open group of that size with token room, or to open one on free ranks; the choice with the least work on the busiest
rank wins, the first of equals. What fits nowhere waits for the next micro-batch. In the end ranks without documents
are filled by doubling the smallest groups; where that does not come out even, all ranks form one group.

Our reading: a group is a ring (Megatron's default exchange). A cluster whose size is no power of two has all ranks as
one more size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from seqloom.cost import CostModel
from seqloom.plan import Plan
from seqloom.planners.published.tuned_plan import RivalGroup, Rounds, tuned_plan

SLACK = 1.05


def plan_megatron(lengths: np.ndarray, cost: CostModel) -> Plan:
    """Plan a batch, int64[n] tokens, as Megatron's packing-aware scheduler does."""
    return tuned_plan(lengths, cost, "megatron", lambda tokens, capacity: micro_batches(tokens, capacity, cost.ranks))


@dataclass(slots=True, eq=False)
class OpenGroup:
    """A group under construction."""

    size: int
    tokens: int = 0
    work: float = 0.0  # per rank
    documents: list[int] = field(default_factory=list)

    def add(self, document: int, tokens: int) -> None:
        """Add a document."""
        self.documents.append(document)
        self.tokens += tokens
        self.work += tokens * tokens / self.size


def micro_batches(tokens: np.ndarray, capacity: int, ranks: int) -> Rounds:
    """Micro-batch after micro-batch until no document is left."""
    waiting = np.argsort(-tokens, kind="stable").tolist()
    rounds: Rounds = []
    while waiting:
        groups, waiting = next_micro_batch(tokens, waiting, capacity, ranks)
        ends = accumulate(group.size for group in groups)
        placed = zip(groups, ends, strict=True)
        rounds.append([RivalGroup(tuple(range(end - group.size, end)), group.documents) for group, end in placed])
    return rounds


def next_micro_batch(
    tokens: np.ndarray, waiting: list[int], capacity: int, ranks: int
) -> tuple[list[OpenGroup], list[int]]:
    """The groups of one micro-batch, and the documents left for the next; ``waiting`` is longest first."""
    menu = sizes(ranks)
    longest = int(tokens[waiting[0]])
    max_work = SLACK * longest * capacity
    groups = [OpenGroup(least_size(longest, capacity, menu))]
    groups[0].add(waiting[0], longest)
    left = []
    for document in waiting[1:]:
        size = int(tokens[document])
        chosen = _best(groups, size, capacity, menu, ranks, max_work)
        if chosen is None:
            left.append(document)
            continue
        if chosen not in groups:
            groups.append(chosen)
        chosen.add(document, size)
    if spread_out(groups, menu, ranks):
        return groups, left
    group, left = OpenGroup(ranks), []  # all ranks, with what fits, longest first
    for document in waiting:
        if group.tokens + int(tokens[document]) <= ranks * capacity:
            group.add(document, int(tokens[document]))
        else:
            left.append(document)
    return [group], left


def sizes(ranks: int) -> list[int]:
    """Sizes that a group may have, ascending."""
    powers = [1 << power for power in range(ranks.bit_length()) if 1 << power <= ranks]
    return sorted({*powers, ranks})


def least_size(tokens: int, capacity: int, menu: list[int]) -> int:
    """The smallest group that holds a document."""
    return next(size for size in menu if size * capacity >= tokens)


def _best(
    groups: list[OpenGroup], tokens: int, capacity: int, menu: list[int], ranks: int, max_work: float
) -> OpenGroup | None:
    """The group to join or a new one, by the least work on the busiest rank of all; None if all exceed ``max_work``."""
    busiest = max(group.work for group in groups)
    free = ranks - sum(group.size for group in groups)
    best: tuple[float, OpenGroup] | None = None
    for size in menu[menu.index(least_size(tokens, capacity, menu)) :]:
        roomy = [group for group in groups if group.size == size and group.tokens + tokens <= size * capacity]
        for group in [*roomy, *([OpenGroup(size)] if size <= free else [])]:
            reached = max(busiest, group.work + tokens * tokens / size)
            if reached <= max_work and (best is None or reached < best[0]):
                best = (reached, group)
    return None if best is None else best[1]


def spread_out(groups: list[OpenGroup], menu: list[int], ranks: int) -> bool:
    """Double the first of the smallest groups until no rank is free; False where that does not come out even."""
    while (free := ranks - sum(group.size for group in groups)) > 0:
        smallest = min(group.size for group in groups)
        larger = menu[menu.index(smallest) + 1]
        if larger - smallest > free:
            return False
        group = next(group for group in groups if group.size == smallest)
        group.work *= smallest / larger
        group.size = larger
    return True
