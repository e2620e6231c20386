"""Lengths out of files with columns: JSON lines, CSV and Parquet."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seqloom.describe.lengths import RULE, checked, refusal
from seqloom.describe.tokens import BYTES, text_counter
from seqloom.errors import SeqloomError, unknown

_USUAL = ("length", "lengths", "num_tokens", "n_tokens", "token_count", "input_length", "seq_len", "text")
"""Columns taken without being asked for, in this order."""


def choose_column(columns: Sequence[str], asked: str | None, what: str) -> str:
    """The column to read: the one asked for, the only one, or one with a usual name."""
    if asked is not None:
        if asked in columns:
            return asked
        error = unknown("column", asked, columns)
        raise SeqloomError(f"{what}: {error} (its columns: {', '.join(columns) or 'none'})")
    if len(columns) == 1:
        return columns[0]
    for name in _USUAL:
        if name in columns:
            return name
    raise SeqloomError(f"{what}: which column holds the lengths? Name one of: {', '.join(columns) or 'none'}")


def whole_number(text: str | bytes) -> int | None:
    """The whole number that a text spells (``7``, ``7.0``, ``7e3``), or None."""
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


def jsonl_lengths(text: str, what: str, column: str | None, tokenizer: str | None) -> np.ndarray:
    """Lengths from JSON lines: a whole number per line, or objects with a column of numbers or of texts."""
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
    return _lengths_of(values, what, name or "text", tokenizer, lambda index: f"line {lines[index]}")


def csv_lengths(text: str, what: str, column: str | None) -> np.ndarray:
    """Lengths from a column of a CSV file; the header may be missing when there is one column of numbers."""
    reader = csv.reader(io.StringIO(text, newline=""))
    header = next((row for row in reader if row), None)
    if header is None:
        raise SeqloomError(f"{what}: empty; at least one length is needed")
    values: list[int] = []
    lines: list[int] = []
    if len(header) == 1 and column is None and whole_number(header[0]) is not None:
        index, rows = 0, [(reader.line_num, header)]
    else:
        names = [name.strip() for name in header]
        index, rows = names.index(choose_column(names, column, what)), []
    for line, row in _chain(rows, ((reader.line_num, row) for row in reader if row)):
        cell = row[index] if index < len(row) else ""
        value = whole_number(cell)
        if value is None:
            raise refusal(what, f"line {line}", cell)
        values.append(value)
        lines.append(line)
    if not values:
        raise SeqloomError(f"{what}: a header but no rows; at least one length is needed")
    return checked(values, what=what, place=lambda index: f"line {lines[index]}")


def parquet_lengths(path: Path, what: str, column: str | None, tokenizer: str | None) -> np.ndarray:
    """Lengths from a Parquet column of numbers or of texts; only that column is read."""
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
        name = choose_column(pyarrow.parquet.read_schema(path).names, column, what)
        values = pyarrow.parquet.read_table(path, columns=[name]).column(name)
    except pyarrow.ArrowException as error:
        raise SeqloomError(f"{what}: not a readable Parquet file ({error}); write it again") from None
    if values.null_count:
        row = int(np.argmax(values.is_null().to_numpy()))
        raise refusal(what, f"row {row}", None)
    kind = values.type
    if pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind):
        if tokenizer == BYTES and len(values):  # counted by Arrow, without making Python strings
            counts = pyarrow.compute.call_function("binary_length", [values]).to_numpy()
            return checked(counts, what=what, place=lambda index: f"row {index}")
        return _lengths_of(values.to_pylist(), what, name, tokenizer, lambda index: f"row {index}")
    if not (pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind)):
        raise SeqloomError(f"{what}: column {name!r} is of type {kind}; name a column of whole numbers or of text")
    return checked(values.to_numpy(), what=what, place=lambda index: f"row {index}")


def _lengths_of(
    values: list[Any], what: str, column: str, tokenizer: str | None, place: Callable[[int], str]
) -> np.ndarray:
    """Lengths of the values of one column: whole numbers as they are, texts by their token count."""
    if not values:
        raise SeqloomError(f"{what}: empty; at least one length is needed")
    if isinstance(values[0], str):
        for index, value in enumerate(values):
            if not isinstance(value, str):
                raise SeqloomError(f"{what}, {place(index)}: {value!r} is not text as the rows before; {RULE}")
        return checked(text_counter(tokenizer, column)(values), what=what, place=place)
    for index, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise refusal(what, place(index), value)
    return checked(values, what=what, place=place)


def _chain(first: list[Any], rest: Iterable[Any]) -> Iterable[Any]:
    yield from first
    yield from rest
