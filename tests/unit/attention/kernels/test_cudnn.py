"""The grid of shapes: small, closed, and every segment on it once."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqloom.attention.kernels.cudnn import (
    DENSE_FROM,
    DENSE_STEP,
    DENSE_TO,
    MAX_PACKED_TOKENS,
    UncoveredRows,
    all_shapes,
    dense_lengths,
    plan_calls,
)
from seqloom.attention.masks import Segments
from support.segment_cases import segment_cases

LENGTHS = st.lists(st.integers(1, 200) | st.integers(1, 20_000) | st.integers(15_000, 140_000), min_size=1, max_size=40)


def test_the_grid_is_small():
    assert len(all_shapes(131_072)) <= 256
    assert len(set(all_shapes(131_072))) == len(all_shapes(131_072))
    assert len(all_shapes(2_048)) < 60
    assert len(all_shapes(131_072, 4_096)) < 40


def test_dense_lengths_are_near_each_other():
    lengths = np.array(dense_lengths())
    assert (lengths[0], lengths[-1]) == (DENSE_FROM, DENSE_TO)
    assert (lengths % 128 == 0).all() and (lengths[1:] > lengths[:-1]).all()
    assert (lengths[1:] / lengths[:-1]).max() <= DENSE_STEP


@given(LENGTHS)
def test_documents_are_on_the_grid_once_and_the_grid_is_closed(lengths):
    calls = plan_calls(Segments.packed(lengths))
    placed = np.concatenate([call.segments for call in calls])
    assert sorted(placed.tolist()) == list(range(len(lengths)))
    assert {call.shape for call in calls} <= set(all_shapes(max(lengths)))
    assert {call.shape for call in calls} <= set(all_shapes(140_000, sum(lengths)))
    for call in calls:
        longest = max(lengths[index] for index in call.segments)
        assert len(call.segments) <= call.shape.batch <= 4 / 3 * len(call.segments)
        assert longest <= call.shape.q_length == call.shape.k_length
        assert call.shape.batch == 1 or call.shape.batch * call.shape.q_length <= MAX_PACKED_TOKENS
        if call.shape.packed:
            assert call.shape.q_length < 2 * max(longest, 65)
        else:
            assert call.shape.q_length <= longest * DENSE_STEP + 128


@given(LENGTHS)
def test_dense_calls_come_first_and_in_row_order(lengths):
    segments = Segments.packed(lengths)
    calls = plan_calls(segments)
    packed = [call.shape.packed for call in calls]
    assert packed == sorted(packed)
    starts = [int(segments.q_start[call.segments[0]]) for call in calls if not call.shape.packed]
    assert starts == sorted(starts)


@given(segment_cases(longest=40, windows=False))
def test_tiles_and_squares_are_told_apart(case):
    fits = case.segments.tiles() | ((case.segments.offset == 0) & (case.segments.q_len == case.segments.k_len))
    segments = case.segments.select(fits)
    for call in plan_calls(segments):
        tiles = segments.tiles()[call.segments]
        assert (tiles == (not call.shape.causal)).all()


def test_a_tile_is_dense_only_with_exactly_its_keys():
    tile = Segments.of([(0, 8_192, 0, 4_096, 9_000)])
    [call] = plan_calls(tile)
    assert (call.shape.q_length, call.shape.k_length, call.shape.packed) == (8_192, 4_096, False)
    [call] = plan_calls(Segments.of([(0, 8_191, 0, 4_095, 9_000)]))
    assert (call.shape.q_length, call.shape.k_length, call.shape.packed) == (8_192, 4_096, True)
    [call] = plan_calls(Segments.packed([8_192]))
    assert not call.shape.packed
    [call] = plan_calls(Segments.packed([8_191]))
    assert call.shape.packed


def test_keys_in_another_order_than_queries_allow_no_surplus():
    swapped = Segments.of([(0, 20_000, 16_384, 36_384, 0), (20_000, 36_384, 0, 16_384, 0)])
    shapes = {call.shape.q_length: call.shape.packed for call in plan_calls(swapped)}
    assert shapes == {32_768: True, 16_384: False}


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=12), st.integers(0, 4), st.randoms()
)
def test_exactly_the_rows_outside_all_segments_are_filled(drawn, behind, random):
    place, segments = 0, []
    for gap, length in drawn:
        segments.append((place + gap, place + gap + length))
        place = segments[-1][1]
    random.shuffle(segments)
    start, stop = np.array(segments).T
    tensor = torch.ones(place + behind, 2)
    UncoveredRows.of(start, stop, torch.device("cpu")).fill(tensor, 0.0)
    inside = {row for low, high in segments for row in range(low, high)}
    assert tensor[:, 0].tolist() == [float(row in inside) for row in range(len(tensor))]
