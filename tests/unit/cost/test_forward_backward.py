"""Shares of forward and of the weight half."""

import numpy as np
import pytest

from seqloom.cost import CostBreakdown
from seqloom.cost.forward_backward import FORWARD, computing_ns, forward_ns, weights_ns
from seqloom.cost.shapes import COST_COLUMNS
from seqloom.plan import Checkpoint

CASES = [
    CostBreakdown(),
    CostBreakdown(linear=300, attention=350, ulysses=100, fixed=30),
    CostBreakdown(linear=300, head=30, attention=350, steps=10, ring=900, ulysses=100, network=400, fixed=30),
    CostBreakdown(linear=300, gather=4000, reduce=2000, fixed=3),
    CostBreakdown(linear=100, gather=100, fixed=1),
]


def random_parts(seed):
    draw = np.random.default_rng(seed)
    return CostBreakdown(**{name: int(draw.integers(0, 10**9)) * int(draw.integers(0, 2)) for name in COST_COLUMNS})


def tables(entries):
    """(int64[entries, parts], int64[entries] total ns)."""
    return (
        np.array([list(entry) for entry in entries]),
        np.array([entry.total_ns for entry in entries]),
    )


@pytest.mark.parametrize("checkpoint", list(Checkpoint))
def test_totals_and_halves_are_possible(checkpoint):
    entries = [*CASES, *map(random_parts, range(200))]
    parts, total = tables(entries)
    forward, weights = forward_ns(parts, total, FORWARD[checkpoint]), weights_ns(parts, FORWARD[checkpoint], 1.0)
    assert (forward >= 0).all() and (weights >= 0).all()
    assert (forward + weights <= total).all()
    assert (computing_ns(parts) <= total).all()


def test_plain_shares():
    attention, linear = CostBreakdown(attention=3500), CostBreakdown(linear=3000)
    parts, total = tables([attention, linear])
    assert forward_ns(parts, total, FORWARD[Checkpoint.NONE]).tolist() == [1000, 1000]
    assert weights_ns(parts, FORWARD[Checkpoint.NONE], 1.0).tolist() == [0, 1000]
    assert weights_ns(parts, FORWARD[Checkpoint.NONE], 0.75).tolist() == [0, 750]


def test_recomputing_belongs_to_the_backward():
    parts = tables([CostBreakdown(linear=4000), CostBreakdown(attention=4500)])
    assert forward_ns(*parts, FORWARD[Checkpoint.FULL]).tolist() == [1000, 1000]


def test_a_gather_that_hides_behind_the_backward_does_not_stretch_the_forward():
    parts = tables([CostBreakdown(linear=300, gather=300)])
    assert forward_ns(*parts, FORWARD[Checkpoint.NONE]).tolist() == [100]


def test_every_part_on_a_stream_has_a_share():
    shares = dict(zip(COST_COLUMNS, FORWARD[Checkpoint.NONE], strict=True))
    assert {name for name, share in shares.items() if not share} == {"reduce", "link"}
