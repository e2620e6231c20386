"""Cuts of equal time: the published table, and what must hold of every cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqloom.errors import PlanError
from seqloom.planners.pipeline.long_sequences import equal_cuts
from support.published_cuts import cuts_from_back, quadratic_cuts

VOCABULARY = 50304
MODELS = {"2.7B": (32, 2560, 32), "7B": (32, 4096, 32), "13B": (40, 5120, 40), "30B": (64, 6144, 64)}
"""Layers, hidden size, heads."""
TABLE = [
    ("2.7B", 16384, [5272, 4232, 3640, 3240]),
    ("2.7B", 32768, [11944, 8264, 6736, 5824]),
    ("7B", 32768, [11016, 8424, 7088, 6240]),
    ("7B", 65536, [25008, 16280, 13040, 11208]),
    ("7B", 131072, [55704, 30872, 24072, 20424]),
    ("13B", 65536, [24120, 16488, 13376, 11552]),
    ("30B", 65536, [23416, 16632, 13640, 11848]),
]


def weights(model):
    """Cost per token and per pair, as the published code counts them."""
    layers, hidden, heads = MODELS[model]
    linear = layers * (8 * hidden**2 + 4 * hidden * 4 * hidden) + 4 * hidden * VOCABULARY
    return linear, layers * heads * (4 * (hidden // heads) + 3)


def sizes(borders):
    return [end - begin for begin, end in pairwise(borders)]


@pytest.mark.parametrize(("model", "length", "pieces"), TABLE)
def test_the_table_of_seq1f1b_is_reproduced(model, length, pieces):
    linear, quadratic = weights(model)
    closed = quadratic_cuts(length, 4, linear, quadratic)
    assert sizes([(border + 4) // 8 * 8 for border in closed]) == pieces
    assert sizes(equal_cuts(length, 4, lambda x: 2 * linear * x + quadratic * x * x, multiple=8)) == pieces


@pytest.mark.parametrize(("model", "length", "pieces"), TABLE)
def test_from_the_back_every_piece_is_rounded_down(model, length, pieces):
    found = sizes(cuts_from_back(length, 4, *weights(model)))
    assert sum(found) == length
    assert all(size % 8 == 0 for size in found[1:])
    assert found[0] >= sizes(quadratic_cuts(length, 4, *weights(model)))[0]
    assert max(abs(a - b) for a, b in zip(found, pieces, strict=True)) <= 8 * 3


lengths = st.integers(1, 200_000)


@given(lengths, st.integers(1, 64), st.integers(1, 10**12), st.integers(0, 10**9))
def test_closed_form_and_bisection_agree(length, pieces, linear, quadratic):
    pieces = min(pieces, length)

    def twice(x):
        return 2 * linear * x + quadratic * x * x

    borders = quadratic_cuts(length, pieces, linear, quadratic)
    for i, border in enumerate(borders):  # the last token whose cost is at most its share
        assert twice(border) * pieces <= twice(length) * i
        assert i == pieces or twice(border + 1) * pieces > twice(length) * i
    found = equal_cuts(length, pieces, twice)
    if len(found) == len(borders):  # fewer where pieces would have no token
        assert found == borders


@given(lengths, st.integers(1, 64), st.integers(0, 50), st.sampled_from([1, 8, 64]), st.integers(1, 5000))
def test_every_cut_is_rounded_and_no_piece_is_too_short(length, pieces, bend, multiple, floor):
    pieces = min(pieces, length)
    borders = equal_cuts(length, pieces, lambda x: 1000 * x + bend * x * x // 100, multiple=multiple, floor=floor)
    assert borders[0] == 0
    assert borders[-1] == length
    assert len(borders) - 1 <= pieces
    assert all(border % multiple == 0 for border in borders[1:-1])
    assert len(borders) == 2 or min(sizes(borders)) >= floor


@given(lengths.filter(lambda n: n > 100), st.integers(2, 32), st.integers(0, 50))
def test_pieces_cost_the_same_but_for_one_token(length, pieces, bend):
    def cost(x):
        return 1000 * x + bend * x * x // 100

    borders = equal_cuts(length, pieces, cost)
    token = cost(length) - cost(length - 1) + 1
    each = [cost(end) - cost(begin) for begin, end in pairwise(borders)]
    assert max(each) - min(each) <= 2 * token


def test_no_cost_leaves_the_document_whole():
    assert equal_cuts(100, 4, lambda x: 0) == (0, 100)


@pytest.mark.parametrize("pieces", [0, 11])
def test_a_number_of_pieces_that_cannot_be_is_refused(pieces):
    with pytest.raises(PlanError, match="10 tokens cannot be cut into"):
        equal_cuts(10, pieces, lambda x: x)
