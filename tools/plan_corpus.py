"""Recompute every plan of the committed corpus and compare hash, simulated time and bound with what is written there.

    python tools/plan_corpus.py                 compare all entries; exit 1 if one differs
    python tools/plan_corpus.py flex zones      only entries whose name contains one of the words
    python tools/plan_corpus.py --write         write what is found into the corpus (new entries have no "found" yet)

An entry of `tests/corpus/plans.jsonl` is one JSON object: a name, what is asked (`kind` and its arguments) and what was
`found`. A refactoring leaves every entry as it is. A change of the planners changes entries in a commit of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parents[1] / "tests" / "corpus"
CORPUS = FOLDER / "plans.jsonl"
Entry = dict[str, Any]


def lengths_of(entry: Entry) -> np.ndarray:
    """Lengths of the documents of an entry: a list, or a sampler with its seed, count and longest length."""
    from seqloom.describe import lengths_from

    given = entry["lengths"]
    if isinstance(given, list):
        return np.array(given, dtype=np.int64)
    drawn = lengths_from(given["sampler"], seed=given["seed"], count=given["count"], max_length=given["max"])
    return drawn[drawn <= given["max"]]


def cost_of(entry: Entry) -> Any:
    """Cost model of an entry."""
    from seqloom.api import cost_model

    model = entry["model"]
    return cost_model(
        entry["cluster"],
        str(FOLDER / model) if model.endswith(".json") else model,
        profile=entry.get("profile"),
        sharding=entry.get("sharding", "full"),
        budget_gib=entry.get("budget_gib"),
        max_length=entry.get("max_length"),
        stages=entry.get("stages", 1),
    )


def find_plan(entry: Entry) -> Entry:
    """Plan one batch; digest the plan, its simulation and its bound."""
    from seqloom.api import evaluate
    from seqloom.planners import make_plan
    from seqloom.simulate import predicted_ns

    cost = cost_of(entry)
    plan = make_plan(entry["planner"], lengths_of(entry), cost, seed=entry.get("seed", 0), **entry.get("options", {}))
    evaluation = evaluate(plan, cost)
    simulation = evaluation.simulation
    return {
        "hash": plan.hash,
        "step_ns": int(simulation.step_ns),
        "predicted_ns": int(predicted_ns(plan, cost)),
        "bound_ns": evaluation.bound_ns,
        "peak_bytes": int(simulation.peak_memory.max()),
        "timeline": _digest(np.ascontiguousarray(column).tobytes() for column in _columns(simulation.events)),
    }


def find_hbp(entry: Entry) -> Entry:
    """Pack a data set into steps; digest their plans and times."""
    from seqloom.packing import hbp, plain_packing

    cost = cost_of(entry)
    made: Callable[..., Any] = plain_packing if entry["planner"] == "plain" else hbp
    packing = made(lengths_of(entry), cost, entry["tokens_per_step"], **entry.get("options", {}))
    return {
        "hash": _digest(packing.plan(step).hash.encode() for step in range(packing.steps)),
        "step_ns": [int(ns) for ns in packing.step_ns],
        "balance": packing.balance.as_dict(),
    }


def find_strategies(entry: Entry) -> Entry:
    """Propose parallel strategies for a data set."""
    from seqloom.planners.hydraulis import propose_strategies

    proposed = propose_strategies(lengths_of(entry), cost_of(entry), tokens_per_step=entry["tokens_per_step"])
    return {"strategies": [str(strategy) for strategy in proposed]}


def find_schedule(entry: Entry) -> Entry:
    """Build a pipeline schedule by its name; digest its table and figures."""
    from seqloom.schedules import build_schedule
    from seqloom.schedules.schedule import to_csv
    from seqloom.schedules.timing import schedule_metrics

    memory = entry.get("memory")
    made = build_schedule(
        entry["schedule"],
        entry["stages"],
        entry["micro_batches"],
        entry.get("pieces", 1),
        entry.get("chunks"),
        tuple(entry.get("times", (1, 1, 1))),
        None if memory is None else Fraction(memory),
    )
    found = schedule_metrics(made, *map(Fraction, entry.get("times", (1, 1, 1))))
    return {
        "hash": _digest([to_csv(made.rows).encode()]),
        "bubble": found.bubble,
        "makespan": found.step_time,
        "peak_memory": found.peak_memory,
    }


KINDS: dict[str, Callable[[Entry], Entry]] = {
    "plan": find_plan,
    "hbp": find_hbp,
    "strategies": find_strategies,
    "schedule": find_schedule,
}


def find(entry: Entry) -> Entry:
    """Answer an entry; a request that is refused is an answer too."""
    from seqloom.errors import SeqloomError

    try:
        return json.loads(json.dumps(KINDS[entry["kind"]](entry)))
    except SeqloomError:
        return {"refused": True}


def _columns(table: Any) -> Iterable[np.ndarray]:
    return (getattr(table, name) for name in ("rank", "kind", "start", "stop", "comm"))


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]


def main() -> int:
    """Compare or write the corpus."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only entries whose name contains one of these")
    parser.add_argument("--write", action="store_true", help="write what is found into the corpus")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    arguments = parser.parse_args()
    entries = [json.loads(line) for line in CORPUS.read_text().splitlines()]
    chosen = [e for e in entries if not arguments.words or any(word in e["name"] for word in arguments.words)]
    differing = 0
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for number, (entry, found) in enumerate(zip(chosen, pool.map(find, chosen), strict=True), 1):
            if entry.get("found") != found:
                differing += 1
                if not arguments.write:
                    print(f"{entry['name']}\n  written {entry.get('found')}\n  found   {found}", flush=True)
                entry["found"] = found
            if number % 50 == 0 or number == len(chosen):
                print(f"{number}/{len(chosen)}, {differing} differ", file=sys.stderr, flush=True)
    if arguments.write:
        CORPUS.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        return 0
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
