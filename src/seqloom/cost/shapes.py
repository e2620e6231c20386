"""Which shapes planners may choose from: a handful per degree, of those only the ones that can be fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np

from seqloom.cost.values import CostTables, Shape
from seqloom.plan import Method

if TYPE_CHECKING:
    from seqloom.plan import GroupFamily

PROBES = tuple(2**power for power in range(7, 23))  # document lengths at which shapes are compared
PROBED = 8192  # tokens of a rank where no variant says how many it holds
NEAR_PERCENT = 103


def candidate_shapes(
    family: GroupFamily, heads: int, kv_heads: int, tensor: int = 1, within: GroupFamily | None = None
) -> tuple[Shape, ...]:
    """Shapes by degree ascending, then Ulysses descending.

    Per degree: the widest Ulysses that the heads allow, a whole node of Ulysses, one kv head per Ulysses
    rank (the widest that needs no replication), and a pure ring.

    Args:
        family: of the ranks.
        heads: query heads of the model.
        kv_heads: its key/value heads.
        tensor: ranks of a team; Ulysses is a multiple of it.
        within: family of the cluster that these ranks are a part of, if they are one: then groups have sizes that
            divide the part and that the cluster knows, so that the part may lie at any multiple of its own size.
    """
    shapes = []
    sizes = [size for size in family.sizes if size % tensor == 0]
    if within is not None:
        sizes = [size for size in sizes if family.ranks % size == 0 and size in within.sizes]
    for degree in sizes:
        legal = [size for size in sizes if size <= heads and _fits(size, degree, family.node_size)]
        if tensor not in legal:
            continue
        wanted = {max(legal), tensor}
        wanted.update(size for size in (family.node_size,) if size in legal)
        unreplicated = [size for size in legal if kv_heads % size == 0]
        wanted.add(max(unreplicated))
        shapes += [Shape(size, degree // size) for size in sorted(wanted, reverse=True)]
    return tuple(shapes)


def with_methods(shapes: Iterable[Shape], node_size: int, cards: int) -> tuple[Shape, ...]:
    """The shapes in every way of sharing keys and values: ring and gather, and routed where they leave a node.

    Args:
        shapes: plain rings.
        node_size: ranks of a node.
        cards: NICs of a node that have a GPU near them; one alone gives a route nothing to spread over.
    """
    every = []
    for plain in shapes:
        every.append(plain)
        if plain.ring > 1:
            every.append(plain._replace(method=Method.GATHER))
            if plain.degree > node_size and cards > 1:
                every += [plain._replace(method=method, routed=True) for method in Method]
    return tuple(every)


def _fits(ulysses: int, degree: int, node_size: int) -> bool:
    """Whether every Ulysses subgroup of an aligned block is itself an aligned block."""
    if degree % ulysses:
        return False
    return degree <= node_size or node_size % ulysses == 0 or ulysses % node_size == 0


def useful_shapes(tables: Callable[[np.ndarray], CostTables]) -> tuple[Shape, ...]:
    """Of every degree as few shapes as possible, such that one is within 3 % of the fastest for any document.

    Documents of every length are tried, alone and in a full pack of their like.

    Args:
        tables: prices all candidate shapes for given lengths.
    """
    priced = tables(np.array(PROBES, dtype=np.int64))
    keep: list[Shape] = []
    for degree in dict.fromkeys(int(d) for d in priced.degree):
        rows = np.flatnonzero(priced.degree == degree)
        keep += [priced.shapes[rows[i]] for i in _cover(_probe(priced, rows, degree * (priced.capacity or PROBED)))]
    return ordered(keep)


def _probe(priced: CostTables, rows: np.ndarray, room: int) -> np.ndarray:
    """int64[shapes, probes] ns of one document and of a full pack, for each length that fits ``room``."""
    columns = []
    for k, tokens in enumerate(int(t) for t in priced.tokens):
        copies = room // tokens
        if copies == 0 and columns:
            break
        for count in {1, max(1, copies)}:
            columns.append((priced.fixed[:, rows] + count * priced.cost[:, rows, k]).max(axis=0))
    return np.stack(columns, axis=1)


def _cover(times: np.ndarray) -> list[int]:
    """Greedily pick rows until the best picked one is near the best of all in every column."""
    best = times.min(axis=0)
    picked: list[int] = []
    reached = np.full(times.shape[1], np.iinfo(np.int64).max // 128)
    while np.any(reached * 100 > best * NEAR_PERCENT) if picked else True:
        near = [int(np.count_nonzero(np.minimum(reached, row) * 100 <= best * NEAR_PERCENT)) for row in times]
        choice = int(np.argmax(near))  # the first of equals: the widest Ulysses
        picked.append(choice)
        reached = np.minimum(reached, times[choice])
    return picked


def ordered(shapes: Iterable[Shape]) -> tuple[Shape, ...]:
    """Each once, by degree ascending, then Ulysses descending, rings before gathers, direct before routed."""
    gather = Method.GATHER
    return tuple(sorted(set(shapes), key=lambda s: (s.degree, -s.ulysses, s.method == gather, s.routed)))
