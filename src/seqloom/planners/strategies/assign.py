"""Assignment of one step: the strategy, which pipeline gets which documents, and their micro-batches.

Every strategy that holds the longest document is assigned in two stages; the one with the least time is taken. Those
that could not win even if all work were shared out freely are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from seqloom.errors import SeqloomError
from seqloom.planners.strategies.dispatch import Problem, dispatch
from seqloom.planners.strategies.pack import pack
from seqloom.planners.strategies.price import SchemeCosts
from seqloom.planners.strategies.values import Strategy


@dataclass(frozen=True, slots=True)
class Assignment:
    """Who does what in one step, and how long it should take.

    Attributes:
        strategy: its index in the list that was asked.
        batches: for every pipeline its micro-batches in running order, each a tuple of documents; () if it is empty.
        pipelines_ns: ns of every pipeline.
        switch_ns: ns to bring the parameters where this strategy needs them.
    """

    strategy: int
    batches: tuple[tuple[tuple[int, ...], ...], ...]
    pipelines_ns: tuple[int, ...]
    switch_ns: int = 0

    @property
    def ns(self) -> int:
        """Step time: the slowest pipeline, and the switch."""
        return max(self.pipelines_ns) + self.switch_ns

    def documents(self, pipeline: int) -> tuple[int, ...]:
        """The documents of a pipeline, ascending."""
        return tuple(sorted(document for batch in self.batches[pipeline] for document in batch))


def choose(
    lengths: np.ndarray,
    strategies: Sequence[Strategy],
    costs: SchemeCosts,
    switch_ns: Sequence[int] | None = None,
    *,
    alike: bool = False,
) -> Assignment:
    """The strategy with the least time for this batch, switch included, and its assignment; the first of equals.

    Args:
        lengths: int64[n] tokens.
        strategies: to choose from.
        costs: of every scheme in them.
        switch_ns: ns to switch to each strategy; None: nothing.
        alike: whether every micro-batch counts like the largest of its pipeline, as the published planner has it.
    """
    return rank_strategies(lengths, strategies, costs, switch_ns, most=1, alike=alike)[0]


def rank_strategies(
    lengths: np.ndarray,
    strategies: Sequence[Strategy],
    costs: SchemeCosts,
    switch_ns: Sequence[int] | None = None,
    most: int | None = None,
    alike: bool = False,
) -> list[Assignment]:
    """Assignments of the `most` best strategies, best first; SeqloomError if none holds the longest document."""
    tokens = np.asarray(lengths, dtype=np.int64)
    extra = [0] * len(strategies) if switch_ns is None else list(switch_ns)
    order = np.argsort(-tokens, kind="stable")
    rooms = [max(min(pipe.longest, costs[pipe.scheme].longest) for pipe in s.pipelines) for s in strategies]
    if max(rooms, default=0) < tokens.max():
        raise too_long(tokens, rooms)
    held = [k for k, room in enumerate(rooms) if room >= tokens.max()]
    problems = {k: problem_of(tokens[order], strategies[k], costs)._replace(alike=alike) for k in held}
    bounds = {k: lower_bound(problem) + extra[k] for k, problem in problems.items()}
    found: list[Assignment] = []
    wanted = len(problems) if most is None else most
    for k in sorted(problems, key=lambda k: (bounds[k], k)):
        if len(found) >= wanted and bounds[k] > found[wanted - 1].ns:
            break
        beat = found[wanted - 1].ns - extra[k] if len(found) >= wanted else None
        found.append(assign(problems[k], order, k, extra[k], beat))
        found.sort(key=lambda assignment: (assignment.ns, assignment.strategy))
    return found[:wanted]


def problem_of(tokens: np.ndarray, strategy: Strategy, costs: SchemeCosts) -> Problem:
    """The documents, int64[n] tokens falling, on the pipelines of a strategy.

    A pipeline holds what the strategy says, as far as the prices, which may be of less memory, agree.
    """
    priced = {pipe.scheme: costs[pipe.scheme].documents_ns(tokens) for pipe in strategy.pipelines}
    own = [costs[pipe.scheme] for pipe in strategy.pipelines]
    longest = np.array([min(pipe.longest, costs[pipe.scheme].longest) for pipe in strategy.pipelines], dtype=np.int64)
    return Problem(
        np.ascontiguousarray(tokens),  # one layout: kernels are compiled once
        np.stack([priced[pipe.scheme] for pipe in strategy.pipelines]),
        np.array([cost.fixed for cost in own], dtype=np.int64),
        longest,
        longest,
        np.array([pipe.scheme.stages for pipe in strategy.pipelines], dtype=np.int64),
    )


def lower_bound(problem: Problem) -> int:
    """ns that no assignment of these documents beats.

    A token costs at least its part of a full micro-batch's constant. Whatever the shares y of the pipelines (they add
    up to 1), the slowest takes at least the mean weighted with y, and a document adds at least its cheapest ``y cost``
    to that. Shares like the pipelines' speeds are near the best. The longest document alone is another bound.
    """
    holds = problem.tokens[None, :] <= problem.longest[:, None]
    alone = problem.cost[:, 0] * problem.stages + problem.fixed * problem.stages
    cost = problem.cost + (problem.fixed / problem.longest)[:, None] * problem.tokens[None, :]
    speed = 1.0 / np.maximum(cost.sum(axis=1), 1)
    shared = np.where(holds, cost * (speed / speed.sum())[:, None], np.inf).min(axis=0).sum()
    return max(int(alone[holds[:, 0]].min()), int(shared) - len(problem.tokens))


def assign(
    problem: Problem, order: np.ndarray, index: int = 0, switch_ns: int = 0, beat: int | None = None
) -> Assignment:
    """Dispatch and pack one strategy.

    Args:
        problem: documents, longest first, on the strategy's pipelines.
        order: int64[n] the document's number of every row of the problem.
        index: of the strategy.
        switch_ns: to switch to it.
        beat: ns, without the switch, that another strategy takes; see `dispatch`.
    """
    place = dispatch(problem, beat)
    assert place is not None
    batches, times = [], []
    for j in range(len(problem.fixed)):
        own = np.flatnonzero(place == j)
        batch = np.empty(len(own), np.int64)
        cost = np.ascontiguousarray(problem.cost[j, own])
        limits = (int(problem.fixed[j]), int(problem.longest[j]), int(problem.stages[j]))
        ns = pack(problem.tokens[own], cost, *limits, problem.alike, batch)
        count = int(batch.max()) + 1 if len(own) else 0
        batches.append(tuple(tuple(sorted(order[own[batch == b]].tolist())) for b in range(count)))
        times.append(int(ns))
    return Assignment(index, tuple(batches), tuple(times), switch_ns)


def too_long(tokens: np.ndarray, rooms: Sequence[int]) -> SeqloomError:
    """The error that says which document no candidate holds, and the nearest way out."""
    longest, room = int(tokens.argmax()), max(rooms, default=0)
    return SeqloomError(
        f"sequence {longest} has {tokens[longest]} tokens, but no pipeline of {len(rooms)} candidate strategies "
        f"holds more than {room}; drop longer sequences (--max-length {max(room, 1)}), propose strategies for "
        f"documents of {tokens[longest]} tokens, raise the memory budget or use more GPUs"
    )
