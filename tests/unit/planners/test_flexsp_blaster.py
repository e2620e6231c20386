"""The blaster's cut against all cuts there are."""

from itertools import combinations, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from seqloom.planners.published.flexsp.planner import cut, fewest_chunks

small = st.lists(st.integers(1, 30), min_size=1, max_size=9)


def every_cut(n, count):
    for inner in combinations(range(1, n), count - 1):
        yield list(pairwise((0, *inner, n)))


@given(small, st.data())
def test_the_largest_chunk_is_as_small_as_can_be(sizes, data):
    tokens = np.sort(sizes)[::-1]
    count = data.draw(st.integers(1, len(tokens)))
    chunks = cut(tokens, count)
    assert len(chunks) == count and all(len(chunk) for chunk in chunks)
    assert np.concatenate(chunks).tolist() == list(range(len(tokens)))
    best = min(max(tokens[a:b].sum() for a, b in edges) for edges in every_cut(len(tokens), count))
    assert max(tokens[chunk].sum() for chunk in chunks) == best


@given(small, st.data())
def test_of_equal_cuts_the_last_chunk_is_longest(sizes, data):
    tokens = np.sort(sizes)[::-1]
    count = data.draw(st.integers(1, len(tokens)))
    table = {0: [0] + [10**9] * len(tokens)}
    for chunk in range(1, count + 1):  # the published recurrence, first of equals
        row, found = [10**9], []
        for k in range(1, len(tokens) + 1):
            row.append(min((max(table[chunk - 1][j], tokens[j:k].sum()) for j in range(chunk - 1, k)), default=10**9))
            found.append(row[-1])
        table[chunk] = row
    end, edges = len(tokens), []
    for chunk in range(count, 0, -1):
        options = [max(table[chunk - 1][j], tokens[j:end].sum()) for j in range(chunk - 1, end)]
        start = chunk - 1 + int(np.argmin(options))
        edges.append((start, end))
        end = start
    assert [(int(chunk[0]), int(chunk[-1]) + 1) for chunk in cut(tokens, count)] == edges[::-1]


def test_fewest_chunks_stay_below_the_capacity():
    tokens = np.array([9, 5, 5, 4, 1])
    assert fewest_chunks(tokens, 100) == 1
    assert fewest_chunks(tokens, 24) == 2  # one chunk would fill it exactly
    assert fewest_chunks(tokens, 10) == 4
    assert fewest_chunks(np.array([10, 10]), 10) == 2  # a document may fill it: it cannot be cut
