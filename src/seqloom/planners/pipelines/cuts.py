"""Where to cut a document so that its pieces take equal time.

A token reads all tokens before it, so equal time means ever shorter pieces. With C(x) the cost of the first x tokens,
a piece from x to y costs C(y) - C(x), and the borders of k pieces of n tokens are where C(x) = C(n) * i / k:

    C(x)  |                /      n = 8, k = 3
          |- - - - - - - -/       borders 0 4 6 8
          |            . /
          |- - - - - -/
          |      . /
          |__/________________ x
             0     4   6 8

Everything is in integers, so every machine cuts alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from seqloom.plan.error import PlanError

Cost = Callable[[int], int]
"""Cost of the first x tokens of a document: 0 for 0 tokens, never falling; its unit does not matter."""


def equal_cuts(length: int, pieces: int, cost: Cost, *, multiple: int = 1, floor: int = 1) -> tuple[int, ...]:
    """Cut a document into pieces of equal cost, found by bisection.

    Args:
        length: tokens of the document.
        pieces: how many are wanted; fewer come back where they would be shorter than `floor`.
        cost: of the first x tokens.
        multiple: borders inside the document are multiples of this.
        floor: the least tokens of a piece, below which kernels lose efficiency; a document shorter than that stays
            whole.

    Returns:
        Borders: 0, .., `length`, one more than pieces.
    """
    count = fitting_pieces(length, pieces, cost, floor)
    total = cost(length)
    while True:
        borders = rounded([_reach(cost, total * i, count, length) for i in range(count + 1)], multiple)
        if count == 1 or shortest(borders) >= floor:
            return borders
        count -= 1


def quadratic_cuts(length: int, pieces: int, linear: int, quadratic: int) -> tuple[int, ...]:
    """Cut a document into pieces of equal cost for C(x) = linear * x + quadratic * x^2 / 2, in closed form.

    The borders are x_i = (-b + sqrt(b^2 + 2 a C(n) i / k)) / a, rounded down, with b `linear` and a `quadratic`.

    Args:
        length: tokens of the document, n.
        pieces: how many, k.
        linear: cost per token, whatever its place.
        quadratic: cost per pair of tokens.
    """
    _check(length, pieces)
    b, a, k = linear, quadratic, pieces
    if not a:
        return tuple(length * i // k for i in range(k + 1))
    twice = 2 * b * length + a * length * length  # C(n), twice
    roots = [math.isqrt(b * b * k * k + a * twice * i * k) for i in range(k + 1)]  # times k, to stay in integers
    return (0, *((root - b * k) // (a * k) for root in roots[1:-1]), length)


def cuts_from_back(length: int, pieces: int, linear: int, quadratic: int, multiple: int = 8) -> tuple[int, ...]:
    """Cut as the published code of Seq1F1B does: from the last piece to the first, each rounded down to a multiple.

    What rounding takes from a piece goes to the ones before it, so the first piece is the longest by more than its
    share. The arguments are those of `quadratic_cuts`.
    """
    _check(length, pieces)
    b, a, k = linear, quadratic, pieces
    twice = 2 * b * length + a * length * length
    borders = [length]
    for _ in range(pieces - 1):
        end = borders[-1]
        left = (2 * b * end + a * end * end) * k - twice  # twice C(begin), times k
        root = math.isqrt((b * b * k + a * left) * k)
        begin = -((b * k - root) // (a * k)) if a else -(-left // (2 * b * k))
        borders.append(end - (end - begin) // multiple * multiple)
    return (0, *reversed(borders))


def fitting_pieces(length: int, pieces: int, cost: Cost, floor: int) -> int:
    """The number of pieces, lowered until the last of them, which is the shortest, has `floor` tokens."""
    _check(length, pieces)
    if length < 2 * floor:
        return 1
    last = cost(length) - cost(length - floor)
    return max(1, min(pieces, length // floor, cost(length) // last if last else pieces))


def rounded(borders: Sequence[int], multiple: int) -> tuple[int, ...]:
    """Move borders to the nearest multiples; the ends stay. Borders that meet become one."""
    inner = [(border + multiple // 2) // multiple * multiple for border in borders[1:-1]]
    return (0, *sorted({border for border in inner if 0 < border < borders[-1]}), borders[-1])


def shortest(borders: Sequence[int]) -> int:
    """Tokens of the shortest piece."""
    return min(end - begin for begin, end in pairwise(borders))


def _reach(cost: Cost, share: int, parts: int, length: int) -> int:
    """The most tokens x with C(x) * parts <= share."""
    low, high = 0, length
    while low < high:
        middle = (low + high + 1) // 2
        if cost(middle) * parts <= share:
            low = middle
        else:
            high = middle - 1
    return low


def _check(length: int, pieces: int) -> None:
    if not 1 <= pieces <= length:
        raise PlanError(
            f"{length:,} tokens cannot be cut into {pieces:,} pieces; take between 1 and {max(1, length):,} pieces",
            rule="pieces",
        )
