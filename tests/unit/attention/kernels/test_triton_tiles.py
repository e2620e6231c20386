"""Tiles on the host: every visible pair is in exactly one tile, full blocks need no mask."""

import numpy as np
import pytest
import torch

from seqloom.attention.kernels.triton_attention import Config, Rows, Tiles, cut, default_config, parallel_kv_heads
from seqloom.attention.masks import Segments

PACK = [5, 3, 1, 40, 7, 9, 70, 1, 64, 200]
SEGMENTS = [
    Segments.packed(PACK),
    Segments.packed(PACK, causal=False),
    Segments.packed(PACK, window=6),
    Segments.packed(PACK, window=50),
    Segments.of([(3, 40, 5, 30, -5), (50, 60, 31, 80, 39), (60, 64, 80, 84, 2)], window=9),
    Segments.of([(0, 40, 40, 90, 0), (40, 90, 0, 40, 20)]),
]


def choose(length):
    return Config(32, 16, 4, 2, join=True) if length <= 20 else Config(32, 16, 4, 2)


def ends_of(rows):
    """low and high of every row up to the last one, 0 and 0 for those in no segment."""
    ends = np.zeros((rows.stop.max(), 2), dtype=int)
    for segment, (start, stop) in enumerate(zip(rows.start, rows.stop, strict=True)):
        row = np.arange(start, stop)
        ends[start:stop] = np.stack(rows.ends(np.full_like(row, segment), row), axis=1)
    return ends


@pytest.mark.parametrize("side", [Rows.queries, Rows.keys], ids=["queries", "keys"])
@pytest.mark.parametrize("segments", SEGMENTS)
def test_tiles_hold_every_visible_pair_once(segments, side):
    rows = side(segments)
    ends = ends_of(rows)
    seen = np.zeros(len(ends), dtype=int)
    for tiles in cut(rows, choose):
        for row, stop, low, high, full_low, full_high, *_ in tiles.table.tolist():
            assert 0 < stop - row <= 32
            seen[row:stop] += 1
            assert low <= full_low <= full_high <= max(high, low)
            assert (full_low - low) % 16 == 0 == (full_high - full_low) % 16
            for first, after in ends[row:stop]:
                assert first == after or (low <= first and after <= high)
                assert full_low == full_high or (first <= full_low and full_high <= after)
    covered = np.zeros(len(ends), dtype=int)
    for start, stop in zip(rows.start, rows.stop, strict=True):
        covered[start:stop] += 1
    assert np.array_equal(seen, covered)


def test_ends_of_rows_say_what_the_mask_says():
    segments = SEGMENTS[4]
    queries, keys = ends_of(Rows.queries(segments)), ends_of(Rows.keys(segments))
    pairs = {(row, column) for row, (low, high) in enumerate(queries.tolist()) for column in range(low, high)}
    assert pairs == {(column, row) for row, (low, high) in enumerate(keys.tolist()) for column in range(low, high)}
    table = (segments.q_start, segments.q_stop, segments.k_start, segments.k_stop, segments.offset)
    assert pairs == {
        (q_start + a, k_start + b)
        for q_start, q_stop, k_start, k_stop, offset in zip(*(column.tolist() for column in table), strict=True)
        for a in range(q_stop - q_start)
        for b in range(k_stop - k_start)
        if 0 <= a + offset - b < 9
    }


def test_documents_of_one_tile_each_cost_their_own_blocks():
    [tiles] = cut(Rows.queries(Segments.packed([32] * 5)), choose)
    assert len(tiles.table) == 5
    assert (tiles.table[:, 3] - tiles.table[:, 2]).max() == 32


def test_tiny_neighbours_share_a_tile_and_strangers_do_not():
    [tiles] = cut(Rows.queries(Segments.packed([4] * 16)), choose)
    assert len(tiles.table) == 2
    [tiles] = cut(Rows.queries(Segments.of([(0, 4, 0, 4, 0), (5, 9, 4, 8, 0), (9, 13, 9, 13, 0)])), choose)
    assert len(tiles.table) == 3


def test_few_queries_of_many_keys_do_not_share_a_tile():
    rows = Rows.queries(Segments.of([(0, 1, 0, 500, 499), (1, 2, 500, 1000, 499)]))
    assert sum(len(tiles.table) for tiles in cut(rows, choose)) == 2


def test_long_segments_and_their_late_tiles_come_first():
    [tiles] = cut(Rows.queries(Segments.packed([64, 96, 96])), choose)
    assert tiles.table[:, 0].tolist() == [128, 96, 64, 224, 192, 160, 32, 0]


@pytest.mark.parametrize(("longest", "side"), [(512, 32), (8192, 4), (131072, 1)])
def test_heads_run_side_by_side_while_their_keys_fit_the_cache(longest, side):
    tiles = Tiles(np.zeros((1, 8), dtype=np.int32), longest, Config(128, 64, 8, 3))
    assert parallel_kv_heads(tiles, 32, 512) == side


def test_no_segments_give_no_tiles():
    rows = Rows.queries(Segments.packed([]))
    assert cut(rows, choose) == []
    assert rows.table().shape == (0, 8)


@pytest.mark.parametrize("kind", ["forward", "dq", "dkdv"])
@pytest.mark.parametrize("dim", [16, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_default_blocks_are_what_triton_can_multiply(kind, dim, dtype):
    for length in (1, 64, 65, 1000, 100_000):
        config = default_config(kind, dim, dtype, length)
        assert min(config.rows, config.columns) >= 16
        assert config.rows & (config.rows - 1) == 0 == config.columns & (config.columns - 1)
