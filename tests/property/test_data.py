"""Stores and samplers: whatever is written is read, whatever is resumed goes on."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqloom.data import IGNORE_INDEX, LengthLimitedSource, Sampler, StoreWriter, TokenStore, load_tokenizer, prepare
from seqloom.data import store as writer
from seqloom.errors import SeqloomError
from support.decoding import decode

DOCUMENTS = st.lists(
    st.lists(st.tuples(st.integers(0, 99), st.booleans()), min_size=1, max_size=30), min_size=1, max_size=8
)


def expected(document):
    ids, counted = zip(*document, strict=True)
    labels = [ids[p + 1] if counted[p + 1] else IGNORE_INDEX for p in range(len(ids) - 1)] + [IGNORE_INDEX]
    return list(ids), labels


@given(documents=DOCUMENTS, part=st.integers(1, 40), limit=st.integers(2, 12), data=st.data())
def test_a_store_gives_back_what_was_written(documents, part, limit, data):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "TOKENS_PER_RECORD_BATCH", part)
        patch.setattr(writer, "DOCUMENTS_PER_RECORD_BATCH", 1 + part % 3)
        with StoreWriter(Path(folder) / "store", vocabulary=100) as made:
            for document in documents:
                made.add(*zip(*document, strict=True))
        store = TokenStore(Path(folder) / "store")
        assert store.lengths.tolist() == [len(document) for document in documents]
        for number, document in enumerate(documents):
            ids, labels = expected(document)
            assert store.valid[number] == sum(label != IGNORE_INDEX for label in labels)
            start = data.draw(st.integers(0, len(ids)))
            stop = data.draw(st.integers(start, len(ids)))
            assert store.tokens(number, start, stop).tolist() == ids[start:stop]
            assert store.labels(number, start, stop).tolist() == labels[start:stop]
        _check_limited(LengthLimitedSource(store, limit, "truncate"), [document[:limit] for document in documents])
        short = [document for document in documents if len(document) <= limit]
        if short:
            _check_limited(LengthLimitedSource(store, limit, "drop"), short)


def _check_limited(source, documents):
    assert len(source.lengths) == len(documents)
    for number, document in enumerate(documents):
        ids, labels = expected(document)
        assert source.tokens(number, 0, len(ids)).tolist() == ids
        assert source.labels(number, 0, len(ids)).tolist() == labels
        assert source.valid[number] == sum(label != IGNORE_INDEX for label in labels)


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), min_size=1, max_size=10))
def test_bytes_of_any_text_come_back(texts):
    import json

    tokenizer = load_tokenizer("bytes")
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "input.jsonl", Path(folder) / "store"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("first", *texts)), encoding="utf-8")
        done = prepare([path], out, tokenizer=tokenizer)
        store = TokenStore(out)
        kept = ["first", *filter(None, texts)]
        assert (done.documents, done.counts.empty) == (len(kept), len(texts) + 1 - len(kept))
        found = [decode("bytes", store.tokens(k, 0, int(n))) for k, n in enumerate(store.lengths)]
        assert found == kept


@st.composite
def runs(draw):
    """Documents, a batch rule, and how a run of some batches is cut into parts on different numbers of ranks."""
    lengths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=25))
    rule = {"documents": draw(st.integers(1, 30))}
    if draw(st.booleans()):
        rule = {"tokens": draw(st.integers(max(lengths), 3 * max(lengths)))}
    parts = draw(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 4)), min_size=1, max_size=6))
    return lengths, rule | {"seed": draw(st.integers(0, 2**63))}, parts


@given(run=runs(), data=st.data())
def test_a_run_in_resumed_parts_on_any_ranks_is_the_uninterrupted_run(run, data):
    lengths, options, parts = run
    valid = [length - 1 for length in lengths]
    whole = Sampler(lengths, valid, **options)
    state = Sampler(lengths, valid, **options).state_dict()
    for steps, ranks in parts:
        samplers = [Sampler(lengths, valid, **options) for _ in range(ranks)]
        for sampler in samplers:
            sampler.load_state_dict(state)
        for _ in range(steps):
            if data.draw(st.booleans()):
                samplers[0].peek(3)
            batches = {tuple(sampler.next_batch().documents) for sampler in samplers}
            assert batches == {tuple(whole.next_batch().documents)}
        [state] = {tuple(sampler.state_dict().items()) for sampler in samplers}
        state = dict(state)
    assert state == whole.state_dict()


@given(run=runs())
def test_every_epoch_has_every_document_once_within_the_budget(run):
    lengths, options, _ = run
    sampler = Sampler(lengths, [0] * len(lengths), **options)
    for epoch in range(3):
        seen = []
        while sampler.epoch == epoch:
            batch = sampler.next_batch()
            assert len(batch) >= 1
            if "tokens" in options:
                assert batch.tokens <= options["tokens"]
            else:
                assert len(batch) <= options["documents"]
            seen += batch.documents.tolist()
        assert sorted(seen) == list(range(len(lengths)))
        assert sampler.position == 0


@given(st.integers(0, 2**40), st.integers(30, 60))
def test_epochs_and_seeds_shuffle_differently(seed, count):
    def order(seed, epoch):
        sampler = Sampler(np.ones(count), np.zeros(count), seed=seed, documents=count)
        for _ in range(epoch):
            sampler.next_batch()
        return tuple(sampler.next_batch().documents.tolist())

    assert len({order(seed, 0), order(seed, 1), order(seed + 1, 0), order(seed + 1, 1)}) == 4
    assert order(seed, 1) == order(seed, 1)


@given(name=st.sampled_from(["tokens.arrow", "index.arrow", "meta.json"]), data=st.data())
def test_a_store_with_changed_bytes_is_refused_or_can_be_read(name, data):
    """Whatever lies there, the answer is ids or a clear error."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        with StoreWriter(path, vocabulary=100) as made:
            for k in range(5):
                made.add(range(k, k + 8), [(p + k) % 3 > 0 for p in range(8)])
        content = bytearray((path / name).read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        (path / name).write_bytes(content)
        try:
            store = TokenStore(path)
            for document, length in enumerate(store.lengths.tolist()):
                assert len(store.tokens(document, 0, length)) == len(store.labels(document, 0, length)) == length
        except SeqloomError as error:
            assert "\n" not in str(error).strip() or name == "meta.json"
