"""Second stage of assignment: the documents of one pipeline into micro-batches, by what they cost and not by tokens.

One stage wants as few micro-batches as hold the tokens: each costs a constant. Several stages want them equal as well,
and more of them: the pipeline fills and drains at the pace of the largest. Every number is tried, within reason.
"""

from __future__ import annotations

import numpy as np

from seqloom.planners.compiled import kernel
from seqloom.planners.strategies.clock import one_f_one_b

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
