"""Fuzz every reader with changed files: whatever comes in, a reader returns or says in words what is wrong.

    python tests/fuzz/run.py --cases 1000000 --jobs 2 --out benchmarks/results/fuzz.json

A case is one changed file. It fails if a reader raises anything but a message for the user, warns, takes longer than
`LIMIT_S`, or asks for more memory than `MEMORY_GIB`. Same seed, same cases; a failing one is printed with what it takes
to repeat it.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "benchmarks")]

from common import Check  # noqa: E402
from record import commit, write  # noqa: E402

from fuzz.readers import Reader, readers  # noqa: E402
from seqloom.errors import SeqloomError  # noqa: E402
from support.pieces import Pieces  # noqa: E402

LIMIT_S = 20
MEMORY_GIB = 6
CHUNK = 500
"""Cases between two lines of progress."""


class Failure(NamedTuple):
    """A case that a reader did not survive, and why."""

    reader: str
    seed: int
    reason: str


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeoutError after so many seconds; on the main thread."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run_case(reader: Reader, seed: int, folder: Path) -> str | None:
    """Read one changed file; return why that fails, None if it does not."""
    for path in folder.iterdir():
        if path.is_file():
            path.unlink()
    number = reader.case(random.Random(seed), folder)
    try:
        with warnings.catch_warnings(), time_limit(LIMIT_S):
            warnings.simplefilter("error")
            reader.read(folder, number)
    except SeqloomError as error:
        return None if str(error) else "an error without a message"
    except OSError as error:
        return None if error.filename is not None else repr(error)
    except BaseException as error:  # also what libraries in Rust raise when they panic
        if isinstance(error, KeyboardInterrupt):
            raise
        return "".join(traceback.format_exception(error)[-4:])
    return None


def run_chunk(first: int, count: int, reader_names: tuple[str, ...]) -> tuple[Counter[str], list[Failure]]:
    """Run so many cases of every reader, from a seed on."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_GIB << 30, resource.getrlimit(resource.RLIMIT_AS)[1]))
    done: Counter[str] = Counter()
    failures = []
    with tempfile.TemporaryDirectory() as made, tempfile.TemporaryDirectory() as changed:
        for reader in readers(Path(made)):
            if reader_names and reader.name not in reader_names:
                continue
            for seed in range(first, first + count):
                reason = run_case(reader, seed, Path(changed))
                done[reader.name] += 1
                if reason is not None:
                    failures.append(Failure(reader.name, seed, reason))
    return done, failures


def main() -> None:
    """Run all cases, print counts and failures, and write them down."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--cases", type=int, default=15_000, help="files to change, over all readers")
    options.add_argument("--seed", type=int, default=0, help="of the first case")
    options.add_argument("--jobs", type=int, default=2, help="processes")
    options.add_argument("--reader", action="append", default=[], help="only this one; may be repeated")
    options.add_argument("--seconds", type=float, default=1e9, help="after which no more cases begin")
    options.add_argument("--state", type=Path, help="go on from the counts in this .json, and keep them there")
    options.add_argument("--out", type=Path, help="write counts to this .json")
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        names = [each.name for each in readers(Path(folder)) if not arguments.reader or each.name in arguments.reader]
    per_reader = -(-arguments.cases // len(names))
    of = {"commit": commit(), "readers": names, "seed": arguments.seed}
    pieces = Pieces(arguments.state, of, {"per_reader": 0, "cases": {}, "failures": []}, arguments.seconds)
    counts = pieces.counts
    starts = range(arguments.seed + counts["per_reader"], arguments.seed + per_reader, CHUNK)
    sizes = [min(CHUNK, arguments.seed + per_reader - start) for start in starts]
    run = partial(run_chunk, reader_names=tuple(names))
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for size, (found, failed) in zip(sizes, pool.map(run, starts, sizes), strict=True):
            counts["per_reader"] += size
            counts["cases"] = dict(sorted((Counter(counts["cases"]) + found).items()))
            counts["failures"] += failed
            pieces.keep()
            total = sum(counts["cases"].values())
            print(f"{total:,} cases, {len(counts['failures'])} failures, {counts['seconds']:.0f} s", flush=True)
            if not pieces.has_time:
                pool.shutdown(wait=False, cancel_futures=True)
                break
    failures = [Failure(*each) for each in counts["failures"]]
    kinds: dict[tuple[str, str], list[Failure]] = {}
    for failure in failures:
        kinds.setdefault((failure.reader, failure.reason.strip().splitlines()[-1]), []).append(failure)
    for (name, _), alike in kinds.items():
        first = alike[0]
        print(f"\n{name}, {len(alike)} times; repeat: --reader {name!r} --seed {first.seed} --cases 1\n{first.reason}")
    print("\n".join(f"{name}: {count:,}" for name, count in counts["cases"].items()))
    figures = {"cases": counts["cases"], "total": sum(counts["cases"].values()), "seconds": round(counts["seconds"])}
    checks = [Check("files that ended in a traceback, or in no time", len(failures), 0)]
    del arguments.state
    write(arguments.out, __file__, arguments, figures, checks, gpu=False, lengths="none")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
