"""Numbers and bars; rich comes with the view, not with the package."""

import subprocess
import sys

from seqloom.view.format import bar, duration, milliseconds, percent, tokens


def test_numbers():
    assert [milliseconds(ns) for ns in (0, 1.5e6, 12.345e6, 123.45e6, 1234.5e6)] == [
        "0.000",
        "1.500",
        "12.35",
        "123.5",
        "1,234",
    ]
    assert [duration(ns) for ns in (5, 1500, 1.5e6, 1.48e9, 4e12)] == [
        "5 ns",
        "1.5 us",
        "1.5 ms",
        "1.48 s",
        "4,000 s",
    ]
    assert [tokens(n) for n in (512, 1024, 1536, 131072, 1 << 20)] == ["512", "1K", "1536", "128K", "1M"]
    assert percent(0.1234) == "12.3"


def test_bars():
    assert bar(1, 4) == "████" and bar(0, 4) == "    " and bar(0.5, 4) == "██  "
    assert bar(1e-9, 4) == "▏   " and bar(0.53125, 4) == "██▏ "
    assert bar(0.5, 4, ascii_only=True) == "##  " and bar(1e-9, 4, ascii_only=True) == "#   "


def test_planning_and_simulating_do_not_import_rich():
    code = "import sys, seqloom, seqloom.simulate; print('rich' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
