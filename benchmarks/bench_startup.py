"""What starting costs: `seqloom --help` beside `python -c "import numpy"` in user time, and `seqloom demo` in all.

Each command runs nine times and the median counts; the demo runs once. --lengths is not used.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from statistics import median
from typing import Any

from common import Check, options, progress, show, show_checks
from record import write

HELP = ["-m", "seqloom", "--help"]
NUMPY = ["-c", "import numpy"]


def run(arguments: list[str], folder: str) -> tuple[float, float]:
    """User and wall seconds of one Python process."""
    user = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    begin = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, cwd=folder)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - user, time.perf_counter() - begin


def main(argv: list[str] | None = None) -> None:
    """Measure starts and the demo."""
    arguments = options(__doc__).parse_args(argv)
    runs = 1 if arguments.quick else 9
    figures: dict[str, Any] = {"runs": runs}
    with tempfile.TemporaryDirectory() as folder:
        for name, command in (("numpy", NUMPY), ("help", HELP)):
            progress(f"{name}: {runs} runs")
            run(command, folder)  # once unmeasured, so that both find their files in memory
            measured = [run(command, folder) for _ in range(runs)]
            figures[f"{name}_user_s"] = median(user for user, _ in measured)
            figures[f"{name}_wall_s"] = median(wall for _, wall in measured)
        if not arguments.quick:
            progress("demo")
            figures["demo_user_s"], figures["demo_wall_s"] = run(["-m", "seqloom", "demo"], folder)
    figures["help_more_user_s"] = figures["help_user_s"] - figures["numpy_user_s"]
    checks = [Check("seqloom --help beyond importing numpy, s of user time", figures["help_more_user_s"], 0.3)]
    if "demo_wall_s" in figures:
        checks.append(Check("seqloom demo, s of wall time", figures["demo_wall_s"], 15))
    shown = [
        (label, f"{figures[f'{name}_user_s']:.3f}", f"{figures[f'{name}_wall_s']:.3f}")
        for name, label in (("numpy", 'python -c "import numpy"'), ("help", "seqloom --help"), ("demo", "seqloom demo"))
        if f"{name}_user_s" in figures
    ]
    show("starting", ("command", "user s", "wall s"), shown)
    show_checks(checks)
    write(arguments.out, __file__, arguments, figures, checks)


if __name__ == "__main__":
    main()
