"""Weights as boxes: who keeps what, who computes with what, what moves together."""

import pytest
import torch

from seqloom.errors import PlanError
from seqloom.layout import Layout
from seqloom.layout.move import move_of_rank
from seqloom.plan import Pipeline, Stage, Weight, compute_layout, optimiser_layout
from seqloom.plan.parameter_layout import dp_groups, layer_buckets


def boxes(layout, rank, item=0):
    columns = (column.tolist() for column in layout.restrict([rank]).columns())
    return [tuple(box) for _, own, *box in zip(*columns, strict=True) if own == item]


def pipeline(*stages):
    return Pipeline(tuple(Stage(*stage) for stage in stages), (), ())


def test_the_optimiser_keeps_torchs_chunks():
    for rows in (1, 3, 8, 11):
        layout, chunks = optimiser_layout([Weight("w", rows, 2, (0,))], 4), torch.arange(rows).chunk(4)
        for rank in range(4):
            own = [(int(chunks[rank][0]), int(chunks[rank][-1]) + 1, 0, 2)] if rank < len(chunks) else []
            assert boxes(layout, rank) == own


def test_the_example_of_the_docstring():
    weights = [Weight("a", 8, 1, (0,), 0), Weight("b", 8, 1, (1,), 0)]
    layout = compute_layout(weights, [pipeline(((0,), (0, 1)), ((1,), (1, 2))), pipeline(((2, 3), (0, 2), 2))])
    assert [boxes(layout, rank) for rank in range(4)] == [[(0, 8, 0, 1)], [], [(0, 4, 0, 1)], [(4, 8, 0, 1)]]
    assert [boxes(layout, rank, 1) for rank in range(4)] == [[], [(0, 8, 0, 1)], [(0, 4, 0, 1)], [(4, 8, 0, 1)]]
    assert [boxes(optimiser_layout(weights, 4), rank) for rank in range(4)] == [
        [(2 * rank, 2 * rank + 2, 0, 1)] for rank in range(4)
    ]


def test_a_column_shares_the_rows_between_passes():
    weights = [Weight("q", 12, 4, (0,), 0), Weight("o", 3, 4, (0,), 1), Weight("norm", 5, 1, (0,))]
    only = pipeline(((4, 5, 6, 7), (0, 1), 2))
    layout = compute_layout(weights, [only], {(0, 0)})
    assert dp_groups((4, 5, 6, 7), 2) == ((4, 6), (5, 7))
    assert [boxes(layout, rank) for rank in (4, 6, 5, 7)] == [
        [(0, 3, 0, 4)], [(3, 6, 0, 4)], [(6, 9, 0, 4)], [(9, 12, 0, 4)]
    ]  # fmt: skip
    assert [boxes(layout, rank, 1) for rank in (4, 6, 5, 7)] == [
        [(0, 2, 0, 2)], [(2, 3, 0, 2)], [(0, 2, 2, 4)], [(2, 3, 2, 4)]
    ]  # fmt: skip
    assert [boxes(layout, rank, 2) for rank in (4, 6, 5, 7)] == [[(0, 3, 0, 1)], [(3, 5, 0, 1)]] * 2


def test_an_ep_group_divides_experts():
    """Ranks 4 and 6 have the first half of the experts, 5 and 7 the second; between passes each an even share of it."""
    weights = [Weight("experts", 8, 6, (0,), 0, experts=True), Weight("norm", 4, 1, (0,))]
    only = Pipeline((Stage((4, 5, 6, 7), (0, 1), expert=2),), (), ())
    halves = [[(0, 4, 0, 6)], [(4, 8, 0, 6)]]
    assert [boxes(compute_layout(weights, [only]), rank) for rank in (4, 5, 6, 7)] == halves * 2
    shares = compute_layout(weights, [only], {(0, 0)})
    assert [boxes(shares, rank) for rank in (4, 6, 5, 7)] == [[(k, k + 2, 0, 6)] for k in (0, 2, 4, 6)]
    assert [boxes(shares, rank, 1) for rank in (4, 5, 6, 7)] == [[(k, k + 1, 0, 1)] for k in range(4)]
    with pytest.raises(PlanError, match=r"8 experts, a stage with expert degree 3 .* divides 8"):
        compute_layout(weights, [Pipeline((Stage((0, 1, 2), (0, 1), expert=3),), (), ())])


def test_what_another_stage_of_the_ranks_keeps_is_kept_whole():
    weights = [Weight("table", 6, 1, ("embedding", "head")), Weight("norm", 6, 1, ("head",))]
    v = pipeline(((0, 1), (0, 1)), ((2, 3), (1, 2)), ((0, 1), (2, 3)))
    layout = compute_layout(weights, [v], {(0, 2)})
    assert boxes(layout, 0) == [(0, 6, 0, 1)], "stage 0 keeps the table for the step"
    assert boxes(layout, 0, 1) == [(0, 3, 0, 1)]
    assert boxes(compute_layout(weights, [v], {(0, 0), (0, 2)}), 1) == [(3, 6, 0, 1)]


def test_bundles_follow_the_model():
    weights = [
        Weight("norm", 4, 1, ("head",)),
        Weight("2.q", 4, 4, (2,)),
        Weight("table", 9, 4, ("head", "embedding")),
        Weight("0.q", 4, 4, (0,)),
        Weight("shared", 4, 4, (2, 0)),
    ]
    assert layer_buckets(weights) == ((2,), (3, 4), (), (1,), (0,))
    assert layer_buckets([]) == ((), ())


def test_no_pipelines_ask_for_nothing():
    weights = [Weight("w", 3, 2, (0,))]
    layout = compute_layout(weights, [])
    assert len(layout) == 0
    assert len(move_of_rank(0, optimiser_layout(weights, 2), layout)) == 0


@pytest.mark.parametrize(
    ("cut", "said"), [(0, "w has 6 rows, .* tensor degree 4"), (1, "w has 10 columns, .* tensor degree 4")]
)
def test_a_cut_that_is_not_even_is_refused(cut, said):
    with pytest.raises(PlanError, match=said):
        compute_layout([Weight("w", 6, 10, (0,), cut)], [pipeline(((0, 1, 2, 3), (0, 1), 4))])


def test_one_pp_rank_that_cuts_a_weight_in_two_ways_is_refused():
    both = pipeline(((0, 1), (0, 1), 1), ((0, 1), (1, 2), 2))
    with pytest.raises(PlanError, match="tensor degrees 1 and 2"):
        compute_layout([Weight("w", 6, 10, (0, 1), 0)], [both])
    assert len(compute_layout([Weight("w", 6, 10, (0, 1))], [both])) == 2


def test_a_weight_without_a_home_is_refused():
    with pytest.raises(PlanError, match="lost has no home"):
        layer_buckets([Weight("lost", 2, 2, ())])


def test_a_target_beyond_the_source_is_refused_by_the_rank_that_lacks_it():
    source, target = Layout.of([(0, 0, 0, 4, 0, 2)]), Layout.of([(1, 0, 2, 6, 0, 2)])
    with pytest.raises(PlanError, match=r"rank 1 shall receive item 0 \[4:6\)"):
        move_of_rank(1, source, target)
    assert len(move_of_rank(0, source, target)) == 1
