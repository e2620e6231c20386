"""Reads HTML reports as a browser would: which elements there are, and the JSON that the script draws."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any


class Report(HTMLParser):
    """Elements of a report with their attributes, its title, and its data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}
        self._open: str | None = None
        self.feed(text)
        self.close()
        self.data: dict[str, Any] = json.loads(self.texts["data"])

    @classmethod
    def load(cls, path: Path) -> Report:
        return cls(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = dict(attrs).get("id") or tag

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self.texts[self._open] = self.texts.get(self._open, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._open = None
