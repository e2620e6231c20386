"""First stage of assignment: which pipeline gets which documents, so that the slowest pipeline is done early.

Documents go, longest first, where they are done earliest; then documents move away from the slowest pipeline, or change
places with those of another, as long as the slower of the two gains. A pipeline may stay empty.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seqloom.planners.compiled import kernel
from seqloom.planners.strategies.clock import estimate

EVALUATIONS = 200_000
"""Estimates of a pipeline that one dispatch may ask for while it changes places."""


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
            if p.tokens[i] <= p.longest[j]:
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
                if j != slow and p.tokens[i] <= p.longest[j]:
                    done = max(lighter, after(p, loads, j, -1, i))
                    if done < best:
                        best, gone, come, where = done, i, -1, j
            for k in range(i + 1, place.shape[0]):  # for a shorter one: a longer one makes the slowest slower
                j = place[k]
                if j == slow or p.tokens[i] > p.longest[j] or p.tokens[k] == p.tokens[i]:
                    continue
                done = after(p, loads, slow, i, k)
                evaluations -= 1
                if done < best:
                    done = max(done, after(p, loads, j, k, i))
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


def dispatch(problem: Problem, evaluations: int = EVALUATIONS) -> np.ndarray | None:
    """int64[n]: the pipeline of every document; None if the longest fits in no pipeline."""
    place = np.empty(len(problem.tokens), np.int64)
    loads = Loads.empty(len(problem.fixed))
    if not deal(problem, place, loads):
        return None
    level(problem, place, loads, evaluations)
    return place
