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
from seqloom.planners.flex import searched_ns, tiles
from seqloom.planners.problem import BatchProblem, GroupPlacement, fitting_problems
from seqloom.planners.published.flexsp import highs_model, require_highspy

MAX_DOCUMENTS = 20
MAX_RANKS = 16


class Slot(NamedTuple):
    """A group that may be opened."""

    policy: int  # Index of the problem whose policy prices the round
    shape: int
    start: int
    degree: int
    ranks: tuple[int, int]  # First rank and number of ranks that run this round together
    number: int  # Of the round, among those on these ranks under this policy

    @property
    def round(self) -> tuple[tuple[int, int], int, int]:
        """The round it would run in: its ranks, its policy, its number."""
        return self.ranks, self.policy, self.number


@dataclass
class Model:
    """A mixed-integer programme in rows, as arrays for the solver. Times in milliseconds, for its tolerances."""

    upper: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    rows: list[tuple[float, float, list[int], list[float]]] = field(default_factory=list)

    def variable(self, *, upper: float, integer: bool) -> int:
        """Add a variable between 0 and ``upper``; returns its column."""
        self.upper.append(upper)
        self.integer.append(integer)
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
        matrix = (
            np.cumsum([0, *map(len, columns)]).astype(np.int32),
            np.concatenate(columns).astype(np.int32),
            np.concatenate(values),
        )
        cost = (np.arange(len(self.upper)) == column).astype(float)
        limits = (np.zeros(len(cost)), np.array(self.upper))
        solver.passModel(highs_model(cost, limits, self.integer, (np.array(low), np.array(high)), matrix))
        solver.run()
        if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            raise SeqloomError(
                f"no proof of optimality within {nodes} nodes; use fewer documents or GPUs, or the planner flex"
            )
        return np.array(solver.getSolution().col_value)


def plan_exact(lengths: np.ndarray, cost: CostModel, *, nodes: int = 200_000) -> Plan:
    """The best plan, proven: over every way to reduce gradients, and in each over the checkpoint of every round.

    SeqloomError if the proof needs more ``nodes`` of the branch-and-bound tree, per way to reduce.
    """
    if len(lengths) > MAX_DOCUMENTS or cost.ranks > MAX_RANKS:
        raise SeqloomError(
            f"exact takes at most {MAX_DOCUMENTS} documents on {MAX_RANKS} GPUs, not {len(lengths)} on {cost.ranks}; "
            f"use flex, whose gap to the bound is printed"
        )
    fitting = fitting_problems(lengths, cost)
    plans = []
    for reduce in dict.fromkeys(problem.policy.reduce for problem in fitting):
        policies = [policy for policy in cost.policies if policy.reduce == reduce]
        plans.append(_exact_plan([BatchProblem(fitting[0].lengths, cost, policy) for policy in policies], nodes))
    return min(plans, key=cost.plan_ns)


def _exact_plan(problems: Sequence[BatchProblem], nodes: int) -> Plan:
    """The best plan whose rounds use any of these policies: data, variables, constraints, objective."""
    # data
    cost, n = problems[0].cost, len(problems[0].lengths)
    longest = min(searched_ns(problem) for problem in problems if problem.fits)  # the optimum is no longer
    most = min(n, max(1, longest // max(1, min(int(p.tables.fixed.max(axis=0).min()) for p in problems))))
    slots = [slot for policy, problem in enumerate(problems) for slot in _slots(problem, policy, most)]
    rounds = sorted({slot.round for slot in slots})
    # variables
    model = Model()
    step = model.variable(upper=longest / 1e6, integer=False)
    time = {one: model.variable(upper=longest / 1e6, integer=False) for one in rounds}
    opened = [model.variable(upper=1, integer=True) for _ in slots]
    holds = [[model.variable(upper=1, integer=True) for _ in slots] for _ in range(n)]
    # constraints
    for k in range(n):
        model.constrain({holds[k][s]: 1.0 for s in range(len(slots))}, 1, 1)
    for s, slot in enumerate(slots):
        problem = problems[slot.policy]
        slowness = problem.slowness(problem.tables.shapes[slot.shape], slot.start)
        tables = problem.tables_at(problem.policy.checkpoint, slowness)
        terms = {holds[k][s]: float(tables.tokens[k]) for k in range(n)}
        model.constrain({**terms, opened[s]: -float(slot.degree * tables.capacity)}, -np.inf, 0)
        for stream in range(len(tables.cost)):
            terms = {holds[k][s]: tables.cost[stream, slot.shape, k] / 1e6 for k in range(n)}
            fixed = tables.fixed[stream, slot.shape] / 1e6
            if fixed or any(terms.values()):
                model.constrain({**terms, opened[s]: fixed, time[slot.round]: -1.0}, -np.inf, 0)
    for rank in range(cost.ranks):
        for one in rounds:
            here = [s for s, slot in enumerate(slots) if slot.round == one]
            covers = [s for s in here if slots[s].start <= rank < slots[s].start + slots[s].degree]
            if len(covers) > 1:
                model.constrain({opened[s]: 1.0 for s in covers}, 0, 1)
    for start in range(0, cost.ranks, cost.shard_group_size):
        runs = [one for one in rounds if one[0][0] <= start < sum(one[0])]
        model.constrain({**{time[one]: 1.0 for one in runs}, step: -1.0}, -np.inf, 0)
    for ranks, policy, number in rounds:  # rounds on the same ranks under one policy are numbered by falling time
        if (ranks, policy, number + 1) in time:
            model.constrain({time[ranks, policy, number]: 1.0, time[ranks, policy, number + 1]: -1.0}, 0, np.inf)
    # objective
    values = model.minimise(step, nodes)
    return problems[0].plan(_chosen_rounds(problems[0], slots, values, opened, holds), "exact")


def _slots(problem: BatchProblem, policy: int, rounds: int) -> Iterator[Slot]:
    """Every group that a plan of at most ``rounds`` rounds on the same ranks may open under this policy."""
    cost, degrees = problem.cost, problem.tables.degree.tolist()
    shard_group = cost.shard_group_size
    for shape, degree in enumerate(degrees):
        if not tiles(degree, shard_group, cost.node_size):
            continue
        for block in cost.family.blocks(degree):
            width = max(shard_group, degree)
            ranks = (block.start // width * width, width) if degree <= shard_group else (block.start, degree)
            for number in range(rounds):
                yield Slot(policy, shape, block.start, degree, ranks, number)


def _chosen_rounds(
    problem: BatchProblem, slots: list[Slot], values: np.ndarray, opened: list[int], holds: list[list[int]]
) -> list[list[GroupPlacement]]:
    """The rounds of a solution; wide ones first, so that no shard group waits in between."""
    rounds: dict[tuple[int, tuple[int, int], int, int], list[GroupPlacement]] = {}
    for s, slot in enumerate(slots):
        members = [k for k in range(len(holds)) if values[holds[k][s]] > 0.5]
        if values[opened[s]] > 0.5 and members:
            group = GroupPlacement(problem.tables.shapes[slot.shape], slot.start, members)
            rounds.setdefault((-slot.ranks[1], *slot.round), []).append(group)
    return [rounds[key] for key in sorted(rounds)]
