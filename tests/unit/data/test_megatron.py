"""Megatron pairs: exactly what a writer wrote, and what is refused. The writer follows the format's description."""

import pickle
import struct

import numpy as np
import pytest

from seqloom.data import IGNORE_INDEX, MegatronSource, TokenStore, open_source
from seqloom.errors import SeqloomError

CODES = {np.uint8: 1, np.int8: 2, np.int16: 3, np.int32: 4, np.int64: 5, np.float64: 6, np.float32: 7, np.uint16: 8}


def write(prefix, documents, dtype=np.uint16, *, version=1, magic=b"MMIDIDX\x00\x00", gap=0, tail=b""):
    """Documents are lists of sequences. `gap` bytes lie before every sequence in the .bin."""
    sequences = [np.array(sequence, dtype=dtype) for document in documents for sequence in document]
    offsets, data = [], b""
    for sequence in sequences:
        data += b"\xff" * gap
        offsets.append(len(data))
        data += sequence.tobytes()
    ends = np.cumsum([0, *(len(document) for document in documents)])
    header = magic + struct.pack("<QBQQ", version, CODES[dtype], len(sequences), len(ends))
    sizes = np.array([len(sequence) for sequence in sequences], dtype="<i4").tobytes()
    rest = np.array(offsets, dtype="<i8").tobytes() + ends.astype("<i8").tobytes()
    prefix.with_name(prefix.name + ".idx").write_bytes(header + sizes + rest + tail)
    prefix.with_name(prefix.name + ".bin").write_bytes(data)
    return prefix


DOCUMENTS = [[[1, 2, 3]], [[4, 5], [6], [7, 8, 9, 10]], [], [[]], [[11], [], [12, 13]], [[14]]]
FLAT = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10], [11, 12, 13], [14]]


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16])
@pytest.mark.parametrize("gap", [0, 3])
def test_every_type_and_every_document(tmp_path, dtype, gap):
    source = MegatronSource(write(tmp_path / "data_text_document", DOCUMENTS, dtype, gap=gap), vocabulary=15)
    assert source.lengths.tolist() == [3, 7, 3, 1]
    assert source.valid.tolist() == [2, 6, 2, 0]
    assert (source.vocabulary, len(source)) == (15, 4)
    for number, ids in enumerate(FLAT):
        for start in range(len(ids) + 1):
            for stop in range(start, len(ids) + 1):
                assert source.tokens(number, start, stop).tolist() == ids[start:stop]
                assert source.labels(number, start, stop).tolist() == [*ids[1:], IGNORE_INDEX][start:stop]


def test_a_pickle_is_the_path(tmp_path):
    source = MegatronSource(write(tmp_path / "data", DOCUMENTS), vocabulary=15)
    again = pickle.loads(pickle.dumps(source))
    assert again.lengths.tolist() == source.lengths.tolist()


def test_every_uint16_is_an_id(tmp_path):
    source = MegatronSource(write(tmp_path / "data", [[[65_535, 40_000]]]), vocabulary=65_536)
    assert source.tokens(0, 0, 2).tolist() == [65_535, 40_000]


def test_one_door_for_both_formats(tmp_path, store):
    write(tmp_path / "data.v2", DOCUMENTS)
    for name in ("data.v2", "data.v2.idx", "data.v2.bin"):
        assert open_source(tmp_path / name, vocabulary=15).lengths.tolist() == [3, 7, 3, 1]
    with pytest.raises(SeqloomError, match="does not name its vocabulary"):
        open_source(tmp_path / "data.v2")
    path = store([1, 2], vocabulary=300).path
    assert isinstance(open_source(path), TokenStore)
    assert open_source(path, vocabulary=512).vocabulary == 300
    with pytest.raises(SeqloomError, match="made with 300 ids, the model has 299"):
        open_source(path, vocabulary=299)
    with pytest.raises(SeqloomError, match="no token store"):
        open_source(tmp_path / "gone")


def test_an_id_outside_the_vocabulary_is_found_when_it_is_read(tmp_path):
    source = MegatronSource(write(tmp_path / "data", DOCUMENTS), vocabulary=10)
    assert source.tokens(1, 0, 6).tolist() == [4, 5, 6, 7, 8, 9]
    with pytest.raises(SeqloomError, match=r"document 1: token 6 is 10, outside the vocabulary 0 \.\. 9"):
        source.tokens(1, 5, 7)
    with pytest.raises(SeqloomError, match="outside"):
        source.labels(1, 5, 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"magic": b"TNTIDX\x00\x00\x00"}, "does not begin with MMIDIDX"),
        ({"version": 2}, "version 2 of the index"),
        ({"dtype": np.float32}, "float32 values, not token ids"),
        ({"tail": bytes(9)}, "a multimodal index"),
        ({"tail": b"xx"}, "bytes where its header asks for"),
        ({"documents": []}, "no sequences"),
        ({"documents": [[[]], [[]]]}, "every sequence of its index is empty"),
    ],
)
def test_what_is_refused(tmp_path, options, message):
    options = {"documents": DOCUMENTS} | options
    assert sum(map(len, DOCUMENTS)) == 9
    write(tmp_path / "data", **options)
    with pytest.raises(SeqloomError, match=message):
        MegatronSource(tmp_path / "data", vocabulary=15)


def test_damaged_files(tmp_path):
    write(tmp_path / "data", DOCUMENTS)
    index, data = tmp_path / "data.idx", tmp_path / "data.bin"
    content, ids = index.read_bytes(), data.read_bytes()
    data.write_bytes(ids[:-1])
    with pytest.raises(SeqloomError, match=r"data\.bin: 27 bytes, but its index reaches to 28"):
        MegatronSource(tmp_path / "data", vocabulary=15)
    data.write_bytes(ids)
    for cut in (5, 20, 40, len(content) - 1):
        index.write_bytes(content[:cut])
        with pytest.raises(SeqloomError, match=r"data\.idx"):
            MegatronSource(tmp_path / "data", vocabulary=15)
    index.write_bytes(content[:17] + b"\x09" + content[18:])
    with pytest.raises(SeqloomError, match="code 9"):
        MegatronSource(tmp_path / "data", vocabulary=15)
    index.write_bytes(content[:-8] + (8).to_bytes(8, "little"))
    with pytest.raises(SeqloomError, match="document index must rise from 0 to 9"):
        MegatronSource(tmp_path / "data", vocabulary=15)
    data.unlink()
    with pytest.raises(SeqloomError, match=r"data\.bin' does not exist"):
        MegatronSource(tmp_path / "data", vocabulary=15)
    with pytest.raises(SeqloomError, match="a vocabulary of 0"):
        MegatronSource(tmp_path / "data", vocabulary=0)
