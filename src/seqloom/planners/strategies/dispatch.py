"""First stage of assignment: which pipeline gets which documents, so that the slowest pipeline is done early.

Documents go, longest first, where they are done earliest; then documents move away from the slowest pipeline, or change
places with those of another, as long as the slower of the two gains. A pipeline may stay empty.

A pipeline of several stages fills and drains at the pace of its largest micro-batch, so one long document among short
ones is expensive there. No single move heals that: several starts keep the longest documents away from such pipelines,
or together on a few of them. From the best one on, pipelines are closed to their longest documents one by one as long
as that helps; the result is levelled to the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np

from seqloom.planners.compiled import kernel
from seqloom.planners.strategies.clock import estimate

EVALUATIONS = 200_000
"""Changes that one dispatch may look at."""
STARTING = 4_000
"""Changes that each start may look at."""
CLOSINGS = 16
"""Times that a pipeline of several stages is closed to its longest documents."""
FAR_PERCENT = 105
"""Where the best start is this far behind what is to be beaten, nothing more is tried."""


class Problem(NamedTuple):
    """Documents, longest first, and the pipelines of one strategy."""

    tokens: np.ndarray
    """int64[n] tokens, falling."""
    cost: np.ndarray
    """int64[pipelines, n] ns that a document adds to a stage of a pipeline; falls with the tokens."""
    fixed: np.ndarray
    """int64[pipelines] ns of a micro-batch before any document."""
    longest: np.ndarray
    """int64[pipelines] tokens that a micro-batch may hold."""
    reach: np.ndarray
    """int64[pipelines] tokens of the longest document that may go there: no more than `longest`."""
    stages: np.ndarray
    """int64[pipelines]."""
    alike: bool = False
    """Whether every micro-batch counts like the largest of its pipeline."""


class Loads(NamedTuple):
    """What every pipeline has so far, int64[pipelines] each."""

    work: np.ndarray
    """ns of all its documents on a stage."""
    tokens: np.ndarray
    count: np.ndarray
    first: np.ndarray
    """Its longest document: the lowest number; -1 without any."""
    second: np.ndarray
    """The next one."""
    done: np.ndarray
    """`estimate`, ns."""

    @classmethod
    def empty(cls, pipelines: int) -> Loads:
        """Nothing anywhere."""
        none = np.full(pipelines, -1, np.int64)
        zero = np.zeros(pipelines, np.int64)
        return cls(zero, zero.copy(), zero.copy(), none, none.copy(), zero.copy())


@kernel
def after(p: Problem, loads: Loads, j: int, out: int, new: int) -> int:
    """ns of pipeline j with document `out` gone and document `new` come; -1 stands for none."""
    work, tokens, count, first = loads.work[j], loads.tokens[j], loads.count[j], loads.first[j]
    if out >= 0:
        work, tokens, count = work - p.cost[j, out], tokens - p.tokens[out], count - 1
        if first == out:
            first = loads.second[j]
    if new >= 0:
        work, tokens, count = work + p.cost[j, new], tokens + p.tokens[new], count + 1
        if first < 0 or new < first:
            first = new
    largest = p.cost[j, first] if first >= 0 else 0
    return estimate(work, tokens, largest, count, p.fixed[j], p.longest[j], p.stages[j], p.alike)


@kernel
def weigh(p: Problem, place: np.ndarray, loads: Loads, j: int) -> None:
    """Write the loads of pipeline j from scratch."""
    loads.work[j] = loads.tokens[j] = loads.count[j] = 0
    loads.first[j] = loads.second[j] = -1
    for i in range(place.shape[0]):
        if place[i] == j:
            loads.work[j] += p.cost[j, i]
            loads.tokens[j] += p.tokens[i]
            loads.count[j] += 1
            if loads.first[j] < 0:
                loads.first[j] = i
            elif loads.second[j] < 0:
                loads.second[j] = i
    loads.done[j] = after(p, loads, j, -1, -1)


@kernel
def deal(p: Problem, place: np.ndarray, loads: Loads) -> bool:
    """Give every document, longest first, to the pipeline that is done with it earliest; False if one fits nowhere."""
    place[:] = -1
    for j in range(p.fixed.shape[0]):
        weigh(p, place, loads, j)
    for i in range(place.shape[0]):
        best, soonest = -1, 0
        for j in range(p.fixed.shape[0]):
            if p.tokens[i] <= p.reach[j]:
                done = after(p, loads, j, -1, i)
                if best < 0 or done < soonest:
                    best, soonest = j, done
        if best < 0:
            return False
        place[i] = best
        loads.work[best] += p.cost[best, i]
        loads.tokens[best] += p.tokens[i]
        loads.count[best] += 1
        if loads.first[best] < 0:
            loads.first[best] = i
        loads.done[best] = soonest
    for j in range(p.fixed.shape[0]):
        weigh(p, place, loads, j)
    return True


@kernel
def level(p: Problem, place: np.ndarray, loads: Loads, evaluations: int) -> int:
    """Change places until nothing helps the slowest pipeline, or `evaluations` are spent; returns its time, ns.

    Every change makes the slower of two pipelines faster than the slowest was, so no arrangement comes twice.
    """
    while evaluations > 0:
        slow = int(np.argmax(loads.done))
        best, gone, come, where = loads.done[slow], -1, -1, -1
        for i in range(place.shape[0]):
            if place[i] != slow or evaluations <= 0:
                continue
            evaluations -= 1 + p.fixed.shape[0]
            lighter = after(p, loads, slow, i, -1)
            if lighter >= best:
                continue
            for j in range(p.fixed.shape[0]):
                if j != slow and p.tokens[i] <= p.reach[j]:
                    done = max(lighter, after(p, loads, j, -1, i))
                    if done < best:
                        best, gone, come, where = done, i, -1, j
            for k in range(i + 1, place.shape[0]):  # for a shorter one: a longer one makes the slowest slower
                j = place[k]
                if j == slow or p.tokens[i] > p.reach[j] or p.tokens[k] == p.tokens[i]:
                    continue
                evaluations -= 1
                if lighter + p.cost[slow, k] >= best or loads.done[j] + p.cost[j, i] - p.cost[j, k] >= best:
                    continue  # more work takes at least so much longer: most changes need no estimate
                done = max(after(p, loads, slow, i, k), after(p, loads, j, k, i))
                if done < best:
                    best, gone, come, where = done, i, k, j
        if gone < 0:
            break
        place[gone] = where
        if come >= 0:
            place[come] = slow
        weigh(p, place, loads, slow)
        weigh(p, place, loads, where)
    return loads.done.max()


class Dealt(NamedTuple):
    """Documents dealt out under a reach of every pipeline."""

    done: int
    """ns of the slowest pipeline."""
    place: np.ndarray
    reach: np.ndarray
    times: np.ndarray
    """int64[pipelines] ns."""


def dispatch(problem: Problem, beat: int | None = None) -> np.ndarray | None:
    """int64[n]: the pipeline of every document; None if the longest fits in no pipeline.

    Args:
        problem: documents and pipelines.
        beat: ns that another strategy takes: one that is far behind it is not worth more search.
    """
    staged = bool((problem.stages > 1).any())
    first = [_dealt(problem, reach, STARTING if staged else EVALUATIONS) for reach in starts(problem)]
    found = [dealt for dealt in first if dealt is not None]
    if not found:
        return None
    best = min(found, key=lambda dealt: dealt.done)
    if not staged or (beat is not None and best.done * 100 > beat * FAR_PERCENT):
        return best.place
    best = _closed(problem, best)
    loads = Loads.empty(len(problem.fixed))
    for j in range(len(problem.fixed)):
        weigh(problem, best.place, loads, j)
    level(problem, best.place, loads, EVALUATIONS)
    return best.place


def _closed(problem: Problem, best: Dealt) -> Dealt:
    """Close pipelines to their longest documents, one after the other, as long as that helps."""
    left = CLOSINGS
    going = True
    while going:
        going = False
        for reach in islice(closings(problem, best), left):
            left -= 1
            dealt = _dealt(problem, reach, STARTING)
            if dealt is not None and dealt.done < best.done:
                best, going = dealt, left > 0
                break
    return best


def _dealt(problem: Problem, reach: np.ndarray, evaluations: int) -> Dealt | None:
    loads = Loads.empty(len(problem.fixed))
    place = np.empty(len(problem.tokens), np.int64)
    narrow = problem._replace(reach=reach)
    if not deal(narrow, place, loads):
        return None
    return Dealt(int(level(narrow, place, loads, evaluations)), place, reach, loads.done)


def starts(problem: Problem) -> list[np.ndarray]:
    """int64[pipelines] each: how long documents may be at the start. First as long as they fit.

    With several stages somewhere: all but 1, 3, 9, 27... documents are short, and only these go to pipelines of one
    stage, or to the first one, or to the first half of them.
    """
    found = [problem.longest]
    count, staged = len(problem.fixed), problem.stages > 1
    if not staged.any():
        return found
    kinds = [staged, np.arange(count) >= 1, np.arange(count) >= (count + 1) // 2]
    kept = {tuple(closed.tolist()): closed for closed in kinds if not closed.all() and closed.any()}
    for closed in kept.values():
        many = 1
        while many < len(problem.tokens):
            found.append(np.where(closed, np.minimum(problem.longest, problem.tokens[many]), problem.longest))
            many *= 3
    return found


def closings(problem: Problem, dealt: Dealt) -> Iterator[np.ndarray]:
    """Reaches with one pipeline of several stages, the slowest first, closed to its longest documents: one, or four."""
    for j in np.argsort(-dealt.times, kind="stable").tolist():
        own = problem.tokens[dealt.place == j]
        for many in (1, 4):
            if problem.stages[j] > 1 and len(own) > many and own[many] < own[0]:
                reach = dealt.reach.copy()
                reach[j] = own[many]
                yield reach
