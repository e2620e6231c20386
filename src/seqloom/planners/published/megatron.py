"""Rivals ``megatron`` and ``megatron-hybrid``: the two schedulers of Megatron-LM's dynamic context parallelism.

In both a group is a ring (Megatron's default exchange), and a document's work on ``c`` ranks is ``s^2 / c``. A cluster
whose size is no power of two has all ranks as one more size of a group.

``megatron``, the packing-aware scheduler of its dev branch (`default_dynamic_cp`). Published
(code), per micro-batch, longest document first: sizes of groups are powers of two; a document's work on ``c`` ranks is
``s^2 / c``. The longest opens a group of the least size that holds it, and no rank may get more work than
``1.05 x longest x capacity``. Every other document tries each size from its least up to all ranks: to join an open
group of that size with token room, or to open one on free ranks; the choice with the least work on the busiest rank
wins, the first of equals. What fits nowhere waits for the next micro-batch. In the end ranks without documents are
filled by doubling the smallest groups; where that does not come out even, all ranks form one group.

``megatron-hybrid``, the balanced scheduler of releases and main (`BalancedCPScheduler`). Published (code): a document
takes the least power of two of ranks that holds it. Documents, longest first, are cut into as many buckets of about
equal work as there are such sizes. The head of the first bucket that finds a place opens a group on free ranks, or
joins the group of its size with the least work. As soon as smaller groups are being filled, ranks within 5 % of each
other end the fill; else the last document of the busiest group is left for later while that levels the ranks. Ranks
without documents are filled by doubling the first of the smallest groups. A barrier over all ranks follows, then the
documents that are left. Our reading: a rank runs its documents one by one there; here a group runs packs of as many as
it holds, which favours the rival. Where doubling does not come out even (there: an error), all ranks form one group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest

import numpy as np

from seqloom.cost import CostModel
from seqloom.plan import Plan
from seqloom.planners.packing import next_fit
from seqloom.planners.published.rivals import RivalGroup, Rounds, tuned_plan

MEGATRON_SLACK = 1.05
"""Times the longest document's work: no rank of a micro-batch gets more."""
LEVEL = 0.05
"""Of the busiest rank's work: ranks this close are level."""
BUCKET_SLACK = 1.1
"""Times the mean work of the buckets: no bucket is filled beyond it."""


def plan_megatron(lengths: np.ndarray, cost: CostModel) -> Plan:
    """Plan a batch, int64[n] tokens, as Megatron's packing-aware scheduler does."""

    def published(tokens: np.ndarray, capacity: int) -> list[Rounds]:
        return [micro_batches(tokens, capacity, cost.ranks)]

    return tuned_plan(lengths, cost, "megatron", published)


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
        rounds.append([RivalGroup(ranks, group.documents) for group, ranks in side_by_side(groups)])
    return rounds


def side_by_side(groups: list[OpenGroup]) -> Iterator[tuple[OpenGroup, tuple[int, ...]]]:
    """Groups with their ranks, one after another from rank 0 on."""
    for group, end in zip(groups, accumulate(group.size for group in groups), strict=True):
        yield group, tuple(range(end - group.size, end))


def next_micro_batch(
    tokens: np.ndarray, waiting: list[int], capacity: int, ranks: int
) -> tuple[list[OpenGroup], list[int]]:
    """The groups of one micro-batch, and the documents left for the next; ``waiting`` is longest first."""
    menu = group_sizes(ranks)
    longest = int(tokens[waiting[0]])
    max_work = MEGATRON_SLACK * longest * capacity
    groups = [OpenGroup(least_size(longest, capacity, menu))]
    groups[0].add(waiting[0], longest)
    left = []
    for document in waiting[1:]:
        size = int(tokens[document])
        chosen = _least_busy(groups, size, capacity, menu, ranks, max_work)
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


def group_sizes(ranks: int) -> list[int]:
    """Sizes that a group may have, ascending."""
    powers = [1 << power for power in range(ranks.bit_length()) if 1 << power <= ranks]
    return sorted({*powers, ranks})


def least_size(tokens: int, capacity: int, menu: list[int]) -> int:
    """The smallest group that holds a document."""
    return next(size for size in menu if size * capacity >= tokens)


def _least_busy(
    groups: list[OpenGroup], tokens: int, capacity: int, menu: list[int], ranks: int, max_work: float
) -> OpenGroup | None:
    """The group to join or a new one, by the least work on the busiest rank of all; None if all exceed ``max_work``."""
    busiest = max(group.work for group in groups)
    free = ranks - sum(group.size for group in groups)
    options: list[tuple[float, OpenGroup]] = []
    for size in menu[menu.index(least_size(tokens, capacity, menu)) :]:
        roomy = [group for group in groups if group.size == size and group.tokens + tokens <= size * capacity]
        new = [OpenGroup(size)] if size <= free else []
        options += [(max(busiest, group.work + tokens * tokens / size), group) for group in (*roomy, *new)]
    reached, best = min(options, key=lambda option: option[0], default=(max_work, None))
    return best if reached <= max_work else None


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


def plan_megatron_hybrid(lengths: np.ndarray, cost: CostModel) -> Plan:
    """Plan a batch, int64[n] tokens, as Megatron's balanced scheduler does."""

    def published(tokens: np.ndarray, capacity: int) -> list[Rounds]:
        return [balanced_rounds(tokens, capacity, cost.ranks)]

    return tuned_plan(lengths, cost, "megatron-hybrid", published)


def balanced_rounds(tokens: np.ndarray, capacity: int, ranks: int) -> Rounds:
    """Packs of every group, side by side; those after a barrier in rounds of their own."""
    waiting = np.argsort(-tokens, kind="stable").tolist()
    rounds: Rounds = []
    while waiting:
        groups, waiting = next_balanced(tokens, waiting, capacity, ranks)
        packed = []
        for group, place in side_by_side(groups):
            packs = next_fit(tokens[group.documents], group.size * capacity)
            packed.append([RivalGroup(place, [group.documents[k] for k in pack]) for pack in packs])
        rounds += [[each for each in column if each is not None] for column in zip_longest(*packed)]
    return rounds


def next_balanced(
    tokens: np.ndarray, waiting: list[int], capacity: int, ranks: int
) -> tuple[list[OpenGroup], list[int]]:
    """Groups between two barriers, and the documents left for the next; ``waiting`` is longest first."""
    menu = group_sizes(ranks)
    need = {document: least_size(int(tokens[document]), capacity, menu) for document in waiting}
    work = {document: int(tokens[document]) ** 2 / size for document, size in need.items()}
    buckets = equal_buckets(waiting, need, work)
    groups: list[OpenGroup] = []
    free, shrunk = ranks, False
    while any(buckets):
        heads = [bucket for bucket in buckets if bucket]
        sizes = {group.size for group in groups}
        bucket = next((each for each in heads if need[each[0]] in sizes or need[each[0]] <= free), None)
        if bucket is None:
            break
        document = bucket.pop(0)
        size = need[document]
        if size <= free:
            groups.append(OpenGroup(size))
            group, free = groups[-1], free - size
        else:
            group = min((group for group in groups if group.size == size), key=lambda group: group.work)
        group.add(document, int(tokens[document]))
        shrunk = shrunk or size < need[waiting[0]]
        if shrunk and any(buckets) and is_level(groups, free):
            break
    left = [document for bucket in buckets for document in bucket]
    if not free:
        left += trim(groups, tokens)
    if spread_out(groups, menu, ranks):
        return groups, left
    everything = OpenGroup(ranks)
    for document in (document for group in groups for document in group.documents):
        everything.add(document, int(tokens[document]))
    return [everything], left


def equal_buckets(waiting: list[int], need: dict[int, int], work: dict[int, float]) -> list[list[int]]:
    """Documents in this order, cut into about as many buckets of equal work as there are sizes of groups."""
    sizes = len(set(need.values()))
    most = BUCKET_SLACK * sum(work.values()) / sizes
    buckets: list[list[int]] = [[]]
    held = 0.0
    for position, document in enumerate(waiting):
        scarce = len(waiting) - position <= sizes - 2 * (len(buckets) - 1)  # as the code counts what is left to fill
        if buckets[-1] and (held + work[document] > most or scarce):
            buckets.append([])
            held = 0.0
        buckets[-1].append(document)
        held += work[document]
    return buckets


def is_level(groups: list[OpenGroup], free: int) -> bool:
    """Whether the work of all ranks is within `LEVEL` of the busiest one's."""
    loads = [group.work for group in groups] + [0.0] * min(free, 1)
    return max(loads) - min(loads) <= LEVEL * max(loads)


def trim(groups: list[OpenGroup], tokens: np.ndarray) -> list[int]:
    """Take the last document from the busiest group while that levels the ranks; return what was taken."""
    left = []
    while not is_level(groups, 0):
        busiest = max(groups, key=lambda group: group.work)
        if len(busiest.documents) < 2:
            break
        others = [group.work for group in groups if group is not busiest]
        size = int(tokens[busiest.documents[-1]])
        after = [*others, busiest.work - size * size / busiest.size]
        before = [*others, busiest.work]
        if max(after) - min(after) >= max(before) - min(before):
            break
        left.append(busiest.documents.pop())
        busiest.tokens -= size
        busiest.work = after[-1]
    return left
