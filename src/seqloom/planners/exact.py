"""Planner ``exact``: the proven best plan of a small batch, a mixed-integer programme over the plan space of ``flex``.

The model reads from top to bottom: data, variables, constraints, objective. It is the yardstick of the fast planners,
practical up to about 8 GPUs and a dozen documents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel
from seqloom.errors import SeqloomError
from seqloom.plan import Plan
from seqloom.planners.flex.planner import finish_searches, start_searches, work_bound
from seqloom.planners.flex.search import tiles
from seqloom.planners.problem import BatchProblem, GroupPlacement, fitting_problems
from seqloom.planners.solver import Matrix, programme, require_highspy

MOST_DOCUMENTS = 20
MOST_RANKS = 16


class Slot(NamedTuple):
    """A group that may be opened: what its round keeps, shape index, first rank, and the round it would run in."""

    kept: int
    """Index of the problem whose policy prices the round."""

    shape: int
    start: int
    degree: int
    place: tuple[int, int]
    """First rank and number of ranks that run this round together."""
    round: int

    @property
    def pair(self) -> tuple[tuple[int, int], int, int]:
        """The round: where it runs, what it keeps, its number."""
        return self.place, self.kept, self.round


@dataclass
class Model:
    """A mixed-integer programme in rows, as arrays for the solver. Times in milliseconds, for its tolerances."""

    upper: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    rows: list[tuple[float, float, list[int], list[float]]] = field(default_factory=list)

    def variable(self, *, upper: float, integer: bool) -> int:
        """Add a variable between 0 and ``upper``; returns its column."""
        self.upper.append(upper)
        self.whole.append(integer)
        return len(self.upper) - 1

    def constrain(self, terms: dict[int, float], low: float, high: float) -> None:
        """Require ``low <= sum(coefficient * variable) <= high``."""
        self.rows.append((low, high, list(terms), list(terms.values())))

    def minimise(self, column: int, nodes: int) -> np.ndarray:
        """Solve for the least value of one variable; returns all values, proven optimal."""
        highspy = require_highspy()
        solver = highspy.Highs()
        options = {"output_flag": False, "threads": 1, "mip_rel_gap": 1e-7, "mip_max_nodes": nodes}
        for name, value in options.items():
            solver.setOptionValue(name, value)
        low, high, columns, values = zip(*self.rows, strict=True)
        matrix = Matrix(
            np.cumsum([0, *map(len, columns)]).astype(np.int32),
            np.concatenate(columns).astype(np.int32),
            np.concatenate(values),
        )
        cost = (np.arange(len(self.upper)) == column).astype(float)
        bounds = (np.zeros(len(cost)), np.array(self.upper))
        solver.passModel(programme(cost, bounds, self.whole, (np.array(low), np.array(high)), matrix))
        solver.run()
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            raise SeqloomError(
                f"no proof of optimality within {nodes} nodes; use fewer documents or GPUs, or the planner flex"
            )
        return np.array(solver.getSolution().col_value)


def slots_of(problem: BatchProblem, kept: int, rounds: int) -> Iterator[Slot]:
    """Every group that a plan of at most ``rounds`` rounds per place may open under this policy."""
    cost, degrees = problem.cost, problem.tables.degree.tolist()
    shard_group = cost.shard_group_size
    for shape, degree in enumerate(degrees):
        if not tiles(degree, shard_group, cost.node_size):
            continue
        for block in cost.family.blocks(degree):
            ranks = max(shard_group, degree)
            place = (block.start // ranks * ranks, ranks) if degree <= shard_group else (block.start, degree)
            for index in range(rounds):
                yield Slot(kept, shape, block.start, degree, place, index)


def plan_exact(lengths: np.ndarray, cost: CostModel, *, nodes: int = 200_000) -> Plan:
    """The best plan, proven: over every way to reduce gradients, and in each over what every round keeps.

    Args:
        lengths: int64[n] tokens, at most 20 of them, on at most 16 ranks.
        nodes: of the branch-and-bound tree, per way to reduce; SeqloomError if the proof needs more.
    """
    if len(lengths) > MOST_DOCUMENTS or cost.ranks > MOST_RANKS:
        raise SeqloomError(
            f"exact takes at most {MOST_DOCUMENTS} documents on {MOST_RANKS} GPUs, not {len(lengths)} on {cost.ranks}; "
            f"use flex, whose gap to the bound is printed"
        )
    fitting = fitting_problems(lengths, cost)
    plans = []
    for reduce in dict.fromkeys(problem.policy.reduce for problem in fitting):
        array = fitting[0].lengths
        alike = [BatchProblem(array, cost, v, cost.tables(array, v)) for v in cost.policies if v.reduce == reduce]
        plans.append(exact_for(alike, nodes))
    return min(plans, key=cost.plan_ns)


def exact_for(problems: Sequence[BatchProblem], nodes: int) -> Plan:
    """The best plan whose rounds use any of these policies: data, variables, constraints, objective."""
    # data
    cost, n = problems[0].cost, len(problems[0].lengths)
    longest = min(searched_ns(problem) for problem in problems if problem.fits)
    rounds = min(n, max(1, longest // max(1, min(int(p.tables.fixed.max(axis=0).min()) for p in problems))))
    slots = [slot for kept, problem in enumerate(problems) for slot in slots_of(problem, kept, rounds)]
    pairs = sorted({slot.pair for slot in slots})
    # variables
    model = Model()
    step = model.variable(upper=longest / 1e6, integer=False)
    time = {pair: model.variable(upper=longest / 1e6, integer=False) for pair in pairs}
    opened = [model.variable(upper=1, integer=True) for _ in slots]
    holds = [[model.variable(upper=1, integer=True) for _ in slots] for _ in range(n)]
    # constraints
    for k in range(n):
        model.constrain({holds[k][s]: 1.0 for s in range(len(slots))}, 1, 1)
    for s, slot in enumerate(slots):
        tables = problems[slot.kept].tables
        room = slot.degree * tables.capacity
        terms = {holds[k][s]: float(tables.tokens[k]) for k in range(n)}
        model.constrain({**terms, opened[s]: -float(room)}, -np.inf, 0)
        for lane in range(len(tables.cost)):
            terms = {holds[k][s]: tables.cost[lane, slot.shape, k] / 1e6 for k in range(n)}
            fixed = tables.fixed[lane, slot.shape] / 1e6
            if fixed or any(terms.values()):
                model.constrain({**terms, opened[s]: fixed, time[slot.pair]: -1.0}, -np.inf, 0)
    for rank in range(cost.ranks):
        for pair in pairs:
            here = [s for s, slot in enumerate(slots) if slot.pair == pair]
            covers = [s for s in here if slots[s].start <= rank < slots[s].start + slots[s].degree]
            if len(covers) > 1:
                model.constrain({opened[s]: 1.0 for s in covers}, 0, 1)
    for start in range(0, cost.ranks, cost.shard_group_size):
        runs = [pair for pair in pairs if pair[0][0] <= start < sum(pair[0])]
        model.constrain({**{time[pair]: 1.0 for pair in runs}, step: -1.0}, -np.inf, 0)
    for place, kept, index in pairs:  # rounds of a place that keep the same may be numbered by falling time
        if (place, kept, index + 1) in time:
            model.constrain({time[place, kept, index]: 1.0, time[place, kept, index + 1]: -1.0}, 0, np.inf)
    # objective
    values = model.minimise(step, nodes)
    return problems[0].plan(chosen_rounds(problems[0], slots, values, opened, holds), "exact")


def searched_ns(problem: BatchProblem) -> int:
    """ns of a step that ``flex`` finds under one policy, without the step's overhead: the optimum is no longer."""
    bound = work_bound(problem.batch_tables)
    return finish_searches(start_searches(problem.batch_tables, bound), bound, None, 0).best_ns


def chosen_rounds(
    problem: BatchProblem, slots: list[Slot], values: np.ndarray, opened: list[int], holds: list[list[int]]
) -> list[list[GroupPlacement]]:
    """The rounds of a solution; wide ones first, so that no shard group waits in between."""
    rounds: dict[tuple[int, tuple[int, int], int, int], list[GroupPlacement]] = {}
    for s, slot in enumerate(slots):
        members = [k for k in range(len(holds)) if values[holds[k][s]] > 0.5]
        if values[opened[s]] > 0.5 and members:
            seat = GroupPlacement(problem.tables.shapes[slot.shape], slot.start, members)
            rounds.setdefault((-slot.place[1], *slot.pair), []).append(seat)
    return [rounds[key] for key in sorted(rounds)]
