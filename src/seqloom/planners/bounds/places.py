"""Shapes that a group may have, each with the fewest messages that any place of it has.

A plan may put a ring on any ranks: inside a node, or over several with any number of its ranks in each. What is sent
depends on that. Of every count (out of a rank, out of a node, through a card) the least is taken, each for itself.
"""

from __future__ import annotations

from typing import NamedTuple

from seqloom.cost import CostModel, Shape
from seqloom.cost.profile import AdditiveProfile
from seqloom.cost.reach import Reach, Traffic, aligned_reach
from seqloom.plan import Method

EVERY_SIZE = 64
"""Clusters of up to so many ranks are looked at in every size of ring."""
ENDLESS = 1 << 30
"""Slices of a route whose filling and emptying takes no time."""


class Place(NamedTuple):
    """A shape, and reaches that are no worse than that of any group of this shape."""

    shape: Shape
    reaches: tuple[Reach, ...]


def every_place(cost: CostModel) -> list[Place]:
    """Rings and gathers of any size, with any Ulysses inside.

    Above ``EVERY_SIZE`` ranks, of any size up to two nodes, then over whole nodes, four sizes per doubling. Published
    constants know their own shapes only. Where teams split weights, of whole teams.
    """
    card_of = cost.cluster.nic_of_gpu
    if isinstance(cost.profile, AdditiveProfile):
        return [Place(shape, (aligned_reach(shape, card_of),)) for shape in cost.shapes]
    node, sizes = cost.node_size, [size for size in cost.family.sizes if size % cost.tensor == 0]
    every = cost.ranks if cost.ranks <= EVERY_SIZE else 2 * node
    degrees = set(range(1, every + 1)) | {node * k for k in _grid(cost.ranks // node)} | set(sizes)
    found = []
    for degree in sorted(degrees):
        for ulysses in sizes:
            if ulysses <= cost.model.heads and degree % ulysses == 0:
                for method in Method if degree > ulysses else (Method.RING,):
                    shape = Shape(ulysses, degree // ulysses, method)
                    reaches = _reaches(shape, cost)
                    found += [Place(shape, reaches)] * bool(reaches)
    return found


def _grid(most: int) -> list[int]:
    """1 to 8, then 10, 12, 14, 16, 20, ...: four per doubling, none above ``most``."""
    found = list(range(1, 9))
    while found[-1] < most:
        found.append(found[-1] + (1 << (found[-1].bit_length() - 3)))
    return [k for k in found if k <= most]


def _reaches(shape: Shape, cost: CostModel) -> tuple[Reach, ...]:
    """Inside a node; over nodes, each message through the card near its sender; over nodes, routed."""
    node, card_of, tensor = cost.node_size, cost.cluster.nic_of_gpu, cost.tensor
    if shape.ulysses > node:  # blocks of whole nodes: wherever they lie, all their messages leave
        direct = aligned_reach(shape, card_of, tensor)
        return (direct, direct._replace(proxies=len(set(card_of)), slices=ENDLESS)) if shape.ring > 1 else (direct,)
    blocks = node // shape.ulysses
    found = (aligned_reach(shape, card_of, tensor),) if shape.ring <= blocks else ()
    if shape.ring > 1 and cost.ranks > node and shape.ring <= blocks * (cost.ranks // node):
        direct = _spread(shape, blocks, cost.ranks // node, len(set(card_of)), tensor)
        found += (direct, direct._replace(proxies=len(set(card_of)), slices=ENDLESS))
    return found


def _spread(shape: Shape, blocks: int, nodes: int, cards: int, tensor: int) -> Reach:
    """The fewest messages of a group over two or more nodes, each with 1 to ``blocks`` of its ``ring`` Ulysses blocks.

    With ``b`` blocks in its fullest node, ``b (ring - b)`` is least at one of the ends.
    """
    inner, ring = shape.ulysses, shape.ring
    fullest, least = min(blocks, ring - 1), -(-ring // nodes)
    left = inner * min(b * (ring - b) for b in (least, fullest))
    counts = range(max(2, -(-ring // blocks)), min(nodes, ring) + 1)  # of nodes
    once = inner * min(-(-ring // count) * (count - 1) for count in counts)

    def traffic(sent: int, left: int) -> Traffic:
        return Traffic(near=0, sent=0, left=left, card=max(sent, -(-left // cards)))

    return Reach(
        ulysses=Traffic(near=inner // tensor - 1),
        ring=traffic(1, inner),
        gather=traffic(ring - fullest, left),
        once=traffic(1, once),
        team=Traffic(near=tensor - 1),
    )
