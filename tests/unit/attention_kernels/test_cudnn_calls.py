"""Rows that no segment holds."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqloom.attention.kernels.cudnn import Gaps


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
    Gaps.of(start, stop, torch.device("cpu")).fill(tensor, 0.0)
    inside = {row for low, high in segments for row in range(low, high)}
    assert tensor[:, 0].tolist() == [float(row in inside) for row in range(len(tensor))]
