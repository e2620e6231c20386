"""Mixtures: shares that hold in every part of an epoch, passes without repetition, and runs that are resumed."""

import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqloom.data import Mixture, Sampler, mixture

WEIGHTS = st.integers(1, 10_000).map(lambda number: number / 1_000)


@st.composite
def mixtures(draw):
    """Lengths of the documents of each source, weights, and what the weights are of."""
    lengths = draw(st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=25), min_size=1, max_size=6))
    weights = draw(st.lists(WEIGHTS, min_size=len(lengths), max_size=len(lengths)))
    return list(map(np.array, lengths)), weights, draw(st.sampled_from(["tokens", "documents"]))


def make(mixed, seed):
    lengths, weights, by = mixed
    return Mixture(lengths, weights, by=by, seed=seed)


def sources_of(order, lengths):
    """The source of every document of an order."""
    return np.searchsorted(np.cumsum([len(part) for part in lengths]), order, side="right")


@given(counts=st.lists(st.integers(0, 60), min_size=1, max_size=12).filter(any), block=st.integers(1, 800))
def test_every_beginning_has_the_shares_of_the_whole_within_one(counts, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture, "_BLOCK", block)
        turns, total = mixture.take_turns(counts), sum(counts)
    assert len(turns) == total
    for source, count in enumerate(counts):
        for places, found in enumerate(np.cumsum(turns == source).tolist(), 1):
            assert places * count // total <= found <= -(-places * count // total)
        assert (turns == source).sum() == count


@given(mixed=mixtures(), seed=st.integers(0, 2**63))
def test_shares_are_the_weights_over_epochs_and_within_them(mixed, seed):
    lengths, weights, by = mixed
    rates = [Fraction(str(weight)) for weight in weights]
    if by == "tokens":
        rates = [rate * len(part) / int(part.sum()) for rate, part in zip(rates, lengths, strict=True)]
    shares = [rate / sum(rates) for rate in rates]
    epoch_size = min(len(part) / share for part, share in zip(lengths, shares, strict=True))
    found, drawn = make(mixed, seed), np.zeros(len(lengths), dtype=int)
    for epoch in range(4):
        sources = sources_of(found.order(epoch), lengths)
        counts = np.bincount(sources, minlength=len(lengths))
        for source, count in enumerate(counts.tolist()):
            for places, came in enumerate(np.cumsum(sources == source).tolist(), 1):
                assert abs(came - Fraction(places * count, len(sources))) < 1
            assert abs(drawn[source] + count - (epoch + 1) * epoch_size * shares[source]) <= Fraction(1, 2)
        assert any(count == len(part) for count, part in zip(counts, lengths, strict=True)), "a source is gone through"
        drawn += counts


@given(mixed=mixtures(), seed=st.integers(0, 2**63), epochs=st.integers(1, 6))
def test_no_document_comes_again_before_all_others_of_its_source(mixed, seed, epochs):
    lengths, _, _ = mixed
    found = make(mixed, seed)
    orders = [found.order(epoch) for epoch in range(epochs)]
    for order in orders:
        assert len(set(order.tolist())) == len(order), "no document is twice in an epoch"
    whole, first = np.concatenate(orders), 0
    sources = sources_of(whole, lengths)
    for source, part in enumerate(lengths):
        stream = whole[sources == source] - first
        for begin in range(0, len(stream), len(part)):
            one_pass = stream[begin : begin + len(part)].tolist()
            assert len(set(one_pass)) == len(one_pass) and set(one_pass) <= set(range(len(part)))
        first += len(part)


@given(
    mixed=mixtures(),
    seed=st.integers(0, 2**63),
    parts=st.lists(st.tuples(st.integers(0, 7), st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=5),
    data=st.data(),
)
def test_a_cursor_goes_on_with_the_rest_of_the_undisturbed_order(mixed, seed, parts, data):
    lengths, _, _ = mixed
    joined = np.concatenate(lengths)

    def sampler(**size):
        return Sampler(joined, joined - 1, seed=seed, mixture=make(mixed, seed), **size)

    state, seen = sampler(documents=1).state_dict(), []
    for steps, ranks, documents in parts:
        size = {"documents": documents}
        if data.draw(st.booleans()):
            size = {"tokens": int(joined.max()) * documents}
        samplers = [sampler(**size) for _ in range(ranks)]
        for each in samplers:
            each.load_state_dict(json.loads(json.dumps(state)))
        for _ in range(steps):
            if data.draw(st.booleans()):
                samplers[0].peek(2)
            [batch] = {tuple(each.next_batch().documents.tolist()) for each in samplers}
            seen += batch
        state = samplers[-1].state_dict()
    undisturbed = sampler(documents=1)
    assert seen == [int(undisturbed.next_batch().documents[0]) for _ in seen]
    assert undisturbed.state_dict() == state
