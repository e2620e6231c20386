"""The blaster: cut a batch, sorted by falling length, into micro-batches of as equal tokens as possible.

Micro-batch ``i`` ends at the document where the largest token sum so far is least:

    least[i][k] = min over j < k of max(least[i - 1][j], tokens of documents j .. k)

The first term rises with ``j`` and the second falls, so the best cut lies where they cross: one binary
search instead of a scan, and still exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np

from seqloom.cost import CostModel, CostTables
from seqloom.errors import SeqloomError
from seqloom.plan import Plan
from seqloom.planners.problem import BatchProblem, GroupPlacement, StepPricer, fitting_problems
from seqloom.planners.published.flexsp.micro_batch import MicroBatch, floor_ns, prepare, seats_of
from seqloom.planners.published.flexsp.milp import Budget
from seqloom.planners.solver import require_highspy
from seqloom.planners.uniform import holding_degrees, uniform_answers


def cut(tokens: np.ndarray, count: int) -> list[np.ndarray]:
    """Cut documents into ``count`` consecutive, non-empty chunks with the least largest token sum.

    Of equally good cuts the last chunk is the longest, then the one before it: the published tie-break.

    Args:
        tokens: int64[n], positive, in the order in which they are to be cut.
        count: 1 to n chunks.

    Returns:
        the positions in each chunk, in order.
    """
    n = len(tokens)
    sums = np.concatenate([[0], np.cumsum(tokens)])
    least = sums.copy()  # one chunk: everything up to k
    cuts = []
    for chunk in range(1, count):
        starts = np.arange(chunk, n)  # earlier chunks hold one document at least
        ends = np.arange(chunk + 1, n + 1)
        crossing = np.searchsorted(least[starts] + sums[starts], sums[ends])
        after = np.clip(starts[np.minimum(crossing, len(starts) - 1)], None, ends - 1)
        before = np.clip(after - 1, chunk, None)
        worth = [np.maximum(least[j], sums[ends] - sums[j]) for j in (before, after)]
        best = np.minimum(*worth)
        first = np.maximum(np.searchsorted(sums, sums[ends] - best), chunk)
        least, cut_at = least.copy(), np.zeros(n + 1, np.int64)
        least[ends], cut_at[ends] = best, first
        cuts.append(cut_at)
    return _walk_back(cuts, n)


def fewest_chunks(tokens: np.ndarray, capacity: int) -> int:
    """The fewest chunks of the cut that all hold less than ``capacity`` tokens (one document may fill it)."""
    count = max(1, -(-int(tokens.sum()) // capacity))
    while count < len(tokens) and max(int(tokens[chunk].sum()) for chunk in cut(tokens, count)) >= capacity:
        count += 1
    return min(count, len(tokens))


def _walk_back(cuts: list[np.ndarray], n: int) -> list[np.ndarray]:
    """Chunks of the best cut of all ``n`` documents, from the last chunk's start to the first's."""
    chunks = []
    end = n
    for cut_at in reversed(cuts):
        start = int(cut_at[end])
        chunks.append(np.arange(start, end))
        end = start
    chunks.append(np.arange(end))
    return chunks[::-1]


# ---- merged: planners.flexsp.planner
# Planner ``flexsp``: the published system, from its paper and its released solver.
#
# 1. The blaster cuts the batch, sorted by length, into M micro-batches of equal tokens; M runs from the least
#    that fits the cluster over ``counts`` values.
# 2. Every micro-batch is bucketed and its mixed-integer programme solved, beginning with the best homogeneous
#    answer.
# 3. Concrete documents are drawn at random from each bucket; the step is priced with their true lengths; the
#    best M wins.
#
# All groups of a micro-batch run side by side over the whole cluster, whatever the sharding. The most promising
# M is solved first, and an M that can no longer win is given up: that saves time and changes nothing else.


def plan_flexsp(
    lengths: np.ndarray,
    cost: CostModel,
    *,
    smallest: int = 1,
    buckets: int = 16,
    counts: int = 5,
    nodes: int = 1,
    gap: float = 0.05,
    time_limit_s: float | None = None,
    seed: int = 0,
) -> Plan:
    """Plan a batch as FlexSP does.

    Args:
        lengths: int64[n] tokens.
        cost: prices the batch.
        smallest: least degree of a group. 1 is the paper's; the released solver begins at 2.
        buckets: buckets per micro-batch to begin with.
        counts: values of M to try.
        nodes: branch-and-bound nodes per micro-batch. The plan is the same on any machine.
        gap: a micro-batch this close to the solver's bound is good enough; counts with ``nodes``.
        time_limit_s: wall seconds per micro-batch in place of ``nodes`` and ``gap`` (published: 10). The plan
            then depends on the machine.
        seed: of the draw from the buckets.
    """
    require_highspy()
    problem = _fastest_variant(lengths, cost)
    menu = _menu(problem, smallest)
    pricer, budget = StepPricer(problem), Budget(nodes, gap, time_limit_s)
    best: tuple[int, list[list[GroupPlacement]]] | None = None
    for window in _windows(problem, menu, buckets, counts):
        for chunks in sorted(window, key=_promise):
            found = _solve(pricer, menu, chunks, budget, seed, None if best is None else best[0])
            if found is not None and (best is None or found[0] < best[0]):
                best = found
        if best is not None:
            return problem.plan(best[1], "flexsp")
    raise SeqloomError(f"flexsp found no plan for this batch on {cost.ranks} GPUs; use planner adaptive or flex")


def _fastest_variant(lengths: np.ndarray, cost: CostModel) -> BatchProblem:
    """The policy under which homogeneous groups are fastest: the published solver knows only one."""
    problems = fitting_problems(lengths, cost)
    if len(problems) == 1:
        return problems[0]
    answers = uniform_answers(problems, holding_degrees(problems, 1))
    return min(answers, key=lambda answer: answer.ns).problem


def _menu(problem: BatchProblem, smallest: int) -> dict[int, int]:
    """Degree to shape index, ascending: powers of two and the whole cluster, each in its cheapest shape.

    On nodes of another size: powers of two that divide a node, and nodes by powers of two. Each then divides
    the next, so that groups in falling order of degree always lie on aligned ranks.
    """
    tables, node, ranks = problem.tables, problem.cost.node_size, problem.cost.ranks
    total = (tables.fixed + tables.cost.sum(axis=2)).max(axis=0)
    menu: dict[int, int] = {}
    for degree in np.unique(tables.degree).tolist():
        inside = node % degree == 0 and degree & (degree - 1) == 0
        nodes = degree // node if degree % node == 0 else 0
        if inside or degree == ranks or (nodes and nodes & (nodes - 1) == 0):
            shapes = np.flatnonzero(tables.degree == degree)
            menu[degree] = int(shapes[total[shapes].argmin()])
    holds = max(menu) * tables.capacity >= tables.tokens.max()
    if not holds:
        raise SeqloomError(
            f"flexsp has groups of {', '.join(map(str, menu))} GPUs here, none holds a sequence of "
            f"{tables.tokens.max()} tokens; use planner adaptive or flex"
        )
    return {degree: shape for degree, shape in menu.items() if degree >= smallest} or menu


def _windows(
    problem: BatchProblem, menu: dict[int, int], buckets: int, counts: int
) -> Iterator[list[list[MicroBatch]]]:
    """Micro-batches for each M: the first ``counts`` values together, the others one at a time."""
    tokens, ranks = problem.tables.tokens, problem.cost.ranks
    order = np.argsort(-tokens, kind="stable")

    def chunks(count: int) -> list[MicroBatch]:
        return [prepare(problem, menu, order[chunk], buckets) for chunk in cut(tokens[order], count)]

    first = fewest_chunks(tokens[order], ranks * problem.tables.capacity)
    later = min(first + counts, len(order) + 1)
    yield [chunks(count) for count in range(first, later)]
    for count in range(later, len(order) + 1):
        yield [chunks(count)]


def _promise(chunks: list[MicroBatch]) -> tuple[bool, int, int]:
    """Sort key: the homogeneous answers' time, ns; those without one come last."""
    starts = [chunk.start[0] for chunk in chunks if chunk.start is not None]
    return len(starts) < len(chunks), sum(starts), len(chunks)


def _solve(
    pricer: StepPricer,
    menu: dict[int, int],
    chunks: list[MicroBatch],
    budget: Budget,
    seed: int,
    to_beat: int | None,
) -> tuple[int, list[list[GroupPlacement]]] | None:
    """Step time and rounds for one M; None if a micro-batch has no answer or ``to_beat`` ns stands."""
    random, problem = Random(seed), pricer.problem
    lock_step = problem.cost.shard_group_size == problem.cost.ranks
    fastest: CostTables = pricer.tables()
    floors = [floor_ns(fastest, c.documents, problem.cost.ranks) if lock_step else 0 for c in chunks]
    rounds: list[list[GroupPlacement]] = []
    for number, chunk in enumerate(chunks):
        if to_beat is not None and pricer.step_ns(rounds) + sum(floors[number:]) >= to_beat:
            return None
        placed = chunk.answer(budget)
        if placed is None:
            return None
        groups = chunk.draw(placed, random)
        rounds.append(seats_of(problem, menu, chunk.programme.degree, groups))
    return pricer.step_ns(rounds), rounds
