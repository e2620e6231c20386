"""Capabilities of kernels: what they refuse, with the rule and legal values."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqloom.attention.kernels.interface import AttentionShape, Capabilities, device_rows
from seqloom.attention.masks import Segments
from support.segment_cases import Case, segment_cases, visible_pairs

BASE = {
    "name": "some",
    "devices": ("cuda",),
    "dtypes": (torch.bfloat16, torch.float16),
    "max_dim": 128,
    "dim_multiple": 8,
}
SQUARES = Capabilities(**BASE, windows=False, offsets=False)
PREFIXES = Capabilities(**BASE, offsets=False, prefixes=True)
SHAPE = {"heads": 4, "kv_heads": 4, "dim": 64, "dtype": torch.bfloat16, "device": torch.device("cuda"), "scale": 1.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device": torch.device("cpu")}, "some: device cpu; it runs on cuda"),
        ({"dtype": torch.float32}, "some: dtype float32; it takes bfloat16 or float16"),
        ({"dim": 100}, "some: head dim 100; it takes a multiple of 8, at most 128"),
        ({"dim": 136}, "some: head dim 136; it takes a multiple of 8, at most 128"),
        ({"kv_heads": 3}, "some: 3 kv heads for 4 heads; kv heads must divide the heads"),
    ],
)
def test_a_shape_is_refused_with_the_rule(change, message):
    assert SQUARES.unsupported(Segments.packed([4]), AttentionShape(**SHAPE | change)) == message


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        (Segments.packed([4, 9], window=5), "some: window 5 over 9 keys; it takes no window"),
        (Segments.of([(0, 3, 0, 3, 0), (3, 5, 3, 9, 4)]), "some: 2 queries on 6 keys at offset 4; it takes squares"),
        (Segments.of([(0, 3, 0, 3, 1)]), "some: 3 queries on 3 keys at offset 1; it takes squares"),
    ],
)
def test_segments_are_refused_with_the_rule(segments, message):
    unsupported = SQUARES.unsupported(segments, AttentionShape(**SHAPE))
    assert unsupported is not None and unsupported.startswith(message)


@pytest.mark.parametrize(
    "segments",
    [
        Segments.packed([4, 9]),
        Segments.packed([4, 9], causal=False),
        Segments.packed([4, 9], window=9),
        Segments.of([(0, 3, 0, 7, 6)]),
        Segments.of([(0, 3, 0, 7, 0)], causal=False),
        Segments.of([]),
    ],
)
def test_squares_and_segments_without_mask_are_taken(segments):
    assert SQUARES.unsupported(segments, AttentionShape(**SHAPE)) is None


def test_prefixes_are_a_capability_of_their_own():
    piece = Segments.of([(0, 2, 0, 6, 4)])
    assert SQUARES.unsupported(piece, AttentionShape(**SHAPE)) is not None
    assert PREFIXES.unsupported(piece, AttentionShape(**SHAPE)) is None
    other = PREFIXES.unsupported(Segments.of([(0, 2, 0, 6, 3)]), AttentionShape(**SHAPE))
    assert other is not None and other.endswith("segments with offset = keys - queries")
    assert PREFIXES.unsupported(Segments.of([(0, 6, 0, 2, -4)]), AttentionShape(**SHAPE)) is not None


@given(case=segment_cases())
def test_what_segments_say_of_themselves(case):
    segments = case.segments
    for index in range(len(segments)):
        one = segments.select(np.array([index]))
        pairs = visible_pairs(Case(one, case.q_rows, case.k_rows))
        q_start, q_stop, k_start, k_stop, _ = next(one.rows())
        tile = pairs[q_start:q_stop, k_start:k_stop]
        assert segments.area()[index] == pairs.sum()
        assert segments.unmasked()[index] == bool(tile.all())
        free = Segments.of(one.rows(), causal=segments.causal)
        assert segments.windowed()[index] == bool((visible_pairs(case._replace(segments=free)) != pairs).any())


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=5))
def test_rows_of_intervals(steps):
    start, stop, end = [], [], 0
    for gap, length in steps:
        start.append(end + gap)
        stop.append(end := start[-1] + length)
    rows = device_rows(np.array(start), np.array(stop), torch.device("cpu"))
    expected = [row for low, high in zip(start, stop, strict=True) for row in range(low, high)]
    assert torch.arange(end)[rows].tolist() == expected
    assert isinstance(rows, slice) == all(gap == 0 for gap, _ in steps[1:])
