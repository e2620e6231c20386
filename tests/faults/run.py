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
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "benchmarks")]

from faults.campaign import FAULTS, Campaign, Failed, compare, losses  # noqa: E402

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
    options.add_argument("--out", type=Path, help="write counts to this .json")
    arguments = options.parse_args()
    met: Counter[str] = Counter()
    begin, failures = time.monotonic(), []
    whole: dict[int, float] | None = None
    campaigns = 0
    while met.total() < arguments.faults and not failures:
        with workplace() as (place, own):
            kinds = [each for each in FAULTS if (own or each.name not in NEEDS_MOUNT)]
            kinds = [each for each in kinds if not arguments.kind or each.name in arguments.kind]
            campaign = Campaign(place, random.Random(arguments.seed + campaigns), ranks=(2, 3))
            whole = campaign.undisturbed() if whole is None else whole
            try:
                campaign.run(kinds)
                compare(losses(place / "run"), whole, torn="metrics torn" in campaign.injected)
            except Failed as error:
                failures.append(f"campaign with seed {arguments.seed + campaigns}: {error}")
            met.update(campaign.injected)
        campaigns += 1
        print(f"{met.total()} faults in {campaigns} runs, {time.monotonic() - begin:.0f} s", flush=True)
    print("\n".join([*(f"{name}: {count}" for name, count in sorted(met.items())), *failures]))
    if arguments.out is not None:
        from common import Check
        from record import write

        figures = {"faults": dict(sorted(met.items())), "total": met.total(), "kinds": len(met), "runs": campaigns}
        figures["seconds"] = round(time.monotonic() - begin)
        checks = [Check("promises that were broken", len(failures), 0)]
        write(arguments.out, __file__, arguments, figures, checks, gpu=False, lengths="made-up documents")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
