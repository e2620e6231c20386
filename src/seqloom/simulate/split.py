"""Which share of a rank's time is forward, and which is the weight half of its backward.

The cost model prices forward and backward together. Shares by part, with ``full`` and ``selective``
checkpointing counting what is recomputed as backward:

    linear, head   backward is twice forward; recomputing adds another forward. Of a linear layer's backward
                   half of the matrix products are for weights
    attention      backward is 2.5 times forward, nothing of it for weights
    ulysses        two exchanges in forward, two in backward, and those that are repeated
    ring, gathered keys
                   K and V travel in both; dK and dV in backward, in float32
    remap, tensor  like ulysses; what tensor ranks repeat is a whole forward
    gather         once for forward and once for backward; gradients are reduced in backward
    fixed          what a layer costs however few tokens it has: as much in forward as in backward
"""

from __future__ import annotations

import numpy as np

from seqloom.cost.rounds import NAMES
from seqloom.cost.values import LANES
from seqloom.plan import Checkpoint

COMPUTING = tuple(name for name in LANES[0] if name not in ("ulysses", "kv_gather", "remap", "tensor"))
"""Parts in which the GPU computes; whatever else a rank's time holds is exposed communication."""

_PARTS = 1 << 16
_WHOLE = 1260  # divisible by 2, 3, 4, 5, 7 and 9: shares are integers
_PLAIN = {
    "linear": _WHOLE // 3,
    "head": _WHOLE // 3,
    "attention": _WHOLE * 2 // 7,
    "steps": _WHOLE // 2,
    "ulysses": _WHOLE // 2,
    "ring": _WHOLE // 4,
    "kv_gather": _WHOLE // 4,
    "remap": _WHOLE // 2,
    "tensor": _WHOLE // 2,
    "gather": _WHOLE // 2,
    "network": _WHOLE // 3,
    "fixed": _WHOLE // 2,
}
_SELECTIVE = {
    "linear": _WHOLE // 4,
    "ulysses": _WHOLE * 2 // 5,
    "remap": _WHOLE * 2 // 5,
    "tensor": _WHOLE // 3,
}
_FULL = {
    "linear": _WHOLE // 4,
    "attention": _WHOLE * 2 // 9,
    "steps": _WHOLE // 3,
    "ulysses": _WHOLE // 3,
    "ring": _WHOLE // 5,
    "kv_gather": _WHOLE // 5,
    "remap": _WHOLE // 3,
    "tensor": _WHOLE // 3,
    "fixed": _WHOLE // 3,
}
FORWARD = {
    Checkpoint.NONE: _PLAIN,
    Checkpoint.PROFILE: _PLAIN,
    Checkpoint.SELECTIVE: _PLAIN | _SELECTIVE,
    Checkpoint.FULL: _PLAIN | _FULL,
    Checkpoint.STAGE: _PLAIN | _FULL,
}


def computing_ns(parts: np.ndarray) -> np.ndarray:
    """int64[ranks]: ns in which the GPU computes."""
    return parts[:, [NAMES.index(name) for name in COMPUTING]].sum(axis=1)


def forward_ns(parts: np.ndarray, total: np.ndarray, checkpoint: Checkpoint) -> np.ndarray:
    """int64[ranks]: ns of the forward of ranks that take `total` ns.

    Its longest lane, as far as the backward keeps room for its own computing: a gather that does not fit
    behind the forward is hidden by the backward.
    """
    share = np.array([FORWARD[checkpoint].get(name, 0) for name in NAMES])
    early = parts * share // _WHOLE
    late = computing_ns(parts) - computing_ns(early)
    lanes = _lanes(early, parts[:, NAMES.index("ring")] > 0)
    return np.minimum(lanes.max(axis=1), total - late)


def weights_ns(parts: np.ndarray, checkpoint: Checkpoint, products: float) -> np.ndarray:
    """int64[ranks]: ns of the weight half of the backward: as many matrix products as the forward has.

    The head's are not among them: its chunks of logits are gone after the input half.

    Args:
        parts: int64[ranks, parts] ns.
        checkpoint: what is kept.
        products: share of the part `linear` that is matrix products.
    """
    forward = parts[:, NAMES.index("linear")] * FORWARD[checkpoint]["linear"] // _WHOLE
    return forward * round(products * _PARTS) // _PARTS


def _lanes(parts: np.ndarray, ring: np.ndarray) -> np.ndarray:
    """int64[ranks, 3] ns per lane; the ring's lane counts only where there is a ring."""
    lanes = [parts[:, [NAMES.index(name) for name in lane]].sum(axis=1) for lane in LANES]
    lanes[1] = np.where(ring, lanes[1], 0)
    return np.stack(lanes, axis=1)
