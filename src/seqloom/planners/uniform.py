"""Planners ``static`` and ``adaptive``: groups of one degree, best-fit packing. What most trainers do.

``static`` has one degree for a whole run, ``adaptive`` chooses one per batch. The packing is that of the published
comparisons: documents, longest first, into the fullest bin that still has room; bins of nine tenths of a group's memory
(or the longest document, if that is more); bins taken as many at a time as groups stand side by side. Nothing evens
out the last round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel
from seqloom.errors import MemoryBudgetError, SeqloomError
from seqloom.plan import Plan
from seqloom.planners.packing import best_fit_decreasing
from seqloom.planners.problem import BatchProblem, GroupPlacement, PlacedRounds, fitting_problems
from seqloom.planners.recompute import CHECKPOINTS


class UniformAnswer(NamedTuple):
    """Priced rounds of one degree, in its best shape, under one memory policy."""

    ns: int
    degree: int
    problem: BatchProblem
    rounds: PlacedRounds

    def plan(self, planner: str) -> Plan:
        """Build the plan."""
        return self.problem.plan(self.rounds, planner)


def plan_static(lengths: np.ndarray, cost: CostModel, *, degree: int | None = None, longest: int | None = None) -> Plan:
    """Plan a batch, int64[n] tokens, with groups of one degree.

    Args:
        degree: ranks per group; None takes the fastest for this batch among those that hold ``longest``.
            To fix one for a whole run, ask ``fastest_static_degree``.
        longest: tokens of the longest sequence the run may see; by default the cost model's ``max_length`` as
            far as the cluster holds it, else the batch's longest.
    """
    problems = fitting_problems(lengths, cost)
    legal = holding_degrees(problems, (longest or longest_of_run(cost)) if degree is None else 1)
    if degree is not None and degree not in legal:
        raise SeqloomError(
            f"degree {degree}: no such groups here, or they do not hold this batch; choose one of "
            f"{', '.join(map(str, legal))}"
        )
    return _fastest(uniform_answers(problems, legal if degree is None else [degree])).plan("static")


def plan_adaptive(lengths: np.ndarray, cost: CostModel) -> Plan:
    """Plan a batch, int64[n] tokens, with groups of the fastest degree that holds it."""
    problems = fitting_problems(lengths, cost)
    return _fastest(uniform_answers(problems, holding_degrees(problems, 1))).plan("adaptive")


def adaptive_and_static(lengths: np.ndarray, cost: CostModel, beat: int | None = None) -> list[Plan]:
    """Plan a batch with ``adaptive`` and with ``static``, packing every degree once; one plan where both agree.

    Degrees that cannot take ``beat`` ns or less are left out; no plan where there is no other.
    """
    problems = fitting_problems(lengths, cost)
    degrees = holding_degrees(problems, 1)
    if beat is not None and not cost.speeds and not cost.model.moe_layers:
        least = least_ns_of_degrees(problems[0].lengths, cost)
        degrees = [degree for degree in degrees if least[degree] <= beat]
    answers = uniform_answers(problems, degrees)
    if not answers:
        return []
    run_degrees = holding_degrees(problems, longest_of_run(cost))
    adaptive, fixed = _fastest(answers), [answer for answer in answers if answer.degree in run_degrees]
    others = [_fastest(fixed)] if fixed and _fastest(fixed) is not adaptive else []
    return [adaptive.plan("adaptive"), *(other.plan("static") for other in others)]


def least_ns_of_degrees(lengths: np.ndarray, cost: CostModel) -> dict[int, int]:
    """ns that no step with groups of a degree beats, whatever recomputes: its least work, on all ranks alike."""
    tables = cost.tables(lengths, min(cost.policies, key=lambda policy: CHECKPOINTS.index(policy.checkpoint)))
    least = (tables.cost.sum(axis=2) * tables.degree // cost.ranks).max(axis=0)
    return {degree: int(least[tables.degree == degree].min()) for degree in np.unique(tables.degree).tolist()}


def fastest_static_degree(batches: Iterable[np.ndarray], cost: CostModel, longest: int | None = None) -> int:
    """The degree that takes least time over these batches, of those that hold them and ``longest`` tokens.

    Without ``longest``, the longest sequence the run may see is that of ``plan_static``.
    """
    longest = longest or longest_of_run(cost)
    total: dict[int, int] = {}
    for lengths in batches:
        problems = fitting_problems(lengths, cost)
        priced: dict[int, int] = {}
        for answer in uniform_answers(problems, holding_degrees(problems, longest)):
            priced[answer.degree] = min(answer.ns, priced.get(answer.degree, answer.ns))
        known = total or dict.fromkeys(priced, 0)  # a degree must hold every batch
        total = {degree: known[degree] + ns for degree, ns in priced.items() if degree in known}
    if not total:
        raise SeqloomError("no batches to choose a degree for; give at least one")
    return min(total, key=lambda degree: (total[degree], degree))


def uniform_answers(problems: Sequence[BatchProblem], degrees: Sequence[int]) -> list[UniformAnswer]:
    """Pack and price every degree under every policy that holds the batch in it, each in its best shape."""
    answers = []
    for problem in problems:
        tables, longest = problem.tables, int(problem.tables.tokens.max())
        for degree in degrees:
            if longest > degree * tables.capacity:
                continue
            packings = [best_fit_decreasing(tables.tokens, max(9 * degree * tables.capacity // 10, longest))]
            if problem.cost.speeds:
                packings.append(best_fit_decreasing(tables.tokens, _capacities_by_speed(problem, degree, longest)))
            candidates = []
            for shape in np.flatnonzero(tables.degree == degree).tolist():
                for bins in packings:
                    rounds = rounds_in_order(problem, bins, shape)
                    candidates.append(UniformAnswer(problem.step_ns(rounds), degree, problem, rounds))
            answers.append(min(candidates, key=lambda answer: answer.ns))
    return answers


def rounds_in_order(problem: BatchProblem, bins: Sequence[Sequence[int]], shape: int) -> list[list[GroupPlacement]]:
    """Rounds of these bins in their order, as many side by side as the cluster has blocks for.

    Of blocks of unequal speed, faster ones take bins with more work.
    """
    own = problem.tables.shapes[shape]
    blocks = _blocks_by_speed(problem.cost, own.degree)
    rounds = [bins[first : first + len(blocks)] for first in range(0, len(bins), len(blocks))]
    if problem.cost.speeds:
        work = problem.tables.cost[:, shape].max(axis=0)
        rounds = [sorted(each, key=lambda documents: -int(work[documents].sum())) for each in rounds]
    return [
        [GroupPlacement(own, block.start, documents) for block, documents in zip(blocks, each, strict=False)]
        for each in rounds
    ]


def _blocks_by_speed(cost: CostModel, degree: int) -> list[range]:
    """The blocks of a degree, the fastest first, of equals the first."""
    return sorted(cost.family.blocks(degree), key=cost.speeds.of_group)


def _capacities_by_speed(problem: BatchProblem, degree: int, longest: int) -> list[int]:
    """Tokens of the bins of a round, in proportion to the speed of their blocks; every bin holds the longest."""
    slowness = [problem.cost.speeds.of_group(block) for block in _blocks_by_speed(problem.cost, degree)]
    most = 9 * degree * problem.tables.capacity // 10
    return [max(int(most * slowness[0] / each), longest) for each in slowness]


def holding_degrees(problems: Sequence[BatchProblem], longest: int) -> list[int]:
    """Degrees whose groups hold ``longest`` tokens, and the batch's longest, under some policy."""
    tables = problems[0].tables
    tokens = max(int(problems[0].cost.padded_lengths(np.array([longest]))[0]), int(tables.tokens.max()))
    most = max(problem.tables.capacity for problem in problems)
    degrees = np.unique(tables.degree)
    holding = degrees[degrees * most >= tokens].tolist()
    if not holding:
        raise MemoryBudgetError(
            f"no group holds a sequence of {longest} tokens: the largest has {degrees[-1]} GPUs x {most} tokens; "
            f"lower the longest sequence to {int(degrees[-1]) * most}, {problems[0].cost.ways_out}"
        )
    return holding


def longest_of_run(cost: CostModel) -> int:
    """Longest sequence the cost model was made for, as far as the cluster holds it; 1 if not said."""
    if cost.max_length is None:
        return 1
    most = max(shape.degree for shape in cost.shapes) * max(map(cost.capacity, cost.policies))
    return min(cost.max_length, most // cost.pad_multiple * cost.pad_multiple)


def _fastest(answers: Sequence[UniformAnswer]) -> UniformAnswer:
    return min(answers, key=lambda answer: answer.ns)
