"""Resharding against whole tensors: assemble them, slice them, add them up."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.dist import Resharder, Transport, run_ranks
from seqloom.layout import move_between
from seqloom.layout.move import move_of_rank
from seqloom.plan import compute_layout, optimiser_layout
from seqloom.plan.parameter_layout import dp_groups
from support.resharding import Held, ReshardCase, reshard_cases
from support.strategies import layouts
from support.transports import CountingTransport

node_sizes = st.sampled_from((None, 1, 2, 4))


def brought(resharder: Resharder, held: Held, dtype: torch.dtype, into: Held | None = None) -> Held:
    """Move values of all buckets, all of them in flight at once."""
    started = [resharder.start_copy(bucket, held, dtype, into=into) for bucket in range(len(resharder.buckets))]
    return {weight: tensor for flight in started for weight, tensor in flight.wait().items()}


def summed(resharder: Resharder, held: Held, dtype: torch.dtype, into: Held | None = None) -> Held:
    """Sum gradients of all buckets, from the last to the first; waits are in another order than starts."""
    started = [
        resharder.start_reduce(bucket, held, dtype, into=into) for bucket in reversed(range(len(resharder.buckets)))
    ]
    return {weight: tensor for flight in reversed(started) for weight, tensor in flight.wait().items()}


def same(found: Held, wanted: Held) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[k], wanted[k]) for k in wanted)


def gradients(case: ReshardCase, rank: int, holes: int) -> Held:
    """Whole numbers, so that sums are exact in any order; some weights have none."""
    held = case.used([whole.mul(8).round() for whole in case.wholes(100 + rank)], rank)
    return {weight: each for weight, each in held.items() if not holes or (weight + rank) % holes}


def totals(case: ReshardCase, holes: int) -> list[torch.Tensor]:
    """The sum over all ranks of their gradients, on whole weights."""
    found = [torch.zeros(weight.rows, weight.columns) for weight in case.weights]
    for rank in range(case.ranks):
        numbers = case.used(case.numbers(), rank)
        for weight, each in gradients(case, rank, holes).items():
            found[weight].view(-1).index_add_(0, numbers[weight].flatten(), each.flatten())
    return found


def missing(case: ReshardCase, rank: int) -> int:
    """Elements that a rank computes with and does not keep."""
    kept, used = case.kept(case.numbers(), rank), case.used(case.numbers(), rank)
    return sum(int((~torch.isin(each, kept.get(weight, each.new_empty(0)))).sum()) for weight, each in used.items())


def crossing(case: ReshardCase, node_size: int) -> int:
    """Elements that the ranks of a node compute with and none of them keeps, each once, over all nodes."""
    total = 0
    for first in range(0, case.ranks, node_size):
        wanted: set[tuple[int, int]] = set()
        there: set[tuple[int, int]] = set()
        for rank in range(first, min(first + node_size, case.ranks)):
            for found, held in ((wanted, case.used), (there, case.kept)):
                found |= {(k, n) for k, each in held(case.numbers(), rank).items() for n in each.flatten().tolist()}
        total += len(wanted - there)
    return total


@settings(max_examples=30)
@given(case=reshard_cases(), node_size=node_sizes, strict=st.booleans(), narrow=st.booleans(), holes=st.integers(0, 3))
def test_values_reach_every_holder_and_gradients_of_all_are_summed(
    case: ReshardCase, node_size: int | None, strict: bool, narrow: bool, holes: int
) -> None:
    wholes, dtype = case.wholes(0), torch.bfloat16 if narrow else torch.float32
    before = [torch.full_like(whole, 3.0) for whole in wholes]
    source, target = optimiser_layout(case.weights, case.ranks), compute_layout(case.weights, case.pipelines)

    def far(counting: CountingTransport) -> int:
        """Bytes for ranks of other nodes."""
        others = (peer for peer in range(case.ranks) if node_size and peer // node_size != counting.rank // node_size)
        return sum(counting.bytes_to(peer) for peer in others)

    def body(transport: Transport) -> tuple[Held, Held, list[tuple[int, int]], int]:
        counting = CountingTransport(transport)
        resharder = Resharder(case.weights, source, target, counting, device="cpu", node_size=node_size)
        copies = brought(resharder, case.kept(wholes, transport.rank), dtype)
        sent, across = (size // dtype.itemsize for size in (counting.traffic("exchange").bytes, far(counting)))
        counting.reset()
        into = case.kept(before, transport.rank) if holes % 2 else None
        sums = summed(resharder, gradients(case, transport.rank, holes), torch.float32, into)
        back = counting.traffic("exchange").bytes // 4
        return copies, sums, [(sent, back), (across, far(counting) // 4)], transport.rank

    results = run_ranks(case.ranks, body, strict=strict)
    wanted = [total + (3.0 if holes % 2 else 0.0) for total in totals(case, holes)]
    for copies, sums, (counted, _), rank in results:
        assert same(copies, case.used([whole.to(dtype) for whole in wholes], rank))
        assert same(sums, case.kept(wanted, rank))
        assert counted[1] == missing(case, rank), "more than what the rank lacks"
    assert sum(counted[0] for *_, (counted, _), _ in results) == sum(map(partial(missing, case), range(case.ranks)))
    if node_size is not None:
        crossed = [sum(way) for way in zip(*(across for *_, (_, across), _ in results), strict=True)]
        assert crossed == [crossing(case, node_size)] * 2, "more than once for a node"


@settings(max_examples=20)
@given(case=reshard_cases(per_pass=True), strict=st.booleans())
def test_stages_that_are_gathered_for_every_pass(case: ReshardCase, strict: bool) -> None:
    wholes = case.wholes(0)
    kept, used = optimiser_layout(case.weights, case.ranks), compute_layout(case.weights, case.pipelines)
    step = compute_layout(case.weights, case.pipelines, case.per_pass)

    def columns(rank: int) -> list[tuple[int, ...]]:
        """The ranks that a rank gathers with, of each of its hosts' weight slices."""
        stages = [stage for pipeline in case.pipelines for stage in pipeline.stages if rank in stage.ranks]
        found = [column for stage in stages for column in dp_groups(stage.ranks, stage.tensor) if rank in column]
        return list(dict.fromkeys(found))

    def body(transport: Transport) -> tuple[Held, Held, Held]:
        rank, near = transport.rank, columns(transport.rank)
        assert len(near) <= 1, "stages of a host are drawn with one tensor degree"
        resharder = Resharder(case.weights, kept, step, transport, device="cpu")
        between = brought(resharder, case.kept(wholes, rank), torch.float32)
        copies, parts = {}, {}
        for column in near:
            gather = Resharder(case.weights, step.restrict(column), used.restrict(column), transport, device="cpu")
            copies = brought(gather, between, torch.float32)
            parts = summed(gather, gradients(case, rank, 0), torch.float32)
            parts = summed(gather, gradients(case, rank, 0), torch.float32, parts)
        return between, copies, summed(resharder, parts, torch.float32)

    for rank, (between, copies, sums) in enumerate(run_ranks(case.ranks, body, strict=strict)):
        assert same(between, case.between_passes(wholes, rank, case.per_pass))
        assert same(copies, case.used(wholes, rank))
        assert same(sums, case.kept([2 * total for total in totals(case, 0)], rank))


@settings(max_examples=15)
@given(case=reshard_cases(), strict=st.booleans())
def test_layouts_that_agree_send_nothing_and_share_memory(case: ReshardCase, strict: bool) -> None:
    layout = compute_layout(case.weights, case.pipelines)

    def body(transport: Transport) -> None:
        counting, held = CountingTransport(transport), case.used(case.wholes(0), transport.rank)
        resharder = Resharder(case.weights, layout, layout, counting, device="cpu", node_size=2)
        found = brought(resharder, held, torch.float32)
        assert same(found, held)
        assert all(found[weight].data_ptr() == held[weight].data_ptr() for weight in held)
        assert same(summed(resharder, held, torch.float32), held)
        cast = brought(resharder, held, torch.float64)
        assert all(torch.equal(cast[weight], held[weight].double()) for weight in held)
        assert counting.traffic("exchange").calls == 0

    run_ranks(case.ranks, body, strict=strict)


@given(case=reshard_cases(), node_size=node_sizes)
def test_a_ranks_part_of_a_move_is_its_part_of_the_whole(case: ReshardCase, node_size: int | None) -> None:
    source, target = optimiser_layout(case.weights, case.ranks), compute_layout(case.weights, case.pipelines)
    check_parts(source, target, case.ranks, node_size)


@settings(max_examples=20)
@given(source=layouts(axes=2, complete=True), target=layouts(axes=2), node_size=node_sizes)
def test_the_same_where_several_ranks_hold_something(source, target, node_size: int | None) -> None:
    check_parts(source, target, 1 + max([*source.rank.tolist(), *target.rank.tolist()]), node_size)


def check_parts(source, target, ranks: int, node_size: int | None) -> None:
    move = move_between(source, target, node_size=node_size)
    whole = np.stack(move.columns(), axis=1)
    for rank in range(ranks):
        mine = (whole[:, 0] == rank) | (whole[:, 1] == rank)
        assert np.array_equal(
            np.stack(move_of_rank(rank, source, target, node_size=node_size).columns(), 1), whole[mine]
        )
