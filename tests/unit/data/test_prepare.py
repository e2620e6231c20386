"""Files to a store: round trips, masks, policies, and what is refused."""

import json
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from seqloom.data import IGNORE_INDEX, RecordFields, TokenStore, load_tokenizer, prepare
from seqloom.errors import SeqloomError
from support.decoding import decode

BYTES = load_tokenizer("bytes")


def whole(store, document):
    return store.tokens(document, 0, int(store.lengths[document]))


def parquet(path, **columns):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


@pytest.mark.parametrize("kind", ["bytes", "file", "folder"])
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".txt"])
def test_round_trip(kind, suffix, texts, jsonl, tmp_path, tokenizer_file, tokenizer_folder):
    name = {"bytes": "bytes", "file": tokenizer_file, "folder": tokenizer_folder}[kind]
    tokenizer = load_tokenizer(name)
    if suffix == ".jsonl":
        path = jsonl(*({"text": text} for text in texts))
    elif suffix == ".parquet":
        path = parquet(tmp_path / "input.parquet", text=texts, other=[1] * len(texts))
    else:
        path = tmp_path / "input.txt"
        path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    done = prepare([path], tmp_path / "store", tokenizer=tokenizer)
    store = TokenStore(tmp_path / "store")
    assert done.documents == len(store) == len(texts)
    assert (done.tokens, done.valid, done.longest) == (store.lengths.sum(), store.valid.sum(), store.lengths.max())
    for document, (text, ids) in enumerate(zip(texts, tokenizer.encode(texts), strict=True)):
        assert whole(store, document).tolist() == [*tokenizer.begin, *ids, *tokenizer.end]
        assert decode(name, whole(store, document)) == text
    assert store.meta.tokenizer == tokenizer.metadata
    store.verify()


def test_the_loss_counts_answers_only(jsonl, tmp_path, tokenizer_folder):
    tokenizer = load_tokenizer(tokenizer_folder)
    path = jsonl({"prompt": "the cat", "completion": "sat"}, {"prompt": "", "completion": "on the mat"})
    prepare([path], tmp_path / "store", tokenizer=tokenizer)
    store = TokenStore(tmp_path / "store")
    prompt, answer = (ids.tolist() for ids in tokenizer.encode(["the cat", "sat"]))
    assert whole(store, 0).tolist() == [0, *prompt, *answer, 1]
    assert store.labels(0, 0, int(store.lengths[0])).tolist() == [IGNORE_INDEX] * len(prompt) + [
        *answer,
        1,
        IGNORE_INDEX,
    ]
    assert store.valid.tolist() == [len(answer) + 1, len(tokenizer.encode(["on the mat"])[0]) + 1]
    for document in range(2):
        labels = store.labels(document, 0, int(store.lengths[document]))
        assert (labels != IGNORE_INDEX).sum() == store.valid[document]


def test_forms_may_differ_from_file_to_file(jsonl, tmp_path):
    paths = [
        jsonl({"text": "plain"}, name="a.jsonl"),
        jsonl({"q": "2 + 2 = ", "a": "4", "text": "not read"}, name="b.jsonl"),
    ]
    with pytest.raises(SeqloomError, match=r"a\.jsonl, line 1: no field 'q', it has 'text'"):
        prepare(paths, tmp_path / "store", tokenizer=BYTES, fields=RecordFields(prompt="q", answer="a"))
    done = prepare(paths[1:], tmp_path / "store", tokenizer=BYTES, fields=RecordFields(prompt="q", answer="a"))
    assert (done.documents, done.valid) == (1, 2)
    more = [paths[0], jsonl({"prompt": "p", "answer": "a"}, name="c.jsonl")]
    assert prepare(more, tmp_path / "both", tokenizer=BYTES).valid == 5 + 2


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_ids_and_labels_as_others_wrote_them(suffix, jsonl, tmp_path):
    ids, labels = [[1, 2, 3], [4, 5], []], [[-100, 2, -100], None, None]
    if suffix == ".jsonl":
        path = jsonl(*({"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)))
    else:
        path = parquet(tmp_path / "input.parquet", input_ids=ids, labels=labels)
    done = prepare([path], tmp_path / "store", vocabulary=6)
    store = TokenStore(tmp_path / "store")
    assert (done.documents, done.counts.empty, store.meta.tokenizer) == (2, 1, None)
    assert whole(store, 0).tolist() == [1, 2, 3]
    assert store.labels(0, 0, 3).tolist() == [2, IGNORE_INDEX, IGNORE_INDEX]
    assert store.labels(1, 0, 2).tolist() == [5, IGNORE_INDEX]


def test_a_text_file_may_be_one_document(tmp_path):
    (tmp_path / "book.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    prepare([tmp_path / "book.txt"], tmp_path / "book", tokenizer=BYTES, unit="file")
    assert decode("bytes", whole(TokenStore(tmp_path / "book"), 0)) == "one\r\ntwo\n"
    prepare([tmp_path / "book.txt"], tmp_path / "lines", tokenizer=BYTES)
    lines = TokenStore(tmp_path / "lines")
    assert [decode("bytes", whole(lines, k)) for k in range(2)] == ["one", "two"]


def test_too_long(jsonl, tmp_path):
    path = jsonl({"text": "abc"}, {"text": "abcdefgh"}, {"text": "xyz"})
    with pytest.raises(SeqloomError, match=r"line 2 has 9 tokens, more than the maximum length 5.*truncate or drop"):
        prepare([path], tmp_path / "store", tokenizer=BYTES, max_length=5)
    assert not (tmp_path / "store").exists()
    cut = prepare([path], tmp_path / "cut", tokenizer=BYTES, max_length=5, too_long="truncate")
    assert (cut.documents, cut.longest, cut.counts.too_long, cut.counts.tokens_lost) == (3, 5, 1, 4)
    store = TokenStore(tmp_path / "cut")
    assert decode("bytes", whole(store, 1)) == "abcde"
    assert store.labels(1, 4, 5).tolist() == [IGNORE_INDEX]
    assert store.valid.tolist() == [3, 4, 3]
    gone = prepare([path], tmp_path / "gone", tokenizer=BYTES, max_length=5, too_long="drop")
    assert (gone.documents, gone.counts.too_long, gone.counts.tokens_lost) == (2, 1, 9)
    assert TokenStore(tmp_path / "gone").meta.prepared == {
        "max_length": 5,
        "too_long": "drop",
        "counts": {"records": 3, "empty": 0, "nothing_to_learn": 0, "too_long": 1, "tokens_lost": 9, "merged": 0},
    }


def test_documents_without_anything_to_learn_are_left_out_and_counted(jsonl, tmp_path, tokenizer_file):
    pairs = jsonl(
        {"prompt": "a long prompt", "answer": "b"}, {"prompt": "p", "answer": ""}, {"prompt": "p", "answer": "b"}
    )
    done = prepare([pairs], tmp_path / "one", tokenizer=BYTES, max_length=5, too_long="truncate")
    assert (done.documents, done.counts.empty, done.counts.nothing_to_learn) == (1, 1, 1)
    texts = jsonl({"text": None}, {"text": ""}, {"text": "ok"}, name="texts.jsonl")
    done = prepare([texts], tmp_path / "two", tokenizer=BYTES)
    assert (done.counts.records, done.documents, done.counts.empty) == (3, 1, 2)
    with pytest.raises(SeqloomError, match=r"no document is left of 2 records \(2 empty, 0 with nothing to learn\)"):
        prepare([jsonl({"text": ""}, {"text": ""})], tmp_path / "three", tokenizer=BYTES)
    ids = jsonl({"input_ids": [3]}, {"input_ids": [3, 4]}, name="ids.jsonl")
    assert prepare([ids], tmp_path / "four", vocabulary=5).counts.nothing_to_learn == 1


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"text": "a"}\n{"text": ', "line 2: not valid JSON"),
        ("[1]\n", "line 1: list, not an object"),
        ('{"text": "a"}\n\n{"txt": "b"}\n', "line 3: no field 'text' as in the records before"),
        (
            '{"input_ids": [1, 2]}\n{"input_ids": [1, 2], "labels": [-100, 2]}\n',
            "line 2: field 'labels', which the records before do not have; give it in all records of a file or in none",
        ),
        ('{"input_ids": [1, 2], "labels": [-100, 2]}\n{"input_ids": [1, 2]}\n', "line 2: no field 'labels' as in"),
        ('{"text": "a"}\n{"text": "b", "prompt": "c", "answer": "d"}\n', "line 2: more than one way to read"),
        ('{"text": 5}\n', "line 1, field 'text': int, not text"),
        ('{"body": "a"}\n', "line 1: no field that is known, it has 'body'; name the text field"),
        ('{"text": "a", "input_ids": [1]}\n', "more than one way to read its records"),
        ('{"prompt": "a", "answer": "b", "response": "c"}\n', "more than one way"),
        ('{"text": "\\ud800"}\n', "half a surrogate pair"),
        ('{"input_ids": [1, 2.5]}\n', "not a list of whole numbers"),
        ('{"input_ids": [1, true]}\n', "not a list of whole numbers"),
        ('{"input_ids": [1, 99999999999999999999]}\n', "too large"),
        ('{"input_ids": [1, 257]}\n', r"line 1: token 1 is 257, outside the vocabulary 0 \.\. 256"),
        ('{"input_ids": [1, -1]}\n', "token 1 is -1"),
        ('{"input_ids": [1, 2], "labels": [1]}\n', "1 labels for 2 ids"),
        ('{"input_ids": [1, 2], "labels": [2, -100]}\n', "label 0 is 2 beside id 1; a label repeats"),
    ],
)
def test_a_bad_record_is_named(lines, message, tmp_path):
    path = tmp_path / "input.jsonl"
    path.write_text(lines)
    with pytest.raises(SeqloomError, match=message):
        prepare([path], tmp_path / "store", tokenizer=BYTES)
    assert [file.name for file in tmp_path.iterdir()] == ["input.jsonl"]


def test_a_bad_file_is_named(tmp_path, jsonl):
    (tmp_path / "latin.txt").write_bytes(b"ok\ncaf\xe9\n")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 not really PAR1")
    cases = {
        "gone.jsonl": "does not exist",
        "table.csv": r"is none of \.jsonl, \.parquet, \.txt",
        "latin.txt": r"latin\.txt, line 2: not UTF-8",
        "broken.parquet": "not a readable Parquet file",
    }
    for name, message in cases.items():
        with pytest.raises(SeqloomError, match=message):
            prepare([tmp_path / name], tmp_path / "store", tokenizer=BYTES)
    with pytest.raises(SeqloomError, match="no input"):
        prepare([], tmp_path / "store", tokenizer=BYTES)
    assert not (tmp_path / "store").exists()


def test_bad_settings(tmp_path, jsonl):
    path = jsonl({"text": "abc"})
    for options, message in (
        ({}, "neither a tokenizer nor a vocabulary"),
        ({"vocabulary": 9}, "line 1: a text, and no tokenizer"),
        ({"tokenizer": BYTES, "vocabulary": 256}, "a vocabulary of 256 for a tokenizer with 257 ids"),
        ({"tokenizer": BYTES, "too_long": "cut"}, "unknown policy"),
        ({"tokenizer": BYTES, "max_length": 1}, "at least 2"),
        ({"tokenizer": BYTES, "unit": "page"}, "unknown unit of text 'page'"),
    ):
        with pytest.raises(SeqloomError, match=message):
            prepare([path], tmp_path / "store", **options)
    for fields in ({"prompt": "p"}, {"text": "t", "ids": "i"}):
        with pytest.raises(SeqloomError, match="name"):
            RecordFields(**fields)
    assert not (tmp_path / "store").exists()


def test_a_larger_vocabulary_may_be_asked_for(tmp_path, jsonl):
    """A model's vocabulary is often rounded up."""
    assert prepare([jsonl({"text": "abc"})], tmp_path / "store", tokenizer=BYTES, vocabulary=512).vocabulary == 512


def test_the_same_input_gives_the_same_bytes_wherever_it_lies(tmp_path, jsonl, texts, tokenizer_folder):
    path = jsonl(*({"text": text} for text in texts))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    moved = elsewhere / "copy.jsonl"
    moved.write_bytes(path.read_bytes())
    for number, source in enumerate((path, moved)):
        prepare([source], tmp_path / f"{number}", tokenizer=load_tokenizer(tokenizer_folder))
    for name in ("tokens.arrow", "index.arrow", "meta.json"):
        assert (tmp_path / "0" / name).read_bytes() == (tmp_path / "1" / name).read_bytes()


def test_progress_rises_and_chunks_do_not_show(tmp_path, jsonl, monkeypatch):
    import seqloom.data.prepare  # noqa: F401 - the function has the module's name

    module, records = sys.modules["seqloom.data.prepare"], sys.modules["seqloom.data.records"]
    paths = [jsonl(*({"text": "x" * n} for n in range(1, 40)), name=f"{k}.jsonl") for k in range(3)]
    prepare(paths, tmp_path / "large", tokenizer=BYTES)
    monkeypatch.setattr(module, "CHUNK", 50)
    monkeypatch.setattr(records, "PARQUET_ROWS", 3)
    seen = []
    prepare(paths, tmp_path / "small", tokenizer=BYTES, progress=seen.append)
    assert len(seen) > 10
    assert seen == sorted(seen)
    assert seen[-1] <= 1
    for name in ("tokens.arrow", "index.arrow", "meta.json"):
        assert (tmp_path / "large" / name).read_bytes() == (tmp_path / "small" / name).read_bytes()


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    def peak(megabytes):
        path = tmp_path / f"{megabytes}.txt"
        with path.open("wb") as file:
            for _ in range(megabytes * 100):
                file.write(b"x" * 9_999 + b"\n")
        tracemalloc.start()
        prepare([path], tmp_path / f"store-{megabytes}", tokenizer=BYTES)
        _, highest = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return highest

    peak(1)  # imports are not counted
    assert peak(40) < 1.2 * peak(10) < 40e6


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_a_prepare_that_is_killed_half_way_leaves_no_store(tmp_path):
    path = tmp_path / "input.txt"
    path.write_text(("some words " * 20 + "\n") * 20_000)
    code = f"""
import os, signal
from seqloom.data import load_tokenizer, prepare
def progress(share):
    if share > 0.5:
        os.kill(os.getpid(), signal.SIGKILL)
prepare([{str(path)!r}], {str(tmp_path / "store")!r}, tokenizer=load_tokenizer("bytes"), progress=progress)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == -9, done.stderr
    assert not (tmp_path / "store").exists()
    assert not [file for file in tmp_path.glob("store.partial-*/meta.json")]


def test_valid_counts_equal_the_labels(tmp_path, jsonl):
    draw = np.random.default_rng(0)
    records = []
    for _ in range(50):
        ids = draw.integers(0, 9, draw.integers(1, 12))
        labels = np.where(draw.random(len(ids)) < 0.5, ids, -100)
        records.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    done = prepare([jsonl(*records)], tmp_path / "store", vocabulary=9, max_length=8, too_long="truncate")
    store = TokenStore(tmp_path / "store")
    counts = [(store.labels(k, 0, int(store.lengths[k])) != IGNORE_INDEX).sum() for k in range(len(store))]
    assert counts == store.valid.tolist()
    assert done.valid == sum(counts) == json.loads((tmp_path / "store" / "meta.json").read_text())["valid"]


# ---- Tokenizers


def test_bytes(texts):
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocabulary, tokenizer.begin, tokenizer.end) == (257, (), (256,))
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        assert bytes(ids.tolist()).decode() == text


def test_a_file_keeps_its_own_template(tokenizer_file, texts):
    tokenizer = load_tokenizer(tokenizer_file)
    assert (tokenizer.begin, tokenizer.end) == ((0,), ())
    assert tokenizer.vocabulary > 258
    assert [decode(tokenizer_file, ids) for ids in tokenizer.encode(texts)] == texts
    assert tokenizer.metadata["kind"] == "tokenizers"


def test_a_folder_adds_its_end_of_sequence(tokenizer_folder, tokenizer_file, texts):
    tokenizer, plain = load_tokenizer(tokenizer_folder), load_tokenizer(tokenizer_file)
    assert (tokenizer.begin, tokenizer.end) == ((0,), (1,))
    assert tokenizer.vocabulary == plain.vocabulary
    assert [decode(tokenizer_folder, ids) for ids in tokenizer.encode(texts)] == texts
    for ours, theirs in zip(tokenizer.encode(texts), plain.encode(texts), strict=True):
        assert ours.tolist() == theirs.tolist()
    described = tokenizer.metadata
    assert (described["kind"], described["name"], len(described["sha256"])) == ("transformers", "little", 64)


def test_a_file_whose_first_words_are_special_is_still_probed(tmp_path):
    """A word-level tokenizer without the word `a`, and with a template on both sides."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({"[A]": 0, "[Z]": 1, "cat": 2}))
    tokenizer.add_special_tokens(["[A]", "[Z]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[A] [A] $A [Z]", special_tokens=[("[A]", 0), ("[Z]", 1)]
    )
    tokenizer.save(str(tmp_path / "words.json"))
    found = load_tokenizer(tmp_path / "words.json")
    assert found.encode(["cat cat"])[0].tolist() == [2, 2]
    assert (found.begin, found.end) == ((0, 0), (1,))
    (tmp_path / "input.txt").write_text("cat\ncat dog\n")
    with pytest.raises(SeqloomError, match=r"input\.txt, line 2: tokenizer 'words\.json' cannot encode a text"):
        prepare([tmp_path / "input.txt"], tmp_path / "store", tokenizer=found)


def test_what_cannot_be_loaded(tmp_path, tokenizer_file, tokenizer_folder, monkeypatch):
    with pytest.raises(SeqloomError, match="neither a file nor a folder"):
        load_tokenizer("gpt-17")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(SeqloomError, match="cannot be read"):
        load_tokenizer(tmp_path / "broken.json")
    with pytest.raises(SeqloomError, match="cannot be read"):
        load_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    for name in (tokenizer_file, tokenizer_folder):
        with pytest.raises(SeqloomError, match=r"pip install 'seqloom\[hf\]'"):
            load_tokenizer(name)
