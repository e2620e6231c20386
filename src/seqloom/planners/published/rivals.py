"""Rivals ``te-cp``, ``llama-cp`` and ``hybrid-dp``, and the settings that every rival is tuned over.

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
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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


class RivalGroup(NamedTuple):
    """Documents on these ranks, cut by position over all of them."""

    ranks: tuple[int, ...]
    documents: Sequence[int]
    method: Method = Method.RING
    routed: bool = False
    ulysses: int = 1  # of the ranks, so many over heads


Rounds = list[list[RivalGroup]]


def tuned_plan(
    lengths: np.ndarray,
    cost: CostModel,
    name: str,
    published: Callable[[np.ndarray, int], Iterable[Rounds]],
    *,
    halved: bool = True,
    finish: Callable[[StageMicroBatch], StageMicroBatch] = lambda work: work,
) -> Plan:
    """The fastest plan of a batch, int64[n] tokens, that a published algorithm gives.

    Args:
        published: the algorithm: (int64[n] tokens of every document, tokens a rank may hold) -> the groups of every
            round, once for each of its settings.
        halved: whether smaller capacities than the largest change its answer.
        finish: adds to every round what does not change where attention runs.
    """
    tokens = fitting_problems(lengths, cost)[0].tables.tokens  # refuses what no rank can hold
    plans: list[Plan] = []
    for capacity in capacities(tokens, cost, halved):
        for rounds in published(tokens, capacity):
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
        merged: dict[RivalGroup, list[int]] = {}  # groups of equal ranks as one
        for group in groups:
            merged.setdefault(group._replace(documents=()), []).extend(group.documents)
        joined = [group._replace(documents=held) for group, held in merged.items()]
        checkpoint = fastest_checkpoint(limits, fullest(joined, tokens))
        if checkpoint is None:
            return None
        built = []
        for ranks, documents, method, routed, ulysses in sorted(joined, key=lambda group: group.ranks):
            ring = len(ranks) // ulysses
            shape = GroupShape(ulysses, ring, method if ring > 1 else Method.RING, routed)
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

    def published(tokens: np.ndarray, capacity: int) -> list[Rounds]:
        packs = next_fit(tokens, cost.ranks * capacity)
        return [[[RivalGroup(tuple(range(cost.ranks)), pack, method, routed)] for pack in packs]]

    return tuned_plan(lengths, cost, name, published, halved=False)


def plan_hybrid_dp(lengths: np.ndarray, cost: CostModel) -> Plan:
    """Plan a batch, int64[n] tokens, with ranks per document by capacity, balanced by FLOPs."""
    work = forward_flops(cost.padded_lengths(lengths), cost.model)

    def published(tokens: np.ndarray, capacity: int) -> list[Rounds]:
        return [hand_out(tokens, work, capacity, cost.ranks)]

    return tuned_plan(lengths, cost, "hybrid-dp", published)


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
