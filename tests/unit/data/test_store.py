"""The token store: what was written is what is read, all or nothing; a damaged one is refused."""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from seqloom.data import IGNORE_INDEX, StoreWriter, TokenStore
from seqloom.data import store as writer
from seqloom.errors import SeqloomError


def test_tokens_labels_and_counts(store):
    found = store([1, 2, 3, 4], ([5, 6, 7, 8, 9], [0, 0, 1, 0, 1]), [299])
    assert found.lengths.tolist() == [4, 5, 1]
    assert found.valid.tolist() == [3, 2, 0]
    assert found.tokens(0, 0, 4).tolist() == [1, 2, 3, 4]
    assert found.labels(0, 0, 4).tolist() == [2, 3, 4, IGNORE_INDEX]
    assert found.labels(1, 0, 5).tolist() == [IGNORE_INDEX, 7, IGNORE_INDEX, 9, IGNORE_INDEX]
    assert found.labels(2, 0, 1).tolist() == [IGNORE_INDEX]
    assert found.tokens(1, 2, 2).tolist() == found.labels(1, 5, 5).tolist() == []
    assert {found.tokens(0, 0, 4).dtype, found.labels(0, 0, 4).dtype, found.lengths.dtype} == {np.dtype(np.int64)}
    assert len(found) == 3
    assert repr(found).endswith("3 documents, 10 tokens)")


def test_the_label_of_a_shards_last_token_is_the_next_shards_first_token(store):
    """Shards of [1, 10, 10, 10, 2, 2]: shifting inside a shard would lose the label at the cut."""
    tokens = [1, 10, 10, 10, 2, 2]
    found = store(tokens)
    whole = found.labels(0, 0, 6)
    assert whole.tolist() == [10, 10, 10, 2, 2, IGNORE_INDEX]
    for cut in range(1, 6):
        left, right = found.labels(0, 0, cut), found.labels(0, cut, 6)
        assert left[-1] == found.tokens(0, cut, 6)[0]
        assert np.concatenate([left, right]).tolist() == whole.tolist()


def test_documents_lie_across_parts_of_the_file(store, monkeypatch):
    monkeypatch.setattr(writer, "TOKENS_PER_RECORD_BATCH", 7)
    monkeypatch.setattr(writer, "DOCUMENTS_PER_RECORD_BATCH", 2)
    documents = [list(range(k, k + size)) for k, size in enumerate((1, 20, 6, 7, 8, 40, 3))]
    masks = [[(k + p) % 3 > 0 for p in range(len(ids))] for k, ids in enumerate(documents)]
    found = store(*zip(documents, masks, strict=True))
    for number, (ids, mask) in enumerate(zip(documents, masks, strict=True)):
        assert found.tokens(number, 0, len(ids)).tolist() == ids
        labels = np.where(mask, ids, IGNORE_INDEX)[1:].tolist()
        assert found.labels(number, 0, len(ids)).tolist() == [*labels, IGNORE_INDEX]
        for start in range(len(ids)):
            assert found.tokens(number, start, len(ids)).tolist() == ids[start:]


@pytest.mark.parametrize(("vocabulary", "dtype"), [(1 << 31, np.int32), ((1 << 31) + 1, np.int64)])
def test_ids_are_int32_on_disk_as_long_as_the_vocabulary_allows(store, vocabulary, dtype):
    import pyarrow

    found = store([0, vocabulary - 1], vocabulary=vocabulary)
    assert found.tokens(0, 0, 2).tolist() == [0, vocabulary - 1]
    with pyarrow.memory_map(str(found.path / "tokens.arrow")) as file:
        assert pyarrow.ipc.open_file(file).schema.field("token").type == pyarrow.from_numpy_dtype(dtype)
    assert found.meta.dtype == np.dtype(dtype).name


def test_a_pickle_is_the_path_and_threads_may_read(store):
    found = store(list(range(250)))
    again = pickle.loads(pickle.dumps(found))
    seen = []
    threads = [threading.Thread(target=lambda: seen.append(again.tokens(0, 3, 200).sum())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [sum(range(3, 200))] * 8


@pytest.mark.parametrize(("document", "start", "stop"), [(2, 0, 1), (-1, 0, 1), (0, 2, 1), (0, -1, 1), (0, 0, 4)])
def test_a_span_outside_is_refused(store, document, start, stop):
    found = store([1, 2, 3], [4])
    with pytest.raises(SeqloomError, match="document"):
        found.tokens(document, start, stop)
    with pytest.raises(SeqloomError, match="document"):
        found.labels(document, start, stop)


def test_columns_cannot_be_changed(store):
    with pytest.raises(ValueError, match="read-only"):
        store([1, 2]).lengths[0] = 5


def test_no_store(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for name, why in (("gone", "does not exist"), ("file", "is a file"), ("folder", "has no meta.json")):
        with pytest.raises(SeqloomError, match=why):
            TokenStore(tmp_path / name)


@pytest.mark.parametrize("name", ["tokens.arrow", "index.arrow"])
def test_a_truncated_missing_or_overwritten_file_is_refused(store, name):
    found = store(list(range(200)))
    path, content = found.path / name, (found.path / name).read_bytes()
    path.write_bytes(content[:-10])
    with pytest.raises(SeqloomError, match=rf"{name}: .* bytes of .*copy it again"):
        TokenStore(found.path)
    path.write_bytes(bytes(len(content)))
    with pytest.raises(SeqloomError, match=rf"{name}: not a readable Arrow file"):
        TokenStore(found.path)
    path.unlink()
    with pytest.raises(SeqloomError, match=rf"{name}.* is missing"):
        TokenStore(found.path)


def test_verify_finds_a_changed_id(store):
    found = store(list(range(64, 128)), vocabulary=256)
    found.verify()
    path = found.path / "tokens.arrow"
    content = bytearray(path.read_bytes())
    at = content.index(np.arange(64, 128, dtype=np.int32).tobytes())
    content[at] = 65
    path.write_bytes(content)
    with pytest.raises(SeqloomError, match=r"tokens\.arrow: its digest"):
        TokenStore(found.path).verify()
    content[at + 1] = 1
    path.write_bytes(content)
    with pytest.raises(SeqloomError, match=r"document 0: token 0 is 321, outside the vocabulary 0 \.\. 255"):
        TokenStore(found.path).tokens(0, 0, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2, not"),
        ({"format": "other"}, "format 'other'"),
        ({"tokens": 7}, "3 tokens, but meta.json says 7"),
        ({"documents": 7}, "1 documents, but meta.json says 7"),
        ({"valid": 7}, "2 valid, but meta.json says 7"),
        ({"vocabulry": 1}, "unknown key 'vocabulry'; did you mean 'vocabulary'"),
        ({"files": {}}, "tokens.arrow is not among its files"),
    ],
)
def test_meta_that_does_not_agree_is_refused(store, change, message):
    path = store([1, 2, 3]).path
    content = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps(content | change))
    with pytest.raises(SeqloomError, match=message):
        TokenStore(path)
    (path / "meta.json").write_text("{")
    with pytest.raises(SeqloomError, match="not valid JSON"):
        TokenStore(path)


def test_files_of_two_stores_mixed_up_are_refused(store):
    one, other = store([1, 2, 3], [4]), store([1, 2], [4, 5], name="other")
    assert (one.path / "index.arrow").stat().st_size == (other.path / "index.arrow").stat().st_size
    (one.path / "index.arrow").write_bytes((other.path / "index.arrow").read_bytes())
    with pytest.raises(SeqloomError, match="longest"):
        TokenStore(one.path)


def test_without_pyarrow_the_extra_is_named(tmp_path, store, monkeypatch):
    path = store([1, 2]).path
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SeqloomError, match=r"a token store needs the package 'pyarrow'.*pip install 'seqloom\[data\]'"):
        TokenStore(path)
    with pytest.raises(SeqloomError, match=r"seqloom\[data\]"):
        StoreWriter(tmp_path / "new", vocabulary=2)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_an_error_leaves_nothing(tmp_path):
    for error in (ValueError, KeyboardInterrupt):
        with pytest.raises(error), StoreWriter(tmp_path / "store", vocabulary=9) as writer:
            writer.add([1, 2, 3])
            assert names(tmp_path) != ["store"]
            raise error
        assert names(tmp_path) == []


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGKILL")
def test_a_killed_writer_leaves_no_store_and_the_next_one_succeeds(tmp_path):
    code = f"""
import os, signal
from seqloom.data import StoreWriter, store as writer
writer.TOKENS_PER_RECORD_BATCH = 4
with StoreWriter({str(tmp_path / "store")!r}, vocabulary=9) as made:
    for _ in range(100):
        made.add([1, 2, 3])
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    [left] = names(tmp_path)
    assert left.startswith("store.partial-")
    with pytest.raises(SeqloomError, match="no token store"):
        TokenStore(tmp_path / "store")
    with pytest.raises(SeqloomError, match="has no meta"):
        TokenStore(tmp_path / left)
    with StoreWriter(tmp_path / "store", vocabulary=9) as made:
        made.add([1, 2, 3])
    assert len(TokenStore(tmp_path / "store")) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs limits of a process")
def test_a_full_disk_is_one_clear_error(tmp_path):
    """A limit on the size of files stands in for a disk without room."""
    code = f"""
import resource
from seqloom.data import StoreWriter
from seqloom.errors import SeqloomError
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    with StoreWriter({str(tmp_path / "store")!r}, vocabulary=9) as made:
        made.add([1] * 1_000_000)
except SeqloomError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "tokens.arrow: cannot be written (File too large); make room" in done.stdout
    assert names(tmp_path) == []


def test_same_documents_same_bytes(store):
    documents = [[1, 2, 3], ([4, 5], [1, 0]), list(range(100))]
    one, other = store(*documents, name="one"), store(*documents, name="other")
    assert names(one.path) == names(other.path) == ["index.arrow", "meta.json", "tokens.arrow"]
    for name in names(one.path):
        assert (one.path / name).read_bytes() == (other.path / name).read_bytes()


def test_a_folder_that_exists_or_cannot_be_made_is_refused(tmp_path, store):
    path = store([1, 2]).path
    with pytest.raises(SeqloomError, match="exists; choose another"):
        StoreWriter(path, vocabulary=9)
    with pytest.raises(SeqloomError, match="needs the folder"):
        StoreWriter(tmp_path / "no" / "store", vocabulary=9)


def test_a_folder_that_appears_meanwhile_is_kept(tmp_path):
    with pytest.raises(SeqloomError, match="exists"), StoreWriter(tmp_path / "store", vocabulary=9) as writer:
        writer.add([1, 2])
        (tmp_path / "store").mkdir()
    assert names(tmp_path) == ["store"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "at least one"),
        (([1.5],), "must be integers"),
        (([[1]],), "must be integers"),
        (([1, 9],), r"document 0: token 1 is 9, outside the vocabulary 0 \.\. 8"),
        (([-1],), "token 0 is -1"),
        (([1, 2], [True]), "a mask of 1 for 2 tokens"),
    ],
)
def test_what_is_no_document_is_refused(tmp_path, arguments, message):
    with pytest.raises(SeqloomError, match=message), StoreWriter(tmp_path / "store", vocabulary=9) as writer:
        writer.add(*arguments)
    assert names(tmp_path) == []


def test_an_empty_store_and_an_empty_vocabulary_are_refused(tmp_path):
    with pytest.raises(SeqloomError, match="no document to store"), StoreWriter(tmp_path / "store", vocabulary=9):
        pass
    with pytest.raises(SeqloomError, match="a vocabulary of 0"):
        StoreWriter(tmp_path / "store", vocabulary=0)
    assert names(tmp_path) == []
