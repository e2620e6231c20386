"""Planner ``static``: one degree for every group of the whole run, best-fit packing. What most trainers do.

The packing is that of the published comparisons: documents, longest first, into the fullest bin that still
has room; bins of nine tenths of a group's memory (or the longest document, if that is more); bins taken as
many at a time as groups stand side by side. No evening-out of the last round.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel
from seqloom.errors import SeqloomError
from seqloom.plan import Plan
from seqloom.planners.problem import GroupPlacement, Pricer, Problem, Rounds, fitting_problems, to_plan


class Answer(NamedTuple):
    """A priced answer: one degree, one shape, one policy."""

    ns: int
    degree: int
    problem: Problem
    rounds: Rounds


def plan_static(lengths: np.ndarray, cost: CostModel, *, degree: int | None = None, longest: int | None = None) -> Plan:
    """Plan a batch with groups of one degree.

    Args:
        lengths: int64[n] tokens.
        cost: prices the batch.
        degree: ranks per group; None takes the fastest for this batch among those that hold ``longest``.
            To fix one for a whole run, ask ``fastest_static_degree``.
        longest: tokens of the longest sequence the run may see; by default the cost model's ``max_length`` as
            far as the cluster holds it, else the batch's longest.
    """
    problems = fitting_problems(lengths, cost)
    if degree is None:
        degrees = holding_degrees(problems, cost, _longest_allowed(cost) if longest is None else longest)
    else:
        degrees = [_checked(degree, problems, cost)]
    best = min(homogeneous_answers(problems, degrees), key=lambda answer: answer.ns)
    return to_plan(best.problem, best.rounds, "static")


def fastest_static_degree(batches: Iterable[np.ndarray], cost: CostModel, longest: int | None = None) -> int:
    """The degree that takes least time over these batches, of those that hold them and ``longest`` tokens.

    Args:
        batches: int64[n] tokens each.
        cost: prices the batches.
        longest: tokens of the longest sequence the run may see; by default as in ``plan_static``.
    """
    longest = _longest_allowed(cost) if longest is None else longest
    total: dict[int, int] = {}
    for lengths in batches:
        problems = fitting_problems(lengths, cost)
        priced: dict[int, int] = {}
        for answer in homogeneous_answers(problems, holding_degrees(problems, cost, longest)):
            priced[answer.degree] = min(answer.ns, priced.get(answer.degree, answer.ns))
        known = total or dict.fromkeys(priced, 0)  # a degree must hold every batch
        total = {degree: known[degree] + ns for degree, ns in priced.items() if degree in known}
    if not total:
        raise SeqloomError("no batches to choose a degree for; give at least one")
    return min(total, key=lambda degree: (total[degree], degree))


def holding_degrees(problems: Sequence[Problem], cost: CostModel, longest: int) -> list[int]:
    """Degrees whose groups hold ``longest`` tokens, and the batch's longest, under some policy."""
    tokens = max(int(cost.padded_lengths(np.array([longest]))[0]), int(problems[0].tables.tokens.max()))
    most = max(problem.tables.capacity for problem in problems)
    degrees = np.unique(problems[0].tables.degree)
    holding = degrees[degrees * most >= tokens].tolist()
    if not holding:
        room = int(degrees[-1]) * most
        raise SeqloomError(
            f"no group holds a sequence of {longest} tokens: the largest has {degrees[-1]} GPUs x {most} "
            f"tokens; lower the longest sequence to {room}, raise the memory budget or use more GPUs"
        )
    return holding


def homogeneous_answers(problems: Sequence[Problem], degrees: Sequence[int]) -> list[Answer]:
    """The packing of every degree under every policy that holds the batch in it, in its best shape."""
    answers = []
    for problem in problems:
        tables, pricer = problem.tables, Pricer(problem)
        longest = int(tables.tokens.max())
        for degree in degrees:
            if longest > degree * tables.capacity:
                continue
            bins = pack(tables.tokens, max(9 * degree * tables.capacity // 10, longest))
            candidates = []
            for shape in np.flatnonzero(tables.degree == degree).tolist():
                rounds = in_turn(problem, bins, shape)
                candidates.append(Answer(pricer.step_ns(rounds), degree, problem, rounds))
            answers.append(min(candidates, key=lambda answer: answer.ns))
    return answers


def pack(tokens: np.ndarray, room: int) -> list[list[int]]:
    """Best fit decreasing: documents, longest first, into the fullest bin of ``room`` tokens that fits."""
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for document in np.argsort(-tokens, kind="stable").tolist():
        size = int(tokens[document])
        place = bisect_left(free, (size, -1))
        if place < len(free):
            left, number = free.pop(place)
        else:
            left, number = room, len(bins)
            bins.append([])
        bins[number].append(document)
        insort(free, (left - size, number))
    return bins


def in_turn(problem: Problem, bins: Sequence[Sequence[int]], shape: int) -> list[list[GroupPlacement]]:
    """Rounds of these bins in their order, as many side by side as the cluster has blocks for."""
    kind = problem.tables.shapes[shape]
    blocks = problem.cost.family.blocks(kind.degree)
    return [
        [GroupPlacement(kind, block.start, documents) for block, documents in zip(blocks, bins[first:], strict=False)]
        for first in range(0, len(bins), len(blocks))
    ]


def _longest_allowed(cost: CostModel) -> int:
    """Longest sequence the cost model was made for, as far as the cluster holds it; 1 if not said."""
    allowed: int | None = cost.max_length
    most = max(shape.degree for shape in cost.shapes) * max(cost.capacity(v) for v in cost.policies)
    return 1 if allowed is None else min(allowed, most // cost.pad_multiple * cost.pad_multiple)


def _checked(degree: int, problems: Sequence[Problem], cost: CostModel) -> int:
    """The degree asked for, if the cluster has such groups and they hold the batch."""
    legal = holding_degrees(problems, cost, 1)
    if degree not in legal:
        known = ", ".join(str(d) for d in legal)
        raise SeqloomError(
            f"degree {degree}: no such groups here, or they do not hold this batch; choose one of {known}"
        )
    return degree


# ---- merged: planners.adaptive
# Planner ``adaptive``: one degree per batch, the fastest that holds it. The same packing as ``static``.


def plan_adaptive(lengths: np.ndarray, cost: CostModel) -> Plan:
    """Plan a batch with groups of one degree: every degree that holds the batch's longest is tried.

    Args:
        lengths: int64[n] tokens.
        cost: prices the batch.
    """
    problems = fitting_problems(lengths, cost)
    answers = homogeneous_answers(problems, holding_degrees(problems, cost, 1))
    best = min(answers, key=lambda answer: answer.ns)
    return to_plan(best.problem, best.rounds, "adaptive")
