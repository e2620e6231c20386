"""Blocks of the pages in docs/."""

import re
from pathlib import Path


def python_blocks(page: Path, heading: str | None = None) -> list[str]:
    """Return the Python blocks of a page, or of its section with this heading."""
    text = page.read_text()
    if heading is not None:
        text = re.split(r"^## ", text.split(f"\n## {heading}\n")[1], flags=re.MULTILINE)[0]
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
