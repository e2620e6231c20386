"""Sequence lengths: read from files and standard input, drawn from a sampler, and checked the same way everywhere.

`lengths_from` takes a sampler's name, a file or ``-``; `read_lengths` reads a file; `check_lengths` refuses what is
not a length with the line or row, the value, the rule and the way out.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from seqloom.errors import SeqloomError, import_extra, unknown_name

MAX_LENGTH = 2**31 - 1
"""Longest sequence in tokens. Attention kernels take cumulative lengths as int32, and a squared length still
fits an int64."""
RULE = f"a length is a whole number of tokens from 1 to {MAX_LENGTH:,}"
STDIN = "-"
BYTES = "bytes"
"""The tokenizer that counts UTF-8 bytes."""
SUFFIXES = (".txt", ".jsonl", ".csv", ".parquet", ".npy", ".npz")
TEXT = "text"
USUAL_COLUMNS = ("length", "lengths", "num_tokens", "n_tokens", "token_count", "input_length", "seq_len", TEXT)
"""Columns that `read_lengths` takes without being told, in this order."""
TEXTS_AT_ONCE = 4096
"""Texts that a tokenizer encodes at once: encodings of a whole file would not fit in memory."""

Place = Callable[[int], str]
"""Index of a value -> its place in the file, for messages: ``"line 3"``."""


def lengths_from(
    source: str,
    *,
    seed: int = 0,
    count: int = 512,
    max_length: int | None = None,
    column: str | None = None,
    tokenizer: str | None = None,
) -> np.ndarray:
    """Return lengths of a sampler's name, a file, or ``-`` for standard input; int64[n], in order.

    A file is read whole; ``seed`` and ``count`` are for samplers. Sequences above ``max_length`` stay:
    `describe.batch.drop_longer` drops and counts them. A sampler draws until ``count`` lengths are at most that long.
    """
    from seqloom.describe.samplers import SAMPLERS

    path = Path(source)
    meant_as_file = source == STDIN or path.suffix or path.exists() or path.name != source
    if meant_as_file and source not in SAMPLERS:
        return read_lengths(source, column=column, tokenizer=tokenizer)
    files = f"give a file, {', '.join(SUFFIXES)}, or - for standard input"
    return SAMPLERS.lookup(source, alternative=files).stream(count, seed=seed, max_length=max_length)


def read_lengths(source: str | Path, *, column: str | None = None, tokenizer: str | None = None) -> np.ndarray:
    """Read lengths from a file or from standard input; int64[n], in file order.

    Args:
        source: ``.txt`` (one whole number per line), ``.jsonl``, ``.csv``, ``.parquet``, ``.npy``, ``.npz``,
            or ``-`` for standard input (lines as in ``.txt``, ``.jsonl`` or ``.csv``, as the first one is).
        column: column, field or array to read where the file has several. A usual name (``length``,
            ``num_tokens``, ``text``) is found by itself.
        tokenizer: how a column of texts is counted: ``"bytes"``, or the path of a ``tokenizer.json``.
    """
    if source == STDIN:
        return lengths_of_bytes(read_stdin(), "standard input", column, tokenizer)
    path = Path(source)
    what, suffix = str(path), path.suffix.lower()
    if path.is_dir():
        raise SeqloomError(f"{what!r} is a folder; give a file ({', '.join(SUFFIXES)})")
    if suffix not in SUFFIXES:
        raise SeqloomError(
            f"{what!r}: lengths cannot be read from {suffix or 'a file without a suffix'}; "
            f"convert it to one of {', '.join(SUFFIXES)}"
        )
    if not path.is_file():
        raise SeqloomError(f"{what!r} does not exist; check the path, it is relative to {Path.cwd()}")
    try:
        if suffix in (".npy", ".npz"):
            return _numpy_lengths(path, what, column)
        if suffix == ".parquet":
            return _parquet_lengths(path, what, column, tokenizer)
        return _text_lengths(suffix, path.read_bytes(), what, column, tokenizer)
    except OSError as error:
        raise SeqloomError(f"{what}: cannot be read ({error.strerror or error}); check the file") from None


def read_stdin() -> bytes:
    """Read standard input to its end. One that is replaced (in tests, notebooks) may have text only."""
    return sys.stdin.buffer.read() if hasattr(sys.stdin, "buffer") else sys.stdin.read().encode()


def lengths_of_bytes(data: bytes, what: str, column: str | None, tokenizer: str | None) -> np.ndarray:
    """Return the lengths in the bytes of a file without a suffix; what its first line is says what the others are."""
    first = next((line for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()), b"").strip()
    number = _whole_number(first.decode("utf-8", "replace")) is not None
    suffix = ".txt" if number or not first else ".jsonl" if first[:1] in b'{"' else ".csv"
    if suffix == ".csv" and not any(byte in first for byte in b",;\t") and not first[:1].isalpha():
        suffix = ".txt"  # a misspelt number, and no header
    return _text_lengths(suffix, data, what, column, tokenizer)


def check_lengths(values: Any, *, what: str = "lengths", place: Place = "entry {}".format) -> np.ndarray:
    """Return ``values`` as a one-dimensional int64 array of lengths, or refuse the first one that is not.

    Whole numbers stored as floats are accepted, as tables with gaps often hold them; NaN is not. int64 arrays are
    returned as they are. Messages name the values by ``what`` (a file name, for example) and ``place``.
    """
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise SeqloomError(f"{what}: not a flat list of lengths ({error}); pass one number per sequence") from None
    if array.ndim != 1:
        given = f"shape {array.shape}" if array.ndim else repr(values)
        raise SeqloomError(f"{what}: {given} is not a flat list; pass one length per sequence")
    if array.size == 0:
        raise SeqloomError(f"{what}: empty; at least one length is needed")
    if array.dtype == object:  # integers too large for numpy, or a mix of types
        for index, value in enumerate(array):
            if isinstance(value, bool) or not isinstance(value, int | float | np.number) or value > MAX_LENGTH:
                raise length_error(what, place(index), value)
        array = array.astype(np.float64)
    if array.dtype.kind not in "iuf":
        raise length_error(what, place(0), array[0].item())
    bad = ~((array >= 1) & (array <= MAX_LENGTH))  # the negation also catches NaN
    if array.dtype.kind == "f":
        bad |= array != np.floor(array)
    if bad.any():
        first = int(np.argmax(bad))
        raise length_error(what, place(first), array[first].item())
    return array if array.dtype == np.int64 else array.astype(np.int64)


def length_error(what: str, place: str, value: Any) -> SeqloomError:
    """Build the error for one value that is not a length."""
    shown = repr(value) if len(repr(value)) <= 40 else repr(value)[:37] + "..."
    return SeqloomError(f"{what}, {place}: {shown} is not a length; {RULE}; correct it or leave it out")


# -- one reader per kind of file -----------------------------------------------------------------------------------


def _numpy_lengths(path: Path, what: str, column: str | None) -> np.ndarray:
    archived = path.suffix.lower() == ".npz"
    try:
        with path.open("rb") as file:  # numpy would not close an archive that it cannot read
            array = np.load(file, allow_pickle=False)
            if archived:
                with array as archive:
                    array = archive[choose_column(list(archive), column, what)]
    except (SeqloomError, OSError):
        raise
    except Exception as error:  # numpy parses headers as Python, and archives by their own rules
        kind, save = ("archive of arrays", "savez") if archived else ("array of numbers", "save")
        raise SeqloomError(f"{what}: not a readable {kind} ({error}); save it with numpy.{save}") from None
    if not isinstance(array, np.ndarray):
        raise SeqloomError(f"{what}: holds several arrays; rename it to .npz")
    return check_lengths(array, what=what)


def _parquet_lengths(path: Path, what: str, column: str | None, tokenizer: str | None) -> np.ndarray:
    """Read one column of numbers or of texts, and nothing else of the file."""
    pyarrow = import_extra(
        f"{what}: reading Parquet",
        "data",
        "pyarrow",
        "pyarrow.compute",
        "pyarrow.parquet",
        otherwise=", or save the column as .npy, .csv or .txt",
    )
    try:
        name = choose_column(pyarrow.parquet.read_schema(path).names, column, what)
        values = pyarrow.parquet.read_table(path, columns=[name]).column(name)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise SeqloomError(f"{what}: not a readable Parquet file ({error}); write it again") from None
    place: Place = "row {}".format
    if values.null_count:
        raise length_error(what, place(int(np.argmax(values.is_null().to_numpy()))), None)
    kind = values.type
    if pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind):
        if tokenizer == BYTES and len(values):  # Arrow counts them without making Python strings
            values = pyarrow.compute.call_function("binary_length", [values])
            return check_lengths(values.to_numpy(), what=what, place=place)
        return _column_lengths(values.to_pylist(), what, name, tokenizer, place)
    if not (pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind)):
        raise SeqloomError(f"{what}: column {name!r} is of type {kind}; name a column of whole numbers or of text")
    return check_lengths(values.to_numpy(), what=what, place=place)


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
    read = _csv_lengths if suffix == ".csv" else _jsonl_lengths
    return read(text, what, column, tokenizer)


def _line_lengths(data: bytes, what: str) -> np.ndarray:
    """Read one whole number per line; blank lines are skipped."""
    rows = data.split(b"\n")
    if not rows[-1].strip():
        rows.pop()
    if not rows:
        raise SeqloomError(f"{what}: empty; write one length per line")
    try:
        if b"_" in data:  # int() would read 1_000
            raise ValueError
        return check_lengths(np.fromiter(map(int, rows), np.int64, len(rows)), what=what, place=_line)
    except (ValueError, OverflowError) as error:  # blank lines, other spellings of numbers, or one to refuse
        if isinstance(error, SeqloomError):
            raise
    cells = ((number, row.strip().decode("utf-8", "replace")) for number, row in enumerate(rows, 1) if row.strip())
    return _cell_lengths(cells, what, "empty")


def _line(index: int) -> str:
    return f"line {index + 1}"


def _csv_lengths(text: str, what: str, column: str | None, tokenizer: str | None) -> np.ndarray:
    """Read a column of a CSV file, of numbers or of texts; a header may be missing above one column of numbers."""
    reader = csv.reader(io.StringIO(text, newline=""))
    rows = ((reader.line_num, row) for row in _csv_rows(reader, what) if row)
    first = next(rows, None)
    if first is None:
        raise SeqloomError(f"{what}: empty; at least one length is needed")
    line, header = first
    name = None
    if len(header) == 1 and column is None and _whole_number(header[0]) is not None:
        index, rows = 0, chain([(line, header)], rows)
    else:
        names = [name.strip() for name in header]
        name = choose_column(names, column, what)
        index = names.index(name)
    cells = ((line, row[index] if index < len(row) else "") for line, row in rows)
    first_cell = next(cells, None)
    cells = cells if first_cell is None else chain([first_cell], cells)
    if first_cell is None or name is None or _whole_number(first_cell[1]) is not None:
        return _cell_lengths(cells, what, "a header but no rows")
    if tokenizer is None and name != TEXT:
        return _cell_lengths(cells, what, "a header but no rows")  # names the cell that is no length
    lines, texts = zip(*cells, strict=True)
    return _column_lengths(list(texts), what, name, tokenizer, lambda index: f"line {lines[index]}")


def _csv_rows(reader: Iterator[list[str]], what: str) -> Iterator[list[str]]:
    """Yield the rows of a CSV file; refuse what the package cannot read, such as a cell above 128 KiB."""
    try:
        yield from reader
    except csv.Error as error:
        raise SeqloomError(f"{what}: not readable as CSV ({error}); write it as .jsonl or .parquet") from None


def _cell_lengths(cells: Iterator[tuple[int, str]], what: str, empty: str) -> np.ndarray:
    """Lengths of (line, text) pairs; `empty` says what is wrong where there is none."""
    values: list[int] = []
    lines: list[int] = []
    for line, cell in cells:
        value = _whole_number(cell)
        if value is None:
            raise length_error(what, f"line {line}", cell)
        values.append(value)
        lines.append(line)
    if not values:
        raise SeqloomError(f"{what}: {empty}; at least one length is needed")
    return check_lengths(values, what=what, place=lambda index: f"line {lines[index]}")


def _whole_number(text: str) -> int | None:
    """The whole number that a text spells (``7``, ``7.0``, ``7e3``), or None."""
    try:
        value = float(text)
    except ValueError:
        return None
    if not value.is_integer() or "_" in text:
        return None
    try:
        return int(text)
    except ValueError:
        return int(value)


def _jsonl_lengths(text: str, what: str, column: str | None, tokenizer: str | None) -> np.ndarray:
    """Read a whole number per line, or objects with a column of numbers or of texts."""
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
                name = choose_column([str(key) for key in row], column, f"{what}, line {number}")
            if name not in row:
                raise SeqloomError(
                    f"{what}, line {number}: no field {name!r}; it has {', '.join(row) or 'none'}; every "
                    "line needs the same field"
                )
            row = row[name]
        values.append(row)
        lines.append(number)
    return _column_lengths(values, what, name or "text", tokenizer, lambda index: f"line {lines[index]}")


def _column_lengths(values: list[Any], what: str, column: str, tokenizer: str | None, place: Place) -> np.ndarray:
    """Lengths of the values of one column: whole numbers as they are, texts by their token count."""
    if not values:
        raise SeqloomError(f"{what}: empty; at least one length is needed")
    if isinstance(values[0], str):
        for index, value in enumerate(values):
            if not isinstance(value, str):
                raise SeqloomError(f"{what}, {place(index)}: {value!r} is not text as the rows before; {RULE}")
        return check_lengths(_count_tokens(values, tokenizer, column), what=what, place=place)
    for index, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise length_error(what, place(index), value)
    return check_lengths(values, what=what, place=place)


def choose_column(columns: Sequence[str], asked: str | None, what: str) -> str:
    """Return the column to read: the one asked for, the only one, or one with a usual name."""
    if asked is not None:
        if asked in columns:
            return asked
        error = unknown_name("column", asked, columns)
        raise SeqloomError(f"{what}: {error} (its columns: {', '.join(columns) or 'none'})")
    usual = columns if len(columns) == 1 else [name for name in USUAL_COLUMNS if name in columns]
    if not usual:
        raise SeqloomError(f"{what}: which column holds the lengths? Name one of: {', '.join(columns) or 'none'}")
    return usual[0]


def _count_tokens(texts: Sequence[str], tokenizer: str | None, column: str) -> list[int]:
    """Tokens of each text. Without a tokenizer it refuses: how texts become tokens is not a thing to guess."""
    if tokenizer is None:
        raise SeqloomError(
            f"column {column!r} holds text and no tokenizer was named; pass tokenizer='bytes' to count "
            "bytes, or the path of a tokenizer.json, or name a column of integers"
        )
    if tokenizer == BYTES:
        return [len(text.encode("utf-8", "surrogatepass")) for text in texts]
    if not Path(tokenizer).is_file():
        raise SeqloomError(
            f"tokenizer {tokenizer!r} is not a file; pass the path of a tokenizer.json, or 'bytes' for bytes"
        )
    tokenizers = import_extra(f"tokenizer {tokenizer!r}", "hf", "tokenizers", otherwise=", or pass tokenizer='bytes'")
    try:
        encoder = tokenizers.Tokenizer.from_file(tokenizer)
    except Exception as error:  # the package raises bare Exception for a file that it cannot parse
        raise SeqloomError(f"tokenizer {tokenizer!r} cannot be read ({error}); pass a tokenizer.json") from None
    encoder.no_truncation()
    encoder.no_padding()
    chunks = (list(texts[start : start + TEXTS_AT_ONCE]) for start in range(0, len(texts), TEXTS_AT_ONCE))
    return [len(encoding.ids) for chunk in chunks for encoding in encoder.encode_batch(chunk)]
