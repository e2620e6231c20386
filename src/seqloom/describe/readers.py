"""Lengths read from files and from standard input, or drawn from a sampler: one door for every source."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import numpy as np

from seqloom.describe.lengths import checked, refusal
from seqloom.describe.samplers import SAMPLERS
from seqloom.describe.tables import choose_column, csv_lengths, jsonl_lengths, parquet_lengths, whole_number
from seqloom.errors import SeqloomError

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
    """Lengths from a sampler's name, a file, or ``-`` for standard input; int64[n], in order.

    A file is read whole; ``seed`` and ``count`` are for samplers. Sequences above ``max_length`` are not left
    out here (:func:`~seqloom.describe.workload.drop_longer` does, and counts them): a sampler only draws on
    until ``count`` lengths are at most that long.
    """
    path = Path(source)
    meant_as_file = source == STDIN or path.suffix or path.exists() or path.name != source
    if meant_as_file and source not in SAMPLERS:
        return read_lengths(source, column=column, tokenizer=tokenizer)
    files = f"give a file, {', '.join(SUFFIXES)}, or - for standard input"
    sampler = SAMPLERS.named(source, otherwise=files)
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
            return parquet_lengths(path, what, column, tokenizer)
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
        return csv_lengths(text, what, column)
    return jsonl_lengths(text, what, column, tokenizer)


def _line_lengths(data: bytes, what: str) -> np.ndarray:
    """One whole number per line; blank lines are skipped."""
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
    return checked(values, what=what, place=lambda index: f"line {index + 1}")


def _slow_line_lengths(rows: list[bytes], what: str) -> np.ndarray:
    """The same for files with blank lines, other spellings of whole numbers, or something wrong to name."""
    values: list[int] = []
    lines: list[int] = []
    for number, row in enumerate(rows, start=1):
        if not row.strip():
            continue
        value = whole_number(row)
        if value is None:
            raise refusal(what, f"line {number}", row.strip().decode("utf-8", "replace"))
        values.append(value)
        lines.append(number)
    return checked(values, what=what, place=lambda index: f"line {lines[index]}")


def _npy_lengths(path: Path, what: str) -> np.ndarray:
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise SeqloomError(f"{what}: not a readable array of numbers ({error}); save it with numpy.save") from None
    if not isinstance(array, np.ndarray):
        raise SeqloomError(f"{what}: holds several arrays; rename it to .npz")
    return checked(array, what=what)


def _npz_lengths(path: Path, what: str, column: str | None) -> np.ndarray:
    try:
        with np.load(path, allow_pickle=False) as archive:
            name = choose_column(list(archive), column, what)
            array = archive[name]
    except SeqloomError:
        raise
    except (ValueError, EOFError, AttributeError, TypeError, zipfile.BadZipFile) as error:
        raise SeqloomError(f"{what}: not a readable archive of arrays ({error}); save it with numpy.savez") from None
    return checked(array, what=what)
