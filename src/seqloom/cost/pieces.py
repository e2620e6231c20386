"""What the spans of a group add up to: whole documents, and pieces with a prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from seqloom.cost.model import CostModel
    from seqloom.cost.reach import Reach
    from seqloom.cost.values import Shape, Variant
    from seqloom.plan import Group


def span_sums(
    cost: CostModel, groups: Sequence[Group], place: tuple[Shape, Reach], variant: Variant
) -> dict[str, np.ndarray]:
    """int64[G] per part: ns that the spans of each of these alike groups add up to.

    A piece adds what the document up to its end costs beyond the document up to its start, so pieces add up to their
    document, and to what every further piece has of its own: the kernels are called once more, gradients of the prefix
    are added up, and in a ring its keys and values are shared once more.
    """
    shape, reach = place
    edges = np.array([(s.start, s.stop) for g in groups for s in g.spans], dtype=np.int64).reshape(-1, 2)
    edges = cost.tokens(edges)
    tokens, inverse = np.unique(edges, return_inverse=True)
    start, stop = inverse.reshape(-1, 2).T
    owner = np.repeat(np.arange(len(groups)), [len(group.spans) for group in groups])
    sums = {}
    for name, values in cost.document_parts(tokens, [place], variant).items():
        sums[name] = np.zeros(len(groups), dtype=np.int64)
        np.add.at(sums[name], owner, values[0, stop] - values[0, start])
    prefix = edges[:, 0].astype(np.float64)
    if prefix.any():
        work = cost.engine.prefix_work(prefix, shape, variant)
        np.add.at(sums["attention"], owner, np.rint(work).astype(np.int64))
    if prefix.any() and shape.ring > 1:
        for name, rate in cost.engine.prefix_rates(shape, variant, reach).items():
            np.add.at(sums[name], owner, np.rint(rate * prefix).astype(np.int64))
    return sums
