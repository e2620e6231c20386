"""How far a group reaches: how many of its messages stay in a node, leave it, and through which network cards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from seqloom.cost.shapes import GroupShape
from seqloom.layout import Route
from seqloom.plan import Method

if TYPE_CHECKING:
    from collections.abc import Callable


class MessageCounts(NamedTuple):
    """Messages of one kind, all of the same size, counted at the busiest place."""

    near: int = 0  # most that a rank sends inside its node
    sent: int = 0  # most that a rank sends out of its node
    left: int = 0  # most that leave one node
    card: int = 0  # most that leave through one network card, every rank using the one near it


class GroupTraffic(NamedTuple):
    """What decides which of a group's messages use NVLink and which the network.

    The units differ: with Ulysses and in a gather a rank sends one message to each of its peers, in a ring one to its
    successor. `once` counts a gather in which what several ranks of a node want crosses only once.
    """

    ulysses: MessageCounts = MessageCounts()
    ring: MessageCounts = MessageCounts()
    gather: MessageCounts = MessageCounts()
    once: MessageCounts = MessageCounts()
    proxies: int = 0  # per node, of the route that the ring or gather takes; 0: every rank uses its own card
    slices: int = 1  # of that route
    team: MessageCounts = MessageCounts()  # to the other tensor ranks of a team, one message each


class NicLoad(NamedTuple):
    """How a group's traffic spreads over network cards, as shares of the busiest one's. Columns of equal length."""

    node: np.ndarray  # int64[n]
    card: np.ndarray  # int64[n] in its node
    ulysses: np.ndarray  # float64[n] 0 to 1
    sharing: np.ndarray  # float64[n] the same of keys and values
    team: np.ndarray  # float64[n] the same of tensor ranks


@lru_cache(maxsize=8192)
def group_traffic(
    ranks: Sequence[int], shape: GroupShape, card_of: tuple[int, ...], route: Route | None = None, tensor: int = 1
) -> GroupTraffic:
    """Reach of the group on these ranks, wherever they lie.

    Args:
        ranks: of the group, in order. Ulysses is the inner axis: rank ``i`` of the group has Ulysses index
            ``i % ulysses`` and ring index ``i // ulysses``.
        shape: of the group.
        card_of: the network card near each rank of a node.
        route: how the ring's or gather's messages cross; None: each through its own card.
        tensor: ranks of a team, the innermost axis: heads are exchanged among the teams' ranks of one index.
    """
    if len(ranks) == 1:
        return GroupTraffic()
    where = np.asarray(ranks, dtype=np.int64)
    node = where // len(card_of)
    card = node * len(card_of) + np.asarray(card_of)[where % len(card_of)]

    def traffic(near: np.ndarray, far: np.ndarray) -> MessageCounts:
        left, through = (int(np.bincount(place, weights=far).max()) for place in (node, card))
        return MessageCounts(int(near.max()), int(far.max()), left, through)

    counts = _messages(node.reshape(shape.ring, -1, tensor))
    ulysses, ring, gather, once, team = (traffic(*pair) for pair in counts)
    if route is None or not gather.left:
        return GroupTraffic(ulysses, ring, gather, once, team=team)
    return GroupTraffic(ulysses, ring, gather, once, len(route.proxies) // len(np.unique(node)), route.slices, team)


def aligned_group_traffic(shape: GroupShape, card_of: tuple[int, ...], tensor: int = 1) -> GroupTraffic:
    """Reach of a group on an aligned block of the group family, not routed: the same for every block of one size."""
    return group_traffic(range(shape.degree), shape, card_of, None, tensor)


def proxies_of(ranks: Sequence[int], card_of: tuple[int, ...]) -> tuple[int, ...]:
    """One rank near each network card in every node of a group, at the same places in all nodes, ascending.

    Members of the group come before other ranks of the node, then the lowest.
    """
    size = len(card_of)
    nodes = sorted({rank // size for rank in ranks})
    members = Counter(rank % size for rank in ranks)
    near: dict[int, list[int]] = {}
    for place, card in enumerate(card_of):
        near.setdefault(card, []).append(place)
    places = sorted(max(some, key=lambda place: (members[place], -place)) for some in near.values())
    return tuple(node * size + place for node in nodes for place in places)


def _messages(node: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """(near, far) int64[ranks] messages that every rank sends: of Ulysses, ring, gather, gather crossing once, team.

    Args:
        node: int64[ring, ulysses beyond tensor, tensor] of every rank.
    """
    ring, inner, tensor = node.shape
    far_heads = (node[:, :, None] != node[:, None, :]).sum(axis=2)
    far_next = (node != np.roll(node, -1, axis=0)).astype(np.int64)
    far_keys = (node[:, None] != node[None, :]).sum(axis=1)
    nodes = np.array([len(np.unique(column)) for column in node.reshape(ring, -1).T]).reshape(inner, tensor)
    far_team = (node[:, :, :, None] != node[:, :, None, :]).sum(axis=3)
    near_keys = ring - 1 - far_keys
    pairs = [
        (inner - 1 - far_heads, far_heads),
        ((ring > 1) - far_next, far_next),
        (near_keys, far_keys),
        (near_keys, np.broadcast_to(nodes - 1, node.shape)),
        (tensor - 1 - far_team, far_team),
    ]
    return [(near.ravel(), far.ravel()) for near, far in pairs]


@lru_cache(maxsize=8192)
def nic_load(
    ranks: Sequence[int], shape: GroupShape, card_of: tuple[int, ...], route: Route | None = None, tensor: int = 1
) -> NicLoad:
    """Which network cards a group uses, and how much of what its busiest one carries. Arguments as `reach_of`."""
    size, cards = len(card_of), max(card_of) + 1
    where = np.asarray(ranks, dtype=np.int64)
    node = where // size
    card = node * cards + np.asarray(card_of)[where % size]
    heads, ring, gather, _, mates = _messages(node.reshape(shape.ring, -1, tensor))
    last = int(node.max()) + 1
    ulysses, team = (np.bincount(card, weights=far, minlength=last * cards) for _, far in (heads, mates))
    keys = (gather if shape.method == Method.GATHER else ring)[1]
    if route is None:
        sharing = np.bincount(card, weights=keys, minlength=last * cards)
    else:  # every proxy of a node carries the same
        proxy = np.asarray(route.proxies, dtype=np.int64)
        through = proxy // size * cards + np.asarray(card_of)[proxy % size]
        sharing = np.zeros(max(last, int(proxy.max()) // size + 1) * cards)
        ulysses, team = (np.concatenate([own, np.zeros(len(sharing) - len(own))]) for own in (ulysses, team))
        left = np.bincount(node, weights=keys, minlength=len(sharing) // cards)
        np.add.at(sharing, through, left[proxy // size])
    used = np.flatnonzero(ulysses + sharing + team)
    parts = [values[used] / max(values.max(), 1.0) for values in (ulysses, sharing, team)]
    return NicLoad(used // cards, used % cards, *parts)


# ---- merged: cost.routing
# What a routed exchange takes: sender -> proxies of its node -> proxies of the other node -> receiver, in slices.
#
# Stages run one after the other; in stage t slice t is dispatched, slice t-1 crosses and slice t-2 is combined. So
# all
# stages but the outer two use NVLink and the network at once, and m slices need m + 2 stages. What stays in a node
# goes
# in slices too, beside those that cross:
#
#     slice 0    dispatch  cross     combine
#     slice 1              dispatch  cross     combine
#     slice 2                        dispatch  cross     combine


WORTHWHILE = 0.999
"""One slice more must lower the time to this share of it."""


class Flow(NamedTuple):
    """ns of some traffic: how long it takes, and how long the busiest card and NVLink port are taken."""

    time: float = 0.0
    network: float = 0.0
    link: float = 0.0

    def __add__(self, other: tuple[float, ...]) -> Flow:  # type: ignore[override]
        """One after the other."""
        return Flow(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def direct_flow(traffic: MessageCounts, link: float, card: float) -> Flow:
    """Every rank uses the card near it; messages inside and out of a node move side by side.

    Args:
        traffic: messages at the busiest places.
        link: ns of one message on NVLink.
        card: ns of one message on a network card.
    """
    inside, outside = traffic.near * link, traffic.card * card
    return Flow(max(inside, outside), outside, inside)


def routed_flow(
    crossing: MessageCounts, wanted: MessageCounts, proxies: int, slices: int, link: float, card: float
) -> Flow:
    """All cards of a node share what leaves it.

    A sender keeps 1/proxies of what it dispatches, a receiver has 1/proxies of what is combined already. A proxy
    handles its share of the node's messages both ways. Messages inside a node go beside those that cross.

    Args:
        crossing: messages that cross, each once per node that wants it.
        wanted: messages that ranks want from other nodes; the same unless several ranks of a node want one.
        proxies: per node.
        slices: pieces of a message under way one behind the other.
        link: ns of one message on NVLink.
        card: ns of one message on a network card.
    """
    kept_apart = (proxies - 1) / proxies
    dispatch = max(crossing.sent * kept_apart, crossing.left / proxies) * link
    combine = max(wanted.sent * kept_apart, wanted.left / proxies) * link
    cross = crossing.left / proxies * card
    out = crossing.sent * kept_apart + wanted.left / proxies
    back = crossing.left / proxies + wanted.sent * kept_apart
    both = max(out, back) * link
    near = crossing.near * link
    if slices == 1:
        time = dispatch + max(cross, near) + combine
    else:
        full = (slices - 2) * max(both + near, cross)
        ends = max(dispatch + near, cross) + max(cross, combine + near)
        time = (dispatch + ends + full + combine) / slices
    return Flow(time, cross, near + both)


def best_slices(time: Callable[[int], float]) -> int:
    """The number of slices that takes least time; falling fill and rising latencies have one minimum from 2 on."""
    slices = 2
    while time(slices + 1) < WORTHWHILE * time(slices):
        slices += 1
    return slices if time(slices) < time(1) else 1
