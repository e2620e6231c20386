"""Binding: what a work means for one rank, and what is refused before anything is sent."""

from dataclasses import is_dataclass, replace

import pytest
import torch

from seqloom.dist import bind_single_rank
from seqloom.dist.rank_tokens import bind
from seqloom.errors import SeqloomError
from seqloom.layout import Layout, Route, Span
from seqloom.plan import Checkpoint, Group, StageMicroBatch
from support.transports import RankOnly

LONG, SHORT = Span(0, 0, 16), Span(1, 0, 5)


def work_of(*groups, **layouts):
    return StageMicroBatch(groups, Checkpoint.NONE, **layouts)


def test_rows_positions_and_documents():
    context = bind(work_of(Group((0, 1, 2, 3), 2, 2, (SHORT, LONG))), RankOnly(2))
    assert context.spans == (Span(0, 4, 7), Span(1, 2, 4))
    assert context.positions.tolist() == [4, 5, 6, 2, 3]
    assert context.documents.tolist() == [0, 0, 0, 1, 1]
    assert (context.rank, context.tokens, context.device) == (2, 5, torch.device("cpu"))


def test_places_in_a_group():
    (group,) = bind(work_of(Group((0, 1, 2, 3), 2, 2, (LONG,))), RankOnly(2)).groups
    assert (group.ulysses_index, group.ring_index) == (0, 1)
    assert (group.block, group.ring_ranks) == ((2, 3), (0, 2))
    assert group.spans == (Span(0, 4, 8), Span(0, 8, 12))
    assert (group.counts, group.tokens, group.rows, group.order) == ((4, 4), 4, slice(0, 4), None)


def test_rows_of_a_block_are_sorted_by_an_index_where_the_plan_lists_documents_otherwise():
    """Rank 0 holds document 1 and the start of 0, rank 1 the rest of 0; each sorts its own rows."""
    (group,) = bind(work_of(Group((0, 1), 2, 1, (SHORT, LONG))), RankOnly(0)).groups
    assert group.counts == (11, 10)
    held = [(0, p) for p in range(6)] + [(1, p) for p in range(5)] + [(0, p) for p in range(6, 16)]
    assert [held[row] for row in group.order] == sorted(held)
    assert group.inverse_order[group.order].tolist() == list(range(21))


def test_a_rank_in_several_groups_knows_its_rows_of_each():
    groups = (Group((0, 1), 1, 2, (Span(1, 0, 8),)), Group((0,), 1, 1, (Span(0, 0, 3), Span(2, 0, 4))))
    context = bind(work_of(*groups), RankOnly(0))
    assert [group.group for group in context.groups] == list(groups)
    assert context.groups[0].rows == slice(3, 7)
    assert context.groups[1].rows.tolist() == [0, 1, 2, 7, 8, 9, 10]
    assert [group.group for group in bind(work_of(*groups), RankOnly(1)).groups] == [groups[0]]


def test_ranks_without_tokens():
    tiny = work_of(Group((0, 1, 2), 3, 1, (Span(0, 0, 1),)))
    for rank, groups in ((2, 1), (3, 0)):
        context = bind(tiny, RankOnly(rank))
        assert (context.tokens, context.spans, len(context.groups)) == (0, (), groups)
    assert bind(work_of(), RankOnly(0)).groups == ()


def test_things_are_built_once_per_key():
    context, built = bind(work_of(), RankOnly(0)), []
    for key in ("a", "b", "a"):
        assert context.cached(key, lambda key=key: built.append(key) or key) == key
    assert built == ["a", "b"]


def test_a_routed_group_needs_the_size_of_a_node_and_proxies_that_exist():
    group = Group((0, 2), 1, 2, (LONG,), route=Route((0, 1, 2, 3)))
    with pytest.raises(SeqloomError, match=r"proxies \(0, 1, 2, 3\): .* bind with node_size"):
        bind(work_of(group), RankOnly(1))
    with pytest.raises(SeqloomError, match="rank 4 is not among the 4 ranks"):
        bind(work_of(replace(group, route=Route((0, 4)))), RankOnly(1), node_size=2)
    assert bind(work_of(group), RankOnly(1), node_size=2).tokens == 0


@pytest.mark.parametrize(
    "group, words",
    [
        (Group((0, 1, 2, 5), 2, 2, (LONG,)), ["rank 5", "4 ranks", "start at least 6"]),
        (Group((0, -1), 1, 2, (LONG,)), ["rank -1"]),
        (Group((0, 0), 1, 2, (LONG,)), ["every rank once"]),
        (Group((0, 1, 2), 2, 2, (LONG,)), ["ulysses x ring different ranks"]),
        (Group((1, 0), 2, 1, (LONG,)), ["ranks (1, 0)", "ascending run", "(0, 1)"]),
        (Group((0, 2), 2, 1, (LONG,)), ["ranks (0, 2)", "ascending run"]),
    ],
)
def test_groups_that_cannot_be_bound(group, words):
    for rank in range(4):  # also ranks that are not in it: the others would wait for nobody
        with pytest.raises(SeqloomError) as error:
            bind(work_of(group), RankOnly(rank))
        assert all(word in str(error.value) for word in words), error.value


def test_a_document_in_two_places():
    with pytest.raises(SeqloomError, match="document 0 is twice"):
        bind(work_of(Group((0,), 1, 1, (LONG,)), Group((1,), 1, 1, (Span(0, 16, 20),))), RankOnly(0))


def test_a_later_piece_without_the_keys_of_the_earlier_ones():
    work = work_of(Group((0,), 1, 1, (Span(0, 16, 20),)))
    with pytest.raises(SeqloomError, match="document 0 from token 16 on: attention needs the keys of its earlier"):
        bind(work, RankOnly(0))
    assert bind(work, RankOnly(0), independent_tokens=True).tokens == 4


def test_an_attention_layout_other_than_the_derived_one():
    work = work_of(Group((0, 1), 1, 2, (LONG,)))
    same = work.attention_layout()
    assert bind(replace(work, attention=same, linear=same), RankOnly(0)).tokens == 8
    moved = Layout(1 - same.rank, same.item, same.start, same.stop)
    with pytest.raises(SeqloomError, match=r"groups deal their tokens .* leave the attention layout out"):
        bind(replace(work, attention=moved), RankOnly(0))


def test_a_context_is_opaque_to_who_looks_for_tensors_in_arguments():
    """FSDP walks through dataclasses, tuples, lists and dicts among a layer's arguments, at every call."""
    context = bind_single_rank([3, 5])
    assert not is_dataclass(context) and not isinstance(context, tuple | list | dict)
    assert not hasattr(context, "__dict__")  # and a misspelt attribute is an error
