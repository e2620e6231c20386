"""Plan random batches twice, in two interpreters with different hash seeds, and compare the hashes of all plans.

    python tests/soak/run.py --batches 1000000 --seconds 600 --out benchmarks/results/soak_plans.json

It goes on where the last call with the same sources and the same two versions of Python has ended (`--state`), so that
a million is reached in pieces. `--python` names the second interpreter.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

import record  # noqa: E402
from common import Check, show_checks  # noqa: E402

from soak.plans import PLANNERS, Side, differing, planner_counts  # noqa: E402
from support.pieces import Pieces  # noqa: E402

CHUNK = 200
"""Batches between two lines of progress, and two states on disk."""


def main() -> None:
    """Plan until there are enough batches, or no time is left; print the counts and write them down."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--batches", type=int, default=1_000_000, help="to plan twice, in all pieces together")
    options.add_argument("--seconds", type=float, default=600, help="after which this piece ends")
    options.add_argument("--python", default=sys.executable, help="the second interpreter, with seqloom's dependencies")
    options.add_argument(
        "--state", type=Path, default=ROOT / "build" / "soak-plans.json", help="where the pieces go on"
    )
    options.add_argument("--out", type=Path, help="write counts to this .json")
    arguments = options.parse_args()
    with Side(sys.executable, 1) as first, Side(arguments.python, 2) as second:
        of = {"commit": record.commit(), "pythons": [first.version, second.version]}
        fresh = {"batches": 0, "refused": 0, "planners": dict.fromkeys(PLANNERS, 0), "differing": []}
        pieces = Pieces(arguments.state, of, fresh, arguments.seconds)
        done = pieces.counts
        while done["batches"] < arguments.batches and pieces.has_time:
            start, count = done["batches"], min(CHUNK, arguments.batches - done["batches"])
            seeds, refused = differing((first, second), start, count)
            done["differing"] += seeds
            done["refused"] += refused
            for name, number in planner_counts(start, count).items():
                done["planners"][name] += number
            done["batches"] += count
            pieces.keep()
            rate = done["batches"] / max(done["seconds"], 0.1)
            print(f"{done['batches']:,} batches, {len(done['differing'])} differ, {rate:.0f} a second", flush=True)
    if done["differing"]:
        print("planned differently: " + ", ".join(map(str, done["differing"][:20])))
    checks = [
        Check("batches whose two plans have different hashes", len(done["differing"]), 0),
        Check("share of batches that no plan can hold", done["refused"] / max(done["batches"], 1), 0.05),
    ]
    show_checks(checks)
    del arguments.state, arguments.python  # paths of this machine
    record.write(arguments.out, __file__, arguments, done, checks, gpu=False, lengths="log-normal lengths")
    sys.exit(not all(check.passed for check in checks))


if __name__ == "__main__":
    main()
