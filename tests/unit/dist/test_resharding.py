"""Resharding: orders of sums, memory, what is in flight at once, refusals."""

from functools import partial

import pytest
import torch

from seqloom.dist import Resharder, SingleRankTransport, run_ranks
from seqloom.dist.resharding import boxes_of, index_buckets
from seqloom.errors import SeqloomError
from seqloom.layout import Layout
from seqloom.layout.move import move_of_rank
from seqloom.plan import Weight, optimiser_layout

WEIGHTS = [Weight("a", 8, 3, (0,)), Weight("b", 4, 1, (1,)), Weight("c", 6, 5, (1,))]


def whole_on(*ranks, weights=WEIGHTS):
    return Layout.of([(rank, k, 0, each.rows, 0, each.columns) for rank in ranks for k, each in enumerate(weights)])


def random_like(resharder, boxes, seed):
    random = torch.Generator().manual_seed(seed)
    return {weight: torch.randn(box.rows, box.columns, generator=random) for weight, box in boxes.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_sums_are_added_in_rank_order_in_float32_or_wider(dtype):
    def body(transport):
        resharder = Resharder(WEIGHTS, optimiser_layout(WEIGHTS, 4), whole_on(0, 1, 2, 3), transport, device="cpu")
        given = {
            weight: each.to(dtype) for weight, each in random_like(resharder, resharder.target, transport.rank).items()
        }
        return given[0], resharder.start_reduce(1, given, dtype).wait()[0]

    wide = torch.promote_types(dtype, torch.float32)
    results = run_ranks(4, body)
    total = results[0][0].to(wide)
    for given, _ in results[1:]:
        total = total + given.to(wide)
    assert torch.equal(torch.cat([own for _, own in results]), total)
    assert results[0][1].dtype == wide


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_node_adds_up_before_its_sum_crosses(dtype):
    """What an owner's own node has comes in single parts, of the other node one sum, which is not rounded again."""

    def body(transport):
        layouts = optimiser_layout(WEIGHTS, 4), whole_on(0, 1, 2, 3)
        resharder = Resharder(WEIGHTS, *layouts, transport, device="cpu", node_size=2)
        given = {
            weight: each.to(dtype) for weight, each in random_like(resharder, resharder.target, transport.rank).items()
        }
        before = given[0].clone()
        return before, resharder.start_reduce(1, given, dtype).wait()[0]

    results = run_ranks(4, body, strict=True)
    a, b, c, d = (given.to(torch.promote_types(dtype, torch.float32)) for given, _ in results)
    first, second = a + b + (c + d), (a + b) + c + d
    assert torch.equal(torch.cat([own for _, own in results]), torch.cat((first[:4], second[4:])))


def test_second_hops_begin_in_the_order_of_the_first():
    """Ranks ask for buckets in different orders, some of them twice, and all find theirs."""

    def body(transport):
        layouts = optimiser_layout(WEIGHTS, 4), whole_on(0, 1, 3)
        resharder = Resharder(WEIGHTS, *layouts, transport, device="cpu", node_size=2)
        values = [torch.arange(each.rows * each.columns).view(each.rows, -1).float() for each in WEIGHTS]
        held = {weight: values[weight][box.start : box.stop] for weight, box in resharder.source.items()}
        started = [resharder.start_copy(bucket, held, torch.float32) for bucket in range(4)]
        order = started[:: 1 if transport.rank % 2 else -1]
        order[1].start_second_hop()
        found = {weight: each for flight in (*order, *order) for weight, each in flight.wait().items()}
        assert found.keys() == resharder.target.keys()
        assert all(torch.equal(found[weight], values[weight]) for weight in found)

    run_ranks(4, body, strict=True)


def test_where_several_ranks_hold_a_box_their_parts_add_up_to_the_sum():
    """Ranks 0 and 1 both have all; 2 and 3 got theirs from one of them, and give it back there."""

    def body(transport):
        resharder = Resharder(WEIGHTS, whole_on(0, 1), whole_on(1, 2, 3), transport, device="cpu")
        given = {
            weight: torch.full((box.rows, box.columns), 10.0**transport.rank)
            for weight, box in resharder.target.items()
        }
        return [resharder.start_reduce(bucket, given, torch.float32).wait() for bucket in range(4)]

    results = run_ranks(4, body, strict=True)
    for bucket, weights in ((1, (0,)), (2, (1, 2))):
        for weight in weights:
            assert torch.all(results[0][bucket][weight] + results[1][bucket][weight] == 1110)
        assert results[2][bucket] == results[3][bucket] == {}


def test_two_bundles_are_in_flight_and_waited_for_in_any_order():
    def body(transport):
        resharder = Resharder(WEIGHTS, optimiser_layout(WEIGHTS, 3), whole_on(2), transport, device="cpu")
        values = [torch.arange(each.rows * each.columns).view(each.rows, -1).float() for each in WEIGHTS]
        held = {weight: values[weight][box.start : box.stop] for weight, box in resharder.source.items()}
        first, second = resharder.start_copy(1, held, torch.float32), resharder.start_copy(2, held, torch.float32)
        found = {**second.wait(), **first.wait()}
        assert found.keys() == resharder.target.keys()
        assert all(torch.equal(found[weight], values[weight]) for weight in found)
        assert first.wait() is first.wait()

    run_ranks(3, body, strict=True)


def test_rows_may_lie_on_ranks_in_any_order():
    """In the buffer of rank 4 pieces lie by rank, in its tensor by row: upward, downward and across columns."""
    weights = [Weight("w", 8, 6, (0,))]
    values = torch.randn(8, 6)
    orders = [
        [(rank, 0, 6 - 2 * rank, 8 - 2 * rank, 0, 6) for rank in range(4)],
        [(rank, 0, 2 * row, 2 * row + 2, 0, 6) for rank, row in enumerate((1, 0, 3, 2))],
        [(rank, 0, 4 * (rank % 2), 4 * (rank % 2) + 4, 3 * (rank // 2), 3 * (rank // 2) + 3) for rank in range(4)],
        [(0, 0, 0, 1, 0, 6), (1, 0, 1, 2, 0, 6), (2, 0, 2, 5, 0, 6), (3, 0, 5, 8, 0, 6)],
    ]

    def body(transport, source):
        resharder = Resharder(weights, source, whole_on(4, weights=weights), transport, device="cpu")
        held = {
            k: values[box.start : box.stop, box.start2 : box.stop2].contiguous() for k, box in resharder.source.items()
        }
        found = resharder.start_copy(1, held, torch.float32).wait()
        assert transport.rank < 4 or torch.equal(found[0], values)
        sums = resharder.start_reduce(1, found, torch.float32).wait()
        assert all(torch.equal(sums[k], held[k]) for k in held)

    for boxes in orders:
        run_ranks(5, partial(body, source=Layout.of(boxes)), strict=True)


def test_given_tensors_are_filled_and_may_have_any_shape():
    weights = [Weight("n", 4, 6, (0,))]
    resharder = Resharder(
        weights, whole_on(0, weights=weights), whole_on(0, weights=weights), SingleRankTransport(), device="cpu"
    )
    values, room = torch.randn(4, 2, 3), torch.zeros(4, 3, 2, dtype=torch.bfloat16)
    found = resharder.start_copy(1, {0: values}, torch.bfloat16, into={0: room}).wait()[0]
    assert found.data_ptr() == room.data_ptr()
    assert torch.equal(room.flatten(), values.bfloat16().flatten())
    parameter = torch.nn.Parameter(values)
    assert resharder.start_copy(1, {0: parameter}, torch.float32).wait()[0].data_ptr() == values.data_ptr()


def test_gradients_may_change_once_their_sum_is_started():
    resharder = Resharder(WEIGHTS, whole_on(0), whole_on(0), SingleRankTransport(), device="cpu")
    given = {0: torch.ones(8, 3)}
    flight = resharder.start_reduce(1, given, torch.float32)
    given[0].zero_()
    assert torch.all(flight.wait()[0] == 1)


def test_pieces_of_many_ranks_are_a_few_strips():
    """Rows of 64 ranks lie at equal distances in the buffer and in the tensor: calls do not grow with ranks."""
    weights = [Weight("a", 640, 3, (0,)), Weight("b", 128, 7, (0,))]
    source, target = optimiser_layout(weights, 64), whole_on(5, 70, weights=weights)
    index = {
        rank: index_buckets(
            move_of_rank(rank, source, target), rank, [[0, 1]], boxes_of(source, rank), boxes_of(target, rank)
        )[0]
        for rank in (5, 9, 70)
    }
    assert len(index[70].incoming) == 2
    assert len(index[70].messages) == 64
    assert len(index[5].incoming) == 4, "before and after what the rank keeps itself"
    assert len(index[5].messages) == 63
    assert [each.peers for each in index[9].outgoing] == [(5, 70)], "one message for both"


def test_what_does_not_fit_is_refused():
    resharder = Resharder(WEIGHTS, whole_on(0), whole_on(0), SingleRankTransport(), device="cpu")
    with pytest.raises(SeqloomError, match="a: no tensor from a rank that holds 8 rows x 3 columns"):
        resharder.start_copy(1, {}, torch.float32)
    with pytest.raises(SeqloomError, match=r"a: a tensor of shape \(8, 2\)"):
        resharder.start_copy(1, {0: torch.zeros(8, 2)}, torch.float32)
    with pytest.raises(SeqloomError, match="strides"):
        resharder.start_copy(1, {0: torch.zeros(3, 8).t()}, torch.float32)
    with pytest.raises(SeqloomError, match=r"a: a tensor of torch.float32 to be filled with torch.bfloat16"):
        resharder.start_copy(1, {0: torch.zeros(8, 3)}, torch.bfloat16, into={0: torch.zeros(8, 3)})
    with pytest.raises(SeqloomError, match="several boxes of one weight"):
        Resharder(
            WEIGHTS,
            Layout.of([(0, 0, 0, 2, 0, 3), (0, 0, 4, 6, 0, 3)]),
            Layout.empty(2),
            SingleRankTransport(),
            device="cpu",
        )
