"""Presets: named values that lie as JSON beside the code and are read the first time one is asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from seqloom.errors import SeqloomError, unknown_name

T = TypeVar("T")


class Presets(Mapping[str, T], Generic[T]):
    """A read-only mapping of names to values built from ``presets/<file>``.

    Nothing is read before the first access, so that importing the package stays free of work. Names are
    found whatever their case. `lookup` refuses an unknown name with the nearest ones; indexing raises KeyError.
    """

    def __init__(self, kind: str, file: str, build: Callable[[str, dict[str, Any]], T]) -> None:
        """``kind`` names the presets in messages; ``build`` turns a name and its entry of the file into the value."""
        self._kind, self._file, self._build = kind, file, build
        self._entries: dict[str, dict[str, Any]] | None = None
        self._values: dict[str, T] = {}

    def _read(self) -> dict[str, dict[str, Any]]:
        if self._entries is None:
            from importlib.resources import files  # not at the top: it imports a good deal

            text = (files("seqloom.describe") / "presets" / self._file).read_text(encoding="utf-8")
            self._entries = json.loads(text)
        return self._entries

    def spelled(self, name: str) -> str | None:
        """The registered spelling of ``name``, found whatever its case; None when there is none."""
        entries = self._read()
        if name in entries:
            return name
        return next((entry for entry in entries if entry.lower() == name.lower()), None)

    def lookup(self, name: str, *, alternative: str = "") -> T:
        """The preset ``name``; when it does not exist the nearest names, and ``alternative``, are offered."""
        if self.spelled(name) is None:
            longer = [entry for entry in self._read() if entry.lower().startswith(name.lower())]
            error = unknown_name(self._kind, name, longer or self._read())
            raise SeqloomError(f"{error} (or {alternative})") if alternative else error
        return self[name]

    def __getitem__(self, name: str) -> T:
        """The preset ``name``, built once."""
        key = self.spelled(name)
        if key is None:
            raise KeyError(name)
        if key not in self._values:
            self._values[key] = self._build(key, self._read()[key])
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read())

    def __len__(self) -> int:
        return len(self._read())

    def __repr__(self) -> str:
        return f"Presets({self._kind}: {', '.join(self)})"
