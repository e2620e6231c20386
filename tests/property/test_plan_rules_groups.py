"""Who computes which pairs: against brute force, and against the schedule that the engine runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqloom.attention.tiles import Tile, ZigzagChunks, gather_schedule, ring_tiles
from seqloom.layout import Span
from seqloom.plan import Group, Method, Plan
from seqloom.plan.rules import groups as groups_rules
from seqloom.plan.rules.groups import ChunkTiles, chunk_tiles, wrong_chunks
from support.attention_tiles import group_tiles
from support.strategies import plans
from support.strategies_groups import groups

CPU = torch.device("cpu")
Pair = tuple[int, int, int]
"""Document, position of the query, position of the key."""


def computed(group: Group) -> list[tuple[int, Pair]]:
    """Every (ring index, pair) of a group's tiles."""
    found = []
    for index, document, a, b, c, d, causal in zip(*(column.tolist() for column in group_tiles(group)), strict=True):
        assert not causal or (a, b) == (c, d)
        found += [(index, (document, q, k)) for q in range(a, b) for k in range(c, d) if not causal or k <= q]
    return found


@given(groups(longest=24))
def test_a_group_computes_every_pair_once_where_the_query_is(group: Group) -> None:
    holder = {(d, q): k for k in range(group.ring) for d, a, b in group.ring_spans(k) for q in range(a, b)}
    expected = [(d, q, k) for d, a, b in group.spans for q in range(a, b) for k in range(q + 1)]
    found = computed(group)
    assert sorted(pair for _, pair in found) == sorted(expected)
    assert all(holder[document, query] == index for index, (document, query, _) in found)


@given(groups(longest=24), st.sampled_from(Method))
def test_the_engine_computes_the_same_pairs(group: Group, method: Method) -> None:
    spans = tuple(Span(document, 0, stop - start) for document, start, stop in group.spans)
    group = replace(group, spans=spans, method=method)
    chunks = [ZigzagChunks.of(group, index) for index in range(group.ring)]
    ids = [document for document, _, _ in sorted(spans)]
    found: list[tuple[int, Pair]] = []
    for own in chunks:
        queries = positions(own, ids)
        if method == Method.RING:
            for other in chunks:
                keys = positions(other, ids)
                for tile in ring_tiles(own, other, causal=True, window=None):
                    found += [(own.index, pair) for pair in tile_pairs(tile, queries, keys)]
        else:
            # An index sees the keys up to the end of its last chunk that is not empty, by document and position.
            last = np.where(own.stop > own.start, own.stop, 0).max(axis=0).tolist()
            keys = [(document, k) for document, stop in zip(ids, last, strict=True) for k in range(stop)]
            for tile in gather_schedule(chunks, own.index, CPU, causal=True, window=None).tiles:
                found += [(own.index, pair) for pair in tile_pairs(tile, queries, keys)]
    assert Counter(found) == Counter(computed(group))


def positions(chunks: ZigzagChunks, ids: list[int]) -> list[tuple[int, int]]:
    """Document and position of every row that a ring index holds."""
    rows = []
    for d, document in enumerate(ids):
        for half in (0, 1):
            rows += [(document, at) for at in range(chunks.start[half, d], chunks.stop[half, d])]
    return rows


def tile_pairs(tile: Tile, queries: list[tuple[int, int]], keys: list[tuple[int, int]]) -> list[Pair]:
    """The pairs that a kernel computes for one tile, by the definition of segments."""
    own, found = tile.segments, []
    for a, b, c, d, offset in zip(own.q_start, own.q_stop, own.k_start, own.k_stop, own.offset, strict=True):
        for q in range(b - a):
            for k in range(d - c):
                if not own.causal or k <= q + offset:
                    document, query = queries[tile.queries.start + a + q]
                    other, key = keys[tile.keys.start + c + k]
                    assert document == other
                    found.append((document, query, key))
    return found


@given(plans(longest=16, max_documents=5))
def test_a_plan_computes_every_causal_pair_once(plan: Plan) -> None:
    """What the rule `pairs` proves, by counting."""
    plan.validate()
    expected = Counter(
        (d, q, k) for d, length in enumerate(plan.documents) for q in range(length) for k in range(q + 1)
    )
    for number in range(max(len(line.stages) for line in plan.pipelines)):
        lines = [line for line in plan.pipelines if number < len(line.stages)]
        works = [current.by_stage[number] for line in lines for current in line.rounds]
        found = Counter(pair for work in works for group in work.groups for _, pair in computed(group))
        here = {span.document for work in works for span in work.spans()}
        assert found == Counter({pair: n for pair, n in expected.items() if pair[0] in here})


@pytest.mark.parametrize("method", Method)
@pytest.mark.parametrize("ring", [1, 2, 3, 8, 31])
def test_every_schedule_of_chunks_is_complete(ring: int, method: Method) -> None:
    assert wrong_chunks(ring, method) is None
    tiles = chunk_tiles(ring, method)
    chunks = 1 if ring == 1 else 2 * ring
    count = np.zeros((chunks, chunks), dtype=int)
    for query, first, last in zip(tiles.query, tiles.first, tiles.last, strict=True):
        count[query, first:last] += 1
    assert np.array_equal(count, np.tri(chunks, dtype=int))


@pytest.mark.parametrize("method", Method)
def test_a_hole_or_a_repeated_chunk_is_found(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = chunk_tiles(3, method)
    for drop in range(len(whole.query)):
        for kept in (np.arange(len(whole.query)) != drop, np.append(np.arange(len(whole.query)), drop)):
            broken = ChunkTiles(*(column[kept] for column in whole))
            if whole.first[drop] == whole.last[drop]:  # the first chunk has none before it
                continue
            monkeypatch.setattr(groups_rules, "chunk_tiles", lambda *_, broken=broken: broken)
            assert wrong_chunks.__wrapped__(3, method) is not None
