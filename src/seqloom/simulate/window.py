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

from dataclasses import dataclass, replace

import numpy as np

from seqloom.cost.rounds import RoundTimes
from seqloom.plan import ActionKind, Checkpoint, Plan, Work
from seqloom.simulate.split import computing_ns, forward_ns, weights_ns

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
    """Members are pairs of a group and one of its ranks, as in `RoundTimes`. ns."""

    rank: np.ndarray  # int64[members]
    group: np.ndarray  # int64[members] index of the group in its `Work`
    degree: np.ndarray  # int64[members] ranks of the group
    before: np.ndarray  # int64[members] what the rank's earlier groups of this round take
    total: np.ndarray  # int64[members] forward and backward of the group
    comm: np.ndarray  # int64[members] exposed communication of the group
    component: np.ndarray  # int64[members]
    length: np.ndarray  # int64[components] forward and backward of the longest rank, card or link
    forward: np.ndarray  # int64[components] where forward ends, in units of 2**-20 of the length
    weights: np.ndarray  # int64[components] where the weight half begins
    apart: int  # what the weight half takes more where it runs by itself
    islands: tuple[tuple[int, ...], ...]  # of every component
    held: np.ndarray  # int64[components] ranks, also those without tokens
    nic: np.ndarray  # int64[nodes, nics] how long each card is taken
    link: np.ndarray  # int64[ranks] how long each NVLink port is taken

    def scaled(self, share: int) -> Window:
        """The window with all its times a share of what they are, in units of 2**-20."""
        times = ("before", "total", "comm", "length", "apart")
        return replace(self, **{name: getattr(self, name) * share >> _BITS for name in times})

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
        duration = between(self.length, low, high)
        low, high = low[self.component], high[self.component]
        most = duration[self.component]
        start = np.minimum(between(self.before, low, high), most)
        stop = np.minimum(between(self.before + self.total, low, high), most)
        comm = np.minimum(between(self.comm, low, high), stop - start)
        if kind is ActionKind.W and self.apart:
            duration, start, stop = duration + self.apart, start + self.apart * (self.before > 0), stop + self.apart
        return Phase(duration, start, stop, comm)


def between(time: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The part of a time from one share to another, in units of 2**-20; parts that follow each other add up."""
    return (time * high >> _BITS) - (time * low >> _BITS)


def cuts(parts: np.ndarray, load: np.ndarray, checkpoint: Checkpoint, products: float) -> tuple[np.ndarray, np.ndarray]:
    """Where forward ends and the weight half begins, as shares of 2**-20, of ranks with these parts and this time.

    `products` as in `weights_ns`.
    """
    forward = _share(forward_ns(parts, load, checkpoint), load)
    return forward, np.maximum((1 << _BITS) - _share(weights_ns(parts, checkpoint, products), load), forward)


def stretched(
    length: np.ndarray, forward: np.ndarray, weights: np.ndarray, least: int | np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(length, forward, weights), with forward and the input half of the backward not shorter than `least` ns."""
    ends = [length * share >> _BITS for share in (forward, weights)]
    early = np.maximum(ends[0], least)
    late = early + np.maximum(ends[1] - ends[0], least)
    longer = late + length - ends[1]
    if np.array_equal(longer, length):
        return length, forward, weights
    return longer, -(-(early << _BITS) // np.maximum(longer, 1)), -(-(late << _BITS) // np.maximum(longer, 1))


WHOLE = 1 << _BITS
"""The share that is everything."""


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


def window_of(
    work: Work,
    times: RoundTimes,
    islands: Islands,
    products: float,
    copied: int = 0,
    apart: int = 0,
    together: tuple[int, ...] = (),
) -> Window:
    """Find out who waits for whom.

    Args:
        work: the stage's share of the round.
        times: its price.
        islands: of the plan; all ranks of an island that the round touches take part in it.
        products: share of linear layers' time that is matrix products.
        copied: ns of copying what is kept to host memory, behind the forward, and back, behind the backward.
        apart: ns that the halves of a backward take more than a whole one.
        together: ranks that meet before and after every pass.
    """
    rank, group = times.member_rank, times.member_group
    component, joined = _components(work, islands.of_rank, together)
    member = component[rank]
    total, load = times.member_ns, times.rank_ns
    length = np.array([times.joined_ns(np.flatnonzero(component == k)) for k in range(len(joined))], dtype=np.int64)
    slowest = np.array([rank[member == k][load[rank[member == k]].argmax()] for k in range(len(joined))])
    forward, weights = cuts(times.parts[slowest], load[slowest], work.checkpoint, products)
    length, forward, weights = stretched(length, forward, weights, copied)
    degrees = np.array([*(len(each.ranks) for each in work.groups), 1])  # the last: ranks without a group
    return Window(
        rank=rank,
        group=group,
        degree=degrees[group],
        before=_earlier(rank, total),
        total=total,
        comm=_exposed(times),
        component=member,
        length=length,
        forward=forward,
        weights=weights,
        apart=apart,
        islands=joined,
        held=np.array([sum(islands.sizes[i] for i in numbers) for numbers in joined], dtype=np.int64),
        nic=times.nic_ns,
        link=times.link_ns,
    )


def _share(time: np.ndarray, length: np.ndarray) -> np.ndarray:
    return (time << _BITS) // np.maximum(length, 1)


def _exposed(times: RoundTimes) -> np.ndarray:
    """int64[members] communication that nothing hides: a rank's time that is not computing, by its members' shares."""
    waits = times.rank_ns - computing_ns(times.parts)
    rank = times.member_rank
    upto = _earlier(rank, times.member_ns) + times.member_ns
    whole = np.maximum(times.rank_ns, 1)[rank].astype(np.float64)
    cuts = [(waits[rank] * (edge / whole)).astype(np.int64) for edge in (upto - times.member_ns, upto)]
    return cuts[1] - cuts[0]


def _earlier(rank: np.ndarray, time: np.ndarray) -> np.ndarray:
    """int64[members]: what the rank's earlier members take."""
    order = np.argsort(rank, kind="stable")
    sums = np.cumsum(time[order]) - time[order]
    _, first = np.unique(rank[order], return_index=True)
    repeats = np.diff(np.append(first, len(rank)))
    before = np.empty_like(sums)
    before[order] = sums - np.repeat(sums[first], repeats)
    return before


def _components(
    work: Work, island_of: dict[int, int], together: tuple[int, ...]
) -> tuple[np.ndarray, tuple[tuple[int, ...], ...]]:
    """(int64[ranks] component of every rank at work, else -1; islands of every component)."""
    parent: dict[int, int] = {}

    def root(island: int) -> int:
        while parent.setdefault(island, island) != island:
            parent[island] = parent[parent[island]]
            island = parent[island]
        return island

    parties = [group.party for group in work.groups]
    if work.linear is not None:  # ranks that have tokens in linear layers only
        parties += [(rank,) for rank in np.unique(work.linear.rank).tolist()]
    parties += [together] * bool(together)
    for party in parties:
        touched = {island_of[rank] for rank in party}
        first = min(touched)
        for island in touched:
            parent[root(island)] = root(first)
    members: dict[int, list[int]] = {}
    for island in sorted(parent):
        members.setdefault(root(island), []).append(island)
    number = {key: k for k, key in enumerate(members)}
    component = np.full(max(island_of) + 1, -1, dtype=np.int64)
    for rank in {rank for party in parties for rank in party}:
        component[rank] = number[root(island_of[rank])]
    return component, tuple(tuple(joined) for joined in members.values())
