"""Units of documents: every token once, caps kept, the order that flows; and units chosen by trying."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.plan.error import PlanError
from seqloom.plan.schedules import Times, Unit, play
from seqloom.plan.schedules.balanced import balanced
from seqloom.planners.pipelines.choosing import chosen
from seqloom.planners.pipelines.packing import Packed, Shape, packed

LINEAR = 4000


def cost(tokens):
    return LINEAR * tokens + tokens * tokens


def time_of(parts):
    return sum(cost(part.stop) - cost(part.start) for part in parts)


def tokens_of(parts):
    return sum(part.stop - part.start for part in parts)


batches = st.lists(st.integers(1, 30_000), min_size=1, max_size=40)


@st.composite
def shapes(draw):
    piece = draw(st.integers(LINEAR * 100, cost(20_000)))
    pack = piece * draw(st.integers(2, 8)) // 2
    return Shape(piece, pack, draw(st.integers(500, 40_000)), draw(st.integers(0, 3)), draw(st.booleans()))


@given(batches, shapes(), st.sampled_from([1, 16]), st.sampled_from([1, 512]))
def test_every_token_is_in_one_unit_and_caps_are_kept(lengths, shape, multiple, floor):
    made = packed(lengths, cost, shape, multiple=multiple, floor=floor)
    seen = Counter(part.document for parts in made.parts for part in parts for _ in range(part.stop - part.start))
    assert seen == Counter({d: length for d, length in enumerate(lengths)})
    reached = [0] * len(lengths)
    for parts in made.parts:
        for part in parts:
            assert part.start == reached[part.document]
            assert part.start % multiple == 0
            reached[part.document] = part.stop
    for unit, parts in zip(made.units, made.parts, strict=True):
        if unit.pieces == 1 and len(parts) > 1:
            assert tokens_of(parts) <= shape.tokens
        if unit.pieces > 1:  # one piece, with whole documents beside the last only
            assert parts[0].stop - parts[0].start >= floor
            assert all(part.start == 0 and part.stop == lengths[part.document] for part in parts[1:])
            assert len(parts) == 1 or (shape.shared and unit.piece == unit.pieces - 1)
            assert len(parts) == 1 or time_of(parts) <= shape.piece


@given(batches, shapes())
def test_units_are_numbered_and_long_documents_come_longest_first(lengths, shape):
    made = packed(lengths, cost, shape)
    chains = {}
    for unit in made.units:
        chains.setdefault(unit.sequence, []).append(unit.piece)
        assert unit.pieces >= 1
    assert list(chains) == list(range(len(chains)))
    assert all(pieces == list(range(len(pieces))) for pieces in chains.values())
    cut = [parts[0].document for unit, parts in zip(made.units, made.parts, strict=True) if unit.pieces > 1]
    assert [lengths[d] for d in cut] == sorted((lengths[d] for d in cut), reverse=True)


def test_starters_grow_and_take_the_shortest_documents():
    lengths = [20_000, *[100 * n for n in range(1, 40)]]
    made = packed(lengths, cost, Shape(cost(4000), cost(8000), 16_000, starters=2))
    first = next(number for number, unit in enumerate(made.units) if unit.pieces > 1)
    assert 3 <= first <= 6
    times = [time_of(parts) for parts in made.parts[:first]]
    assert times[0] < times[-1] <= cost(8000) // 2
    starters = {part.document for parts in made.parts[:first] for part in parts}
    assert starters == set(range(1, len(starters) + 1))


def test_last_pieces_are_shared():
    lengths = [10_000, 100, 100, 100]
    shape = Shape(cost(10_000) // 2 + cost(300), cost(5000), 1000, shared=True)
    made = packed(lengths, cost, shape)
    assert [unit.pieces for unit in made.units] == [2, 2]
    assert {part.document for part in made.parts[1]} == {0, 1, 2, 3}


def test_packed_is_whole():
    with pytest.raises(PlanError, match="1 units, but the tokens of 2"):
        Packed((Unit(0, 0, 1),), ((), ()))


def price(units):
    tokens = np.array([tokens_of(parts) for parts in units.parts], dtype=np.int64)
    time = np.array([time_of(parts) for parts in units.parts], dtype=np.int64)
    rows = time // 3 + 50 * LINEAR, time // 2 + 50 * LINEAR, LINEAR * (tokens + 50)
    return Times(*(np.tile(row, (4, 1)) for row in rows)), np.tile(tokens, (4, 1))


@settings(max_examples=10)
@given(st.lists(st.integers(50, 20_000), min_size=1, max_size=20), st.integers(100, 250))
def test_chosen_units_fit_and_are_a_valid_order(lengths, percent):
    cap = max(lengths) * percent // 100
    found = chosen(lengths, cost, price, range(4), cap, cap, floor=64, budget=4)
    found.schedule.validate(cap, found.held)
    assert found.schedule.units == found.packed.units
    assert sum(tokens_of(parts) for parts in found.packed.parts) == sum(lengths)
    again = chosen(lengths, cost, price, range(4), cap, cap, floor=64, budget=4)
    assert again.schedule == found.schedule


def test_chosen_units_are_better_than_few_and_than_many():
    rng = np.random.default_rng(3)
    lengths = [24_000, 16_000, *np.minimum(rng.lognormal(7, 1.3, 60), 20_000).astype(int).tolist()]
    cap = 2 * 24_000
    found = chosen(lengths, cost, price, range(4), cap, cap, floor=64)
    fastest = play(found.schedule, found.times).makespan
    for pieces in (4, 96):
        target = cost(24_000) // pieces
        units = packed(lengths, cost, Shape(target, target, cap // 4))
        times, held = price(units)
        assert fastest < play(balanced(range(4), units.units, times, held, cap), times).makespan


def test_a_document_that_does_not_fit_is_refused():
    with pytest.raises(PlanError, match=r"may hold 5,000.*needs 10,000"):
        chosen([10_000, 10], cost, price, range(4), 5_000, 5_000)
