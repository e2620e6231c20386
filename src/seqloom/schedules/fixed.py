"""Fixed orders: GPipe, 1F1B, TeraPipe and Seq1F1B; with several chunks interleaved 1F1B, breadth-first and Seq1F1B-I.

All of them run forwards in the order of the units and backwards in the order of `backward_order`: sequences first in,
first out; pieces last in, first out. They differ in how many forwards come before which backward.

    GPipe, TeraPipe    all forwards first: the least waiting for messages, the most memory
    1F1B, Seq1F1B      one forward, one backward; d pipeline ranks before the last, d forwards ahead of it
    interleaved        chunks of the model per pipeline rank, units in blocks: less waiting, more messages
    breadth-first      one block of all units, and backwards after all forwards

Sequences may have different numbers of pieces. Where all have k, the last pipeline rank begins with k forwards and
pipeline rank r of p holds at most k + p - 1 - r units.

With v chunks, stage c * p + r is chunk c of pipeline rank r. A block's units go through chunk 0, then through chunk 1,
and so on, then the next block; backward likewise from the last chunk to the first. Blocks of p units wait the least;
then pipeline rank 0 holds (v - 1) p + 2 (p - 1) + k units of size 1 / (k v).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from seqloom.errors import PlanError
from seqloom.plan.action import Action, B, F
from seqloom.schedules.memory import peak_memory
from seqloom.schedules.schedule import Schedule, Unit, backward_order, units_of
from seqloom.schedules.timing import Times, simulate_schedule


def all_forwards_first(name: str, pp_size: int, chunks: int, pieces: Sequence[int]) -> Schedule:
    """Build breadth-first over pieces, `chunks` stages per pipeline rank; with one chunk GPipe, which is TeraPipe.

    All units go forward through a chunk before any goes through the next; then backward likewise. `pieces` has the
    number of pieces of every sequence, in forward order.
    """
    return _blocked(name, pp_size, chunks, units_of(pieces), sum(pieces), backward_last=True)


def one_forward_one_backward(name: str, pp_size: int, pieces: Sequence[int], lead: int = 1) -> Schedule:
    """Build 1F1B over pieces, which is Seq1F1B: a warm-up of p - r - 2 + k forwards on pipeline rank r.

    A pipeline rank is `lead` forwards ahead of the next one; 1 is the least that never waits for itself.
    """
    return _blocked(name, pp_size, 1, units_of(pieces), sum(pieces), lead)


def interleaved(name: str, pp_size: int, chunks: int, pieces: Sequence[int]) -> Schedule:
    """Build interleaved 1F1B over pieces, for any number of them.

    The published Seq1F1B-I counts forwards by a formula that is wrong where a block of p units ends inside a sequence:
    it then asks for a backward of a sequence that has not gone forward yet. Here the count comes from what every
    backward needs, which is the formula where k divides p; where it does not, blocks of whole sequences are tried too,
    and of the orders that end at most 3 % after the fastest the one with the least memory is taken.
    """
    units = units_of(pieces)
    if len(set(pieces)) == 1 and pp_size % pieces[0] == 0 and len(units) % pp_size == 0:
        return _blocked(name, pp_size, chunks, units, pp_size, 2)
    longest = max(pieces, default=1)
    fewest = -(-pp_size // longest)  # sequences of a block that has at least p units
    sizes = {pp_size, *(longest * count for count in range(fewest, 2 * fewest + 1))}
    orders = [all_forwards_first(name, pp_size, chunks, pieces)]
    orders += [_blocked(name, pp_size, chunks, units, size, 2) for size in sorted(sizes)]
    timed: list[tuple[int, int, Schedule]] = []
    for order in orders:
        with suppress(PlanError):  # an order that stops
            makespan = simulate_schedule(order, Times.uniform(order)).makespan
            timed.append((max(peak_memory(order), default=0), makespan, order))
    fastest = min(makespan for _, makespan, _ in timed)
    return min((entry for entry in timed if 100 * entry[1] <= 103 * fastest), key=lambda entry: entry[:2])[2]


def _blocked(
    name: str,
    pp_size: int,
    chunks: int,
    units: tuple[Unit, ...],
    size: int,
    lead: int = 0,
    *,
    backward_last: bool = False,
) -> Schedule:
    """Build an order in blocks of `size` units; a pipeline rank is `lead` forwards ahead of the next one."""
    forwards = _in_blocks(range(len(units)), size, range(chunks))
    backwards = _in_blocks(list(backward_order(units)), size, range(chunks)[::-1])
    place = {entry: number for number, entry in enumerate(forwards)}
    last = {unit.sequence: number for number, unit in enumerate(units)}
    # Forwards before every backward of the last pipeline rank: those without which it cannot run, or one more than
    # before. Sequences of k pieces that follow each other need k, k, .., 2k, 2k, ..; this gives k, k + 1, .., all.
    before: list[int] = []
    for c, u in backwards:
        needed = len(forwards) if backward_last else place[c, last[units[u].sequence]] + 1
        before.append(min(len(forwards), max(needed, before[-1] + 1 if before else 0)))
    rows = []
    for r in range(pp_size):
        ahead, done = lead * (pp_size - 1 - r), 0
        row: list[Action] = []
        for (chunk, unit), count in zip(backwards, before, strict=True):
            until = min(len(forwards), count + ahead)
            row += [Action(c * pp_size + r, F, u) for c, u in forwards[done:until]]
            row.append(Action(chunk * pp_size + r, B, unit))
            done = until
        rows.append(tuple(row))
    return Schedule(name, tuple(range(pp_size)) * chunks, units, tuple(rows))


def _in_blocks(units: Sequence[int], size: int, chunks: range) -> list[tuple[int, int]]:
    """Return (chunk, unit) of every unit on every chunk: a block of units through all chunks, then the next block."""
    firsts = range(0, len(units), max(1, size))
    return [(c, u) for first in firsts for c in chunks for u in units[first : first + size]]
