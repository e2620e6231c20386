"""Attention in tp_groups is attention in one process: members compute slices of heads, columns of them share keys."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.attention.kernels.cpu import Reference
from support.attention_cases import assemble, attend, worst
from support.kv_cache_cases import attend_pieces
from support.strategies_attention import cases, cases_of_many_groups, with_prefixes
from support.strategies_kv_cache import pieces_cases

torch.set_num_threads(1)
MOST_RANKS = 8
FEW = settings(max_examples=max(1, settings().max_examples // 2))
FEWER = settings(max_examples=max(1, settings().max_examples // 4))


@st.composite
def in_tp_groups(draw, kinds):
    """A case with tp_groups of 2 to 4 in the place of its ranks."""
    case = draw(kinds.filter(lambda case: case.world <= MOST_RANKS // 2))
    return case.in_tp_groups(draw(st.integers(2, min(4, MOST_RANKS // case.world))))


@FEW
@given(case=in_tp_groups(cases() | cases_of_many_groups() | with_prefixes(cases())), strict=st.booleans())
def test_teams_are_the_truth(threads, case, strict):
    """Heads for tokens, rings, gathers, windows, several groups of a rank, ranks without any."""
    inputs = case.inputs(torch.float64)
    parts = threads(case.world).run(lambda transport: attend(transport, case, inputs, Reference()), strict=strict)
    assert worst(assemble(parts), case.truth(inputs)) < 1e-9


@FEWER
@given(case=in_tp_groups(pieces_cases()), strict=st.booleans())
def test_documents_in_pieces_are_the_truth_under_every_checkpoint(threads, case, strict):
    inputs = case.inputs(torch.float64)
    run = threads(case.world).run
    parts = run(lambda transport: attend_pieces(transport, case, inputs, Reference()), strict=strict)
    for own, given_ in zip(zip(*parts, strict=True), inputs, strict=True):
        assert worst(assemble(own), case.truth(given_)) < 1e-9
