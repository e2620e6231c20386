"""Rivals ``wlb-llm``, ``skrull`` and ``verl``: groups of one size for a step, among which work is balanced.

All cut the ranks into context-parallel groups of equal size. The size is a setting of their users; here every size that
holds the longest document is tried, and the fastest plan counts, which favours the rivals.

``wlb-llm`` (arXiv 2503.17924). Published: micro-batches of variable length have equal latency, attention and the rest,
by offline profiles. Documents, longest first, go to the micro-batch with the least work if it has token room, else to
that with the fewest tokens, else they are carried over to the next step. Every document is cut zigzag over its group,
which gathers keys and values. Our reading: the cost model is the profile; micro-batches are as few as hold the tokens;
those of a round are neighbours by work. A batch is planned as it is, so outliers are not delayed to later steps, which
is where most of the published gain comes from, and what is carried over opens more micro-batches of the same step.

``skrull`` (arXiv 2505.19609; a description was read). Published: documents go to groups by FLOPs,
``(20 h^2 + 4 h h_kv) s + 4 h s^2`` a layer. Inside a micro-batch, shortest first, a document stays whole on the rank
with the least work if that has room, else on the rank with the most room; else it is cut over the group if the fullest
rank holds its share; else a document of the fullest rank is cut instead (roll-back) and the search goes on. Cut
documents travel behind whole ones. Our reading: a ring carries them, roll-back takes the longest document, and a
group's documents go, longest first, to the micro-batch with the least work, of as few as hold them.

``verl``, its sequence balancing (code). Published: a document's work is ``24576 s + s^2`` whatever the model. The
largest differencing method deals documents to groups, equally many each if they divide, and then into micro-batches:
all groups have as many as the one that needs most, and more until none exceeds its token cap. Our reading: groups are
Ulysses where heads allow it, else with a ring around; micro-batches run heaviest first, so those of a round are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from seqloom.cost import CostModel, GroupShape
from seqloom.plan import Method, Plan
from seqloom.planners.packing import largest_differencing, least_loaded
from seqloom.planners.published.rivals import RivalGroup, Rounds, tuned_plan

VERL_LINEAR = 24_576
"""Attention of so many tokens is as much work as the linear layers of one, in verl's weight of a document."""


def group_sizes(tokens: np.ndarray, capacity: int, cost: CostModel) -> list[int]:
    """Sizes of groups that hold the longest document, ascending."""
    sizes = sorted({shape.degree for shape in cost.shapes})
    return [size for size in sizes if size * capacity >= tokens.max()]


def in_rounds(packs: list[list[list[int]]], size: int, place: Callable[[range, list[int]], list[RivalGroup]]) -> Rounds:
    """Rounds of micro-batches: the next of every group of ``size`` ranks, side by side; groups may have fewer."""
    rounds: Rounds = [[] for _ in range(max(map(len, packs)))]
    for group, own in enumerate(packs):
        for number, documents in enumerate(own):
            rounds[number] += place(range(group * size, (group + 1) * size), documents)
    return rounds


# WLB-LLM.


def plan_wlb_llm(lengths: np.ndarray, cost: CostModel) -> Plan:
    """Plan a batch, int64[n] tokens, in micro-batches of equal work, as WLB-LLM packs them."""

    def published(tokens: np.ndarray, capacity: int) -> Iterator[Rounds]:
        for size in group_sizes(tokens, capacity, cost):
            routed = size > cost.node_size
            work = document_ns(lengths, cost, GroupShape(1, size, Method.GATHER if size > 1 else Method.RING, routed))
            groups = cost.ranks // size
            packs = equal_work_packs(tokens, work, groups, size * capacity)
            yield in_rounds([packs[group::groups] for group in range(groups)], size, gathering(routed))

    return tuned_plan(lengths, cost, "wlb-llm", published)


def gathering(routed: bool) -> Callable[[range, list[int]], list[RivalGroup]]:
    """Return what places a micro-batch on one group that gathers keys and values."""
    return lambda ranks, documents: [RivalGroup(tuple(ranks), documents, Method.GATHER, routed)]


def document_ns(lengths: np.ndarray, cost: CostModel, shape: GroupShape) -> np.ndarray:
    """int64[n] ns of every document on a group of this shape, forward and backward."""
    return cost.tables(lengths, cost.policies[0], [shape]).cost[:, 0].max(axis=0)


def equal_work_packs(tokens: np.ndarray, work: np.ndarray, multiple: int, capacity: int) -> list[list[int]]:
    """Micro-batches of at most ``capacity`` tokens, most work first, opened so many at a time."""
    waiting = np.argsort(-tokens, kind="stable").tolist()
    packs: list[list[int]] = []
    while waiting:
        needed = -(-int(tokens[waiting].sum()) // (multiple * capacity)) * multiple
        opened, carried = fill_by_work(tokens, work, waiting, needed, capacity)
        packs += [pack for pack in opened if pack]
        waiting = carried
    return sorted(packs, key=lambda pack: (-int(work[pack].sum()), pack))


def fill_by_work(
    tokens: np.ndarray, work: np.ndarray, waiting: list[int], count: int, capacity: int
) -> tuple[list[list[int]], list[int]]:
    """(micro-batches, documents that fit into none): the least work first, else the fewest tokens."""
    packs: list[list[int]] = [[] for _ in range(count)]
    load, held = [0] * count, [0] * count
    carried = []
    for document in waiting:
        size = int(tokens[document])
        chosen = load.index(min(load))
        if held[chosen] + size > capacity:
            chosen = held.index(min(held))
        if held[chosen] + size > capacity:
            carried.append(document)
            continue
        packs[chosen].append(document)
        load[chosen] += int(work[document])
        held[chosen] += size
    return packs, carried


# Skrull.


def plan_skrull(lengths: np.ndarray, cost: CostModel) -> Plan:
    """Plan a batch, int64[n] tokens, with documents whole or cut over their group, as Skrull does."""
    hidden, kv = cost.model.hidden, cost.model.kv_heads * cost.model.head_dim

    def published(tokens: np.ndarray, capacity: int) -> Iterator[Rounds]:
        work = (20 * hidden + 4 * kv) * tokens + 4 * tokens**2  # FLOPs a layer over h
        for size in group_sizes(tokens, capacity, cost):
            packs = flops_packs(tokens, work, cost.ranks // size, size * capacity)

            def place(ranks: range, documents: list[int]) -> list[RivalGroup]:
                whole, cut = whole_or_cut(tokens, work, documents, len(ranks), capacity)
                local = [RivalGroup((rank,), own) for rank, own in zip(ranks, whole, strict=True) if own]
                return [*local, RivalGroup(tuple(ranks), cut)] if cut else local

            yield in_rounds(packs, size, place)

    return tuned_plan(lengths, cost, "skrull", published)


def flops_packs(tokens: np.ndarray, work: np.ndarray, groups: int, capacity: int) -> list[list[list[int]]]:
    """Micro-batches of every group, equally many or one less where a group has too few documents."""
    order = np.argsort(-tokens, kind="stable")
    owner = least_loaded(tokens[order], work[order], groups, int(tokens.sum()))
    assert owner is not None
    owned = [order[owner == group] for group in range(groups)]
    count = max(1, *(-(-int(tokens[own].sum()) // capacity) for own in owned))
    while True:
        chosen = [least_loaded(tokens[own], work[own], count, capacity) for own in owned]
        if all(bins is not None for bins in chosen):
            break
        count += 1
    packs = []
    for own, bins in zip(owned, chosen, strict=True):
        made = [own[bins == number].tolist() for number in range(count)]
        packs.append([pack for pack in made if pack])
    return packs


def whole_or_cut(
    tokens: np.ndarray, work: np.ndarray, documents: list[int], size: int, capacity: int
) -> tuple[list[list[int]], list[int]]:
    """(documents that every rank has whole, documents cut over all); together at most ``size * capacity`` tokens."""
    whole: list[list[int]] = [[] for _ in range(size)]
    held, load = [0] * size, [0] * size
    cut: list[int] = []
    cut_tokens = 0

    def room(rank: int, more: int = 0) -> int:
        return capacity - held[rank] - -(-(cut_tokens + more) // size)

    for document in sorted(documents, key=lambda document: (int(tokens[document]), document)):
        length = int(tokens[document])
        while True:
            ranks = (load.index(min(load)), held.index(min(held)))
            chosen = next((rank for rank in ranks if room(rank) >= length), None)
            if chosen is not None:
                whole[chosen].append(document)
                held[chosen] += length
                load[chosen] += int(work[document])
                break
            fullest = held.index(max(held))
            if room(fullest, length) >= 0:
                cut.append(document)
                cut_tokens += length
                break
            longest = whole[fullest].pop()  # roll back: the last is the longest
            held[fullest] -= int(tokens[longest])
            load[fullest] -= int(work[longest])
            cut.append(longest)
            cut_tokens += int(tokens[longest])
    return whole, cut


# verl.


def plan_verl(lengths: np.ndarray, cost: CostModel) -> Plan:
    """Plan a batch, int64[n] tokens, as verl balances sequences."""

    def published(tokens: np.ndarray, capacity: int) -> Iterator[Rounds]:
        for size in group_sizes(tokens, capacity, cost):
            ulysses = max(shape.ulysses for shape in cost.shapes if shape.degree == size)

            def place(ranks: range, documents: list[int], ulysses: int = ulysses) -> list[RivalGroup]:
                return [RivalGroup(tuple(ranks), documents, ulysses=ulysses)]

            yield in_rounds(differencing_packs(tokens, cost.ranks // size, size * capacity), size, place)

    return tuned_plan(lengths, cost, "verl", published)


def differencing_packs(tokens: np.ndarray, groups: int, capacity: int) -> list[list[list[int]]]:
    """Micro-batches of every group, heaviest first, of at most ``capacity`` tokens."""
    work = [VERL_LINEAR * length + length * length for length in tokens.tolist()]
    parts = largest_differencing(work, groups, equal_size=len(work) % groups == 0)
    count = max(1, *(-(-int(tokens[part].sum()) // capacity) for part in parts))
    while True:
        packs = [_differenced(part, work, count) for part in parts]
        if all(int(tokens[pack].sum()) <= capacity for own in packs for pack in own):
            return packs
        count += 1


def _differenced(part: list[int], work: list[int], count: int) -> list[list[int]]:
    """Documents of a group in so many micro-batches, or one each where it has fewer."""
    if not part:
        return []
    packs = largest_differencing([work[document] for document in part], min(count, len(part)))
    packs = [[part[index] for index in pack] for pack in packs if pack]
    return sorted(packs, key=lambda pack: -sum(work[document] for document in pack))
