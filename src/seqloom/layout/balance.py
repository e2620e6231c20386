"""Token balancing: a second layout for linear layers, in which attention and linear work together are level (Zeppelin).

Attention work grows with the square of a document, linear work with its tokens. `balanced_token_counts` says how many
tokens each rank takes so that both together are level; `rebalance_layout` moves as few of them as that needs, and those
as near as can be: what a rank has too many goes to ranks of its node that have too few, and only the rest to other
nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from seqloom.errors import PlanError
from seqloom.layout.layout import Column, Layout, deal_intervals


def balanced_token_counts(
    work_ns: Sequence[int] | np.ndarray,
    token_ns: int | np.ndarray,
    tokens: Sequence[int] | np.ndarray,
    shard_groups: Sequence[Sequence[int]] | None = None,
) -> Column:
    """Return how many tokens every rank shall have, int64[ranks], so that the slowest is as fast as can be.

    A rank with n tokens takes `work_ns + token_ns * n`, with a `token_ns` of its own where ranks differ in speed. The
    greatest time of a shard group's ranks that have tokens is the least possible in whole tokens, and any rank would
    reach it with one token more. Of equal choices, ranks that have more tokens now keep more.

    Args:
        work_ns: int64[ranks], other work of every rank, in ns.
        token_ns: time of one token, in ns, at least 1: of any rank, or int64[ranks].
        tokens: int64[ranks], tokens that every rank has now; those of a shard group stay in it.
        shard_groups: ranks among which tokens may move, disjoint; None: all. Ranks in none keep theirs.
    """
    if np.min(token_ns) < 1:
        raise PlanError(f"token_ns is {np.min(token_ns)}: a token takes time; give at least 1 ns")
    work, held = np.asarray(work_ns, dtype=np.int64), np.asarray(tokens, dtype=np.int64)
    each = np.broadcast_to(np.asarray(token_ns, dtype=np.int64), held.shape)
    if work.shape != held.shape:
        raise PlanError(f"work of {work.size} ranks and tokens of {held.size}; give both for every rank")
    targets = held.copy()
    for shard_group in [range(len(held))] if shard_groups is None else shard_groups:
        ranks = np.asarray(shard_group, dtype=np.int64)
        targets[ranks] = _fill(work[ranks], each[ranks], held[ranks])
    return targets


def _fill(work: Column, token_ns: Column, held: Column) -> Column:
    """Fill ranks up to the lowest time level at which all tokens fit."""
    total = int(held.sum())
    if not total:
        return held

    def tokens_up_to(level: int) -> Column:  # without going over that time
        return np.maximum(level - work, 0) // token_ns

    low, high = int(work.min()), int(work.min()) + total * int(token_ns.max())  # too low, high enough
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if tokens_up_to(middle).sum() >= total else (middle, high)
    below, at = tokens_up_to(low), tokens_up_to(high)
    last = np.flatnonzero(at > below)  # ranks that one more token brings up to the level
    chosen = last[np.argsort(below[last] - held[last], kind="stable")][: total - int(below.sum())]
    below[chosen] += 1
    return below


def rebalance_layout(
    layout: Layout,
    targets: Sequence[int] | np.ndarray,
    node_size: int,
    shard_groups: Sequence[Sequence[int]] | None = None,
) -> Layout:
    """Return a layout with `targets[r]` tokens on every rank r, as near to `layout` as can be.

    The fewest tokens move, of these the fewest between nodes, and these are spread over the ranks of both nodes as
    evenly as that allows. A rank keeps its first tokens and gives away its last ones in runs.

    Args:
        layout: one axis, every token on one rank.
        targets: int64[ranks]; they sum up to the tokens, in every shard group.
        node_size: ranks per node.
        shard_groups: ranks among which tokens may move, disjoint; None: all. Ranks in none keep theirs.
    """
    wanted = np.asarray(targets, dtype=np.int64)
    ranks = len(wanted)
    held = _tokens_held(layout, ranks)
    home = np.full(ranks, -1, dtype=np.int64)
    for number, shard_group in enumerate([range(ranks)] if shard_groups is None else shard_groups):
        home[list(shard_group)] = number
    _check_targets(held, wanted, home)
    if not len(layout):
        return layout
    surplus, deficit = np.maximum(held - wanted, 0), np.maximum(wanted - held, 0)
    node = np.arange(ranks) // node_size
    group = np.unique(home * ranks + node, return_inverse=True)[1]  # ranks of one shard group and node
    leaves, enters = _spread(surplus, deficit, group), _spread(deficit, surplus, group)
    order = np.argsort(group, kind="stable")
    flows = [_pair_flows(surplus - leaves, deficit - enters, order), _pair_flows(leaves, enters, order)]
    kept = np.minimum(held, wanted)
    sender, receiver, count = (
        np.concatenate(columns) for columns in zip((order, order, kept[order]), *flows, strict=True)
    )
    first = np.argsort(sender, kind="stable")  # of every rank: what it keeps, what stays in the node, what leaves it
    return Layout(*deal_intervals(layout.item, layout.start, layout.stop, receiver[first], np.cumsum(count[first])))


def _tokens_held(layout: Layout, ranks: int) -> Column:
    """Return the tokens of every rank, int64[ranks]."""
    if layout.axes != 1:
        raise PlanError("a layout with two axes cannot be rebalanced; only whole tokens move, use one axis")
    if len(layout) and int(layout.rank.max()) >= ranks:
        raise PlanError(f"targets for {ranks} ranks, but rank {layout.rank.max()} holds tokens; give one for each rank")
    held = np.zeros(ranks, dtype=np.int64)
    np.add.at(held, layout.rank, layout.sizes)
    return held


def _check_targets(held: Column, wanted: Column, home: Column) -> None:
    """Check that every shard group's targets sum up to its tokens, and that ranks without one keep what they have."""
    if len(wanted) and wanted.min() < 0:
        rank = int(wanted.argmin())
        raise PlanError(f"rank {rank} shall have {wanted[rank]} tokens; a target is 0 or more")
    strays = np.flatnonzero((home < 0) & (held != wanted))
    if len(strays):
        rank = strays[0]
        raise PlanError(
            f"rank {rank} shall have {wanted[rank]} of its {held[rank]} tokens but is in no shard group; "
            f"tokens move inside shard groups only, use {held[rank]}"
        )
    has, shall = (_sums(tokens, home + 1) for tokens in (held, wanted))
    wrong = np.flatnonzero(has != shall)
    if len(wrong):
        raise PlanError(
            f"targets of shard group {wrong[0] - 1} sum to {shall[wrong[0]]}, its ranks hold {has[wrong[0]]} tokens; "
            "nothing comes from other shard groups, so both must be equal"
        )


def _spread(give: Column, take: Column, group: Column) -> Column:
    """Return how much of `give` its own group cannot take, int64[ranks], spread evenly over the ranks that give.

    A group's level is the lowest up to which its ranks must give; ranks that have less give all of it.
    """
    rest = np.maximum(_sums(give - take, group), 0)
    low, level = np.full_like(rest, -1), np.full_like(rest, give.max())  # too low, high enough
    while (level - low > 1).any():
        middle = (low + level) // 2
        enough = _sums(np.minimum(give, middle[group]), group) >= rest
        low, level = np.where(enough, low, middle), np.where(enough, middle, level)
    over = np.minimum(give, np.maximum(level - 1, 0)[group])
    odd = rest - _sums(over, group)
    more = (give > over) & (level > 0)[group]
    before = np.zeros_like(give)
    ranks = np.flatnonzero(more)[np.argsort(group[more], kind="stable")]
    before[ranks] = np.arange(len(ranks)) - np.searchsorted(group[ranks], group[ranks])
    return over + (more & (before < odd[group]))


def _sums(values: Column, group: Column) -> Column:
    """Sum the values of every group, int64[groups]."""
    sums = np.zeros(int(group.max()) + 1, dtype=np.int64)
    np.add.at(sums, group, values)
    return sums


def _pair_flows(give: Column, take: Column, order: Column) -> tuple[Column, Column, Column]:
    """Lay given and taken tokens side by side and read off (sender, receiver, tokens).

    Both sums agree in every shard group (and, inside nodes, in every node), and ranks of one are neighbours in `order`:
    so nothing goes from one to another.
    """
    given, taken = np.cumsum(give[order]), np.cumsum(take[order])
    edges = np.unique(np.concatenate([[0], given, taken]))
    sender = order[np.searchsorted(given, edges[:-1], side="right")]
    receiver = order[np.searchsorted(taken, edges[:-1], side="right")]
    return sender, receiver, np.diff(edges)
