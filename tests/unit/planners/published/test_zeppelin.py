"""Zeppelin's partitioner: zones by length under a capacity, by hand and on drawn batches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqloom.api import cost_model
from seqloom.planners import make_plan
from seqloom.planners.published.rivals import fullest
from seqloom.planners.published.zeppelin import Nodes, partition

TWO = Nodes(2, 4, 100)


def placed(lengths, nodes_of=TWO):
    array = np.array(lengths, dtype=np.int64)
    places = partition(array, list(range(len(lengths))), nodes_of)
    return {document: place.ranks for place in places for document in place.documents}


def test_short_documents_stay_whole_on_the_gpu_with_the_least_work():
    # nodes get 90, 80, 70, 60 in turn (least tokens): 90+60 | 80+70; inside, the emptiest GPU
    assert placed([90, 80, 70, 60]) == {0: (0,), 1: (4,), 2: (5,), 3: (1,)}


def test_a_document_beyond_a_gpu_is_cut_inside_its_node():
    found = placed([150, 40])
    assert found[0] == (0, 1, 2, 3)  # the only one that is cut: all squared tokens are its own, so all GPUs
    assert found[1] == (4,)


def test_gpus_go_by_squared_length():
    one = Nodes(1, 4, 160)
    found = placed([300, 160], one)  # 90,000 and 25,600: a GPU's fair share is 28,900, so 4 GPUs and the least, 2
    assert found == {0: (0, 1, 2, 3), 1: (0, 1)}


def test_a_document_beyond_a_node_crosses_on_all_gpus_of_as_few_nodes_as_hold_it():
    found = placed([900, 410], Nodes(5, 4, 100))
    assert found == {0: tuple(range(12)), 1: tuple(range(12, 20))}


def test_the_threshold_drops_when_a_node_is_full():
    # a node holds 400: 296 in one, 250 in the other, and 160 fits nowhere; with 148 of the longest in each, both fit
    found = placed([296, 250, 160])
    assert found == {0: tuple(range(8)), 1: (0, 1, 2, 3), 2: (4, 5, 6, 7)}


@given(
    st.lists(st.integers(1, 900), min_size=1, max_size=25),
    st.integers(1, 4),
    st.sampled_from([1, 2, 8]),
    st.integers(20, 400),
)
def test_capacity_holds_and_every_document_is_placed_once(lengths, nodes, node_size, slack):
    array = np.array(lengths, dtype=np.int64)
    capacity = -(-int(array.sum()) // (nodes * node_size)) + slack
    places = partition(array, list(range(len(lengths))), Nodes(nodes, node_size, capacity))
    assert sorted(k for place in places for k in place.documents) == list(range(len(lengths)))
    assert fullest(places, array) <= capacity
    for place in places:
        assert list(place.ranks) == sorted(set(place.ranks)) and place.ranks[-1] < nodes * node_size
        touched = {rank // node_size for rank in place.ranks}
        if len(touched) > 1:  # a ring between nodes has all GPUs of each
            assert len(place.ranks) == len(touched) * node_size


COST = cost_model("2x8xA800", "llama-7b", capacity=2_000)
LENGTHS = np.array([17_000, 3_000, 100, 200])


def works_of(plan):
    return [current.by_stage[0] for current in plan.pipelines[0].rounds]


def test_rings_between_nodes_run_first_and_only_they_are_routed():
    [work] = works_of(make_plan("zeppelin", LENGTHS, COST))
    crossing = [len({rank // 8 for rank in group.ranks}) > 1 for group in work.groups]
    assert crossing == sorted(crossing, reverse=True) and crossing[0]
    assert [group.route is not None for group in work.groups] == crossing
    assert work.groups[0].route.proxies == (0, 2, 4, 6, 8, 10, 12, 14)  # one near each of the four nics of a node
    assert all(group.ulysses == 1 for group in work.groups)
    [plain] = works_of(make_plan("zeppelin", LENGTHS, COST, routing=False))
    assert all(group.route is None for group in plain.groups)


def test_linear_modules_see_as_many_tokens_on_every_gpu():
    [work] = works_of(make_plan("zeppelin", LENGTHS, COST))
    held = np.bincount(work.linear_layout().rank, weights=work.linear_layout().sizes, minlength=16)
    assert held.sum() == LENGTHS.sum() and held.max() - held.min() <= 1
    [plain] = works_of(make_plan("zeppelin", LENGTHS, COST, remapping=False))
    assert plain.linear is None


def test_ring_over_everything_can_be_routed_too():
    [work] = works_of(make_plan("te-cp", LENGTHS, COST, routed=True))
    assert work.groups[0].route is not None
    assert COST.plan_ns(make_plan("te-cp", LENGTHS, COST, routed=True)) < COST.plan_ns(
        make_plan("te-cp", LENGTHS, COST)
    )


@pytest.mark.parametrize("length", [1, 31_999])
def test_one_document(length):
    assert len(placed([length], Nodes(2, 8, 2_000))) == 1
