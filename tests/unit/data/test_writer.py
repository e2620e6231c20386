"""Writing: all or nothing, the same bytes for the same documents."""

import os
import signal
import subprocess
import sys

import pytest

from seqloom.data import StoreWriter, TokenStore
from seqloom.errors import SeqloomError


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
writer.TOKENS_PER_PART = 4
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
