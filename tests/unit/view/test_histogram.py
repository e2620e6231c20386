"""The histogram of lengths."""

from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from seqloom.view import length_histogram
from seqloom.view.format import bar
from seqloom.view.tables import buckets


class Ascii(StringIO):
    encoding = "ascii"


def text_of(renderable, width=80, file=StringIO):
    console = Console(file=file(), width=width, color_system=None, legacy_windows=False)
    console.print(renderable)
    return console.file.getvalue()


def test_buckets_are_powers_of_two_without_holes():
    found = buckets([1, 1024, 1025, 2047, 4096])
    assert [bucket.low for bucket in found] == [1 << k for k in range(13)]
    by_low = {bucket.low: bucket for bucket in found}
    assert by_low[1024].sequences == pytest.approx(0.6) and by_low[2048].sequences == 0
    assert sum(bucket.sequences for bucket in found) == pytest.approx(1)
    assert sum(bucket.tokens for bucket in found) == pytest.approx(1)
    assert by_low[4096].tokens == pytest.approx(4096 / (1 + 1024 + 1025 + 2047 + 4096))


def test_bars():
    assert bar(1, 4) == "████" and bar(0, 4) == "    " and bar(0.5, 4) == "██  "
    assert bar(1e-9, 4) == "▏   " and bar(0.53125, 4) == "██▏ "
    assert bar(0.5, 4, ascii_only=True) == "##  " and bar(1e-9, 4, ascii_only=True) == "#   "


def test_chart():
    text = text_of(length_histogram(np.array([600] * 9 + [60000])))
    header, _, *rows = [line for line in text.splitlines() if line.strip()]
    assert header.split() == ["length", "sequences", "%", "tokens", "%"]
    labels = ["512-1K", "1K-2K", "2K-4K", "4K-8K", "8K-16K", "16K-32K", "32K-64K"]
    assert [row.split()[0] for row in rows] == labels
    assert rows[0].split()[1] == "90.0" and rows[-1].split()[1] == "10.0"
    assert rows[-1].count("█") > rows[0].split()[-1].count("█")
    ends = {row.index(".") for row in rows}
    assert len(ends) == 1  # decimal points line up


@pytest.mark.parametrize("width", [50, 80, 200])
def test_width_and_ascii(width):
    text = text_of(length_histogram([100, 5000, 131072]), width=width, file=Ascii)
    assert text.isascii() and "#" in text and "128K-256K" in text
    assert max(map(len, text.splitlines())) <= width


def test_no_lengths():
    assert "tokens" in text_of(length_histogram([]))
