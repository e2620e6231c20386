"""The merge that makes a row: how many forwards come before which backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from seqloom.errors import PlanError
from seqloom.plan.action import Action, ActionKind
from seqloom.schedules.schedule import Schedule, Unit, backward_order, units_of
from seqloom.schedules.timing import Times, simulate_schedule


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


# ---- merged: plan.schedules.strict
# Orders with one stage per host: GPipe, 1F1B, TeraPipe and Seq1F1B.
#
# All of them run forwards in the order of the units and backwards in the order of `backward_order`: sequences first
# in, first out; pieces last in, first out. They differ in how many forwards come before which backward.
#
#     GPipe, TeraPipe    all forwards first: the least waiting for messages, the most memory
#     1F1B, Seq1F1B      one forward, one backward; a host that is d hosts before the last is d forwards ahead of it
#
# Sequences may have different numbers of pieces. Where all have k, the last host begins with k forwards and host r
# of p holds at most k + p - 1 - r units.


F, B = ActionKind.F, ActionKind.B


def all_forwards_first(name: str, stages: int, pieces: Sequence[int]) -> Schedule:
    """GPipe over pieces, which is TeraPipe's order.

    Args:
        name: of the schedule.
        stages: one per host.
        pieces: how many each sequence has, in forward order.
    """
    units = units_of(pieces)
    return _paced(name, stages, units, [len(units)] * len(units), 0)


def one_forward_one_backward(name: str, stages: int, pieces: Sequence[int], lead: int = 1) -> Schedule:
    """1F1B over pieces, which is Seq1F1B: warm-up of p - r - 2 + k forwards on host r where all have k pieces.

    Args:
        name: of the schedule.
        stages: one per host.
        pieces: how many each sequence has, in forward order.
        lead: forwards that a host is ahead of the next one; 1 is the least that never waits for itself.
    """
    units = units_of(pieces)
    ends = {unit.sequence: number + 1 for number, unit in enumerate(units)}
    before = one_more_each([ends[units[u].sequence] for u in backward_order(units)], len(units))
    return _paced(name, stages, units, before, lead)


def _paced(name: str, stages: int, units: tuple[Unit, ...], before: Sequence[int], lead: int) -> Schedule:
    back = list(backward_order(units))
    rows = [
        paced([Action(s, F, u) for u in range(len(units))], [Action(s, B, u) for u in back], before, lead * d)
        for s, d in zip(range(stages), reversed(range(stages)), strict=True)
    ]
    return Schedule(name, tuple(range(stages)), units, tuple(rows))


# ---- merged: plan.schedules.looped
# Orders with several chunks of the model per host: interleaved 1F1B, breadth-first, and Seq1F1B-I.
#
# Stage c * p + r is chunk c of host r. Units go through the chunks in blocks: a block's units through chunk 0, the
# same units through chunk 1, and so on, then the next block; backward likewise from the last chunk to the first.
#
#     interleaved    blocks of p units: the least waiting, ((v - 1) p + 2 (p - 1) + k) units of size 1 / (k v) on
# host 0
#     breadth-first  one block of all units, and backwards after all forwards
#
# The published Seq1F1B-I counts forwards by a formula that is wrong where a block of p units ends inside a
# sequence:
# it then asks for a backward of a sequence that has not gone forward yet. Here the count comes from what every
# backward needs, which is the formula where k divides p; where it does not, blocks of whole sequences are tried
# too.


F, B = ActionKind.F, ActionKind.B


def breadth_first(name: str, pp_size: int, chunks: int, pieces: Sequence[int]) -> Schedule:
    """All units forward through a chunk before any goes through the next; then backward likewise.

    Args:
        name: of the schedule.
        pp_size: of the pipeline.
        chunks: stages per host.
        pieces: how many each sequence has, in forward order.
    """
    units = units_of(pieces)
    return _looped(name, pp_size, chunks, units, len(units), late=True)


def interleaved(name: str, pp_size: int, chunks: int, pieces: Sequence[int]) -> Schedule:
    """Interleaved 1F1B over pieces, for any number of them.

    Args:
        name: of the schedule.
        pp_size: of the pipeline.
        chunks: stages per host.
        pieces: how many each sequence has, in forward order.
    """
    units = units_of(pieces)
    if len(set(pieces)) == 1 and pp_size % pieces[0] == 0 and len(units) % pp_size == 0:
        return _looped(name, pp_size, chunks, units, pp_size)
    longest = max(pieces, default=1)
    fewest = -(-pp_size // longest)  # sequences of a block that has at least p units
    sizes = {pp_size, *(longest * count for count in range(fewest, 2 * fewest + 1))}
    orders = [breadth_first(name, pp_size, chunks, pieces)]
    orders += [_looped(name, pp_size, chunks, units, size) for size in sorted(sizes)]
    return _leanest_of_the_fast(orders)


def _leanest_of_the_fast(orders: Sequence[Schedule]) -> Schedule:
    """Return the order with the least memory among those that end at most 3 % after the first.

    Units are equal here, and a backward takes twice its forward.
    """
    found: list[tuple[int, int, Schedule]] = []
    for order in orders:
        with suppress(PlanError):  # an order that stops
            played = simulate_schedule(order, Times.uniform(order))
            found.append((max(played.peak_memory, default=0), played.makespan, order))
    fastest = min(makespan for _, makespan, _ in found)
    return min((entry for entry in found if 100 * entry[1] <= 103 * fastest), key=lambda entry: entry[:2])[2]


def _looped(name: str, pp_size: int, chunks: int, units: tuple[Unit, ...], size: int, late: bool = False) -> Schedule:
    """Build the order with blocks of so many units; `late`: backwards after all forwards."""
    back = list(backward_order(units))
    forwards = [(c, u) for block in _blocks(range(len(units)), size) for c in range(chunks) for u in block]
    backwards = [(c, u) for block in _blocks(back, size) for c in reversed(range(chunks)) for u in block]
    place = {entry: number for number, entry in enumerate(forwards)}
    last = {unit.sequence: number for number, unit in enumerate(units)}
    needed = [len(forwards) if late else place[c, last[units[u].sequence]] + 1 for c, u in backwards]
    before = one_more_each(needed, len(forwards))
    rows = []
    for r in range(pp_size):
        mine = [Action(c * pp_size + r, F, u) for c, u in forwards]
        rows.append(paced(mine, [Action(c * pp_size + r, B, u) for c, u in backwards], before, 2 * (pp_size - 1 - r)))
    return Schedule(name, tuple(range(pp_size)) * chunks, units, tuple(rows))


def _blocks(numbers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for first in range(0, len(numbers), max(1, size)):
        yield numbers[first : first + size]
