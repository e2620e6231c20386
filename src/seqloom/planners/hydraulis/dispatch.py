"""Assignment of one step in two stages: dispatch documents to pipelines, then pack each pipeline's micro-batches.

Dispatch: documents go, longest first, where they are done earliest; then documents move away from the slowest pipeline,
or change places with those of another, as long as the slower of the two gains. A pipeline may stay empty. A pipeline
of several stages fills and drains at the pace of its largest micro-batch, so one long document among short ones is
expensive there. No single move heals that: several starts limit how long documents may be on such pipelines, or on all
but a few. From the best start on, limits are lowered one by one as long as that helps.

Pack: one stage wants as few micro-batches as hold the tokens, since each costs a constant. Several stages want them
equal as well, and more of them. Every number is tried, within reason.

All times are integer ns of one stage, forward and backward; stages take equally long, a third of it forward. The
published planner charges every micro-batch like the largest: ``largest x (stages - 1 + micro-batches)``. That is exact
where all are equal and too much elsewhere. `charge_largest` does the same, to compare like with like.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from seqloom.errors import SeqloomError
from seqloom.planners.compiled import kernel
from seqloom.planners.hydraulis.strategy import ConfigCosts, Strategy

EVALUATIONS = 200_000
"""Changes that one dispatch may look at."""
START_EVALUATIONS = 4_000
"""Changes that each start may look at."""
LOWERED_LIMITS = 16
"""Times that the limit of a pipeline of several stages is lowered."""
FAR_PERCENT = 105
"""Where the best start is this far behind the time to beat, nothing more is tried."""
MICRO_BATCH_COUNTS = 24
"""Numbers of micro-batches that packing tries, from the least that may hold the tokens."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Documents of one step by pipeline and micro-batch, and how long they should take.

    Attributes:
        strategy: its index in the list to choose from.
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

    Strategies that could not be among them even if all work were shared out freely are not assigned.

    Args:
        lengths: int64[n] tokens.
        strategies: to choose from; of equals, the first is better.
        costs: of every config in them.
        switch_ns: ns to switch to each strategy; None: nothing.
        most: assignments to return; None: of all strategies.
        charge_largest: whether every micro-batch counts like the largest of its pipeline.
    """
    tokens = np.asarray(lengths, dtype=np.int64)
    switch = [0] * len(strategies) if switch_ns is None else list(switch_ns)
    order = np.argsort(-tokens, kind="stable")
    limits = [
        max(min(pipe.max_tokens, costs[pipe.parallel].max_tokens) for pipe in strategy.pipelines)
        for strategy in strategies
    ]
    if max(limits, default=0) < tokens.max():
        longest, limit = int(tokens.argmax()), max(limits, default=0)
        raise SeqloomError(
            f"sequence {longest} has {tokens[longest]} tokens, but no pipeline of {len(limits)} candidate strategies "
            f"holds more than {limit}; drop longer sequences (--max-length {max(limit, 1)}), propose strategies for "
            f"documents of {tokens[longest]} tokens, raise the memory budget or use more GPUs"
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


class DispatchProblem(NamedTuple):
    """Documents, longest first, and the pipelines of one strategy."""

    tokens: np.ndarray
    """int64[n] tokens, falling."""
    cost: np.ndarray
    """int64[pipelines, n] ns that a document adds to a stage of a pipeline; falls with the tokens."""
    fixed: np.ndarray
    """int64[pipelines] ns of a micro-batch before any document."""
    max_tokens: np.ndarray
    """int64[pipelines] tokens that a micro-batch may hold."""
    max_length: np.ndarray
    """int64[pipelines] tokens of the longest document that may go there: no more than `max_tokens`."""
    stages: np.ndarray
    """int64[pipelines]."""
    charge_largest: bool
    """Whether every micro-batch counts like the largest of its pipeline."""


def problem_of(
    tokens: np.ndarray, strategy: Strategy, costs: ConfigCosts, charge_largest: bool = False
) -> DispatchProblem:
    """Price documents, int64[n] tokens falling, on the pipelines of a strategy.

    A pipeline holds what the strategy says, as far as the costs, which may be of less memory, agree.
    """
    configs = [pipe.parallel for pipe in strategy.pipelines]
    documents_ns = {config: costs[config].documents_ns(tokens) for config in dict.fromkeys(configs)}
    limits = [min(pipe.max_tokens, costs[pipe.parallel].max_tokens) for pipe in strategy.pipelines]
    max_tokens = np.array(limits, dtype=np.int64)
    return DispatchProblem(
        np.ascontiguousarray(tokens),  # one layout: kernels are compiled once
        np.stack([documents_ns[config] for config in configs]),
        np.array([costs[config].fixed for config in configs], dtype=np.int64),
        max_tokens,
        max_tokens,
        np.array([config.stages for config in configs], dtype=np.int64),
        charge_largest,
    )


def lower_bound(problem: DispatchProblem) -> int:
    """ns that no assignment of these documents beats.

    A token costs at least its part of a full micro-batch's constant. Whatever the shares y of the pipelines (they add
    up to 1), the slowest takes at least the mean weighted with y, and a document adds at least its cheapest ``y cost``
    to that. Shares like the pipelines' speeds are near the best. The longest document alone is another bound.
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
    """Dispatch and pack one strategy.

    Args:
        problem: documents, longest first, on the strategy's pipelines.
        order: int64[n] the number in the batch of every document of the problem.
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
        limits = (int(problem.fixed[j]), int(problem.max_tokens[j]), int(problem.stages[j]))
        times.append(int(pack(problem.tokens[own], cost, *limits, problem.charge_largest, batch)))
        count = int(batch.max(initial=-1)) + 1
        batches.append(tuple(tuple(sorted(order[own[batch == b]].tolist())) for b in range(count)))
    return Assignment(index, tuple(batches), tuple(times), switch_ns)


# ---- first stage: documents to pipelines


class Dispatched(NamedTuple):
    """Documents on pipelines that take documents up to given lengths."""

    ns: int
    """Of the slowest pipeline."""
    place: np.ndarray
    """int64[n] the pipeline of every document."""
    max_length: np.ndarray
    pipelines_ns: np.ndarray
    """int64[pipelines] ns."""


def dispatch(problem: DispatchProblem, beat: int | None = None) -> np.ndarray | None:
    """Return the pipeline of every document, int64[n]; None if the longest fits in no pipeline.

    Args:
        problem: documents and pipelines.
        beat: ns that another strategy takes: one that is far behind it is not worth more search.
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
    loads = Loads.empty(len(problem.fixed))
    for j in range(len(problem.fixed)):
        recompute_load(problem, best.place, loads, j)
    swap_rebalance(problem, best.place, loads, EVALUATIONS)
    return best.place


def _dispatched(problem: DispatchProblem, max_length: np.ndarray, evaluations: int) -> Dispatched | None:
    loads = Loads.empty(len(problem.fixed))
    place = np.empty(len(problem.tokens), np.int64)
    limited = problem._replace(max_length=max_length)
    if not dispatch_longest_first(limited, place, loads):
        return None
    return Dispatched(int(swap_rebalance(limited, place, loads, evaluations)), place, max_length, loads.ns)


def initial_limits(problem: DispatchProblem) -> list[np.ndarray]:
    """List lengths of documents, int64[pipelines], that pipelines take at the start; first as long as they hold.

    With several stages somewhere: only the longest 1, 3, 9, 27... documents are long, and these go only to pipelines of
    one stage, or to the first pipeline, or to the first half of them.
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
    """Close pipelines of several stages to their longest documents, one after the other, as long as that helps."""
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
    """Limits that close one pipeline of several stages, the slowest first, to its longest document, or to four."""
    for j in np.argsort(-dispatched.pipelines_ns, kind="stable").tolist():
        own = problem.tokens[dispatched.place == j]
        for many in (1, 4):
            if problem.stages[j] > 1 and len(own) > many and own[many] < own[0]:
                limits = dispatched.max_length.copy()
                limits[j] = own[many]
                yield limits


class Loads(NamedTuple):
    """Documents of every pipeline so far, int64[pipelines] each."""

    work: np.ndarray
    """ns of all its documents on a stage."""
    tokens: np.ndarray
    count: np.ndarray
    first: np.ndarray
    """Its longest document: the lowest number; -1 without any."""
    second: np.ndarray
    """The next one."""
    ns: np.ndarray
    """Time of the pipeline by `estimate`."""

    @classmethod
    def empty(cls, pipelines: int) -> Loads:
        """No document anywhere."""
        work, tokens, count, ns = np.zeros((4, pipelines), np.int64)
        first, second = np.full((2, pipelines), -1, np.int64)
        return cls(work, tokens, count, first, second, ns)


@kernel
def estimate(
    work: int, tokens: int, largest: int, count: int, fixed: int, max_tokens: int, stages: int, charge_largest: bool
) -> int:
    """ns of a pipeline whose documents are not packed yet: ``sum + (stages - 1) x largest micro-batch``.

    The number of micro-batches is the one at which this is least, as if documents could be levelled freely: few cost
    few constants, many make the first and the last one short. None is shorter than the largest document.

    Args:
        work: ns of all documents on a stage.
        tokens: of all documents.
        largest: ns of the largest document.
        count: documents.
        fixed: ns of a micro-batch before any document.
        max_tokens: that a micro-batch may hold.
        stages: of the pipeline.
        charge_largest: whether every micro-batch counts like the largest.
    """
    if count == 0:
        return 0
    batches = -(-tokens // max_tokens)
    if stages > 1:
        wanted = int(np.sqrt(work * (stages - 1) / max(fixed, 1)))
        batches = max(batches, min(wanted, -(-work // max(largest, 1)), count))
    level = max(largest, -(-work // batches)) + fixed
    if charge_largest:
        return level * (stages - 1 + batches)
    return work + batches * fixed + (stages - 1) * level


@kernel
def time_with_change(p: DispatchProblem, loads: Loads, j: int, removed: int, added: int) -> int:
    """ns of pipeline j without document `removed` and with document `added`; -1 stands for none."""
    work, tokens, count, first = loads.work[j], loads.tokens[j], loads.count[j], loads.first[j]
    if removed >= 0:
        work, tokens, count = work - p.cost[j, removed], tokens - p.tokens[removed], count - 1
        if first == removed:
            first = loads.second[j]
    if added >= 0:
        work, tokens, count = work + p.cost[j, added], tokens + p.tokens[added], count + 1
        if first < 0 or added < first:
            first = added
    largest = p.cost[j, first] if first >= 0 else 0
    return estimate(work, tokens, largest, count, p.fixed[j], p.max_tokens[j], p.stages[j], p.charge_largest)


@kernel
def recompute_load(p: DispatchProblem, place: np.ndarray, loads: Loads, j: int) -> None:
    """Write the load of pipeline j from scratch."""
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
    loads.ns[j] = time_with_change(p, loads, j, -1, -1)


@kernel
def dispatch_longest_first(p: DispatchProblem, place: np.ndarray, loads: Loads) -> bool:
    """Give every document, longest first, to the pipeline that is done with it earliest; False if one fits nowhere."""
    place[:] = -1
    for j in range(p.fixed.shape[0]):
        recompute_load(p, place, loads, j)
    for i in range(place.shape[0]):
        best, soonest = -1, 0
        for j in range(p.fixed.shape[0]):
            if p.tokens[i] <= p.max_length[j]:
                done = time_with_change(p, loads, j, -1, i)
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
    for j in range(p.fixed.shape[0]):
        recompute_load(p, place, loads, j)
    return True


@kernel
def swap_rebalance(p: DispatchProblem, place: np.ndarray, loads: Loads, evaluations: int) -> int:
    """Move and swap documents until nothing helps the slowest pipeline, or `evaluations` are spent; return its ns.

    Every change makes the slower of two pipelines faster than the slowest was, so no arrangement comes twice.
    """
    while evaluations > 0:
        slow = int(np.argmax(loads.ns))
        best, gone, come, where = loads.ns[slow], -1, -1, -1
        for i in range(place.shape[0]):
            if place[i] != slow or evaluations <= 0:
                continue
            evaluations -= 1 + p.fixed.shape[0]
            lighter = time_with_change(p, loads, slow, i, -1)
            if lighter >= best:
                continue
            for j in range(p.fixed.shape[0]):
                if j != slow and p.tokens[i] <= p.max_length[j]:
                    done = max(lighter, time_with_change(p, loads, j, -1, i))
                    if done < best:
                        best, gone, come, where = done, i, -1, j
            for k in range(i + 1, place.shape[0]):  # for a shorter one: a longer one makes the slowest slower
                j = place[k]
                if j == slow or p.tokens[i] > p.max_length[j] or p.tokens[k] == p.tokens[i]:
                    continue
                evaluations -= 1
                if lighter + p.cost[slow, k] >= best or loads.ns[j] + p.cost[j, i] - p.cost[j, k] >= best:
                    continue  # more work takes at least so much longer: most changes need no estimate
                done = max(time_with_change(p, loads, slow, i, k), time_with_change(p, loads, j, k, i))
                if done < best:
                    best, gone, come, where = done, i, k, j
        if gone < 0:
            break
        place[gone] = where
        if come >= 0:
            place[come] = slow
        recompute_load(p, place, loads, slow)
        recompute_load(p, place, loads, where)
    return loads.ns.max()


# ---- second stage: documents of one pipeline to micro-batches


@kernel
def pack(
    tokens: np.ndarray,
    cost: np.ndarray,
    fixed: int,
    max_tokens: int,
    stages: int,
    charge_largest: bool,
    batch: np.ndarray,
) -> int:
    """Pack the documents of one pipeline; none of them is longer than `max_tokens`. Return its ns.

    Args:
        tokens: int64[n], falling.
        cost: int64[n] ns that every document adds to a stage.
        fixed: ns of a micro-batch before any document.
        max_tokens: that a micro-batch may hold.
        stages: of the pipeline.
        charge_largest: whether every micro-batch counts like the largest.
        batch: int64[n], written: the micro-batch of every document, in running order.
    """
    if tokens.shape[0] == 0:
        return 0
    fitted = first_fit(tokens, max_tokens, batch)
    best = running_time(cost, batch, fitted, fixed, stages, charge_largest)
    least = -(-tokens.sum() // max_tokens)
    tried = np.empty_like(batch)
    for count in range(least, min(tokens.shape[0], least + MICRO_BATCH_COUNTS - 1) + 1):
        if stages == 1 and count > fitted:
            break
        if fill_cheapest(tokens, cost, max_tokens, count, tried):
            time = running_time(cost, tried, count, fixed, stages, charge_largest)
            if time < best or (time == best and stages == 1):  # of one stage level ones: they need the least memory
                best = time
                batch[:] = tried
    return best


@kernel
def first_fit(tokens: np.ndarray, max_tokens: int, batch: np.ndarray) -> int:
    """Put every document, largest first, into the first micro-batch with room; return how many there are."""
    room = np.zeros(tokens.shape[0], np.int64)
    count = 0
    for i in range(tokens.shape[0]):
        b = 0
        while b < count and room[b] < tokens[i]:
            b += 1
        if b == count:
            room[b] = max_tokens
            count += 1
        room[b] -= tokens[i]
        batch[i] = b
    return count


@kernel
def fill_cheapest(tokens: np.ndarray, cost: np.ndarray, max_tokens: int, count: int, batch: np.ndarray) -> bool:
    """Put every document, largest first, into the cheapest of `count` micro-batches with room; False if none has."""
    held = np.zeros(count, np.int64)
    spent = np.zeros(count, np.int64)
    for i in range(tokens.shape[0]):
        best = -1
        for b in range(count):
            if held[b] + tokens[i] <= max_tokens and (best < 0 or spent[b] < spent[best]):
                best = b
        if best < 0:
            return False
        batch[i] = best
        held[best] += tokens[i]
        spent[best] += cost[i]
    return True


@kernel
def running_time(cost: np.ndarray, batch: np.ndarray, count: int, fixed: int, stages: int, charge_largest: bool) -> int:
    """ns of these micro-batches; numbers them in running order: the largest in the middle, the smallest at both ends.

    A pipeline fills and drains at the pace of its first and its last micro-batches.
    """
    times = np.zeros(count, np.int64)
    for i in range(batch.shape[0]):
        times[batch[i]] += cost[i]
    rising = np.argsort(times, kind="mergesort")
    turn = np.empty(count, np.int64)
    order = np.empty(count, np.int64)
    for k in range(count):
        at = k // 2 if k % 2 == 0 else count - 1 - k // 2
        order[at] = rising[k]
        turn[rising[k]] = at
    for i in range(batch.shape[0]):
        batch[i] = turn[batch[i]]
    if charge_largest:
        return (times.max() + fixed) * (stages - 1 + count)
    return one_f_one_b(times[order] + fixed, stages)


@kernel
def one_f_one_b(times: np.ndarray, stages: int) -> int:
    """Makespan in ns of micro-batches through a pipeline in 1F1B order, by its recurrence; messages take no time.

    Stage s runs ``stages - 1 - s`` forwards ahead, then one forward and one backward in turn, then what is left:

        stage 0    F0 F1    B0 F2 B1    B2
        stage 1       F0 B0 F1 B1 F2 B2

    Args:
        times: int64[v] ns of every micro-batch on a stage, in running order; they may differ.
        stages: of the pipeline.
    """
    count = times.shape[0]
    forward = times // 3
    free = np.zeros(stages, np.int64)
    returned = np.zeros(stages + 1, np.int64)  # when the last backward of every stage has ended
    for i in range(count + stages - 1):  # forward of micro-batch i, then one backward on every stage that has begun
        arrived = 0
        for s in range(stages):
            if i < count:
                free[s] = max(free[s], arrived) + forward[i]
                arrived = free[s]
        for s in range(stages):
            j = i - (stages - 1 - s)
            if 0 <= j < count:
                free[s] = max(free[s], returned[s + 1]) + times[j] - forward[j]
                returned[s] = free[s]
    return free.max()
