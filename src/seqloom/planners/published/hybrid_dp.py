"""Rival ``hybrid-dp``: hybrid data parallelism, as ByteScale describes it.

Published: data and context parallelism are one dimension. A document takes as many ranks as its tokens need at the
capacity of a rank, any number, not only powers of two; shorter ones are packed by best fit into packs of one rank.
Units are handed out longest first, always to ranks that are behind, by FLOPs; a rank with cheap units runs more of
them.

Our reading: a document that is spread uses a ring (the paper: point-to-point messages on one communicator). FLOPs are
those of the model, products and causal attention. "Behind" is: least FLOPs so far, so the order of the buckets is the
order of the sort. A unit runs in the first round in which all its ranks are free; neighbouring ranks are taken where
several are equally far behind. Offloading activations is left out.
"""

from __future__ import annotations

import numpy as np

from seqloom.cost import CostModel
from seqloom.describe import ModelSpec
from seqloom.plan import Plan
from seqloom.planners.packing import best_fit_decreasing
from seqloom.planners.published.tuned import Place, Rounds, tuned_plan


def plan_hybrid_dp(lengths: np.ndarray, cost: CostModel) -> Plan:
    """Plan a batch with ranks per document by capacity, balanced by FLOPs.

    Args:
        lengths: int64[n] tokens.
        cost: prices the batch.
    """
    each = flops(cost.padded_lengths(lengths), cost.model)
    return tuned_plan(lengths, cost, "hybrid-dp", lambda tokens, room: hand_out(tokens, each, room, cost.ranks))


def hand_out(tokens: np.ndarray, work: np.ndarray, capacity: int, ranks: int) -> Rounds:
    """Rounds of documents on as many ranks as they need, and of packs on one rank.

    Args:
        tokens: int64[n] of every document.
        work: float64[n] FLOPs of every document.
        capacity: tokens of a rank in a round.
        ranks: of the world.
    """
    rounds: Rounds = []
    load = [0.0] * ranks  # FLOPs handed out so far
    begins = [0] * ranks  # the first round that has nothing for the rank yet
    for documents, width in units(tokens, work, capacity):
        behind = sorted(range(ranks), key=lambda rank: (load[rank], rank))
        chosen = tuple(sorted(behind[:width]))
        number = max(begins[rank] for rank in chosen)
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(Place(chosen, documents))
        for rank in chosen:
            load[rank] += float(work[documents].sum()) / width
            begins[rank] = number + 1
    return rounds


def units(tokens: np.ndarray, work: np.ndarray, capacity: int) -> list[tuple[list[int], int]]:
    """(documents, ranks) that run together, most FLOPs per rank first: long documents alone, short ones packed."""
    long = np.flatnonzero(tokens > capacity).tolist()
    short = np.flatnonzero(tokens <= capacity)
    found = [([document], -(-int(tokens[document]) // capacity)) for document in long]
    found += [(short[members].tolist(), 1) for members in best_fit_decreasing(tokens[short], capacity)]
    return sorted(found, key=lambda unit: (-float(work[unit[0]].sum()) / unit[1], unit[0]))


def flops(tokens: np.ndarray, model: ModelSpec) -> np.ndarray:
    """float64[n] forward FLOPs of documents: products with the weights, and attention under a causal mask."""
    sizes = tokens.astype(np.float64)
    return 2 * model.matmul_parameters * sizes + 2 * model.layers * model.heads * model.head_dim * sizes * sizes
