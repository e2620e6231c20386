"""A long campaign in pieces: counts that are kept on disk, from which the next call goes on.

They are of one commit and one set of settings; a call with others begins anew.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


class Pieces:
    """Counts of a campaign, over all calls with the same sources and settings.

    Attributes:
        counts: what JSON can hold; `seconds` is among it.
    """

    def __init__(self, path: Path | None, of: dict[str, Any], fresh: dict[str, Any], limit_s: float) -> None:
        """Go on from the file, if it has the counts of the same; None: begin anew and keep nothing."""
        self._path, self._begin, self._limit_s = path, time.monotonic(), limit_s
        self.counts: dict[str, Any] = {"of": of, **fresh, "seconds": 0.0}
        if path is not None and path.exists():
            before = json.loads(path.read_text())
            self.counts = before if before["of"] == of else self.counts
        self._spent = self.counts["seconds"]

    @property
    def has_time(self) -> bool:
        """Whether this call may go on."""
        return time.monotonic() - self._begin < self._limit_s

    def keep(self) -> None:
        """Write the counts."""
        self.counts["seconds"] = round(self._spent + time.monotonic() - self._begin, 1)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps(self.counts))
            part.replace(self._path)
