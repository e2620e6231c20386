"""Every source of lengths reads the same numbers, and every fault is named with its place."""

from __future__ import annotations

import io
import json
import sys
import time

import numpy as np
import pytest

from seqloom.describe import lengths_from, read_lengths, sampler
from seqloom.errors import SeqloomError

LENGTHS = [12, 345, 6]


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return write


def parquet(path, **columns):
    pq = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    pq.write_table(pa.table(columns), path)
    return str(path)


@pytest.mark.parametrize(
    ("name", "content", "column"),
    [
        ("a.txt", "12\n345\n6\n", None),
        ("a.txt", "12\r\n345\r\n6", None),
        ("a.TXT", "\ufeff12\n\n 345 \n6.0\n\n", None),
        ("a.jsonl", "12\n345\n6\n", None),
        ("a.jsonl", '{"n": 12}\n{"n": 345}\n\n{"n": 6}\n', None),
        ("a.jsonl", '{"id": 1, "n": 12}\n{"id": 2, "n": 345}\n{"n": 6}', "n"),
        ("a.jsonl", '{"id": 1, "length": 12}\n{"id": 2, "length": 345}\n{"length": 6.0}', None),
        ("a.csv", "id,n\n1,12\n2,345\n3,6\n", "n"),
        ("a.csv", 'name,length\n"a, b",12\nb,345\n\nc,6\n', None),
        ("a.csv", "12\n345\n6\n", None),
    ],
)
def test_text_files(write, name, content, column):
    lengths = read_lengths(write(name, content), column=column)
    assert lengths.dtype == np.int64 and lengths.tolist() == LENGTHS


def test_arrays(tmp_path):
    for dtype in (np.uint32, np.int64, np.float32):
        np.save(tmp_path / "a.npy", np.array(LENGTHS, dtype=dtype))
        assert read_lengths(str(tmp_path / "a.npy")).tolist() == LENGTHS
    np.savez(tmp_path / "one.npz", x=LENGTHS)
    np.savez(tmp_path / "two.npz", x=LENGTHS, y=[1])
    assert read_lengths(tmp_path / "one.npz").tolist() == LENGTHS
    assert read_lengths(tmp_path / "two.npz", column="x").tolist() == LENGTHS
    with pytest.raises(SeqloomError, match="Name one of: x, y"):
        read_lengths(tmp_path / "two.npz")


def test_parquet(tmp_path):
    path = parquet(tmp_path / "a.parquet", id=[1, 2, 3], length=LENGTHS, text=["a", "é", "abc"], flag=[True] * 3)
    assert read_lengths(path).tolist() == LENGTHS
    assert read_lengths(path, column="text", tokenizer="bytes").tolist() == [1, 2, 3]
    with pytest.raises(SeqloomError, match="unknown column 'lenght'; did you mean length"):
        read_lengths(path, column="lenght")
    with pytest.raises(SeqloomError, match="column 'flag' is of type bool"):
        read_lengths(path, column="flag")
    with pytest.raises(SeqloomError, match="no tokenizer was named"):
        read_lengths(path, column="text")
    with pytest.raises(SeqloomError, match="row 1: None"):
        read_lengths(parquet(tmp_path / "b.parquet", length=[1, None, 2]))
    with pytest.raises(SeqloomError, match="row 2: nan"):
        read_lengths(parquet(tmp_path / "c.parquet", length=[1.0, 2.0, float("nan")]))
    (tmp_path / "d.parquet").write_bytes(b"no")
    with pytest.raises(SeqloomError, match="not a readable Parquet file"):
        read_lengths(tmp_path / "d.parquet")


def test_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("12\n345\n6\n"))
    assert read_lengths("-").tolist() == LENGTHS
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"n": 12, "m": 1}\n')))
    assert lengths_from("-", seed=0, count=1, column="n").tolist() == [12]
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(SeqloomError, match="standard input: empty"):
        read_lengths("-")


def test_texts_are_counted_in_bytes(write):
    path = write("a.jsonl", '{"text": "abc", "id": "x"}\n{"text": "é", "id": "y"}\n')
    assert read_lengths(path, column="text", tokenizer="bytes").tolist() == [3, 2]
    with pytest.raises(SeqloomError, match="column 'text' holds text and no tokenizer was named"):
        read_lengths(path)
    with pytest.raises(SeqloomError, match=r"is not a file; pass the path of a tokenizer\.json"):
        read_lengths(path, column="text", tokenizer="nowhere.json")


class FakeTokenizer:
    """Stands for the package ``tokenizers``: one token for each word."""

    @classmethod
    def from_file(cls, path):
        if "broken" in path:
            raise Exception("expected value at line 1")
        return cls()

    def no_truncation(self): ...
    def no_padding(self): ...

    def encode_batch(self, texts):
        return [type("Encoding", (), {"ids": text.split()}) for text in texts]


def test_texts_are_counted_by_a_tokenizer_file(write, monkeypatch):
    path = write("a.jsonl", '{"text": "one two"}\n{"text": "three"}\n')
    tokenizer = write("tokenizer.json", "{}")
    monkeypatch.setitem(sys.modules, "tokenizers", type(sys)("tokenizers"))
    sys.modules["tokenizers"].Tokenizer = FakeTokenizer
    assert read_lengths(path, tokenizer=tokenizer).tolist() == [2, 1]
    with pytest.raises(SeqloomError, match="cannot be read"):
        read_lengths(path, tokenizer=write("broken.json", "{}"))


def test_optional_packages_are_named_when_missing(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = write("a.jsonl", '{"text": "one two"}\n')
    with pytest.raises(SeqloomError, match=r"needs the package 'tokenizers'.*install the extra 'hf'"):
        read_lengths(path, tokenizer=write("tokenizer.json", "{}"))
    with pytest.raises(SeqloomError, match=r"needs the package 'pyarrow'.*save the column as"):
        read_lengths(write("a.parquet", ""))


@pytest.mark.parametrize(
    ("name", "content", "column", "message"),
    [
        ("a.txt", "", None, "empty"),
        ("a.txt", "\n\n", None, "empty"),
        (
            "a.txt",
            "5\nnan\n",
            None,
            r"line 2: 'nan' is not a length; a length is .* correct it or leave it out",
        ),
        ("a.txt", "5\n\n0\n", None, "line 3: 0 is not"),
        ("a.txt", "5\n-3\n", None, "line 2: -3"),
        ("a.txt", "5\n1.5\n", None, "line 2: '1.5'"),
        ("a.txt", "5\n1_000\n", None, "line 2: '1_000'"),
        ("a.txt", "5\n6 7\n", None, "line 2: '6 7'"),
        ("a.txt", "5\n99999999999999999999\n", None, "line 2: 99999999999999999999"),
        ("a.txt", "9" * 5000, None, "line 1: '9999"),
        ("a.txt", "5\n", "n", r"\.txt has none; leave it out"),
        ("a.jsonl", "", None, "empty"),
        ("a.jsonl", '{"n": 1}\n{"n": }', None, "line 2: not JSON"),
        ("a.jsonl", '{"n": 1}\n{"m": 1}', None, "line 2: no field 'n'; it has m"),
        ("a.jsonl", '{"n": 1}', "m", "unknown column 'm'; .*its columns: n"),
        ("a.jsonl", '{"n": 1, "m": 2}', None, "which column holds the lengths"),
        ("a.jsonl", '{"n": 1}\n{"n": NaN}', None, "line 2: nan"),
        ("a.jsonl", '{"n": 1}\n{"n": true}', None, "line 2: True"),
        ("a.jsonl", '{"n": 1}\n{"n": null}', None, "line 2: None"),
        ("a.jsonl", '{"n": 1}\n\n{"n": 2.5}', None, "line 3: 2.5"),
        ("a.jsonl", '{"n": 1}\n{"n": "x"}', None, "line 2: 'x'"),
        ("a.jsonl", '{"n": "x"}\n{"n": 1}', None, "line 2: 1 is not text"),
        ("a.jsonl", '{"n": [1]}', None, r"line 1: \[1\]"),
        ("a.jsonl", b'{"n": 1}\n\xff', None, "line 2: not UTF-8"),
        ("a.csv", "", None, "empty"),
        ("a.csv", "a,b\n", "a", "a header but no rows"),
        ("a.csv", "a,b\n1,2\n", "c", "unknown column 'c'; .*its columns: a, b"),
        ("a.csv", "a,b\n1,2\n", None, "Name one of: a, b"),
        ("a.csv", "a,b\n1,2\n1,\n", "b", "line 3: ''"),
        ("a.csv", "a,b\n1,2\n1\n", "b", "line 3: ''"),
        ("a.csv", "a,b\n1,0\n", "b", "line 2: 0"),
        ("a.csv", "a,b\n1,nan\n", "b", "line 2: 'nan'"),
        ("a.npy", b"", None, "not a readable array"),
        ("a.npz", b"PK", None, "not a readable archive"),
        ("a.npz", b"text", None, "not a readable archive"),
        ("a.xlsx", "", None, r"cannot be read from \.xlsx; convert it to one of \.txt"),
        ("a", "", None, "a file without a suffix"),
    ],
)
def test_faults_are_named(write, name, content, column, message):
    with pytest.raises(SeqloomError, match=message):
        read_lengths(write(name, content), column=column)


def test_faulty_arrays_are_named(tmp_path):
    for values, message in (
        ([[1, 2]], "not a flat list"),
        ([1, np.nan], "entry 1: nan"),
        ([], "empty"),
        (["a"], "'a'"),
        ([1, -1], "entry 1: -1"),
    ):
        np.save(tmp_path / "a.npy", values)
        with pytest.raises(SeqloomError, match=message):
            read_lengths(tmp_path / "a.npy")
    np.save(tmp_path / "o.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(SeqloomError, match="not a readable array of numbers"):
        read_lengths(tmp_path / "o.npy")


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(SeqloomError, match="does not exist; check the path"):
        read_lengths(tmp_path / "nothing.txt")
    with pytest.raises(SeqloomError, match="is a folder"):
        read_lengths(tmp_path)


def test_lengths_from_takes_names_and_files(write):
    assert lengths_from("web", seed=1, count=50).tolist() == sampler("web").sample(50, seed=1).tolist()
    assert lengths_from(write("a.txt", "12\n345\n6\n"), seed=1, count=2).tolist() == LENGTHS
    with pytest.raises(SeqloomError, match=r"unknown sampler 'wikpedia'; did you mean wikipedia.*or give a"):
        lengths_from("wikpedia", seed=0, count=1)
    with pytest.raises(SeqloomError, match="does not exist"):
        lengths_from("nowhere.txt", seed=0, count=1)


def test_a_million_lines_are_read_quickly(write):
    values = sampler("wikipedia").sample(1_000_000, seed=0)
    path = write("a.txt", "\n".join(map(str, values.tolist())))
    start = time.process_time()
    assert np.array_equal(read_lengths(path), values)
    assert time.process_time() - start < 1.5


def test_json_lines_may_hold_line_separators(write):
    path = write("a.jsonl", json.dumps({"text": "a\u2028b"}, ensure_ascii=False) + "\n")
    assert read_lengths(path, tokenizer="bytes").tolist() == [5]


def test_a_column_whose_name_is_no_text_is_refused(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "lengths.parquet"
    table = pytest.importorskip("pyarrow").table({"length": [1, 2], "other": [3, 4]})
    parquet.write_table(table, path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"other", b"oth\xfcr"))
    with pytest.raises(SeqloomError, match="not a readable Parquet file"):
        read_lengths(str(path))
