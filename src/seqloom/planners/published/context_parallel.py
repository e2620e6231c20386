"""Rivals ``te-cp``, ``llama-cp`` and ``hybrid-dp``: context parallelism over all ranks, or as few as hold a document.

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

import numpy as np

from seqloom.cost import CostModel
from seqloom.describe import ModelSpec
from seqloom.plan import Method, Plan
from seqloom.planners.packing import best_fit_decreasing, next_fit
from seqloom.planners.published.tuned_plan import RivalGroup, Rounds, tuned_plan


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
    work = flops(cost.padded_lengths(lengths), cost.model)
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


def flops(tokens: np.ndarray, model: ModelSpec) -> np.ndarray:
    """float64[n] forward FLOPs of documents: products with the weights, and attention under a causal mask."""
    sizes = tokens.astype(np.float64)
    return 2 * model.matmul_parameters * sizes + 2 * model.layers * model.heads * model.head_dim * sizes * sizes
