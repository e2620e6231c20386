"""Two-stage assignment of a step (Hydraulis): dispatch documents to pipelines, then pack each pipeline's micro-batches.

Dispatch: every document, longest first, goes to the pipeline that finishes it earliest. Then documents move from the
slowest pipeline to another, or swap with one there, as long as the slower of the two gains. A pipeline may stay empty.
A pipeline of several stages fills and drains at the pace of its largest micro-batch, so one long document among short
ones is expensive there, and no single move mends that. So dispatch starts several times, with limits on the length of
documents on such pipelines or on all but a few. From the best start it lowers limits one by one as long as that helps.

Pack: one stage needs as few micro-batches as hold the tokens, since each costs a constant. Several stages need equal
micro-batches, and more of them. Every number up to a limit is tried.

All times are integer ns of one stage, forward and backward; stages take equally long, a third of it forward. The
published planner charges every micro-batch like the largest: ``largest x (stages - 1 + micro-batches)``, which is exact
only where all are equal. `charge_largest` does the same, for comparisons with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from seqloom.errors import MemoryBudgetError, how_to_drop
from seqloom.planners.compiled import kernels
from seqloom.planners.hydraulis.strategy import ConfigCosts, Strategy
from seqloom.planners.loops import DispatchProblem, PipelineLoads

EVALUATIONS = 200_000
"""Moves and swaps that one dispatch may evaluate."""
START_EVALUATIONS = 4_000
"""Moves and swaps that each start may evaluate."""
LOWERED_LIMITS = 16
"""Lower limits to try, over all pipelines of several stages."""
FAR_PERCENT = 105
"""Dispatch ends after its starts if the best of them takes this much of the time to beat."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Documents of one step by pipeline and micro-batch, and their estimated times."""

    strategy: int  # its index in the list to choose from
    batches: tuple[tuple[tuple[int, ...], ...], ...]  # documents of every pipeline's micro-batches, in running order
    pipelines_ns: tuple[int, ...]  # ns of every pipeline
    switch_ns: int = 0  # ns to reshard the parameters for this strategy

    @property
    def ns(self) -> int:
        """Step time: the slowest pipeline, and the switch."""
        return max(self.pipelines_ns) + self.switch_ns

    def documents(self, pipeline: int) -> tuple[int, ...]:
        """The documents of a pipeline, ascending."""
        return tuple(sorted(document for batch in self.batches[pipeline] for document in batch))


def rank_strategies(
    lengths: np.ndarray,
    strategies: Sequence[Strategy],
    costs: ConfigCosts,
    switch_ns: Sequence[int] | None = None,
    most: int | None = None,
    *,
    charge_largest: bool = False,
) -> list[Assignment]:
    """Assign a batch under every strategy that holds its longest document; return the `most` best, best first.

    Strategies whose lower bound is above the `most`-th best time are skipped; of equals, the first is better.
    `switch_ns` is to switch to each strategy.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    switch = [0] * len(strategies) if switch_ns is None else list(switch_ns)
    order = np.argsort(-tokens, kind="stable")
    limits = [max(_capacities(strategy, costs)) for strategy in strategies]
    if max(limits, default=0) < tokens.max():
        longest, limit = int(tokens.argmax()), max(limits, default=0)
        raise MemoryBudgetError(
            f"sequence {longest} has {tokens[longest]} tokens, but no pipeline of {len(limits)} candidate strategies "
            f"holds more than {limit}; {how_to_drop(limit)}, propose strategies for documents of "
            f"{tokens[longest]} tokens, raise the memory budget or use more GPUs"
        )
    holding = [k for k, limit in enumerate(limits) if limit >= tokens.max()]
    problems = {k: problem_of(tokens[order], strategies[k], costs, charge_largest) for k in holding}
    bounds = {k: lower_bound(problem) + switch[k] for k, problem in problems.items()}
    found: list[Assignment] = []
    wanted = len(problems) if most is None else most
    for k in sorted(problems, key=lambda k: (bounds[k], k)):
        full = len(found) >= wanted
        if full and bounds[k] > found[wanted - 1].ns:
            break
        beat = found[wanted - 1].ns - switch[k] if full else None
        found.append(assign(problems[k], order, k, switch[k], beat))
        found.sort(key=lambda assignment: (assignment.ns, assignment.strategy))
    return found[:wanted]


def problem_of(
    tokens: np.ndarray, strategy: Strategy, costs: ConfigCosts, charge_largest: bool = False
) -> DispatchProblem:
    """Price documents, int64[n] tokens falling, on the pipelines of a strategy."""
    configs = [pipe.parallel for pipe in strategy.pipelines]
    documents_ns = {config: costs[config].documents_ns(tokens) for config in dict.fromkeys(configs)}
    max_tokens = np.array(_capacities(strategy, costs), dtype=np.int64)
    return DispatchProblem(
        np.ascontiguousarray(tokens),  # one layout: kernels are compiled once
        np.stack([documents_ns[config] for config in configs]),
        np.array([costs[config].fixed for config in configs], dtype=np.int64),
        max_tokens,
        max_tokens,
        np.array([config.stages for config in configs], dtype=np.int64),
        charge_largest,
    )


def _capacities(strategy: Strategy, costs: ConfigCosts) -> list[int]:
    """Tokens that every pipeline holds, by the strategy and by the costs, which may be of less memory."""
    return [min(pipe.max_tokens, costs[pipe.parallel].max_tokens) for pipe in strategy.pipelines]


def lower_bound(problem: DispatchProblem) -> int:
    """ns that no assignment of these documents beats.

    A token costs at least its part of a full micro-batch's constant. For any weights y of the pipelines that add up to
    1, the slowest takes at least the mean weighted with y, and a document adds at least its least ``y cost`` to that.
    Weights in proportion to the pipelines' speeds are near the best. The longest document gives another bound.
    """
    holds = problem.tokens[None, :] <= problem.max_tokens[:, None]
    longest = (problem.cost[:, 0] + problem.fixed) * problem.stages
    cost = problem.cost + (problem.fixed / problem.max_tokens)[:, None] * problem.tokens[None, :]
    speed = 1.0 / np.maximum(cost.sum(axis=1), 1)
    shared = np.where(holds, cost * (speed / speed.sum())[:, None], np.inf).min(axis=0).sum()
    return max(int(longest[holds[:, 0]].min()), int(shared) - len(problem.tokens))


def assign(
    problem: DispatchProblem, order: np.ndarray, index: int = 0, switch_ns: int = 0, beat: int | None = None
) -> Assignment:
    """Dispatch and pack one strategy, of this index; see `dispatch` for `beat`, which is without the switch.

    `order` has the number in the batch of every document of the problem.
    """
    place = dispatch(problem, beat)
    assert place is not None
    batches, times = [], []
    for j in range(len(problem.fixed)):
        own = np.flatnonzero(place == j)
        batch = np.empty(len(own), np.int64)
        cost = np.ascontiguousarray(problem.cost[j, own])
        limits = (int(problem.fixed[j]), int(problem.max_tokens[j]), int(problem.stages[j]))
        times.append(
            int(kernels().pack_micro_batches(problem.tokens[own], cost, *limits, problem.charge_largest, batch))
        )
        count = int(batch.max(initial=-1)) + 1
        batches.append(tuple(tuple(sorted(order[own[batch == b]].tolist())) for b in range(count)))
    return Assignment(index, tuple(batches), tuple(times), switch_ns)


class Dispatched(NamedTuple):
    """A dispatch under limits on the length of every pipeline's documents."""

    ns: int  # Of the slowest pipeline
    place: np.ndarray  # int64[n] the pipeline of every document
    max_length: np.ndarray  # int64[pipelines] tokens
    pipelines_ns: np.ndarray  # int64[pipelines] ns


def dispatch(problem: DispatchProblem, beat: int | None = None) -> np.ndarray | None:
    """Return the pipeline of every document, int64[n]; None if the longest fits in no pipeline.

    `beat` is the time of another strategy, ns: if this one is far behind it, the search ends early.
    """
    staged = bool((problem.stages > 1).any())
    evaluations = START_EVALUATIONS if staged else EVALUATIONS
    starts = [_dispatched(problem, limits, evaluations) for limits in initial_limits(problem)]
    found = [start for start in starts if start is not None]
    if not found:
        return None
    best = min(found, key=lambda start: start.ns)
    if not staged or (beat is not None and best.ns * 100 > beat * FAR_PERCENT):
        return best.place
    best = _lower_limits(problem, best)
    loads = PipelineLoads.empty(len(problem.fixed))
    for j in range(len(problem.fixed)):
        kernels().sum_pipeline(problem, best.place, loads, j)
    kernels().swap_rebalance(problem, best.place, loads, EVALUATIONS)
    return best.place


def _dispatched(problem: DispatchProblem, max_length: np.ndarray, evaluations: int) -> Dispatched | None:
    loads = PipelineLoads.empty(len(problem.fixed))
    place = np.empty(len(problem.tokens), np.int64)
    limited = problem._replace(max_length=max_length)
    if not kernels().dispatch_longest_first(limited, place, loads):
        return None
    return Dispatched(int(kernels().swap_rebalance(limited, place, loads, evaluations)), place, max_length, loads.done)


def initial_limits(problem: DispatchProblem) -> list[np.ndarray]:
    """Limits to start from, int64[pipelines] tokens of the longest document; the first are the pipelines' capacities.

    If a pipeline has several stages, others reserve the pipelines of one stage, or the first pipeline, or the first
    half of the pipelines, for the longest 1, 3, 9, 27... documents.
    """
    found = [problem.max_tokens]
    count, staged = len(problem.fixed), problem.stages > 1
    if not staged.any():
        return found
    kinds = [staged, np.arange(count) >= 1, np.arange(count) >= (count + 1) // 2]
    closed_sets = {tuple(closed.tolist()): closed for closed in kinds if not closed.all() and closed.any()}
    for closed in closed_sets.values():
        many = 1
        while many < len(problem.tokens):
            short = np.minimum(problem.max_tokens, problem.tokens[many])
            found.append(np.where(closed, short, problem.max_tokens))
            many *= 3
    return found


def _lower_limits(problem: DispatchProblem, best: Dispatched) -> Dispatched:
    """Lower the limits of pipelines of several stages below their longest documents, as long as that helps."""
    left = LOWERED_LIMITS
    improved = True
    while improved and left > 0:
        improved = False
        for limits in islice(_lowered(problem, best), left):
            left -= 1
            found = _dispatched(problem, limits, START_EVALUATIONS)
            if found is not None and found.ns < best.ns:
                best, improved = found, True
                break
    return best


def _lowered(problem: DispatchProblem, dispatched: Dispatched) -> Iterator[np.ndarray]:
    """Limits that exclude from one pipeline of several stages, the slowest first, its longest document, or four."""
    for j in np.argsort(-dispatched.pipelines_ns, kind="stable").tolist():
        own = problem.tokens[dispatched.place == j]
        for many in (1, 4):
            if problem.stages[j] > 1 and len(own) > many and own[many] < own[0]:
                limits = dispatched.max_length.copy()
                limits[j] = own[many]
                yield limits
