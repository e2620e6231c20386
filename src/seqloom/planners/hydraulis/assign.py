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
from seqloom.planners.compiled import kernel
from seqloom.planners.hydraulis.config import SchemeCosts, Strategy


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
    if stages == 1 or count == 0:
        return times.sum()
    forward = times // 3
    backward = times - forward
    begun = np.zeros((stages, 2), np.int64)  # forwards and backwards that every stage has done
    free = np.zeros(stages, np.int64)
    there = np.zeros((stages + 1, count), np.int64)  # when a micro-batch's forward reaches a stage
    back = np.zeros((stages + 1, count), np.int64)  # when its gradient reaches the stage before
    left = 2 * stages * count
    while left > 0:
        for s in range(stages):
            while begun[s, 1] < count:
                i, j = begun[s, 0], begun[s, 1]
                if i < count and i - j < min(stages - s, count):  # a forward is next
                    if s > 0 and begun[s - 1, 0] <= i:
                        break
                    free[s] = max(free[s], there[s, i]) + forward[i]
                    there[s + 1, i] = free[s]
                    begun[s, 0] += 1
                else:
                    if s < stages - 1 and begun[s + 1, 1] <= j:
                        break
                    free[s] = max(free[s], back[s + 1, j]) + backward[j]
                    back[s, j] = free[s]
                    begun[s, 1] += 1
                left -= 1
    return free.max()


@kernel
def estimate(
    work: int, tokens: int, largest: int, count: int, fixed: int, longest: int, stages: int, alike: bool
) -> int:
    """ns of a pipeline whose documents are known but not packed: ``sum + (stages - 1) x largest micro-batch``.

    The number of micro-batches is the one at which this is least, as if documents could be levelled freely: few cost
    few constants, many make the first and the last one short. None is shorter than the largest document.

    Args:
        work: ns of all documents on a stage.
        tokens: of all documents.
        largest: ns of the largest document.
        count: documents.
        fixed: ns of a micro-batch before any document.
        longest: tokens that a micro-batch may hold.
        stages: of the pipeline.
        alike: whether every micro-batch counts like the largest.
    """
    if count == 0:
        return 0
    batches = -(-tokens // longest)
    if stages > 1:
        wanted = int(np.sqrt(work * (stages - 1) / max(fixed, 1)))
        batches = max(batches, min(wanted, -(-work // max(largest, 1)), count))
    level = max(largest, -(-work // batches)) + fixed
    if alike:
        return level * (stages - 1 + batches)
    return work + batches * fixed + (stages - 1) * level


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


# ---- merged: planners.strategies.pack
# Second stage of assignment: the documents of one pipeline into micro-batches, by what they cost and not by tokens.
#
# One stage wants as few micro-batches as hold the tokens: each costs a constant. Several stages want them equal as
# well,
# and more of them: the pipeline fills and drains at the pace of the largest. Every number is tried, within reason.


NUMBERS = 24
"""Numbers of micro-batches that are tried, from the least that may hold the tokens."""


@kernel
def fill(tokens: np.ndarray, cost: np.ndarray, longest: int, count: int, batch: np.ndarray) -> int:
    """Put every document, largest first, into the cheapest of `count` micro-batches with room; -1 if one finds none.

    Args:
        tokens: int64[n], falling.
        cost: int64[n] ns.
        longest: tokens that a micro-batch may hold.
        count: micro-batches.
        batch: int64[n], written: the micro-batch of every document.

    Returns:
        ns of the most expensive micro-batch, without its constant.
    """
    held = np.zeros(count, np.int64)
    spent = np.zeros(count, np.int64)
    for i in range(tokens.shape[0]):
        best = -1
        for b in range(count):
            if held[b] + tokens[i] <= longest and (best < 0 or spent[b] < spent[best]):
                best = b
        if best < 0:
            return -1
        batch[i] = best
        held[best] += tokens[i]
        spent[best] += cost[i]
    return spent.max()


@kernel
def first_fit(tokens: np.ndarray, longest: int, batch: np.ndarray) -> int:
    """Put every document, largest first, into the first micro-batch with room; returns how many there are."""
    room = np.zeros(tokens.shape[0], np.int64)
    count = 0
    for i in range(tokens.shape[0]):
        b = 0
        while b < count and room[b] < tokens[i]:
            b += 1
        if b == count:
            room[b] = longest
            count += 1
        room[b] -= tokens[i]
        batch[i] = b
    return count


@kernel
def running_time(cost: np.ndarray, batch: np.ndarray, count: int, fixed: int, stages: int, alike: bool) -> int:
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
    if alike:
        return (times.max() + fixed) * (stages - 1 + count)
    return one_f_one_b(times[order] + fixed, stages)


@kernel
def pack(
    tokens: np.ndarray, cost: np.ndarray, fixed: int, longest: int, stages: int, alike: bool, batch: np.ndarray
) -> int:
    """Pack the documents of one pipeline; none of them is longer than `longest`.

    Args:
        tokens: int64[n], falling.
        cost: int64[n] ns that every document adds to a stage.
        fixed: ns of a micro-batch before any document.
        longest: tokens that a micro-batch may hold.
        stages: of the pipeline.
        alike: whether every micro-batch counts like the largest.
        batch: int64[n], written: the micro-batch of every document, in running order.

    Returns:
        ns of the pipeline.
    """
    if tokens.shape[0] == 0:
        return 0
    fitted = first_fit(tokens, longest, batch)
    best = running_time(cost, batch, fitted, fixed, stages, alike)
    least = -(-tokens.sum() // longest)
    tried = np.empty_like(batch)
    for count in range(least, min(tokens.shape[0], least + NUMBERS - 1) + 1):
        if stages == 1 and count > fitted:
            break
        if fill(tokens, cost, longest, count, tried) >= 0:
            time = running_time(cost, tried, count, fixed, stages, alike)
            if time < best or (time == best and stages == 1):  # of one stage level ones: they need the least memory
                best = time
                batch[:] = tried
    return best


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
