"""Random legal programs of verbs end the same on every transport, and as worked out by hand."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from seqloom.dist import run_ranks
from seqloom.plan import GroupFamily
from support.programs import expected_of, random_program, run_program


@given(ranks=st.integers(1, 6), random=st.randoms(use_true_random=False), strict=st.booleans())
def test_random_programs_give_what_they_must(ranks, random, strict):
    program = random_program(random, ranks)
    family = GroupFamily.cached(ranks, node_size=ranks)
    results = run_ranks(ranks, lambda transport: run_program(transport, program), strict=strict, family=family)
    for rank, received in enumerate(results):
        expected = expected_of(program, rank)
        assert len(received) == len(expected)
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(received, expected, strict=True))
