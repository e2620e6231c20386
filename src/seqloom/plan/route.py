"""A route: how a group's messages between nodes travel when one network card is not enough.

A message leaves its node through the card near its sender. A routed one is cut into parts that cross through the cards
of all proxies, and is put together again at its receiver:

    sender -> proxies of its node -> proxies of the receiver's node -> receiver
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Route:
    """Ranks that carry a group's traffic between nodes.

    Attributes:
        proxies: ascending, in every node of the group the same places, one near each network card. They take part in
            the round; those that are not in the group only pass on.
        slices: pieces of a message that are under way at once, one behind the other.
    """

    proxies: tuple[int, ...]
    slices: int = 1
