"""What every rank knows after binding adds up to the work."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from seqloom.dist.rank_tokens import bind
from support.strategies_attention import cases, cases_of_many_groups, cases_of_zones


class Place:
    """A transport that can only say where it is."""

    def __init__(self, rank, ranks):
        self.rank, self.ranks = rank, ranks


@given(case=cases() | cases_of_many_groups() | cases_of_zones())
def test_contexts_hold_the_layout_of_the_work(case):
    layout = case.work.attention_layout()
    for rank in range(case.world):
        context = bind(case.work, Place(rank, case.world), node_size=case.node_size)
        assert context.spans == layout.spans(rank)
        tokens = [(span.document, position) for span in context.spans for position in range(span.start, span.stop)]
        assert list(zip(context.documents.tolist(), context.positions.tolist(), strict=True)) == tokens
        rows = torch.arange(context.tokens)
        found = [rows[group.rows] for group in context.groups]
        assert [len(each) for each in found] == [group.tokens for group in context.groups]
        assert torch.equal(torch.cat([rows[:0], *found]).sort().values, rows), "every row is in one group"
        for group, each in zip(context.groups, found, strict=True):
            documents = {span.document for span in group.group.spans}
            assert {tokens[row][0] for row in each} <= documents


@given(data=st.data())
def test_ranks_of_a_block_agree_how_their_rows_are_sorted(data):
    case = data.draw(cases() | cases_of_many_groups())
    contexts = [bind(case.work, Place(rank, case.world), node_size=case.node_size) for rank in range(case.world)]
    for context in contexts:
        for group in context.groups:
            held = []
            for peer in group.block:
                other = contexts[peer]
                same = next(each for each in other.groups if each.group is group.group)
                assert (same.counts, same.spans) == (group.counts, group.spans)
                places = torch.stack([other.documents[same.rows], other.positions[same.rows]], 1)
                held += [tuple(place) for place in places.tolist()]
            wanted = [(span.document, position) for span in group.spans for position in range(span.start, span.stop)]
            order = range(len(held)) if group.order is None else group.order.tolist()
            assert [held[row] for row in order] == wanted
            assert group.inverse_order is None or group.inverse_order[group.order].tolist() == list(range(len(held)))
