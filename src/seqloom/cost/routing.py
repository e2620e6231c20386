"""What a routed exchange takes: sender -> proxies of its node -> proxies of the other node -> receiver, in slices.

Stages run one after the other; in stage t slice t is dispatched, slice t-1 crosses and slice t-2 is combined. So all
stages but the outer two use NVLink and the network at once, and m slices need m + 2 stages. What stays in a node goes
in slices too, beside those that cross:

    slice 0    dispatch  cross     combine
    slice 1              dispatch  cross     combine
    slice 2                        dispatch  cross     combine
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from seqloom.cost.reach import Traffic

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


def direct_flow(traffic: Traffic, link: float, card: float) -> Flow:
    """Every rank uses the card near it; messages inside and out of a node move side by side.

    Args:
        traffic: messages at the busiest places.
        link: ns of one message on NVLink.
        card: ns of one message on a network card.
    """
    inside, outside = traffic.near * link, traffic.card * card
    return Flow(max(inside, outside), outside, inside)


def routed_flow(crossing: Traffic, wanted: Traffic, proxies: int, slices: int, link: float, card: float) -> Flow:
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
