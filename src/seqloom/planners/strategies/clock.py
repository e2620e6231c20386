"""How long a pipeline takes: estimated from sums while documents are dealt, by the 1F1B order once they are packed.

All times are integer ns of one stage, forward and backward; stages take equally long. A third of it is forward.

The published planner charges every micro-batch like the largest: ``largest x (stages - 1 + micro-batches)``. That is
exact where all are equal and too much elsewhere. Asked for `alike`, the clock does the same, to compare like with like.
"""

from __future__ import annotations

import numpy as np

from seqloom.planners.compiled import kernel


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
