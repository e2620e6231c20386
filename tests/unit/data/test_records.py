"""Which files an input names: folders, globs, packed files; and what is refused."""

import gzip

import pytest

from seqloom.data import TokenStore, load_tokenizer, prepare
from seqloom.data.records import find_files
from seqloom.errors import SeqloomError

BYTES = load_tokenizer("bytes")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder `data` with three files that are read, and three that are not."""
    for name in ("data/b.txt", "data/a.jsonl", "data/sub/c.txt", "data/README.md", "data/.hidden/x.txt", "data/.y.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"text": "a"}\n' if name.endswith("jsonl") else f"{name}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(inputs):
    found, others = find_files(inputs)
    return [str(path) for path in found], [str(path) for path in others]


def test_folders_and_globs_in_the_order_of_names(folder):
    every = ["data/a.jsonl", "data/b.txt", "data/sub/c.txt"]
    assert names(["data"]) == (every, ["data/README.md"])
    assert names(["data/*.txt", "data/a.jsonl"]) == (["data/b.txt", "data/a.jsonl"], [])
    assert names(["data/**/*.txt"]) == (["data/b.txt", "data/sub/c.txt"], [])
    assert names(["data/[ab].*"]) == (["data/a.jsonl", "data/b.txt"], [])
    (folder / "odd[1].txt").write_text("x\n")
    assert names(["odd[1].txt"]) == (["odd[1].txt"], [])  # a file of that name is no pattern
    done = prepare(["data"], folder / "store", tokenizer=BYTES)
    assert (done.files, done.documents, done.other_files) == (3, 3, ("data/README.md",))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["data/*.csv"], r"no file matches 'data/\*\.csv'"),
        (["data/*"], "matches 'data/README.md', which is none of"),
        (["data/s*"], "matches 'data/sub', which is a folder; narrow"),
        (["empty"], "'empty' has no file of .jsonl"),
        (["data/b.txt", "data"], "'data/b.txt' is named twice; name every file once"),
        (["data/README.md"], "is none of .jsonl"),
        ([], "no input; name at least one file"),
    ],
)
def test_refused_inputs(folder, inputs, message):
    (folder / "empty").mkdir()
    with pytest.raises(SeqloomError, match=message):
        find_files(inputs)


@pytest.mark.parametrize("unit", ["line", "file"])
def test_packed_files_hold_what_they_hold_unpacked(folder, unit):
    text = "".join(f"line {number}\r\n" for number in range(500))
    (folder / "plain.txt").write_bytes(text.encode())
    (folder / "packed.txt.gz").write_bytes(gzip.compress(text[:900].encode()) + gzip.compress(text[900:].encode()))
    for name in ("plain.txt", "packed.txt.gz"):
        prepare([name], folder / name.partition(".")[0], tokenizer=BYTES, unit=unit)
    for name in ("tokens.arrow", "index.arrow"):
        assert (folder / "plain" / name).read_bytes() == (folder / "packed" / name).read_bytes()
    (folder / "c.JSONL.gz").write_bytes(gzip.compress(b'{"text": "abc"}\n'))
    prepare(["c.JSONL.gz"], folder / "c", tokenizer=BYTES)
    assert TokenStore(folder / "c").lengths.tolist() == [4]


def test_a_broken_archive_is_named(folder):
    whole = gzip.compress(b"some words\n" * 1000)
    cases = {"cut": whole[:30], "none": b"some words\n", "changed": whole[:14] + b"\xff" * 9 + whole[23:], "sum": whole}
    cases["sum"] = whole[:-8] + b"\0" * 8
    for name, content in cases.items():
        (folder / f"{name}.txt.gz").write_bytes(content)
        with pytest.raises(SeqloomError, match=f"{name}.txt.gz: not a readable gzip file"):
            prepare([f"{name}.txt.gz"], folder / "store", tokenizer=BYTES)
        assert not (folder / "store").exists()


def test_progress_of_a_packed_file_rises_to_one(folder, monkeypatch):
    import sys

    monkeypatch.setattr(sys.modules["seqloom.data.prepare"], "CHUNK", 50)
    lines = [f"{number * 7919 % 10007} words" for number in range(20_000)]
    (folder / "p.txt.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    seen = []
    prepare(["p.txt.gz"], folder / "store", tokenizer=BYTES, progress=seen.append)
    assert seen == sorted(seen)
    assert 0 < seen[0] < 0.5 < seen[-1] <= 1
