"""A window: one stage's share of a round, priced, with the ranks that go through it in lock step.

Groups join the islands that they touch. Joined islands form a component: its ranks start together and leave
together, when the slowest of them is done. Until then the others wait.

    rank 0   |FFFFFBBBBBBBBBB|        component 0: one group over ranks 0 and 1, another on rank 2;
    rank 1   |FFFFFBBBBBBBBBB|        rank 3 has no tokens and waits
    rank 2   |FFFBBBBBB      |
    rank 3   |               |

Forward and backward of all groups of a component are cut at the same share of their time, that of the rank
that works longest. So a component's forward and backward are exactly as long as both together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from seqloom.plan import ActionKind, Plan, Work

_BITS = 20  # shares are in units of 2**-20: products with times up to 2**43 ns (two hours) stay in int64


@dataclass(frozen=True, slots=True, eq=False)
class Phase:
    """One action of a window. ns; members as in `Window`, times counted from the start of the action."""

    duration: np.ndarray  # int64[components]
    start: np.ndarray  # int64[members]
    stop: np.ndarray  # int64[members]
    comm: np.ndarray  # int64[members] exposed communication


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Members are pairs of a group and one of its ranks, in the order of the groups. ns."""

    rank: np.ndarray  # int64[members]
    group: np.ndarray  # int64[members] index of the group in its `Work`
    degree: np.ndarray  # int64[members] ranks of the group
    before: np.ndarray  # int64[members] what the rank's earlier groups of this round take
    total: np.ndarray  # int64[members] forward and backward of the group
    comm: np.ndarray  # int64[members] exposed communication of the group
    component: np.ndarray  # int64[members]
    length: np.ndarray  # int64[components] forward and backward of the longest rank
    forward: np.ndarray  # int64[components] where forward ends, in units of 2**-20 of the length
    weights: np.ndarray  # int64[components] where the weight half begins
    islands: tuple[tuple[int, ...], ...]  # of every component
    held: np.ndarray  # int64[components] ranks, also those without tokens

    def phase(self, kind: ActionKind) -> Phase:
        """Return what F, B, I or W of this window takes.

        The cuts are rounded down on the time a rank has spent so far, so that a rank's actions add up to its
        time to the nanosecond and none of them outlasts the component's.
        """
        none, whole = np.zeros_like(self.forward), np.full_like(self.forward, 1 << _BITS)
        low, high = {
            ActionKind.F: (none, self.forward),
            ActionKind.B: (self.forward, whole),
            ActionKind.I: (self.forward, self.weights),
            ActionKind.W: (self.weights, whole),
        }[kind]
        duration = _between(self.length, low, high)
        low, high = low[self.component], high[self.component]
        most = duration[self.component]
        start = np.minimum(_between(self.before, low, high), most)
        stop = np.minimum(_between(self.before + self.total, low, high), most)
        comm = np.minimum(_between(self.comm, low, high), stop - start)
        return Phase(duration, start, stop, comm)


def _between(time: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    return (time * high >> _BITS) - (time * low >> _BITS)


@dataclass(frozen=True, slots=True, eq=False)
class GroupTimes:
    """Prices of the groups of one `Work`, int64[groups] ns."""

    total: np.ndarray
    comm: np.ndarray
    forward: np.ndarray
    weights: np.ndarray


@dataclass(frozen=True, slots=True)
class Islands:
    """The islands of a plan, numbered."""

    of_rank: dict[int, int]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan) -> Islands:
        """Number the islands over all pipelines: no two have the same number."""
        islands = plan.islands
        return cls({rank: i for i, island in enumerate(islands) for rank in island}, tuple(map(len, islands)))


def window_of(work: Work, times: GroupTimes, islands: Islands) -> Window:
    """Spread the groups over their ranks and find out who waits for whom.

    Args:
        work: the stage's share of the round.
        times: prices of its groups.
        islands: of the plan; all ranks of an island that the round touches take part in it.
    """
    degrees = np.array([len(group.ranks) for group in work.groups])
    group = np.repeat(np.arange(len(degrees)), degrees)
    rank = np.array([rank for each in work.groups for rank in each.ranks], dtype=np.int64)
    component, joined = _components(work, islands.of_rank)
    member = component[group]
    total = times.total[group]
    before, load = _in_turn(rank, total)
    length = np.zeros(len(joined), dtype=np.int64)
    np.maximum.at(length, member, load[rank])
    longest = np.flatnonzero(load[rank] == length[member])
    _, first = np.unique(member[longest], return_index=True)
    slowest = rank[longest[first]]  # one rank per component
    forward = _share(_in_turn(rank, times.forward[group])[1][slowest], length)
    weights = (1 << _BITS) - _share(_in_turn(rank, times.weights[group])[1][slowest], length)
    return Window(
        rank=rank,
        group=group,
        degree=degrees[group],
        before=before,
        total=total,
        comm=times.comm[group],
        component=member,
        length=length,
        forward=forward,
        weights=np.maximum(weights, forward),
        islands=joined,
        held=np.array([sum(islands.sizes[i] for i in numbers) for numbers in joined], dtype=np.int64),
    )


def _share(time: np.ndarray, length: np.ndarray) -> np.ndarray:
    return (time << _BITS) // np.maximum(length, 1)


def _in_turn(rank: np.ndarray, time: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(int64[members] what the rank's earlier groups take, int64[ranks] what all of them take)."""
    load = np.zeros(int(rank.max()) + 1, dtype=np.int64)
    np.add.at(load, rank, time)
    order = np.argsort(rank, kind="stable")
    sums = np.cumsum(time[order]) - time[order]
    _, first = np.unique(rank[order], return_index=True)
    repeats = np.diff(np.append(first, len(rank)))
    before = np.empty_like(sums)
    before[order] = sums - np.repeat(sums[first], repeats)
    return before, load


def _components(work: Work, island_of: dict[int, int]) -> tuple[np.ndarray, tuple[tuple[int, ...], ...]]:
    """(int64[groups] component of every group, islands of every component)."""
    parent: dict[int, int] = {}

    def root(island: int) -> int:
        while parent.setdefault(island, island) != island:
            parent[island] = parent[parent[island]]
            island = parent[island]
        return island

    firsts = []
    for group in work.groups:
        touched = {island_of[rank] for rank in group.ranks}
        first = min(touched)
        firsts.append(first)
        for island in touched:
            parent[root(island)] = root(first)
    members: dict[int, list[int]] = {}
    for island in sorted(parent):
        members.setdefault(root(island), []).append(island)
    number = {key: k for k, key in enumerate(members)}
    component = np.array([number[root(first)] for first in firsts], dtype=np.int64)
    return component, tuple(tuple(joined) for joined in members.values())
