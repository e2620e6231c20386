"""How long a pipeline takes: estimated from sums while documents are dealt, by the 1F1B order once they are packed.

All times are integer ns of one stage, forward and backward; stages take equally long. A third of it is forward.

The published planner charges every micro-batch like the largest: ``largest x (stages - 1 + micro-batches)``. That is
exact where all are equal and too much elsewhere. Asked for `alike`, the clock does the same, to compare like with like.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from seqloom.errors import SeqloomError
from seqloom.planners.compiled import kernels
from seqloom.planners.hydraulis.config import SchemeCosts, Strategy
from seqloom.planners.loops import DispatchProblem, PipelineLoads

# ---- merged: planners.strategies.dispatch
# First stage of assignment: which pipeline gets which documents, so that the slowest pipeline is done early.
#
# Documents go, longest first, where they are done earliest; then documents move away from the slowest pipeline, or
# change
# places with those of another, as long as the slower of the two gains. A pipeline may stay empty.
#
# A pipeline of several stages fills and drains at the pace of its largest micro-batch, so one long document among
# short
# ones is expensive there. No single move heals that: several starts keep the longest documents away from such
# pipelines,
# or together on a few of them. From the best one on, pipelines are closed to their longest documents one by one as
# long
# as that helps; the result is levelled to the end.


EVALUATIONS = 200_000
"""Changes that one dispatch may look at."""
STARTING = 4_000
"""Changes that each start may look at."""
CLOSINGS = 16
"""Times that a pipeline of several stages is closed to its longest documents."""
FAR_PERCENT = 105
"""Where the best start is this far behind what is to be beaten, nothing more is tried."""


class Dealt(NamedTuple):
    """Documents dealt out under a reach of every pipeline."""

    done: int
    """ns of the slowest pipeline."""
    place: np.ndarray
    reach: np.ndarray
    times: np.ndarray
    """int64[pipelines] ns."""


def dispatch(problem: DispatchProblem, beat: int | None = None) -> np.ndarray | None:
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
    loads = PipelineLoads.empty(len(problem.fixed))
    for j in range(len(problem.fixed)):
        kernels().sum_pipeline(problem, best.place, loads, j)
    kernels().swap_rebalance(problem, best.place, loads, EVALUATIONS)
    return best.place


def _closed(problem: DispatchProblem, best: Dealt) -> Dealt:
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


def _dealt(problem: DispatchProblem, reach: np.ndarray, evaluations: int) -> Dealt | None:
    loads = PipelineLoads.empty(len(problem.fixed))
    place = np.empty(len(problem.tokens), np.int64)
    narrow = problem._replace(max_length=reach)
    if not kernels().dispatch_longest_first(narrow, place, loads):
        return None
    return Dealt(int(kernels().swap_rebalance(narrow, place, loads, evaluations)), place, reach, loads.done)


def starts(problem: DispatchProblem) -> list[np.ndarray]:
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


def closings(problem: DispatchProblem, dealt: Dealt) -> Iterator[np.ndarray]:
    """Reaches with one pipeline of several stages, the slowest first, closed to its longest documents: one, or four."""
    for j in np.argsort(-dealt.times, kind="stable").tolist():
        own = problem.tokens[dealt.place == j]
        for many in (1, 4):
            if problem.stages[j] > 1 and len(own) > many and own[many] < own[0]:
                reach = dealt.reach.copy()
                reach[j] = own[many]
                yield reach


# ---- merged: planners.strategies.pack
# Second stage of assignment: the documents of one pipeline into micro-batches, by what they cost and not by tokens.
#
# One stage wants as few micro-batches as hold the tokens: each costs a constant. Several stages want them equal as
# well,
# and more of them: the pipeline fills and drains at the pace of the largest. Every number is tried, within reason.


# ---- merged: planners.strategies.assign
# Assignment of one step: the strategy, which pipeline gets which documents, and their micro-batches.
#
# Every strategy that holds the longest document is assigned in two stages; the one with the least time is taken.
# Those
# that could not win even if all work were shared out freely are left out.


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
    problems = {k: problem_of(tokens[order], strategies[k], costs)._replace(charge_largest=alike) for k in held}
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


def problem_of(tokens: np.ndarray, strategy: Strategy, costs: SchemeCosts) -> DispatchProblem:
    """The documents, int64[n] tokens falling, on the pipelines of a strategy.

    A pipeline holds what the strategy says, as far as the prices, which may be of less memory, agree.
    """
    priced = {pipe.scheme: costs[pipe.scheme].documents_ns(tokens) for pipe in strategy.pipelines}
    own = [costs[pipe.scheme] for pipe in strategy.pipelines]
    longest = np.array([min(pipe.longest, costs[pipe.scheme].longest) for pipe in strategy.pipelines], dtype=np.int64)
    return DispatchProblem(
        np.ascontiguousarray(tokens),  # one layout: kernels are compiled once
        np.stack([priced[pipe.scheme] for pipe in strategy.pipelines]),
        np.array([cost.fixed for cost in own], dtype=np.int64),
        longest,
        longest,
        np.array([pipe.scheme.stages for pipe in strategy.pipelines], dtype=np.int64),
    )


def lower_bound(problem: DispatchProblem) -> int:
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
    problem: DispatchProblem, order: np.ndarray, index: int = 0, switch_ns: int = 0, beat: int | None = None
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
        ns = kernels().pack_micro_batches(problem.tokens[own], cost, *limits, problem.charge_largest, batch)
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
