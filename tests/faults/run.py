"""Inject faults into training runs until so many were met, and count them by kind.

    python tests/faults/run.py --faults 300 --out benchmarks/results/faults.json

Every campaign works in a file system of its own (an image of 96 MiB, where this is root), so that a full, slow or
read-only disk is that of the run alone. Every third one is on two nodes (`nodes`), where this machine can have them.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "benchmarks")]

from common import Check  # noqa: E402
from record import commit, write  # noqa: E402

from faults.campaign import (  # noqa: E402
    FAKE_CLOCK,
    FAULTS,
    FREEZES,
    OWN_DISK,
    Campaign,
    Failed,
    compare,
    fake_clock_library,
    losses,
)
from faults.nodes import NODE_FAULTS, NodesCampaign  # noqa: E402
from support.hosts import why_not  # noqa: E402
from support.pieces import Pieces  # noqa: E402

IMAGE_MIB, NODES_EVERY = 96, 3


@contextmanager
def workplace() -> Iterator[tuple[Path, set[str]]]:
    """Yield a folder, and which of the needs of faults it meets: see `Fault.needs`."""
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile() as image:
        place = Path(folder)
        os.truncate(image.name, IMAGE_MIB << 20)
        commands = ["mkfs.ext4", "-q", image.name], ["mount", "-o", "loop", image.name, folder]
        own = os.geteuid() == 0 and all(shutil.which(words[0]) for words in commands)
        own = own and not any(subprocess.run(words, capture_output=True).returncode for words in commands)
        meets = {OWN_DISK, *([FREEZES] if shutil.which("fsfreeze") else [])} if own else set()
        try:
            yield place, meets | ({FAKE_CLOCK} if fake_clock_library() else set())
        finally:
            if own:
                subprocess.run(["umount", "-l", folder], check=True)


def one_campaign(place: Path, meets: set[str], seed: int, kinds: Sequence[str]) -> tuple[Campaign, Sequence[Any]]:
    """Return the campaign with a seed, and the faults that it may meet here, of these kinds or of all."""
    of_nodes = [each for each in NODE_FAULTS if not kinds or each.name in kinds]
    of_processes = [each for each in FAULTS if not kinds or each.name in kinds]
    of_processes = [each for each in of_processes if not each.needs or each.needs in meets]
    if of_nodes and (seed % NODES_EVERY == 0 or not of_processes) and why_not() is None:
        return NodesCampaign(place, random.Random(seed)), of_nodes
    return Campaign(place, random.Random(seed), ranks=(2, 3)), of_processes


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
    undisturbed: dict[int, dict[int, float]] = {}
    while met.total() < arguments.faults and not counts["failures"] and pieces.has_time:
        with workplace() as (place, meets):
            campaign, kinds = one_campaign(place, meets, arguments.seed + counts["runs"], arguments.kind)
            if campaign.steps not in undisturbed:
                undisturbed[campaign.steps] = campaign.undisturbed()
            try:
                campaign.run(kinds)
                compare(losses(place / "run"), undisturbed[campaign.steps], torn="metrics torn" in campaign.injected)
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
