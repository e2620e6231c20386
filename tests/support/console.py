"""What a view prints, as text."""

from __future__ import annotations

from io import StringIO
from typing import Any

from rich.console import Console


class _Ascii(StringIO):
    encoding = "ascii"


def text_of(
    renderable: Any, width: int = 80, *, ascii_only: bool = False, colours: Any = None, no_color: bool | None = None
) -> str:
    """Print on a console of this width; without colours unless a colour system is given."""
    console = Console(
        file=_Ascii() if ascii_only else StringIO(),
        width=width,
        color_system=colours,
        force_terminal=colours is not None,
        no_color=no_color,
        legacy_windows=False,
    )
    console.print(renderable)
    return console.file.getvalue()
