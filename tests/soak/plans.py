"""Random batches on random clusters, planned by two interpreters that share nothing: every plan has one hash.

A planner side is a process that reads `FIRST COUNT` from its standard input and answers with the digest of the plans of
so many batches. The two sides have different hash seeds, and may be different versions of Python.
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np

from seqloom.api import cost_model
from seqloom.cost import CostModel
from seqloom.errors import SeqloomError
from seqloom.planners import make_plan

CLUSTERS = ("1x2xH200", "1x8xH200", "2x4xH100", "3x2xA100-80G", "2x8xH200")
MODELS = ("qwen3-0.6b", "qwen3-1.7b")
SHARDINGS = ("full", "hybrid", "free")
PLANNERS = ("static", "adaptive", "flex", "zones", "auto", "pipeline:2")
LONGEST = 65_536


@cache
def batch_cost(cluster: str, model: str, sharding: str, stages: int) -> CostModel:
    """Return the cost model of a batch, from its settings."""
    return cost_model(cluster, model, sharding=sharding, stages=stages)


def draw_batch(seed: int) -> tuple[str, dict[str, Any], np.ndarray]:
    """Return planner, settings of the cost model and lengths of a batch."""
    draw = random.Random(seed)
    planner = draw.choice(PLANNERS)
    settings = {"cluster": draw.choice(CLUSTERS), "model": draw.choice(MODELS), "sharding": draw.choice(SHARDINGS)}
    settings["stages"] = 2 if planner.startswith("pipeline") else 1
    spread = draw.choice((0.3, 1.0, 2.0))
    lengths = [min(LONGEST, max(1, round(draw.lognormvariate(6.5, spread)))) for _ in range(draw.randint(1, 24))]
    return planner, settings, np.array(lengths)


def digest(first: int, count: int) -> str:
    """Return one digest of the plans of so many batches, and how many have none; why is part of the digest."""
    found, refused = hashlib.sha256(), 0
    for seed in range(first, first + count):
        planner, settings, lengths = draw_batch(seed)
        try:
            text = make_plan(planner, lengths, batch_cost(**settings)).hash
        except SeqloomError as error:
            text, refused = str(error), refused + 1
        found.update(text.encode() + b"\n")
    return f"{found.hexdigest()} {refused}"


class Side:
    """An interpreter that plans. Used in a `with`."""

    def __init__(self, python: str, hash_seed: int) -> None:
        """Start it; `python` has seqloom installed, or finds it as this process does."""
        source = os.pathsep.join(str(Path(__file__).parents[level] / name) for level, name in ((2, "src"), (1, "")))
        environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": source}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process: subprocess.Popen[str] = subprocess.Popen([python, __file__], env=environment, **pipes)
        self.version = self._answer()

    def ask(self, first: int, count: int) -> None:
        """Have so many batches planned."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{first} {count}\n")
        self._process.stdin.flush()

    def digest(self) -> str:
        """Wait for the answer to the last question."""
        return self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise SystemExit(f"a planning process has ended with code {self._process.wait()}")
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()


def differing(sides: tuple[Side, Side], first: int, count: int) -> tuple[list[int], int]:
    """Return the batches that the two sides plan differently, and how many cannot be planned."""
    ours, theirs = _digests(sides, first, count)
    seeds = range(first, first + count) if ours != theirs else ()
    unequal = [seed for seed in seeds if len({*_digests(sides, seed, 1)}) > 1]
    return unequal, int(ours.split()[1])


def _digests(sides: tuple[Side, Side], first: int, count: int) -> list[str]:
    for side in sides:
        side.ask(first, count)
    return [side.digest() for side in sides]


def planner_counts(first: int, count: int) -> Counter[str]:
    """Count batches by their planner."""
    return Counter(draw_batch(seed)[0] for seed in range(first, first + count))


def main() -> None:
    """Be a side."""
    print(".".join(map(str, sys.version_info[:3])), flush=True)
    for line in sys.stdin:
        print(digest(*map(int, line.split())), flush=True)


if __name__ == "__main__":
    main()
