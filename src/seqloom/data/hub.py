"""Data sets of the library `datasets`: by name from Hugging Face, or in a folder that the library has saved.

    hf:org/name                 split train
    hf:org/name:test            another split, or a part of one: train[:1000]
    hf:org/name/config:train    a configuration of it
    hf:saved:train              a folder of `save_to_disk`, or of data files without code

Nothing that a data set holds is run: the library reads data files only.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seqloom.errors import SeqloomError, import_extra

HUB = "hf:"
"""Prefix of a data set of the library `datasets`, in place of a file's name."""
SAVED = ("state.json", "dataset_dict.json")
"""A folder that `save_to_disk` has written has one of these files: of one split, or of several."""
ROWS = 64
"""Rows converted to Python values at a time."""
HASHED_ROWS = 1_000
_NAME = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)(/(?P<config>[\w.-]+))?")


@dataclass(frozen=True, slots=True, eq=False)
class HubDataset:
    """One split of a data set, opened: its rows are on this machine."""

    name: str  # as it was given
    rows: Any  # datasets.Dataset

    @classmethod
    def open(cls, name: str) -> HubDataset:
        """Open `hf:NAME`, downloaded if need be, by the library `datasets`; see the head of this module."""
        wanted, _, split = name.removeprefix(HUB).partition(":")
        folder, parts = Path(wanted), _NAME.fullmatch(wanted)
        if not wanted or not (parts or folder.is_dir()):
            raise SeqloomError(
                f"{name!r} is no data set; write hf:org/name, hf:org/name:split or hf:org/name/config:split, or a "
                "folder that the library datasets has saved after hf:"
            )
        datasets = import_extra(f"{name!r}: a data set by name", "datasets", "datasets", "datasets.exceptions")
        try:
            if is_saved_dataset(folder):
                return cls(name, _take_split(name, datasets.load_from_disk(str(folder)), split))
            where = (str(folder),) if parts is None or folder.is_dir() else (parts["name"], parts["config"])
            return cls(name, datasets.load_dataset(*where, split=split or "train"))
        except (datasets.exceptions.DatasetsError, OSError, ValueError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise SeqloomError(
                f"{name!r} cannot be loaded ({reason}); check name, configuration and split, load it once where there "
                "is a network, or name data files (.jsonl, .parquet)"
            ) from None

    @property
    def columns(self) -> list[str]:
        """Names of the fields of a row."""
        return list(self.rows.column_names)

    @property
    def size(self) -> int:
        """Bytes of its tables, about."""
        return int(self.rows.data.nbytes)

    def read(self, columns: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield number and fields of every row."""
        number = 0
        for table in self.rows.select_columns(columns).with_format("arrow").iter(ROWS):
            for row in table.to_pylist():
                yield number, row
                number += 1

    def digest(self) -> str:
        """Return a digest of all rows, whatever files they come from."""
        pyarrow = import_extra(f"{self.name!r}: a data set by name", "data", "pyarrow", "pyarrow.ipc")
        sha256 = hashlib.sha256(repr(self.columns).encode())
        for table in self.rows.with_format("arrow").iter(HASHED_ROWS):
            sink = pyarrow.BufferOutputStream()
            plain = table.replace_schema_metadata(None).combine_chunks()
            with pyarrow.ipc.new_stream(sink, plain.schema) as writer:
                writer.write_table(plain)
            sha256.update(sink.getvalue())
        return sha256.hexdigest()


def is_saved_dataset(folder: Path) -> bool:
    """Whether the library `datasets` has saved a folder with `save_to_disk`."""
    return any((folder / name).is_file() for name in SAVED)


def _take_split(name: str, saved: Any, split: str) -> Any:
    """Return a split of what a folder holds: a data set by itself, or several by the names of splits."""
    if not isinstance(saved, dict):
        if split not in ("", str(saved.split)):
            raise SeqloomError(f"{name!r}: the folder holds one split, {str(saved.split)!r}; leave the split out")
        return saved
    chosen = split or "train"
    if chosen not in saved:
        raise SeqloomError(f"{name!r}: no split {chosen!r} in the folder; it has {', '.join(map(repr, saved))}")
    return saved[chosen]
