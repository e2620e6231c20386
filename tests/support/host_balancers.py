"""The balancing that RL frameworks publish, from its description: rivals of `seqloom.integrations.balancing`.

verl, slime    Karmarkar-Karp differencing of 24576 L + L^2; slime packs first-fit in order and splits the fullest bins
NeMo-RL,       first-fit decreasing; more bins by moving one sequence at a time out of the fullest
SkyRL
"""

from __future__ import annotations

from collections.abc import Sequence

Parts = list[list[int]]


def differencing(weights: Sequence[int], parts: int, equal_size: bool) -> Parts:
    """Join the two most uneven partial solutions, heaviest part with lightest, until one is left."""
    order = sorted(range(len(weights)), key=lambda i: (weights[i], i))
    size = parts if equal_size else 1
    solutions = []
    for number, first in enumerate(range(0, len(order), size)):
        sums = sorted(([weights[i], [i]] for i in order[first : first + size]), reverse=True)
        solutions.append((number, sums + [[0, []] for _ in range(parts - len(sums))]))
    following = len(solutions)
    while len(solutions) > 1:
        solutions.sort(key=lambda each: (each[1][-1][0] - each[1][0][0], each[0]))
        (_, one), (_, other) = solutions.pop(0), solutions.pop(0)
        joined = [[a[0] + b[0], a[1] + b[1]] for a, b in zip(one, other[::-1], strict=True)]
        solutions.append((following, sorted(joined, key=lambda part: (-part[0], part[1]))))
        following += 1
    return [members for _, members in solutions[0][1]]


def first_fit_decreasing(lengths: Sequence[int], capacity: int, least: int, multiple: int) -> Parts:
    """Pack longest first, then open bins with the shortest sequence of the fullest bin that has two or more."""
    bins: Parts = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        for part in bins:
            if sum(lengths[k] for k in part) + lengths[i] <= capacity:
                part.append(i)
                break
        else:
            bins.append([i])
    while len(bins) < least or len(bins) % multiple:
        fullest = max((part for part in bins if len(part) > 1), key=lambda part: sum(lengths[k] for k in part))
        bins.append([fullest.pop()])
    return bins


def slime_bins(lengths: Sequence[int], capacity: int, multiple: int) -> Parts:
    """Pack in order of arrival, first fit, then split the fullest bins until their number is a multiple."""
    bins: Parts = []
    for i, length in enumerate(lengths):
        for part in bins:
            if sum(lengths[k] for k in part) + length <= capacity:
                part.append(i)
                break
        else:
            bins.append([i])
    while len(bins) % multiple:
        fullest = max((part for part in bins if len(part) > 1), key=lambda part: sum(lengths[k] for k in part))
        shortest = min(fullest, key=lambda i: lengths[i])
        fullest.remove(shortest)
        bins.append([shortest])
    return bins


def lockstep(ranks: Sequence[Sequence[Sequence[int]]], weights: Sequence[int]) -> int:
    """Work of a step in which every round waits for its heaviest micro-batch; `ranks[r][k]` are sequences."""
    rounds = zip(*ranks, strict=True)
    return sum(max(sum(weights[i] for i in part) for part in parts) for parts in rounds)
