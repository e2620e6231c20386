"""Lengths of documents before they are prepared: those of the store that `prepare` writes from the same input."""

import gzip
import io
import json
import sys

import pytest

from seqloom.data import TokenStore, document_lengths, load_tokenizer, prepare
from seqloom.describe import read_lengths
from seqloom.errors import SeqloomError

TEMPLATE = "{% for m in messages %}<s>{{ m.role }}|{{ m.content }}</s>{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<s>assistant|{% endif %}"
CHAT = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
RECORDS = {
    "chats": [{"messages": CHAT}, {"messages": CHAT[:1]}, {"messages": [*CHAT, CHAT[0]]}, {"messages": []}],
    "talks": [{"conversations": CHAT + CHAT}],
    "pairs": [{"prompt": "a dog ", "completion": "and a bird"}, {"prompt": "x", "completion": ""}],
    "lists": [{"prompt": CHAT[:1], "completion": CHAT[1:]}],
    "texts": [{"text": "the cat sat"}, {"text": ""}, {"text": "naïve"}],
    "ids": [
        {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]},
        {"input_ids": [5], "labels": [5]},
        {"input_ids": [1, 2], "labels": None},
    ],
}


@pytest.fixture
def template(tmp_path):
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    return tmp_path / "t.jinja"


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def set_stdin(monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.mark.parametrize("kind", RECORDS)
@pytest.mark.parametrize("form", [".jsonl", ".jsonl.gz", ".parquet", "folder", "glob", "-"])
def test_lengths_are_those_of_the_store(kind, form, tmp_path, template, tokenizer_folder, monkeypatch):
    records = RECORDS[kind]
    folder = tmp_path / "input"
    folder.mkdir()
    path = folder / f"input{form if form.startswith('.') else '.jsonl'}"
    if form == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    else:
        path.write_bytes(gzip.compress(lines(records)) if form.endswith(".gz") else lines(records))
    if form == "-":
        set_stdin(monkeypatch, b"\n" + lines(records))
    given = {"folder": str(folder), "glob": str(folder / "*.jsonl"), "-": "-"}.get(form, str(path))
    options = {} if kind == "ids" else {"tokenizer": str(tokenizer_folder), "chat_template": template}
    found = document_lengths(given, **options)
    tokenizer = load_tokenizer(tokenizer_folder, template)
    done = prepare([path], tmp_path / "store", tokenizer=tokenizer)
    store = TokenStore(tmp_path / "store")
    assert found.lengths.tolist() == store.lengths.tolist()
    assert found.left_out == done.counts.empty + done.counts.nothing_to_learn == len(records) - len(store)
    assert document_lengths(str(tmp_path / "store")).lengths.tolist() == store.lengths.tolist()


def test_text_files_are_documents_where_a_tokenizer_is_named(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("7\nabc\n\n")
    found = document_lengths(str(path), tokenizer="bytes")
    assert (found.lengths.tolist(), found.left_out) == ([2, 4], 1)
    path.write_text("7\n12\n")
    assert document_lengths(str(path)).lengths.tolist() == [7, 12]


def test_a_field_of_lengths_goes_first(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines([{"input_ids": [1, 2], "length": 9, "text": "abc"}]))
    assert document_lengths(str(path)).lengths.tolist() == [9]
    assert document_lengths(str(path), column="text", tokenizer="bytes").lengths.tolist() == [3]


@pytest.mark.parametrize(
    ("data", "options", "wanted"),
    [
        ("12\n345\n", {}, [12, 345]),
        ('{"n": 12}\n{"n": 5}\n', {}, [12, 5]),
        ('{"n": 12, "m": 4}\n', {"column": "m"}, [4]),
        ("length,name\n5,a\n6,b\n", {}, [5, 6]),
        ("n\n5\n", {}, [5]),
        ("a,b\n5,6\n", {"column": "b"}, [6]),
        ('name,text\na,"one, two"\nb,three\n', {"tokenizer": "bytes"}, [8, 5]),
        ('name,text\na,"one\ntwo"\n', {"tokenizer": "bytes"}, [7]),
        ('"abc"\n"de"\n', {"tokenizer": "bytes"}, [3, 2]),
    ],
)
def test_standard_input_may_be_lines_json_or_csv(data, options, wanted, monkeypatch):
    set_stdin(monkeypatch, data.encode())
    assert document_lengths("-", **options).lengths.tolist() == wanted
    set_stdin(monkeypatch, data.encode())
    assert read_lengths("-", **options).tolist() == wanted


def test_texts_of_csv(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("id,text\n1,abc\n2,\n3,é\n")
    with pytest.raises(SeqloomError, match="column 'text' holds text and no tokenizer was named"):
        read_lengths(path)
    with pytest.raises(SeqloomError, match=r"a\.csv, line 3: 0 is not a length"):
        read_lengths(path, tokenizer="bytes")
    path.write_text("id,text\n1,abc\n3,é\n")
    assert read_lengths(path, tokenizer="bytes").tolist() == [3, 2]
    assert read_lengths(path, column="id", tokenizer="bytes").tolist() == [1, 3]
    path.write_text("id,text\n1," + "x" * 200_000 + "\n")
    with pytest.raises(SeqloomError, match=r"not readable as CSV \(field larger.*write it as"):
        read_lengths(path, tokenizer="bytes")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chats.jsonl", {}, "line 1: a chat, and no tokenizer to encode it"),
        ("chats.jsonl", {"tokenizer": "bytes"}, "line 1: a chat, and tokenizer 'bytes' has no chat template"),
        ("chats.jsonl", {"chat_template": "t.jinja"}, "--chat-template t.jinja without --tokenizer"),
        ("pairs.jsonl", {}, "line 1: a text, and no tokenizer"),
        ("empty.jsonl", {"tokenizer": "bytes"}, "2 records, none with anything to learn"),
        ("store", {"tokenizer": "bytes"}, "--tokenizer bytes for .*a token store, which knows its lengths; leave it"),
        ("store", {"column": "length"}, "--column length for .*a token store"),
        ("*.jsonl", {"column": "text"}, "--column text for .*documents of a data set; leave it out"),
        ("gone.jsonl", {}, "does not exist"),
        ("mixed.jsonl", {"tokenizer": "bytes"}, r"line 2: a record with 'text', and those before it"),
    ],
)
def test_refused(name, options, message, tmp_path, store):
    store([1, 2, 3])
    files = {"chats": [{"messages": CHAT}], "pairs": RECORDS["pairs"], "empty": [{"text": ""}, {"text": ""}]}
    files["mixed"] = [{"prompt": "a", "answer": "b"}, {"text": "a"}]
    for each, records in files.items():
        (tmp_path / f"{each}.jsonl").write_bytes(lines(records))
    with pytest.raises(SeqloomError, match=message):
        document_lengths(str(tmp_path / name), **options)
