"""Inject faults into training runs until so many were met, and count them by kind.

    python tests/faults/run.py --faults 300 --out benchmarks/results/faults.json

Every campaign works in a file system of its own (a tmpfs of 48 MiB, where this is root), so that a full or read-only
disk is that of the run alone.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "benchmarks")]

from common import Check  # noqa: E402
from record import commit, write  # noqa: E402

from faults.campaign import FAULTS, Campaign, Failed, compare, losses  # noqa: E402
from support.pieces import Pieces  # noqa: E402

NEEDS_MOUNT = ("disk full", "disk read-only")


@contextmanager
def workplace() -> Iterator[tuple[Path, bool]]:
    """Yield a folder, and whether it is a small file system of its own."""
    with tempfile.TemporaryDirectory() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", folder]
        own = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0
        try:
            yield Path(folder), own
        finally:
            if own:
                subprocess.run(["umount", "-l", folder], check=True)


def main() -> None:
    """Run campaigns, print what they met, and write it down."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--faults", type=int, default=40, help="faults to inject, at least")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--kind", action="append", default=[], help="only this kind of fault; may be repeated")
    options.add_argument("--seconds", type=float, default=1e9, help="after which no more runs begin")
    options.add_argument("--state", type=Path, help="go on from the counts in this .json, and keep them there")
    options.add_argument("--out", type=Path, help="write counts to this .json")
    arguments = options.parse_args()
    of = {"commit": commit(), "kinds": arguments.kind, "seed": arguments.seed}
    pieces = Pieces(arguments.state, of, {"runs": 0, "faults": {}, "failures": []}, arguments.seconds)
    counts, met = pieces.counts, Counter(pieces.counts["faults"])
    whole: dict[int, float] | None = None
    while met.total() < arguments.faults and not counts["failures"] and pieces.has_time:
        with workplace() as (place, own):
            kinds = [each for each in FAULTS if (own or each.name not in NEEDS_MOUNT)]
            kinds = [each for each in kinds if not arguments.kind or each.name in arguments.kind]
            campaign = Campaign(place, random.Random(arguments.seed + counts["runs"]), ranks=(2, 3))
            whole = campaign.undisturbed() if whole is None else whole
            try:
                campaign.run(kinds)
                compare(losses(place / "run"), whole, torn="metrics torn" in campaign.injected)
            except Failed as error:
                counts["failures"].append(f"campaign with seed {arguments.seed + counts['runs']}: {error}")
            met.update(campaign.injected)
        counts["faults"] = dict(sorted(met.items()))
        counts["runs"] += 1
        pieces.keep()
        print(f"{met.total()} faults in {counts['runs']} runs, {counts['seconds']:.0f} s", flush=True)
    print("\n".join([*(f"{name}: {count}" for name, count in sorted(met.items())), *counts["failures"]]))
    figures = {"faults": counts["faults"], "total": met.total(), "kinds": len(met), "runs": counts["runs"]}
    figures["seconds"] = round(counts["seconds"])
    checks = [Check("promises that were broken", len(counts["failures"]), 0)]
    del arguments.state
    write(arguments.out, __file__, arguments, figures, checks, gpu=False, lengths="made-up documents")
    sys.exit(bool(counts["failures"]))


if __name__ == "__main__":
    main()
