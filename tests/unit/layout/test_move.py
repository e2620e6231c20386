"""What lands where: once for every node, on those who want it, evenly."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.errors import PlanError
from seqloom.layout import Layout
from seqloom.layout.move import node_staging_layout, reshard_moves_of_rank
from seqloom.plan import Weight, compute_layout, optimiser_layout
from support.resharding import reshard_cases

EIGHT = [Weight("w", 8, 3, (0,))]


def whole_on(*ranks):
    return Layout.of([(rank, 0, 0, 8, 0, 3) for rank in ranks])


def cells(layout, rank, item, shape):
    """bool[rows, columns], what a rank has of an item."""
    found = np.zeros(shape, dtype=bool)
    for owner, number, start, stop, start2, stop2 in zip(*layout.columns(), strict=True):
        if (owner, number) == (rank, item):
            found[start:stop, start2:stop2] = True
    return found


def test_two_nodes_share_a_weight():
    landing = node_staging_layout(optimiser_layout(EIGHT, 4), whole_on(0, 1, 2, 3), 2)
    rows = [np.flatnonzero(cells(landing, rank, 0, (8, 3)).all(axis=1)).tolist() for rank in range(4)]
    assert rows == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 6, 7], [0, 1, 4, 5, 6, 7], [2, 3, 4, 5, 6, 7]]


@settings(max_examples=25)
@given(case=reshard_cases(), node_size=st.sampled_from((1, 2, 3, 4)))
def test_what_is_away_lands_once_in_a_node_on_those_who_want_it(case, node_size):
    source, target = optimiser_layout(case.weights, case.ranks), compute_layout(case.weights, case.pipelines)
    landing = node_staging_layout(source, target, node_size)
    for item, weight in enumerate(case.weights):
        shape = weight.rows, weight.columns
        has, wants, lands = (
            np.stack([cells(each, rank, item, shape) for rank in range(case.ranks)])
            for each in (source, target, landing)
        )
        assert not (lands & ~wants).any()
        for first in range(0, case.ranks, node_size):
            node = slice(first, first + node_size)
            owned, wanted = has[node].any(axis=0), wants[node].any(axis=0)
            assert (lands[node] == wants[node])[:, owned].all(), "owners in the node serve all"
            assert (lands[node].sum(axis=0)[~owned] == wanted[~owned]).all()


def test_shares_are_even():
    weights = [Weight("w", 64, 4, (0,)), Weight("v", 48, 1, (0,))]
    target = Layout.of(
        [(rank, k, 0, each.rows, 0, each.columns) for rank in (4, 5, 7) for k, each in enumerate(weights)]
    )
    landing = node_staging_layout(optimiser_layout(weights, 8), target, 4)
    away = [int(cells(landing, rank, 0, (64, 4))[:32].sum()) for rank in range(4, 8)]
    assert max(away) - min(away[:2] + away[3:]) <= 4 and away[2] == 0 and sum(away) == 128


@pytest.mark.parametrize(
    ("target", "node_size"),
    [(whole_on(0, 1, 2, 3), None), (whole_on(0, 1, 2, 3), 4), (whole_on(0, 2), 2), (Layout.empty(2), 2)],
    ids=["nodes are not known", "one node", "one rank of each", "nothing"],
)
def test_one_hop_is_enough(target, node_size):
    source = optimiser_layout(EIGHT, 4)
    assert [len(reshard_moves_of_rank(rank, source, target, node_size=node_size)) for rank in range(4)] == [1] * 4
    assert node_size is None or node_staging_layout(source, target, node_size) == target


def test_where_ranks_have_the_same_rows_there_is_one_hop():
    assert len(reshard_moves_of_rank(0, whole_on(0, 2), whole_on(0, 1, 2, 3), node_size=2)) == 1


def test_what_nobody_holds_is_refused():
    half = Layout.of([(0, 0, 0, 4, 0, 3)])
    with pytest.raises(PlanError, match="which nobody holds"):
        reshard_moves_of_rank(2, half, whole_on(2, 3), node_size=2)
