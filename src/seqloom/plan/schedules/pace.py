"""The merge that makes a row: how many forwards come before which backward."""

from __future__ import annotations

from collections.abc import Sequence

from seqloom.plan.action import Action


def one_more_each(needed: Sequence[int], of: int) -> list[int]:
    """How many forwards come before the 1st, 2nd, .. backward: one more than before the last one, or what it needs.

    Args:
        needed: forwards without which each backward cannot run, in the order of the backwards.
        of: forwards in all.

    Sequences of k pieces that follow each other need k, k, .., 2k, 2k, ..; this gives k, k + 1, k + 2, .., all.
    """
    before: list[int] = []
    for least in needed:
        before.append(min(of, max(least, before[-1] + 1 if before else 0)))
    return before


def paced(
    forwards: Sequence[Action], backwards: Sequence[Action], before: Sequence[int], ahead: int
) -> tuple[Action, ...]:
    """Merge the forwards and backwards of one host.

    Args:
        forwards: in order.
        backwards: in order.
        before: forwards that the last host runs before each backward, never fewer than before the last one.
        ahead: forwards that this host is ahead of the last one.
    """
    row: list[Action] = []
    done = 0
    for backward, least in zip(backwards, before, strict=True):
        until = min(len(forwards), least + ahead)
        row += forwards[done:until]
        row.append(backward)
        done = until
    return tuple(row)
