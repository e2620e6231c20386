"""Rules about how groups share attention: in which order, by which method, over which NICs, and every pair once.

That every pair of query and key is computed once follows from the zigzag ring as a table of chunks, without tensors.

A group with ring r cuts every span into 2 r chunks; index i holds chunk i, its low one, and chunk 2 r - 1 - i, its high
one. When the keys of index j come by, index i computes

    j == i   low x low and high x high under the causal mask, high x low
    j <  i   low x low of j, high x low of j
    j >  i   high x low of j, high x high of j

Gathered keys are computed in one go: each chunk x all chunks before it, and itself under the causal mask. A piece with
tokens before it (its prefix) sees all of them: they lie on the same ranks and come by in the same way. ring 2, chunks
of queries downwards, of keys to the right, by ring index:

    0
    1 1
    1 1 1
    0 0 0 0
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from seqloom.errors import PlanError, violation
from seqloom.layout.layout import Column
from seqloom.layout.route import Route
from seqloom.plan.pipeline import Stage
from seqloom.plan.round import Group, Method
from seqloom.plan.rules.structure import place, stage_batches, stage_groups, whole_numbers

if TYPE_CHECKING:
    from seqloom.plan.plan import Plan


class ChunkTiles(NamedTuple):
    """Rectangles of a causal attention matrix in chunks of one span, as columns with one entry per tile.

    Attributes:
        index: ring index that computes it.
        query: query chunk.
        first, last: key chunks `first .. last - 1`.
        causal: bool, later keys are hidden; queries and keys are then the same tokens.
    """

    index: Column
    query: Column
    first: Column
    last: Column
    causal: np.ndarray


@lru_cache(maxsize=256)
def chunk_tiles(ring: int, method: Method) -> ChunkTiles:
    """Return who computes which chunks. Without a ring the span is one chunk, with ring r there are 2 r."""
    low = np.arange(ring)
    high = 2 * ring - 1 - low
    if ring == 1:
        return _table([(low, low, low, low + 1)], [])
    squares: list[tuple[Column, ...]] = [(low, chunk, chunk, chunk + 1) for chunk in (low, high)]
    if method == Method.GATHER:
        return _table(squares, [(low, chunk, 0 * chunk, chunk) for chunk in (low, high)])
    i, j = (grid.ravel() for grid in np.indices((ring, ring)))
    earlier, later = j < i, j > i
    steps = [(low, high, low)]
    steps += [(i[earlier], query[i[earlier]], j[earlier]) for query in (low, high)]
    steps += [(i[later], high[i[later]], key[j[later]]) for key in (low, high)]
    return _table(squares, [(index, query, key, key + 1) for index, query, key in steps])


def _table(causal: list[tuple[Column, ...]], full: list[tuple[Column, ...]]) -> ChunkTiles:
    """Join columns of index, query chunk and run of key chunks, with and without the mask."""
    index, query, first, last = (np.concatenate(columns) for columns in zip(*causal, *full, strict=True))
    masked = sum(len(columns[0]) for columns in causal)
    return ChunkTiles(index, query, first, last, np.arange(len(index)) < masked)


@lru_cache(maxsize=256)
def wrong_chunks(ring: int, method: Method) -> tuple[int, int] | None:
    """Return a query and a key chunk that are not computed exactly once, or None: the schedule is complete.

    Chunks on the diagonal must be in one tile under the causal mask, those before it in one without.
    """
    tiles = chunk_tiles(ring, method)
    chunks = 1 if ring == 1 else 2 * ring
    for causal in (False, True):
        chosen = tiles.causal == causal
        count = np.zeros((chunks, chunks + 1), dtype=np.int64)
        np.add.at(count, (tiles.query[chosen], tiles.first[chosen]), 1)
        np.add.at(count, (tiles.query[chosen], tiles.last[chosen]), -1)
        expected = np.eye(chunks, dtype=np.int64) if causal else np.tri(chunks, k=-1, dtype=np.int64)
        wrong = np.argwhere(np.cumsum(count, axis=1)[:, :-1] != expected)
        if len(wrong):
            return int(wrong[0, 0]), int(wrong[0, 1])
    return None


_KINDS = ("between nodes", "inside a node", "of one rank")
_METHODS = frozenset(Method)


def group_order(plan: Plan) -> None:
    """Groups between nodes come first, then groups inside a node, then groups of one rank.

    All ranks run their groups in the order of the round, so no two wait for each other, and slow links start first.
    """
    size = plan.limits.node_size
    for where, _, share in stage_batches(plan):
        turns = [group.order_key(size) for group in share.groups]
        for g, (before, after) in enumerate(pairwise(turns), start=1):
            if after < before:
                value = f"{place(where)} has group {g}, {_KINDS[after]}, after group {g - 1}, {_KINDS[before]}"
                must = "groups between nodes come first, then those inside a node, then those of one rank"
                later = next(k for k, turn in enumerate(turns) if turn > after)
                raise violation("group-order", value, must, f"put it before group {later}")


def methods(plan: Plan) -> None:
    """Keys and values are gathered only in groups with a ring."""
    for where, _, group in stage_groups(plan):
        if group.method not in _METHODS:
            value = f"{place(where)} has method {group.method!r}"
            raise violation("methods", value, "it is one of a fixed list", f"choose among {', '.join(Method)}")
        if group.method == Method.GATHER and group.ring == 1:
            value = f"{place(where)} has method {group.method} with ring 1"
            must = "keys and values are gathered over a ring, which has at least two indices"
            raise violation("methods", value, must, f"use method {Method.RING}, or ring 2 or more")


def routes(plan: Plan) -> None:
    """Proxies are ranks that take part in the round, at the same places in every node of a group with a ring.

    A rank takes part if it or a rank of its shard group is in a group of the round.
    """
    home: dict[int, int] = {}
    for where, stage, share in stage_batches(plan):
        routed = [(g, group, group.route) for g, group in enumerate(share.groups) if group.route is not None]
        if not routed:
            continue
        home = home or {rank: number for number, shard_group in enumerate(plan.shard_groups) for rank in shard_group}
        awake = {home[rank] for group in share.groups for rank in group.ranks}
        for g, group, route in routed:
            here = place((*where, g))
            _check_numbers(here, route, stage)
            _check_nodes(here, group, route, plan.limits.node_size)
            asleep = [rank for rank in route.proxies if home[rank] not in awake]
            if asleep:
                value = f"{here} has proxy {asleep[0]}, whose shard group has no tokens in this round"
                must = "proxies take part in the round of their group"
                ranks = [rank for rank in stage.ranks if home[rank] in awake]
                raise violation("routes", value, must, f"use ranks among {ranks}")


def _check_numbers(here: str, route: Route, stage: Stage) -> None:
    if not whole_numbers([route.slices]) or route.slices < 1:
        value = f"{here} has a route with {route.slices!r} slices"
        raise violation("routes", value, "a message is at least one slice", "use 1 or more")
    proxies = route.proxies
    if not whole_numbers(proxies) or any(first >= second for first, second in pairwise(proxies)):
        value = f"{here} has proxies {list(proxies)}"
        way_out = f"use {sorted(set(proxies))}" if whole_numbers(proxies) else "use integers"
        raise violation("routes", value, "proxies are distinct ranks in ascending order", way_out)
    foreign = sorted(set(proxies) - set(stage.ranks))
    if foreign:
        value = f"{here} has proxy {foreign[0]}, which is not in the stage"
        raise violation("routes", value, "proxies are ranks of the stage", f"use ranks among {list(stage.ranks)}")


def _check_nodes(here: str, group: Group, route: Route, node_size: int) -> None:
    nodes = {rank // node_size for rank in group.ranks}
    if group.ring == 1 or len(nodes) == 1:
        what = "no ring" if group.ring == 1 else "all ranks in one node"
        must = "a route is for keys and values that cross between nodes"
        raise violation("routes", f"{here} has a route but {what}", must, "leave the route out")
    strange = [rank for rank in route.proxies if rank // node_size not in nodes]
    if strange:
        value = f"{here} has proxy {strange[0]} in node {strange[0] // node_size}"
        must = "proxies stand in the nodes of their group"
        raise violation("routes", value, must, f"use ranks of nodes {sorted(nodes)}")
    try:
        route.common_local_ranks(nodes, node_size)
    except PlanError as error:
        raise PlanError(f"plan rule 'routes': {here}: {error}", rule="routes") from None


def pairs(plan: Plan) -> None:
    """Every pair of a query and a key that it sees is computed exactly once.

    In two steps. The chunks into which a ring cuts a span are computed once each, whatever their lengths: that is a
    property of ring and method alone. And the queries of a document's pieces are disjoint, with all keys up to their
    own position, s (s + 1) / 2 pairs in all.
    """
    for ring, method in {(group.ring, group.method) for _, _, group in stage_groups(plan)}:
        wrong = wrong_chunks(ring, method)
        if wrong is not None:
            value = f"ring {ring} with method {method} computes query chunk {wrong[0]} x key chunk {wrong[1]}"
            must = "chunks up to the diagonal are computed exactly once, and no others"
            raise violation("pairs", value, must, "use ring 1")
    spans = [span for where, _, share in stage_batches(plan) if where[2] == 0 for span in share.spans()]
    table = np.fromiter(chain.from_iterable(spans), dtype=np.int64, count=3 * len(spans)).reshape(-1, 3)
    document, start, stop = table[np.lexsort((table[:, 1], table[:, 0]))].T
    again = np.flatnonzero((document[1:] == document[:-1]) & (start[1:] < stop[:-1])) + 1
    if len(again):
        k = again[0]
        value = f"the queries of document {document[k]} [{start[k]}:{min(stop[k], stop[k - 1])}) are computed twice"
        must = "every pair of query and key is computed exactly once"
        raise violation("pairs", value, must, f"continue the document at token {stop[k - 1]}")
    # A piece [a, b) computes, for every query in it, all keys from 0: (b (b + 1) - a (a + 1)) / 2 pairs.
    lengths = np.array(plan.documents, dtype=np.int64)
    found = np.zeros_like(lengths)
    np.add.at(found, document, (stop * (stop + 1) - start * (start + 1)) // 2)
    wanted = lengths * (lengths + 1) // 2
    wrong = np.flatnonzero(found != wanted)
    if len(wrong):
        k = wrong[0]
        value = f"document {k} has {found[k]} pairs of query and key"
        must = f"{lengths[k]} tokens have {wanted[k]}, each computed exactly once"
        raise violation("pairs", value, must, f"cover its tokens 0 to {lengths[k] - 1} once")
