"""The interval arithmetic, and plans, against what is counted element by element.

A case of "moves" is one item (a document, a weight) that random ranks hold and random ranks want: every element that
is wanted is received once, from a rank that has it, from oneself or one's node where one of them has it. Cases of
"routes" replay a routed move step by step, those of "resharding" both hops of every rank. A case of "plans" is a batch
that a planner plans: the plan obeys every rule, is read back equal from JSON and text, and takes no less time than the
lower bound of its batch.

Hundreds of items lie in one layout, and a dense array says who holds what: that is what makes ten millions feasible.

    python tests/fuzz/arithmetic.py --layouts 10000000 --plans 100000 --out benchmarks/results/fuzz_arithmetic.json
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "benchmarks")]

from common import Check  # noqa: E402
from record import commit, write  # noqa: E402

from seqloom.errors import SeqloomError  # noqa: E402
from seqloom.layout import Layout, Move, Route, move_between, route_move  # noqa: E402
from seqloom.layout.move import reshard_moves_of_rank  # noqa: E402
from seqloom.plan import Plan  # noqa: E402
from seqloom.planners import make_plan  # noqa: E402
from seqloom.planners.bounds import plan_bound  # noqa: E402
from seqloom.simulate import simulate  # noqa: E402
from soak.plans import batch_cost, draw_batch  # noqa: E402
from support.pieces import Pieces  # noqa: E402

ITEMS = 500
"""Items of one layout."""
CHUNK, CHUNK_S = 1_000, 2.0
"""Layouts or batches between two lines of progress, at most, and about how many seconds they take."""


class Wrong(AssertionError):  # noqa: N818 - as tests say it
    """A case whose result is not the counted one."""


def check(right: np.ndarray | np.bool_ | bool, what: str) -> None:
    """Refuse a batch of cases."""
    if not np.all(right):
        raise Wrong(what)


# ---- Layouts as dense arrays: bool[ranks, items, rows, columns]


def to_boxes(held: np.ndarray) -> list[np.ndarray]:
    """Return rank, item, row, first and last column of every run of elements."""
    padded = np.zeros((*held.shape[:3], held.shape[3] + 2), dtype=np.int8)
    padded[..., 1:-1] = held
    steps = np.diff(padded, axis=3)
    begins, ends = np.nonzero(steps == 1), np.nonzero(steps == -1)
    return [*begins, ends[3]]


def to_layout(held: np.ndarray, axes: int) -> Layout:
    """Return the layout; with one axis an item is its first row."""
    rank, item, row, start, stop = to_boxes(held)
    return Layout(rank, item, start, stop) if axes == 1 else Layout(rank, item, row, row + 1, start, stop)


def elements(move: Move) -> tuple[np.ndarray, ...]:
    """Return sender, receiver, item, row and column of every element that a move carries."""
    sender, receiver, item, *edges = move.columns()
    if move.axes == 1:
        edges = [np.zeros_like(sender), np.ones_like(sender), *edges]
    columns = [sender, receiver, item, *edges]
    for low, high in ((3, 4), (5, 6)):  # boxes into rows, rows into elements
        sizes = columns[high] - columns[low]
        of = np.repeat(np.arange(len(sizes)), sizes)
        at = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        columns = [column[of] for column in columns]
        columns[low] = columns[low] + at
    return tuple(columns[place] for place in (0, 1, 2, 3, 5))


def draw_shape(draw: np.random.Generator, axes: int) -> tuple[int, int, int, int]:
    """Draw ranks, items, rows and columns."""
    return int(draw.integers(1, 9)), ITEMS, 1 if axes == 1 else int(draw.integers(1, 5)), int(draw.integers(1, 13))


def draw_runs(draw: np.random.Generator, shape: tuple[int, ...], share: float) -> np.ndarray:
    """Draw who holds what, as runs: neighbours are alike more often than not."""
    held = draw.random(shape) < share
    for column in range(1, shape[3]):
        alike = draw.random(shape[:3]) < 0.6
        held[..., column] = np.where(alike, held[..., column - 1], held[..., column])
    return held


# ---- Cases


def moves(draw: np.random.Generator) -> int:
    """Check one move between two layouts that replicate; return its cases."""
    axes = int(draw.integers(1, 3))
    shape = draw_shape(draw, axes)
    held, wanted = draw_runs(draw, shape, draw.random()), draw_runs(draw, shape, draw.random())
    nobody = ~held.any(axis=0)
    held[draw.integers(0, shape[0])] |= nobody
    node_size = [None, 1, 2, 3][draw.integers(0, 4)]
    move = move_between(to_layout(held, axes), to_layout(wanted, axes), node_size=node_size)
    sender, receiver, *where = elements(move)
    received = np.zeros(shape, dtype=np.int64)
    np.add.at(received, (receiver, *where), 1)
    check(received == wanted, "what is received is not what is wanted, once")
    check(held[sender, *where], "somebody sends what it does not hold")
    check(~held[receiver, *where] | (sender == receiver), "somebody sends what the receiver holds")
    if node_size is not None:
        node = np.arange(shape[0]) // node_size
        near = np.stack([held[node == each].any(axis=0) for each in range(node[-1] + 1)])
        check(~near[node[receiver], *where] | (node[sender] == node[receiver]), "a near holder was passed over")
    return ITEMS


def routes(draw: np.random.Generator) -> int:
    """Replay one routed move; return its cases."""
    node_size, nodes = int(draw.integers(1, 5)), int(draw.integers(1, 5))
    ranks, length = node_size * nodes, int(draw.integers(1, 25))
    wanted = draw_runs(draw, (ranks, ITEMS, 1, length), 0.5 * draw.random())
    owner = draw.integers(0, ranks, ITEMS)
    receiver, item, _, start, stop = to_boxes(wanted)
    move = Move(owner[item], receiver, item, start, stop)
    places = np.flatnonzero(draw.random(node_size) < 0.5)
    places = places if len(places) else np.array([draw.integers(0, node_size)])
    proxies = (np.arange(nodes)[:, None] * node_size + places).ravel()
    route = Route(tuple(proxies.tolist()), int(draw.integers(1, 5)))
    held = np.zeros(wanted.shape, dtype=bool)
    held[owner, np.arange(ITEMS)] = True
    received, crossed = np.zeros(wanted.shape, dtype=np.int64), np.zeros((nodes, ITEMS, 1, length), dtype=np.int64)
    for step in route_move(move, route, node_size):
        sender, receiver, *where = elements(step)
        check(held[sender, *where], "somebody sends what it lacks")
        held[receiver, *where] = True
        np.add.at(received, (receiver, *where), 1)
        across = sender // node_size != receiver // node_size
        np.add.at(crossed, (receiver[across] // node_size, *(each[across] for each in where)), 1)
    check(held | ~wanted, "somebody lacks what it wants")
    check(received <= 1, "an element reaches a rank twice")
    check(crossed <= 1, "an element crosses to a node twice")
    extra = received.astype(bool) & ~wanted
    check(np.isin(np.nonzero(extra)[0], proxies), "a rank that passes nothing on gets what it does not want")
    return ITEMS


def resharding(draw: np.random.Generator) -> int:
    """Replay both hops of all ranks from a layout in which rows have one owner; return its cases."""
    node_size, nodes = int(draw.integers(1, 4)), int(draw.integers(1, 4))
    ranks, rows, width = node_size * nodes, int(draw.integers(1, 9)), int(draw.integers(1, 4))
    items = ITEMS // 10
    owner = np.sort(draw.integers(0, ranks, (items, rows)), axis=1)
    held = owner == np.arange(ranks)[:, None, None]
    wants = draw.random((ranks, items)) < draw.random()
    source = to_layout(np.repeat(held[..., None], width, axis=3), 2)
    wanted = np.zeros((ranks, items, rows, width), dtype=bool)
    cut = np.sort(draw.integers(0, width + 1, (ranks, items, 2)), axis=2)
    columns = np.arange(width)
    wanted |= ((columns >= cut[..., :1]) & (columns < cut[..., 1:]) & wants[..., None])[:, :, None, :]
    target = to_layout(wanted, 2)
    has = np.repeat(held[..., None], width, axis=3)
    received = np.zeros(wanted.shape, dtype=np.int64)
    hops = [reshard_moves_of_rank(rank, source, target, node_size=node_size) for rank in range(ranks)]
    check(len({len(each) for each in hops}) == 1, "ranks find different numbers of hops")
    for hop in range(len(hops[0])):
        taken = []
        for rank in range(ranks):
            sender, receiver, *where = elements(hops[rank][hop])
            mine = receiver == rank
            taken.append([each[mine] for each in (sender, receiver, *where)])
        sender, receiver, *where = (np.concatenate(column) for column in zip(*taken, strict=True))
        check(has[sender, *where], "somebody sends what it lacks")
        has[receiver, *where] = True
        np.add.at(received, (receiver, *where), sender != receiver)
    check(has | ~wanted, "somebody lacks what it wants")
    check(received <= 1, "an element reaches a rank twice")
    return items


def plans(draw: np.random.Generator) -> int:
    """Check one plan, or that a batch without one is refused in words; return 1."""
    planner, settings, lengths = draw_batch(int(draw.integers(1 << 62)))
    cost = batch_cost(**settings)
    try:
        plan = make_plan(planner, lengths, cost)
    except SeqloomError as error:
        check(bool(str(error)), "a refusal without a word")
        return 1
    check(plan.documents == tuple(lengths.tolist()), "documents differ from those of the batch")
    again = Plan.from_json(plan.to_json())
    again.validate()  # a plan that was made has been checked, and would not be once more
    check(again == plan, "JSON does not give the plan back")
    check(Plan.from_text(plan.to_text()) == plan, "text does not give the plan back")
    check(simulate(plan, cost).step_ns >= plan_bound(plan, cost), "a step is faster than the lower bound")
    return 1


LAYOUTS = {"moves": moves, "routes": routes, "resharding": resharding}


def run_chunk(kind: str, seed: int) -> tuple[int, str]:
    """Run cases of a kind for about a second, from a seed on; return how many, and why one is wrong."""
    run = plans if kind == "plans" else LAYOUTS[kind]
    done, begin = 0, time.monotonic()
    for number in range(CHUNK):
        try:
            done += run(np.random.default_rng([seed, number]))
        except Exception as error:
            return done, f"{kind}, seed [{seed}, {number}]: {''.join(traceback.format_exception(error)[-3:])}"
        if time.monotonic() - begin > CHUNK_S:
            break
    return done, ""


def main() -> None:
    """Run cases until there are enough, or no time is left; print the counts and write them down."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--layouts", type=int, default=600_000, help="cases of moves, routes and resharding")
    options.add_argument("--plans", type=int, default=2_000, help="batches that are planned")
    options.add_argument("--jobs", type=int, default=2, help="processes")
    options.add_argument("--seconds", type=float, default=1e9, help="after which no more cases begin")
    options.add_argument("--state", type=Path, help="go on from the counts in this .json, and keep them there")
    options.add_argument("--out", type=Path, help="write counts to this .json")
    arguments = options.parse_args()
    fresh = {"chunks": 0, "cases": dict.fromkeys((*LAYOUTS, "plans"), 0), "failures": []}
    pieces = Pieces(arguments.state, {"commit": commit()}, fresh, arguments.seconds)
    counts, cases = pieces.counts, pieces.counts["cases"]

    def wanted() -> list[str]:
        kinds = [*LAYOUTS] if sum(cases[kind] for kind in LAYOUTS) < arguments.layouts else []
        return kinds + (["plans"] if cases["plans"] < arguments.plans else [])

    with ProcessPoolExecutor(arguments.jobs) as pool:
        while wanted() and pieces.has_time and not counts["failures"]:
            kinds = [kind for kind in wanted() for _ in range(arguments.jobs)]
            seeds = range(counts["chunks"], counts["chunks"] + len(kinds))
            for kind, (done, failure) in zip(kinds, pool.map(run_chunk, kinds, seeds), strict=True):
                cases[kind] += done
                counts["failures"] += [failure] if failure else []
            counts["chunks"] += len(kinds)
            pieces.keep()
            told = ", ".join(f"{count:,} {kind}" for kind, count in cases.items())
            print(f"{told}, {len(counts['failures'])} failures, {counts['seconds']:.0f} s", flush=True)
    print("\n".join(counts["failures"]))
    figures = {"cases": cases, "seconds": round(counts["seconds"])}
    checks = [Check("cases that differ from what is counted", len(counts["failures"]), 0)]
    del arguments.state
    write(arguments.out, __file__, arguments, figures, checks, gpu=False, lengths="log-normal lengths")
    sys.exit(bool(counts["failures"]))


if __name__ == "__main__":
    main()
