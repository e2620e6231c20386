"""Importing the description of a workload stays light."""

from __future__ import annotations

import subprocess
import sys


def test_heavy_packages_are_not_imported():
    code = "import sys, seqloom.describe; print([m for m in sys.argv[1:] if m in sys.modules])"
    heavy = ["pydantic", "pyarrow", "torch", "tokenizers", "importlib.resources"]
    result = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
