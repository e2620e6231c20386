"""Lengths of sequences: read from files and standard input, or drawn from a sampler, all checked by one rule.

.txt                one whole number per line
.jsonl, .csv        a column of numbers, or (JSON lines) of texts, which a tokenizer counts
.parquet            the same; only that column is read
.npy, .npz          an array
-                   standard input
a sampler's name    see `samplers`
"""

from __future__ import annotations

import csv
import io
import json
import sys
import zipfile
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from seqloom.errors import SeqloomError, unknown_name

MAX_LENGTH = 2**31 - 1
"""Longest sequence in tokens. Attention kernels take cumulative lengths as int32, and a squared length still
fits an int64."""

RULE = f"a length is a whole number of tokens from 1 to {MAX_LENGTH:,}"


STDIN = "-"
"""The source that means standard input."""

SUFFIXES = (".txt", ".jsonl", ".csv", ".parquet", ".npy", ".npz")
"""Kinds of file that :func:`read_lengths` reads."""


def lengths_from(
    source: str,
    *,
    seed: int,
    count: int,
    max_length: int | None = None,
    column: str | None = None,
    tokenizer: str | None = None,
) -> np.ndarray:
    """Return lengths from a sampler's name, a file, or ``-`` for standard input; int64[n], in order.

    A file is read whole; ``seed`` and ``count`` are for samplers. Sequences above ``max_length`` are not left
    out here (:func:`~seqloom.describe.batch.drop_longer` does, and counts them): a sampler only draws on
    until ``count`` lengths are at most that long.
    """
    from seqloom.describe.samplers import SAMPLERS

    path = Path(source)
    meant_as_file = source == STDIN or path.suffix or path.exists() or path.name != source
    if meant_as_file and source not in SAMPLERS:
        return read_lengths(source, column=column, tokenizer=tokenizer)
    files = f"give a file, {', '.join(SUFFIXES)}, or - for standard input"
    sampler = SAMPLERS.lookup(source, alternative=files)
    return sampler.stream(count, seed=seed, max_length=max_length)


def read_lengths(source: str | Path, *, column: str | None = None, tokenizer: str | None = None) -> np.ndarray:
    """Read lengths from a file or from standard input; int64[n], in file order.

    Args:
        source: ``.txt`` (one whole number per line), ``.jsonl``, ``.csv``, ``.parquet``, ``.npy``, ``.npz``,
            or ``-`` for standard input (lines as in ``.txt``; JSON lines when ``column`` is given).
        column: column, field or array to read where the file has several. A usual name (``length``,
            ``num_tokens``, ``text``) is found by itself.
        tokenizer: how a column of texts is counted: ``"bytes"``, or the path of a ``tokenizer.json``.

    Raises:
        SeqloomError: with the line or row, the value, the rule and the way out.
    """
    if source == STDIN:
        return _stdin_lengths(column, tokenizer)
    path = Path(source)
    suffix = path.suffix.lower()
    if path.is_dir():
        raise SeqloomError(f"{str(path)!r} is a folder; give a file ({', '.join(SUFFIXES)})")
    if suffix not in SUFFIXES:
        raise SeqloomError(
            f"{str(path)!r}: lengths cannot be read from {suffix or 'a file without a suffix'}; "
            f"convert it to one of {', '.join(SUFFIXES)}"
        )
    if not path.is_file():
        raise SeqloomError(f"{str(path)!r} does not exist; check the path, it is relative to {Path.cwd()}")
    what = str(path)
    try:
        if suffix == ".npy":
            return _npy_lengths(path, what)
        if suffix == ".npz":
            return _npz_lengths(path, what, column)
        if suffix == ".parquet":
            return _parquet_lengths(path, what, column, tokenizer)
        return _text_lengths(suffix, path.read_bytes(), what, column, tokenizer)
    except OSError as error:
        raise SeqloomError(f"{what}: cannot be read ({error.strerror or error}); check the file") from None


def _stdin_lengths(column: str | None, tokenizer: str | None) -> np.ndarray:
    # A replaced sys.stdin (tests, notebooks) may have text only.
    data = sys.stdin.buffer.read() if hasattr(sys.stdin, "buffer") else sys.stdin.read().encode()
    return _text_lengths(".txt" if column is None else ".jsonl", data, "standard input", column, tokenizer)


def _text_lengths(suffix: str, data: bytes, what: str, column: str | None, tokenizer: str | None) -> np.ndarray:
    data = data.removeprefix(b"\xef\xbb\xbf")
    if suffix == ".txt":
        if column is not None:
            raise SeqloomError(f"{what}: a column ({column!r}) was named but .txt has none; leave it out")
        return _line_lengths(data, what)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SeqloomError(f"{what}, line {line}: not UTF-8 ({error.reason}); save the file as UTF-8") from None
    if suffix == ".csv":
        return _csv_lengths(text, what, column)
    return _jsonl_lengths(text, what, column, tokenizer)


def _line_lengths(data: bytes, what: str) -> np.ndarray:
    """Read one whole number per line; blank lines are skipped."""
    rows = data.split(b"\n")
    if rows and not rows[-1].strip():
        rows.pop()
    if not rows:
        raise SeqloomError(f"{what}: empty; write one length per line")
    try:
        if b"_" in data:  # int() would read 1_000
            raise ValueError
        values = np.fromiter(map(int, rows), np.int64, len(rows))
    except (ValueError, OverflowError):
        return _slow_line_lengths(rows, what)
    return check_lengths(values, what=what, place=lambda index: f"line {index + 1}")


def _slow_line_lengths(rows: list[bytes], what: str) -> np.ndarray:
    """Read files with blank lines, other spellings of whole numbers, or something wrong to name."""
    values: list[int] = []
    lines: list[int] = []
    for number, row in enumerate(rows, start=1):
        if not row.strip():
            continue
        value = _whole_number(row)
        if value is None:
            raise _length_error(what, f"line {number}", row.strip().decode("utf-8", "replace"))
        values.append(value)
        lines.append(number)
    return check_lengths(values, what=what, place=lambda index: f"line {lines[index]}")


def _npy_lengths(path: Path, what: str) -> np.ndarray:
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise SeqloomError(f"{what}: not a readable array of numbers ({error}); save it with numpy.save") from None
    if not isinstance(array, np.ndarray):
        raise SeqloomError(f"{what}: holds several arrays; rename it to .npz")
    return check_lengths(array, what=what)


def _npz_lengths(path: Path, what: str, column: str | None) -> np.ndarray:
    try:
        with np.load(path, allow_pickle=False) as archive:
            name = _choose_column(list(archive), column, what)
            array = archive[name]
    except SeqloomError:
        raise
    except (ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise SeqloomError(f"{what}: not a readable archive of arrays ({error}); save it with numpy.savez") from None
    return check_lengths(array, what=what)


_USUAL = ("length", "lengths", "num_tokens", "n_tokens", "token_count", "input_length", "seq_len", "text")
"""Columns taken without being asked for, in this order."""


def _choose_column(columns: Sequence[str], asked: str | None, what: str) -> str:
    """Return the column to read: the one asked for, the only one, or one with a usual name."""
    if asked is not None:
        if asked in columns:
            return asked
        error = unknown_name("column", asked, columns)
        raise SeqloomError(f"{what}: {error} (its columns: {', '.join(columns) or 'none'})")
    if len(columns) == 1:
        return columns[0]
    for name in _USUAL:
        if name in columns:
            return name
    raise SeqloomError(f"{what}: which column holds the lengths? Name one of: {', '.join(columns) or 'none'}")


def _whole_number(text: str | bytes) -> int | None:
    """Return the whole number that a text spells (``7``, ``7.0``, ``7e3``), or None."""
    try:
        value = float(text)
    except ValueError:
        return None
    if not value.is_integer() or b"_" in (text if isinstance(text, bytes) else text.encode()):
        return None
    try:
        return int(text)
    except ValueError:
        return int(value)


def _jsonl_lengths(text: str, what: str, column: str | None, tokenizer: str | None) -> np.ndarray:
    """Read JSON lines: a whole number per line, or objects with a column of numbers or of texts."""
    values: list[Any] = []
    lines: list[int] = []
    name = column
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise SeqloomError(f"{what}, line {number}: not JSON ({error}); write one value per line") from None
        if isinstance(row, dict):
            if not values:
                name = _choose_column([str(key) for key in row], column, f"{what}, line {number}")
            if name not in row:
                raise SeqloomError(
                    f"{what}, line {number}: no field {name!r}; it has {', '.join(row) or 'none'}; every "
                    "line needs the same field"
                )
            row = row[name]
        values.append(row)
        lines.append(number)
    return _lengths_of(values, what, name or "text", tokenizer, lambda index: f"line {lines[index]}")


def _csv_lengths(text: str, what: str, column: str | None) -> np.ndarray:
    """Read a column of a CSV file; the header may be missing when there is one column of numbers."""
    reader = csv.reader(io.StringIO(text, newline=""))
    header = next((row for row in reader if row), None)
    if header is None:
        raise SeqloomError(f"{what}: empty; at least one length is needed")
    values: list[int] = []
    lines: list[int] = []
    if len(header) == 1 and column is None and _whole_number(header[0]) is not None:
        index, rows = 0, [(reader.line_num, header)]
    else:
        names = [name.strip() for name in header]
        index, rows = names.index(_choose_column(names, column, what)), []
    for line, row in chain(rows, ((reader.line_num, row) for row in reader if row)):
        cell = row[index] if index < len(row) else ""
        value = _whole_number(cell)
        if value is None:
            raise _length_error(what, f"line {line}", cell)
        values.append(value)
        lines.append(line)
    if not values:
        raise SeqloomError(f"{what}: a header but no rows; at least one length is needed")
    return check_lengths(values, what=what, place=lambda index: f"line {lines[index]}")


def _parquet_lengths(path: Path, what: str, column: str | None, tokenizer: str | None) -> np.ndarray:
    """Read a Parquet column of numbers or of texts; only that column is read."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError:
        raise SeqloomError(
            f"{what}: reading Parquet needs the package 'pyarrow', which is not installed; install it "
            "(pip install 'seqloom[data]'), or save the column as .npy, .csv or .txt"
        ) from None
    try:
        name = _choose_column(pyarrow.parquet.read_schema(path).names, column, what)
        values = pyarrow.parquet.read_table(path, columns=[name]).column(name)
    except pyarrow.ArrowException as error:
        raise SeqloomError(f"{what}: not a readable Parquet file ({error}); write it again") from None
    if values.null_count:
        row = int(np.argmax(values.is_null().to_numpy()))
        raise _length_error(what, f"row {row}", None)
    kind = values.type
    if pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind):
        if tokenizer == BYTES and len(values):  # counted by Arrow, without making Python strings
            counts = pyarrow.compute.call_function("binary_length", [values]).to_numpy()
            return check_lengths(counts, what=what, place=lambda index: f"row {index}")
        return _lengths_of(values.to_pylist(), what, name, tokenizer, lambda index: f"row {index}")
    if not (pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind)):
        raise SeqloomError(f"{what}: column {name!r} is of type {kind}; name a column of whole numbers or of text")
    return check_lengths(values.to_numpy(), what=what, place=lambda index: f"row {index}")


def _lengths_of(
    values: list[Any], what: str, column: str, tokenizer: str | None, place: Callable[[int], str]
) -> np.ndarray:
    """Return the lengths of the values of one column: whole numbers as they are, texts by their token count."""
    if not values:
        raise SeqloomError(f"{what}: empty; at least one length is needed")
    if isinstance(values[0], str):
        for index, value in enumerate(values):
            if not isinstance(value, str):
                raise SeqloomError(f"{what}, {place(index)}: {value!r} is not text as the rows before; {RULE}")
        return check_lengths(_text_counter(tokenizer, column)(values), what=what, place=place)
    for index, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _length_error(what, place(index), value)
    return check_lengths(values, what=what, place=place)


BYTES = "bytes"
"""The tokenizer that counts UTF-8 bytes."""

_CHUNK = 4096
"""Texts encoded at a time: encodings of a whole file would not fit in memory."""


def _text_counter(tokenizer: str | None, column: str) -> Callable[[Sequence[str]], np.ndarray]:
    """Return the function that counts tokens of texts.

    Args:
        tokenizer: ``"bytes"`` for UTF-8 bytes, or the path of a ``tokenizer.json`` (needs the package
            ``tokenizers``). None is refused: how texts become tokens is not a thing to guess.
        column: name of the column that holds the texts, for messages.
    """
    if tokenizer is None:
        raise SeqloomError(
            f"column {column!r} holds text and no tokenizer was named; pass tokenizer='bytes' to count "
            "bytes, or the path of a tokenizer.json, or name a column of integers"
        )
    return _count_bytes if tokenizer == BYTES else _file_counter(Path(tokenizer))


def _count_bytes(texts: Sequence[str]) -> np.ndarray:
    """Return the UTF-8 bytes of each text, int64[n]."""
    return np.fromiter((len(text.encode("utf-8", "surrogatepass")) for text in texts), np.int64, len(texts))


def _file_counter(path: Path) -> Callable[[Sequence[str]], np.ndarray]:
    if not path.is_file():
        raise SeqloomError(
            f"tokenizer {str(path)!r} is not a file; pass the path of a tokenizer.json, or 'bytes' for bytes"
        )
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise SeqloomError(
            f"tokenizer {str(path)!r} needs the package 'tokenizers', which is not installed; install it "
            "(pip install tokenizers), or pass tokenizer='bytes'"
        ) from None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception for a file that it cannot parse
        raise SeqloomError(f"tokenizer {str(path)!r} cannot be read ({error}); pass a tokenizer.json") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def count(texts: Sequence[str]) -> np.ndarray:
        counts: list[int] = []
        for start in range(0, len(texts), _CHUNK):
            counts.extend(len(encoding.ids) for encoding in tokenizer.encode_batch(list(texts[start : start + _CHUNK])))
        return np.array(counts, dtype=np.int64)

    return count


def check_lengths(values: Any, *, what: str = "lengths", place: Callable[[int], str] = "entry {}".format) -> np.ndarray:
    """Return ``values`` as a one-dimensional int64 array of lengths, or refuse the first one that is not.

    Whole numbers stored as floats are accepted, as tables with gaps often hold them; NaN is not.

    Args:
        values: anything numpy makes a one-dimensional array of; int64 arrays are returned as they are.
        what: what the values are, for messages (a file name, for example).
        place: turns an index into the place shown to the user (``"line 3"``).
    """
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise SeqloomError(f"{what}: not a flat list of lengths ({error}); pass one number per sequence") from None
    if array.ndim != 1:
        raise SeqloomError(f"{what}: shape {array.shape} is not a flat list; pass one length per sequence")
    if array.size == 0:
        raise SeqloomError(f"{what}: empty; at least one length is needed")
    if array.dtype == object:
        array = _from_objects(array, what, place)
    if array.dtype.kind not in "iuf":
        raise _length_error(what, place(0), array[0].item())
    bad = ~((array >= 1) & (array <= MAX_LENGTH))  # the negation also catches NaN
    if array.dtype.kind == "f":
        bad |= array != np.floor(array)
    if bad.any():
        first = int(np.argmax(bad))
        raise _length_error(what, place(first), array[first].item())
    return array if array.dtype == np.int64 else array.astype(np.int64)


def _length_error(what: str, place: str, value: Any) -> SeqloomError:
    """Build the error for one value that is not a length: where, which, the rule and the way out."""
    shown = repr(value) if len(repr(value)) <= 40 else repr(value)[:37] + "..."
    return SeqloomError(f"{what}, {place}: {shown} is not a length; {RULE}; correct it or leave it out")


def _from_objects(array: np.ndarray, what: str, place: Callable[[int], str]) -> np.ndarray:
    """Integers too large for numpy, or a mix of types: name the first value that is not a plain number."""
    for index, value in enumerate(array):
        if isinstance(value, bool) or not isinstance(value, int | float | np.number) or value > MAX_LENGTH:
            raise _length_error(what, place(index), value)
    return array.astype(np.float64)
