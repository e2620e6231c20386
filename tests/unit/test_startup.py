"""The command line starts fast: no heavy import before a verb runs."""

import resource
import subprocess
import sys

HEAVY = ["torch", "numba", "highspy", "pyarrow", "transformers", "scipy", "matplotlib"]
HELP = ["-m", "seqloom", "--help"]
ALLOWED_SECONDS = 0.3


def test_no_heavy_module_is_imported_by_the_command_line():
    code = f"import sys, seqloom.cli; print(*[name for name in {HEAVY} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def test_help_costs_little_more_than_importing_numpy():
    extra = _user_seconds(HELP) - _user_seconds(["-c", "import numpy"])
    assert extra < ALLOWED_SECONDS


def _user_seconds(arguments: list[str]) -> float:
    """The least user time of three runs: other processes on the machine can only add to it."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
        times.append(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before)
    return min(times)
