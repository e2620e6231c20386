"""The tables that planners search on, for documents of given lengths."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from seqloom.cost.values import LANES, CostTables, Parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from seqloom.cost.model import CostModel
    from seqloom.cost.reach import Reach
    from seqloom.cost.values import Shape, Variant


def cost_tables(
    cost: CostModel, lengths: Sequence[int] | np.ndarray, variant: Variant, shapes: tuple[Shape, ...]
) -> CostTables:
    """Everything planners compare, of these shapes on aligned blocks."""
    tokens = cost.tokens(np.asarray(lengths))
    places = [(shape, cost.aligned(shape)) for shape in shapes]
    lanes = np.zeros((len(LANES), len(places), len(tokens)), dtype=np.int64)
    for name, values in cost.document_parts(tokens, places, variant).items():
        for lane, members in enumerate(LANES):
            if name in members:
                lanes[lane] += values
    whole = [not shape.hides for shape in shapes]
    lanes[1, whole] = 0  # without a ring that lane is never the longest
    fixed = [Parts(**cost.fixed_parts(shape, variant, reach)).lanes for shape, reach in places]
    return CostTables(
        shapes=shapes,
        degree=np.array([shape.degree for shape in shapes], dtype=np.int64),
        cost=lanes,
        fixed=np.array(fixed, dtype=np.int64).T.copy(),
        tokens=tokens,
        capacity=0 if variant.resident else cost.capacity(variant),  # a stage of a pipeline has a limit of its own
    )


def document_parts(
    cost: CostModel, tokens: np.ndarray, places: Sequence[tuple[Shape, Reach]], variant: Variant
) -> dict[str, np.ndarray]:
    """int64[S, n] per part: ns that each document adds to a group of each shape.

    Plain elementwise float64 operations only, each rounded on its own, so that the integers are the
    same on every machine and whether documents are priced together or one by one.
    """
    engine, lengths = cost.engine, tokens.astype(np.float64)
    rates = [cost.token_rates(shape, variant, reach) for shape, reach in places]
    parts = {}
    for name in rates[0]:
        column = np.array([rate[name] for rate in rates])[:, None]
        parts[name] = np.rint(column * lengths).astype(np.int64)
    whole = {ring: engine.attention(lengths, ring, variant) for ring in {shape.ring for shape, _ in places}}
    calls = {shape: engine.document_calls(lengths, shape.kernels, variant) for shape, _ in places}
    shares = [whole[shape.ring] * engine.attention_share(shape) + calls[shape] for shape, _ in places]
    parts["attention"] = np.rint(np.stack(shares)).astype(np.int64)
    return parts
