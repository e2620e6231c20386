"""The best plan of a tiny batch whose groups may share ranks, by enumeration: the oracle of the bound.

Every document may be on any ranks, in any legal shape, in any round. Priced by the plain formula: a rank pays for a
round once, for its groups one after another, and for ring messages that neither their own attention nor that of its
local documents hides. With ``journey`` the linear time of tokens may be spread over a shard group, as real numbers,
at so much per token that leaves or arrives. That is never dearer than what a plan pays, so no plan is below the result.

It serves up to about 4 documents on 4 ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from seqloom.cost import CostModel, GroupShape, MemoryPolicy
from seqloom.cost.plan_cost import columns
from seqloom.layout import Span
from seqloom.plan import Group, Method
from support.shard_groups import shortest_schedule

SERIAL = ("attention", "steps", "ulysses", "kv_gather")


@dataclass(frozen=True, eq=False)
class Places:
    """Every place a document can be: ``P`` places, ``n`` documents, ``N`` ranks. ns."""

    on: np.ndarray  # float64[P, N] 1 where the rank is in the place
    tokens: np.ndarray  # float64[n, P] of the document on each rank of the place
    linear: np.ndarray  # float64[n, P]
    serial: np.ndarray  # float64[n + 1, P] attention, steps, ulysses; the last row is the group's own
    excess: np.ndarray  # float64[n + 1, P] ring messages beyond attention and steps
    adapter: np.ndarray  # float64[n, P]
    attention: np.ndarray  # float64[n, P] where the place is one rank, else 0
    once: float
    floor: float  # parameter gathers and gradient reduction


def legal_groups(cost: CostModel) -> list[Group]:
    """A group without documents for every set of ranks and every legal shape on it, routed or not."""
    found = []
    for size in range(1, cost.ranks + 1):
        for ranks in combinations(range(cost.ranks), size):
            for ulysses in cost.family.sizes:
                if size % ulysses or ulysses > cost.model.heads or not _aligned(Group(ranks, ulysses, 1, ()), cost):
                    continue
                for method in Method if size > ulysses else (Method.RING,):
                    plain = GroupShape(ulysses, size // ulysses, method)
                    if cost.engine.links is None and plain not in cost.shapes:
                        continue  # published constants know their own shapes only
                    ways = [cost.group(plain._replace(routed=routed), ranks, ()) for routed in (False, True)]
                    ways = ways[: 1 if ways[1].route is None else 2]
                    found += ways
                    found += [replace(way, latent=True) for way in ways if cost.model.latent]
    return found


def _aligned(group: Group, cost: CostModel) -> bool:
    return all(
        block == tuple(range(block[0], block[0] + group.ulysses)) and cost.family.contains(block[0], group.ulysses)
        for block in group.ulysses_groups()
        if group.ulysses > 1
    )


def price_places(lengths: np.ndarray, cost: CostModel, policy: MemoryPolicy, groups: list[Group]) -> Places:
    """Price every document in every place."""
    sizes = [int(length) for length in lengths]
    single = [[_with(group, [size]) for group in groups] for size in sizes]
    parts = np.array([cost.group_costs(row, policy) for row in single], float)  # [n, P, columns]
    double = cost.group_costs([_with(group, [sizes[0], sizes[0]]) for group in groups], policy)

    def own(*names: str) -> np.ndarray:
        """float64[P]: of the group itself: once too many in two documents apart, beyond the two together."""
        return (2 * parts[0] - double)[:, columns(names)].sum(axis=1)

    def of(*names: str) -> np.ndarray:
        return parts[:, :, columns(names)].sum(axis=2) - own(*names)

    local = np.array([group.degree == 1 for group in groups])
    rings = np.array([group.ring > 1 and group.method == Method.RING for group in groups])
    excess = np.vstack([of("ring") - of("attention", "steps"), own("ring") - own("attention", "steps")])
    degree = np.array([group.degree for group in groups])
    on = np.zeros((len(groups), cost.ranks))
    for p, group in enumerate(groups):
        on[p, list(group.ranks)] = 1
    return Places(
        on=on,
        tokens=cost.padded_lengths(lengths)[:, None] / degree,
        linear=of("linear", "head"),
        serial=np.vstack([of(*SERIAL), own(*SERIAL)]),
        excess=np.where(rings, excess, 0.0),
        adapter=of("network"),
        attention=np.where(local, of("attention"), 0.0),
        once=float(own("fixed").min()),
        floor=float(own("gather", "reduce").min()),
    )


def _with(group: Group, sizes: list[int]) -> Group:
    spans = tuple(Span(k, 0, size) for k, size in enumerate(sizes))
    return replace(group, spans=spans)


def shortest_overlapping_step(
    lengths: np.ndarray, cost: CostModel, policy: MemoryPolicy, journey: float | None = None
) -> float:
    """ns of the best plan under one policy, without the step's overhead.

    Args:
        lengths: int64[n].
        cost: of a tiny cluster.
        policy: of all rounds.
        journey: ns per token that changes its rank for linear layers, on either side; None: no token may.
    """
    groups = legal_groups(cost)
    places = price_places(np.asarray(lengths), cost, policy, groups)
    shard_group = np.arange(cost.ranks) // cost.shard_group_size
    rounds = [(np.zeros((0, 1)), np.zeros((0, 1, 1), bool))]  # no round is empty
    for subset in range(1, 1 << len(lengths)):
        documents = [k for k in range(len(lengths)) if subset >> k & 1]
        rounds.append(_round_times(places, documents, shard_group, cost.capacity(policy), journey))
    return shortest_schedule(rounds, int(shard_group.max()) + 1)


def _round_times(
    places: Places, documents: list[int], shard_group: np.ndarray, capacity: int, journey: float | None
) -> tuple[np.ndarray, np.ndarray]:
    """(float64[X, I] ns of every shard group, bool[X, I, I] which are joined) for all ways to place these documents."""
    count = len(places.on)
    choice = np.indices((count,) * len(documents)).reshape(len(documents), -1)
    chosen = [choice[i][:, None] == np.arange(count) for i in range(len(documents))]  # each bool[X, P]
    shape = (choice.shape[1], count)

    def total(values: np.ndarray, own: bool = False) -> np.ndarray:
        sums = np.zeros(shape)
        for k, here in zip(documents, chosen, strict=True):
            sums += here * values[k]
        return sums + used * values[-1] if own else sums

    used = np.zeros(shape, bool)
    for here in chosen:
        used |= here
    held = total(places.tokens) @ places.on
    fits = (held <= capacity + 1e-6).all(axis=1)
    exposed = np.maximum(total(places.excess, own=True), 0.0) @ places.on - total(places.attention) @ places.on
    stays = total(places.serial, own=True) @ places.on + np.maximum(exposed, 0.0)
    linear = total(places.linear) @ places.on
    least = places.floor + total(places.adapter) @ places.on
    joined = np.zeros((shape[0], int(shard_group.max()) + 1, int(shard_group.max()) + 1), bool)
    for p, row in enumerate(places.on):
        touched = np.bincount(shard_group, weights=row) > 0
        joined |= used[:, p, None, None] & (touched[:, None] & touched[None, :])
    times = np.stack(
        [
            _leveled(stays[:, own], linear[:, own], held[:, own], least[:, own], places.once, journey)
            for own in (shard_group == i for i in range(int(shard_group.max()) + 1))
        ],
        axis=1,
    )
    active = joined.any(axis=2)
    return np.where(active, times, 0.0)[fits], joined[fits]


def _leveled(
    stays: np.ndarray, linear: np.ndarray, held: np.ndarray, least: np.ndarray, once: float, journey: float | None
) -> np.ndarray:
    """float64[X]: time of a shard group; with a ``journey`` tokens are spread so that its last rank ends first."""
    apart = np.maximum(once + stays + linear, least).max(axis=1)
    if journey is None or linear.shape[1] == 1:
        return apart
    rate = np.divide(linear, held, out=np.zeros_like(linear), where=held > 0).max(axis=1, keepdims=True)  # ns per token
    pays = (rate > journey)[:, 0]
    low, high = np.maximum(once + stays + np.minimum(rate, journey) * held, least).max(axis=1), apart
    for _ in range(40):
        end = ((low + high) / 2)[:, None]
        over = once + stays + linear - end
        leave = np.maximum(over, 0.0) / np.maximum(rate - journey, 1e-12)
        take = np.maximum(-over, 0.0) / (rate + journey + 1e-12)
        possible = (leave.sum(axis=1) <= take.sum(axis=1)) & (leave <= held * (1 + 1e-12)).all(axis=1)
        low, high = np.where(possible, low, end[:, 0]), np.where(possible, end[:, 0], high)
    return np.where(pays, low, apart)
