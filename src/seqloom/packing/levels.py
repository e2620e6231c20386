"""Packing levels of HBP: lengths of packs, with the group shape and the memory policy that run packs of each length.

The shape and the policy of a level are those with the least time per token of a full step: a cluster full of such
packs, round after round, plus the constant of a step. Four lengths matter:

    best   the one with the least time per token
    1      best / its degree: what one rank of it holds, so that short documents need no communication
    top    the one that holds the longest document
    2      top / its degree, if that is more than best

A level takes the documents that are too long for the level below it. More levels are not always better: a level with
few documents has few steps, and long packs have space for short documents anyway. So `hbp` tries every choice among the
lower lengths on the data set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel, GroupShape, MemoryPolicy
from seqloom.errors import SeqloomError, how_to_drop

SAMPLE = 1024
"""Documents that represent a level's when it is priced."""
NEAR_PERCENT = 101
"""Among levels within this much of the least time per token, the one with the fullest steps wins."""
FILL_PARTS = 32
"""Resolution of a step's fill: unused tokens are counted in this fraction of the step."""


class PackingLevel(NamedTuple):
    """Packs of one length, and how they are run."""

    tokens: int  # of a full pack
    shape: GroupShape  # of the group that runs a pack
    policy: MemoryPolicy  # activations that a round stores, and when gradients are reduced
    packs: int  # packs of a step, in as many full rounds as the step's tokens allow
    token_ps: int  # predicted picoseconds per token of a full step


def level_sets(lengths: np.ndarray, cost: CostModel, step_tokens: int) -> Iterator[tuple[PackingLevel, ...]]:
    """Yield the levels that a data set may have, shortest packs first; each level has documents of its own.

    Every set has packs that hold the longest document; the first set has no others. SeqloomError for a document that
    no group holds, or that is longer than a step.
    """
    *lower, top = level_lengths(lengths, cost, step_tokens)
    sizes = np.sort(cost.padded_lengths(lengths))
    seen = set()
    for count in range(len(lower) + 1):
        for chosen in combinations(lower, count):
            levels = _levels([*chosen, top], sizes, cost, step_tokens)
            if levels not in seen:
                seen.add(levels)
                yield levels


def level_lengths(lengths: np.ndarray, cost: CostModel, step_tokens: int) -> list[int]:
    """Tokens of packs that may make a level, ascending: 1, best, 2 and top, as far as they differ."""
    _check_longest(lengths, cost, step_tokens)
    sizes = np.sort(cost.padded_lengths(lengths))
    longest = int(sizes[-1])
    half = int(sizes[np.searchsorted(np.cumsum(sizes), (int(sizes.sum()) + 1) // 2)])
    candidates = candidate_lengths(cost, step_tokens)
    usual = [tokens for tokens in candidates if tokens >= half] or [longest]  # a level is for a good part of all tokens
    common = sizes[sizes <= usual[0]]  # what all of them can hold, so that they are compared on the same documents
    best = top = cheapest_level(usual, common, cost, step_tokens)
    if longest > best.tokens:
        holding = {longest, *(tokens for tokens in candidates if tokens >= longest)}
        top = cheapest_level(holding, sizes[sizes > best.tokens], cost, step_tokens)
    wanted = {best.tokens // best.shape.degree, best.tokens, top.tokens}
    wanted |= {tokens for tokens in (top.tokens // top.shape.degree,) if tokens > best.tokens}
    return sorted({tokens // cost.pad_multiple * cost.pad_multiple for tokens in wanted} - {0})


def candidate_lengths(cost: CostModel, step_tokens: int) -> list[int]:
    """Pack lengths to try, ascending: powers of two, and for every degree and policy the length that fills a step in
    the fewest full rounds.
    """
    most = min(max_pack_tokens(cost), step_tokens)
    found = {1 << power for power in range(most.bit_length())}
    for degree in {shape.degree for shape in cost.shapes}:
        share = step_tokens // len(cost.family.blocks(degree))
        for policy in cost.policies:
            found.add(share // max(1, -(-share // (degree * cost.capacity(policy)))))
    multiple = cost.pad_multiple
    return sorted({tokens // multiple * multiple for tokens in found if multiple <= tokens <= most})


def max_pack_tokens(cost: CostModel) -> int:
    """Tokens that the largest group holds, in whole pad multiples."""
    degree = max(shape.degree for shape in cost.shapes)
    return degree * max(map(cost.capacity, cost.policies)) // cost.pad_multiple * cost.pad_multiple


def _levels(lengths: Sequence[int], sizes: np.ndarray, cost: CostModel, step_tokens: int) -> tuple[PackingLevel, ...]:
    """Levels of these lengths, each priced with its own documents; lengths that have none are left out."""
    levels, below = [], 0
    for tokens in lengths:
        own = sizes[(sizes > below) & (sizes <= tokens)]
        if len(own):
            levels.append(cheapest_level([tokens], own, cost, step_tokens))
            below = levels[-1].tokens
    return tuple(levels)


def cheapest_level(lengths: Iterable[int], documents: np.ndarray, cost: CostModel, step_tokens: int) -> PackingLevel:
    """Find the level with the least time per token; of nearly equal ones, the one that fills a step best.

    Its packs have one of these lengths, or are somewhat longer to fill a step of at most `step_tokens`, and hold such
    documents, int64[n] tokens, sorted.
    """
    sample = documents[np.linspace(0, len(documents) - 1, min(SAMPLE, len(documents))).astype(np.int64)]
    priced = [each for policy in cost.policies for each in _priced(sorted(lengths), policy, sample, cost, step_tokens)]
    levels = [level for _, level in sorted(priced, key=itemgetter(0))]
    least = min(level.token_ps for level in levels)
    near = [level for level in levels if 100 * level.token_ps <= NEAR_PERCENT * least]
    empty = {level: FILL_PARTS * (step_tokens - level.packs * level.tokens) // step_tokens for level in near}
    return min(near, key=lambda level: (empty[level], level.token_ps, level.tokens, level.shape.degree))


def _priced(
    lengths: Iterable[int], policy: MemoryPolicy, documents: np.ndarray, cost: CostModel, step_tokens: int
) -> Iterator[tuple[int, PackingLevel]]:
    """Yield (length, its level) for every shape whose group holds a pack of that length, full of such documents.

    Packs become longer, as far as memory allows, where that brings a step nearer to its tokens.
    """
    tables, step_ns, multiple = cost.tables(documents, policy), cost.step_overhead_ns(policy), cost.pad_multiple
    token_ns = tables.cost.sum(axis=2) / float(tables.tokens.sum())
    for tokens in lengths:
        for index, shape in enumerate(tables.shapes):
            most = shape.degree * tables.capacity
            if tokens <= most:
                packs, rounds = packs_per_step(tokens, shape.degree, cost, step_tokens)
                full = max(tokens, min(most, step_tokens // packs) // multiple * multiple)
                pack_ns = int(np.rint(tables.fixed[:, index] + token_ns[:, index] * full).max())
                token_ps = 1000 * (rounds * pack_ns + step_ns) // (packs * full)
                yield tokens, PackingLevel(full, shape, policy, packs, token_ps)


def packs_per_step(tokens: int, degree: int, cost: CostModel, step_tokens: int) -> tuple[int, int]:
    """(packs, rounds) of a step: as many packs as its tokens allow, at least one; beyond one round, only full ones."""
    side_by_side = len(cost.family.blocks(degree))
    packs = max(1, step_tokens // tokens)
    if packs > side_by_side:
        packs -= packs % side_by_side
    return packs, -(-packs // side_by_side)


def _check_longest(lengths: np.ndarray, cost: CostModel, step_tokens: int) -> None:
    document = int(np.argmax(lengths))
    size, most = int(cost.padded_lengths(lengths).max()), max_pack_tokens(cost)
    if size > most:
        raise SeqloomError(
            f"sequence {document} has {lengths[document]} tokens, but the largest group holds {most}; "
            f"{how_to_drop(most)}, raise the memory budget or use more GPUs"
        )
    if size > step_tokens:
        fits = step_tokens // cost.pad_multiple * cost.pad_multiple
        drop = f" or {how_to_drop(fits)}" if fits else ""
        raise SeqloomError(
            f"sequence {document} has {lengths[document]} tokens, more than the {step_tokens} of a step; raise the "
            f"tokens per step to {size}{drop}"
        )
