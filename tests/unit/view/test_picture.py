"""The picture: one file, in colour, that refers to nothing outside itself."""

import re

from seqloom.view import save_picture


def test_a_picture_stands_alone(tmp_path):
    path = tmp_path / "step.svg"
    save_picture(path, "a title", lambda console: console.print("[green]weft[/green] and [red]warp[/red]"))
    text = path.read_text()
    assert text.startswith("<svg") and text.rstrip().endswith("</svg>")
    assert "weft" in text and "warp" in text and "a&#160;title" in text.replace(" ", "&#160;")
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]
    assert len(set(re.findall(r"fill: (#[0-9a-f]{6})", text))) >= 2  # two colours at least
