"""Equal cuts of a sequence as Seq1F1B publishes them: in closed form, and as its code rounds them."""

from __future__ import annotations

import math


def quadratic_cuts(length: int, pieces: int, linear: int, quadratic: int) -> tuple[int, ...]:
    """Cut a document into pieces of equal cost for C(x) = linear * x + quadratic * x^2 / 2, in closed form.

    The borders are x_i = (-b + sqrt(b^2 + 2 a C(n) i / k)) / a, rounded down, with b `linear` and a `quadratic`.
    """
    b, a, k = linear, quadratic, pieces
    if not a:
        return tuple(length * i // k for i in range(k + 1))
    twice = 2 * b * length + a * length * length  # C(n), twice
    roots = [math.isqrt(b * b * k * k + a * twice * i * k) for i in range(k + 1)]  # times k, to stay in integers
    return (0, *((root - b * k) // (a * k) for root in roots[1:-1]), length)


def cuts_from_back(length: int, pieces: int, linear: int, quadratic: int, multiple: int = 8) -> tuple[int, ...]:
    """Cut as the published code does: from the last piece to the first, each rounded down to a multiple.

    What rounding takes from a piece goes to the ones before it, so the first piece is the longest by more than its
    share.
    """
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
