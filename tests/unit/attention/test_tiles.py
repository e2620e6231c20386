"""Tiles, chunk by chunk, against the mask they stand for: every visible pair once, nothing else."""

import numpy as np
import pytest
import torch

from seqloom.attention.kernels.flash import FlashAttention4
from seqloom.attention.masks import MaskRule
from seqloom.attention.tiles import ZigzagChunks, gather_schedule, packed_tiles, ring_tiles
from seqloom.cost import GroupShape
from seqloom.layout import Span
from seqloom.plan import Group, Method
from support.oracle import visible

CPU = torch.device("cpu")
PACKS = [(1,), (2, 1), (9,), (40,), (3, 17, 1, 8), (1,) * 12, (64, 33)]
MASKS = [(True, None), (False, None), (True, 1), (True, 2), (True, 7), (True, 30), (True, 1000)]


def group_of(lengths, ring):
    spans = [Span(document, 0, length) for document, length in enumerate(lengths)]
    return Group(tuple(range(ring)), 1, ring, tuple(reversed(spans)))


def chunks_of(lengths, ring, attention_chunk=None):
    return [ZigzagChunks.of(group_of(lengths, ring), index, attention_chunk) for index in range(ring)]


def tokens_of(chunks):
    """(document, position) of every row of an index, from the columns; an attention chunk is a document."""
    rows = {}
    for half in (0, 1):
        for document, (start, stop, row) in enumerate(
            zip(chunks.start[half].tolist(), chunks.stop[half].tolist(), chunks.row[half].tolist(), strict=True)
        ):
            rows |= {row + k: (document, start + k) for k in range(stop - start)}
    return [rows[row] for row in range(chunks.rows)]


def pairs(tiles, queries, keys):
    """Every (query token, key token) that the tiles compute, with repetition."""
    found = []
    for segments, q_rows, k_rows in tiles:
        for q_start, q_stop, k_start, k_stop, offset in segments.rows():
            known = len(found)
            for a in range(q_stop - q_start):
                for b in range(k_stop - k_start):
                    behind = a + offset - b
                    if (not segments.causal or behind >= 0) and (segments.window is None or behind < segments.window):
                        found.append((queries[q_rows.start + q_start + a], keys[k_rows.start + k_start + b]))
            used_queries, used_keys = (set(side) for side in zip(*found[known:], strict=True))
            assert (len(used_queries), len(used_keys)) == (q_stop - q_start, k_stop - k_start), "no row for nothing"
    return found


def expected_pairs(lengths, queries, causal, window, attention_chunk=None):
    """Every pair that the mask shows to these queries; attention chunks are numbered through all documents."""
    size = attention_chunk or max(lengths)
    numbered = [(document, start) for document, length in enumerate(lengths) for start in range(0, length, size)]
    found = set()
    for number, position in queries:
        document, start = numbered[number]
        assert start <= position < start + size
        keys = torch.nonzero(visible(lengths[document], causal, window, attention_chunk)[position]).flatten().tolist()
        found |= {((number, position), (number, key)) for key in keys}
    return found


@pytest.mark.parametrize("ring", [2, 3, 5])
@pytest.mark.parametrize("lengths", PACKS)
def test_chunks_are_the_spans_of_the_plan(lengths, ring):
    group = group_of(lengths, ring)
    for index in range(ring):
        chunks = ZigzagChunks.of(group, index)
        spans = sorted(group.ring_spans(index))
        expected = [(span.document, position) for span in spans for position in range(span.start, span.stop)]
        assert tokens_of(chunks) == expected
        assert tokens_of(chunks.merged()) == expected


@pytest.mark.parametrize("attention_chunk", [1, 4, 7, 24, 100])
@pytest.mark.parametrize("lengths", PACKS)
def test_attention_chunks_keep_the_order_of_rows(lengths, attention_chunk):
    for index, chunks in enumerate(chunks_of(lengths, 3, attention_chunk)):
        spans = sorted(group_of(lengths, 3).ring_spans(index))
        assert [position for _, position in tokens_of(chunks)] == [
            position for span in spans for position in range(span.start, span.stop)
        ]


CHUNKED = [(*mask, None) for mask in MASKS] + [(*MASKS[k], chunk) for k in (0, 1, 4) for chunk in (1, 4, 24)]


@pytest.mark.parametrize("ring", [2, 3, 5])
@pytest.mark.parametrize("causal, window, attention_chunk", CHUNKED)
@pytest.mark.parametrize("lengths", PACKS)
def test_steps_of_a_ring_compute_every_visible_pair_once(lengths, causal, window, attention_chunk, ring):
    chunks = chunks_of(lengths, ring, attention_chunk)
    for own in chunks:
        found = []
        for other in chunks:
            tiles = ring_tiles(own, other, causal=causal, window=window)
            found += pairs(tiles, tokens_of(own), tokens_of(other))
            if other is own and own.rows:
                assert tiles[0].queries == tiles[0].keys == slice(0, own.rows), "accumulators start from the first tile"
        assert len(found) == len(set(found))
        assert set(found) == expected_pairs(lengths, tokens_of(own), causal, window, attention_chunk)


@pytest.mark.parametrize("ring", [2, 3, 5])
@pytest.mark.parametrize("causal, window, attention_chunk", CHUNKED)
@pytest.mark.parametrize("lengths", PACKS)
def test_a_gather_fetches_what_is_visible_and_computes_it_once(lengths, causal, window, attention_chunk, ring):
    chunks = chunks_of(lengths, ring, attention_chunk)
    schedules = [gather_schedule(chunks, index, CPU, causal=causal, window=window) for index in range(ring)]
    for index, schedule in enumerate(schedules):
        arrived = []
        for source, other in enumerate(schedules):
            rows = np.arange(chunks[source].rows)[other.sends[index]]
            assert len(rows) == schedule.counts[source]
            arrived += [tokens_of(chunks[source])[row] for row in rows]
        keys = arrived if schedule.order is None else [arrived[row] for row in schedule.order]
        expected = expected_pairs(lengths, tokens_of(chunks[index]), causal, window, attention_chunk)
        assert keys == sorted({key for _, key in expected}), "exactly the visible keys, sorted"
        found = pairs(schedule.tiles, tokens_of(chunks[index]), keys)
        assert len(found) == len(set(found))
        assert set(found) == expected


PREFIXES = [(1, None), (2, 3), (5, None), (9, 4), (40, None), (40, 7), (0, None)]


def prefixes_of(lengths, most):
    """A prefix for every other document."""
    return [min(most, length) if document % 2 == 0 else 0 for document, length in enumerate(lengths)]


def expected_with_prefixes(lengths, queries, window, prefixes):
    found = set()
    for document, position in queries:
        seen = visible(lengths[document], True, window, prefix=prefixes[document])[position]
        found |= {((document, position), (document, key)) for key in torch.nonzero(seen).flatten().tolist()}
    return found


@pytest.mark.parametrize("ring", [2, 3, 5])
@pytest.mark.parametrize("most, window", PREFIXES)
@pytest.mark.parametrize("lengths", PACKS)
def test_tiles_with_prefixes_compute_every_visible_pair_once(lengths, most, window, ring):
    chunks, prefixes = chunks_of(lengths, ring), prefixes_of(lengths, most)
    rule = {"causal": True, "window": window, "prefix": np.array(prefixes)}
    documents = [(document, position) for document, length in enumerate(lengths) for position in range(length)]
    for own in chunks:
        tokens = tokens_of(own)
        expected = expected_with_prefixes(lengths, tokens, window, prefixes)
        around = [pair for each in chunks for pair in pairs(ring_tiles(own, each, **rule), tokens, tokens_of(each))]
        held = {document for document, _ in tokens}
        keys = [token for token in documents if token[0] in held]
        gathered = pairs(gather_schedule(chunks, own.index, CPU, **rule).tiles, tokens, keys)
        for found in (around, gathered):
            assert len(found) == len(set(found)) and set(found) == expected


@pytest.mark.parametrize("most, window", PREFIXES)
@pytest.mark.parametrize("lengths", PACKS)
def test_documents_of_one_rank_with_prefixes(lengths, most, window):
    spans = [Span(document, 0, length) for document, length in enumerate(lengths)]
    prefixes = prefixes_of(lengths, most)
    tokens = [(document, position) for document, length in enumerate(lengths) for position in range(length)]
    tiles = packed_tiles(spans, MaskRule(window=window, prefixes=dict(enumerate(prefixes))))
    found = pairs(tiles, tokens, tokens)
    assert len(found) == len(set(found))
    assert set(found) == expected_with_prefixes(lengths, tokens, window, prefixes)
    assert all(FlashAttention4.capabilities.supports(tile.segments).all() for tile in tiles), "a square, and the rest"


def test_causal_rings_share_the_work_evenly():
    """Zigzag: every index computes the same area, and together half of the square."""
    ring, length = 4, 64
    chunks = [ZigzagChunks.of(group_of((length,), ring), index) for index in range(ring)]
    areas = [
        sum(
            int(tile.segments.area().sum())
            for other in chunks
            for tile in ring_tiles(own, other, causal=True, window=None)
        )
        for own in chunks
    ]
    assert set(areas) == {length * (length + 1) // 2 // ring}


def test_only_rows_that_do_something_are_handed_over():
    """High queries alone see the keys of a later index: the low ones are not even passed."""
    first, second = (ZigzagChunks.of(group_of((40,), 2), index) for index in (0, 1))
    (earlier,) = ring_tiles(first, second, causal=True, window=None)
    assert (earlier.queries, earlier.keys) == (slice(10, 20), slice(0, 20))
    (later,) = ring_tiles(second, first, causal=True, window=None)
    assert (later.queries, later.keys) == (slice(0, 20), slice(0, 10))


def test_a_window_skips_steps_and_fetches_neighbours_only():
    """One document of 64 in 8 chunks of 8: a window of 4 reaches the chunk before, no further."""
    chunks = [ZigzagChunks.of(group_of((64,), 4), index) for index in range(4)]
    busy = [[bool(ring_tiles(own, other, causal=True, window=4)) for other in chunks] for own in chunks]
    neighbours = [[abs(own - other) <= 1 for other in range(4)] for own in range(4)]
    assert busy == neighbours
    schedule = gather_schedule(chunks, 1, CPU, causal=True, window=4)  # chunks 1 and 6, behind chunks 0 and 5
    assert schedule.counts == (3, 16, 3, 0)
    assert len(schedule.tiles) == 1, "no key is seen by both chunks"


def test_an_attention_chunk_lies_on_few_indices():
    """One document of 64 in 8 chunks of 8, in attention chunks of 16: each is two chunks that follow each other."""
    chunks = chunks_of((64,), 4, 16)
    busy = [[bool(ring_tiles(own, other, causal=True, window=None)) for other in chunks] for own in chunks]
    assert busy == [[own // 2 == other // 2 for other in range(4)] for own in range(4)]
    assert gather_schedule(chunks, 1, CPU, causal=True, window=None).counts == (8, 16, 0, 0)


@pytest.mark.parametrize("ring", [1, 2, 3, 4, 8])
def test_a_document_takes_as_many_kernel_calls_as_the_cost_model_counts(ring):
    group = group_of((64, 96, 80), ring)
    chunks = [ZigzagChunks.of(group, index) for index in range(ring)]
    gathers = [gather_schedule(chunks, index, CPU, causal=True, window=None).tiles for index in range(ring)]
    rings = [[t for keys in chunks for t in ring_tiles(own, keys, causal=True, window=None)] for own in chunks]
    for method, tiles in ((Method.GATHER, gathers), (Method.RING, rings)):
        calls = [sum(len(list(tile.segments.rows())) for tile in own) for own in tiles]
        assert max(calls) == len(group.spans) * GroupShape(1, ring, method).kernel_calls
