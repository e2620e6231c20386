"""Rivals ``te-cp``, ``llama-cp``, ``hybrid-dp`` and ``megatron``, and the settings that every rival is tuned over.

Tuning: the published planners take a token capacity per rank as a setting and know nothing of checkpointing. Here each
answers for every capacity that memory holds under some checkpoint, and for every halving of the largest, down to the
mean load of a rank; its fastest plan counts, and every round has the fastest checkpoint that fits. That favours the
rival: a user tunes once per run, not per batch.

``te-cp``, as Transformer Engine runs it. Published: all ranks form one ring; a pack of documents is cut so that of
every document each rank holds one early and one late chunk (zigzag); keys and values travel around the ring behind
attention. It is the baseline of Zeppelin's evaluation, where the ring spans all GPUs. Our reading: packs of at most all
ranks' memory, documents in order of arrival. Documents are not padded to a multiple of twice the ranks, which favours
the rival a little.

``llama-cp``, as Llama 3 was trained. Published: every rank gathers the keys and values of all ranks before attention,
and then computes its own queries against them under a document mask; nothing hides the gather. In Zeppelin's evaluation
the group is all GPUs, so it is here. Our reading: packs and cuts as ``te-cp``. NCCL's all-gather brings every block
into a node once, over all NICs; in our words the gather is routed.

``hybrid-dp``, as ByteScale describes it. Published: data and context parallelism are one dimension. A document takes as
many ranks as its tokens need at the capacity of a rank, any number, not only powers of two; best fit packs shorter ones
into packs of one rank. Units go to ranks longest first, always to ranks that are behind, by FLOPs; a rank with cheap
units runs more of them. Our reading: a document on several ranks is a ring (the paper: point-to-point messages on one
communicator). FLOPs are those of the model, products and causal attention. "Behind" is: least FLOPs so far, so the
order of the buckets is the order of the sort. A unit runs in the first round in which all its ranks are free, on
neighbouring ranks where several are equally far behind. Offloading activations is left out.

``megatron``, dynamic context parallelism of Megatron-LM: the packing-aware scheduler of its dev branch. Published
(code), per micro-batch, longest document first: sizes of groups are powers of two; a document's work on ``c`` ranks is
``s^2 / c``. The longest opens a group of the least size that holds it, and no rank may get more work than
``1.05 x longest x capacity``. Every other document tries each size from its least up to all ranks: to join an open
group of that size with token room, or to open one on free ranks; the choice with the least work on the busiest rank
wins, the first of equals. What fits nowhere waits for the next micro-batch. In the end ranks without documents are
filled by doubling the smallest groups; where that does not come out even, all ranks form one group. Our reading: a
group is a ring (Megatron's default exchange). A cluster whose size is no power of two has all ranks as one more size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel, GroupShape
from seqloom.cost.compute import forward_flops
from seqloom.plan import Method, Plan, Reduce, StageMicroBatch, sort_groups
from seqloom.planners.packing import best_fit_decreasing, next_fit
from seqloom.planners.problem import (
    build_plan,
    fitting_problems,
    whole_documents,
)
from seqloom.planners.recompute import checkpoint_capacities, fastest_checkpoint

MEGATRON_SLACK = 1.05
"""Times the longest document's work: no rank of a micro-batch gets more."""


class RivalGroup(NamedTuple):
    """Documents on these ranks, cut by position over all of them."""

    ranks: tuple[int, ...]
    documents: Sequence[int]
    method: Method = Method.RING
    routed: bool = False


Rounds = list[list[RivalGroup]]


def tuned_plan(
    lengths: np.ndarray,
    cost: CostModel,
    name: str,
    published: Callable[[np.ndarray, int], Rounds],
    *,
    halved: bool = True,
    finish: Callable[[StageMicroBatch], StageMicroBatch] = lambda work: work,
) -> Plan:
    """The fastest plan of a batch, int64[n] tokens, that a published algorithm gives.

    Args:
        published: the algorithm: (int64[n] tokens of every document, tokens a rank may hold) -> the groups of every
            round.
        halved: whether smaller capacities than the largest change its answer.
        finish: adds to every round what does not change where attention runs.
    """
    tokens = fitting_problems(lengths, cost)[0].tables.tokens  # refuses what no rank can hold
    plans: list[Plan] = []
    for capacity in capacities(tokens, cost, halved):
        rounds = published(tokens, capacity)
        for reduce in dict.fromkeys(policy.reduce for policy in cost.policies):
            works = _works(rounds, lengths.tolist(), tokens, cost, reduce)
            if works is not None:
                plans.append(build_plan(cost, lengths.tolist(), map(finish, works), reduce, name))
    return min(plans, key=cost.plan_ns)


def capacities(tokens: np.ndarray, cost: CostModel, halved: bool = True) -> list[int]:
    """Settings to try, descending: what memory holds under every policy, and halves of the largest.

    All ranks together hold the longest document under each, and the whole batch under the halves.
    """
    found = {cost.capacity(policy) for policy in cost.policies}
    half, multiple = max(found), cost.pad_multiple
    least = max(-(-int(tokens.sum()) // cost.ranks), multiple)
    while halved and (half := half // 2 // multiple * multiple) >= least:
        found.add(half)
    return sorted((capacity for capacity in found if capacity * cost.ranks >= tokens.max()), reverse=True)


def _works(
    rounds: Rounds, lengths: list[int], tokens: np.ndarray, cost: CostModel, reduce: Reduce
) -> list[StageMicroBatch] | None:
    """Every round with the fastest checkpoint under one way to reduce; None where its memory does not hold one."""
    limits, works = checkpoint_capacities(cost, reduce), []
    for groups in rounds:
        merged: dict[tuple[tuple[int, ...], Method, bool], list[int]] = {}  # groups of equal ranks as one
        for group in groups:
            merged.setdefault((group.ranks, group.method, group.routed), []).extend(group.documents)
        joined = [RivalGroup(ranks, held, method, routed) for (ranks, method, routed), held in merged.items()]
        checkpoint = fastest_checkpoint(limits, fullest(joined, tokens))
        if checkpoint is None:
            return None
        built = []
        for ranks, documents, method, routed in sorted(joined, key=lambda group: group.ranks):
            shape = GroupShape(1, len(ranks), method if len(ranks) > 1 else Method.RING, routed)
            built.append(whole_documents(cost, shape, ranks, documents, lengths))
        works.append(StageMicroBatch(sort_groups(built, cost.node_size), checkpoint))
    return works


def fullest(groups: Iterable[RivalGroup], tokens: np.ndarray) -> int:
    """Tokens on the fullest rank."""
    held: dict[int, int] = {}
    for group in groups:
        share = -(-int(tokens[list(group.documents)].sum()) // len(group.ranks))
        for rank in group.ranks:
            held[rank] = held.get(rank, 0) + share
    return max(held.values())


def plan_te_cp(lengths: np.ndarray, cost: CostModel, *, routed: bool = False) -> Plan:
    """Plan a batch, int64[n] tokens, as one ring over all ranks.

    ``routed`` puts Zeppelin's routing layer under the same ring: the first row of its ablation.
    """
    return _over_all_ranks(lengths, cost, "te-cp", Method.RING, routed)


def plan_llama_cp(lengths: np.ndarray, cost: CostModel) -> Plan:
    """Plan a batch, int64[n] tokens, as one all-gather group over all ranks."""
    return _over_all_ranks(lengths, cost, "llama-cp", Method.GATHER, routed=True)


def _over_all_ranks(lengths: np.ndarray, cost: CostModel, name: str, method: Method, routed: bool) -> Plan:
    """Packs in order of arrival, each over all ranks."""

    def rounds(tokens: np.ndarray, capacity: int) -> Rounds:
        packs = next_fit(tokens, cost.ranks * capacity)
        return [[RivalGroup(tuple(range(cost.ranks)), pack, method, routed)] for pack in packs]

    return tuned_plan(lengths, cost, name, rounds, halved=False)


def plan_hybrid_dp(lengths: np.ndarray, cost: CostModel) -> Plan:
    """Plan a batch, int64[n] tokens, with ranks per document by capacity, balanced by FLOPs."""
    work = forward_flops(cost.padded_lengths(lengths), cost.model)
    return tuned_plan(lengths, cost, "hybrid-dp", lambda tokens, capacity: hand_out(tokens, work, capacity, cost.ranks))


def hand_out(tokens: np.ndarray, work: np.ndarray, capacity: int, ranks: int) -> Rounds:
    """Rounds of documents on as many ranks as they need, and of packs on one rank; ``work`` is float64[n] FLOPs."""
    rounds: Rounds = []
    load = [0.0] * ranks  # FLOPs so far
    begins = [0] * ranks  # the first round that has nothing for the rank yet
    for documents, width in units(tokens, work, capacity):
        behind = sorted(range(ranks), key=lambda rank: (load[rank], rank))
        chosen = tuple(sorted(behind[:width]))
        number = max(begins[rank] for rank in chosen)
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(RivalGroup(chosen, documents))
        for rank in chosen:
            load[rank] += float(work[documents].sum()) / width
            begins[rank] = number + 1
    return rounds


def units(tokens: np.ndarray, work: np.ndarray, capacity: int) -> list[tuple[list[int], int]]:
    """(documents, ranks) that run together, most FLOPs per rank first: single long documents, packs of short ones."""
    long = np.flatnonzero(tokens > capacity).tolist()
    short = np.flatnonzero(tokens <= capacity)
    found = [([document], -(-int(tokens[document]) // capacity)) for document in long]
    found += [(short[members].tolist(), 1) for members in best_fit_decreasing(tokens[short], capacity)]
    return sorted(found, key=lambda unit: (-float(work[unit[0]].sum()) / unit[1], unit[0]))


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
