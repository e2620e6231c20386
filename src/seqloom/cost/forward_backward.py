"""Where forward, input half and weight half of a time end, and the copies to host memory that run beside them.

The cost model prices forward and backward together. `FORWARD` says which share of each part of a price is forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from seqloom.cost.shapes import COST_COLUMNS, STREAMS, columns
from seqloom.plan import Checkpoint, LayerRange, StageMicroBatch

EXCHANGES = ("ulysses", "kv_gather", "remap", "tensor", "expert", "expert_latency")
"""Parts of the compute stream in which a rank waits for messages."""
COMPUTING = columns(name for name in STREAMS[0] if name not in EXCHANGES)
"""Columns in which the GPU computes; the rest of a rank's time is exposed communication."""
_UNITS = 1260  # divisible by 2, 3, 4, 5, 7 and 9: shares are integers
_SHARES = {  # forward of forward and backward, under checkpoint none, selective, full: recomputing is backward
    "linear": (1 / 3, 1 / 4, 1 / 4),  # backward is twice forward
    "routed": (1 / 3, 1 / 4, 1 / 4),
    "head": (1 / 3, 1 / 3, 1 / 3),  # never recomputed
    "attention": (2 / 7, 2 / 7, 2 / 9),  # backward is 2.5 times forward
    "steps": (1 / 2, 1 / 2, 1 / 3),
    "ulysses": (1 / 2, 2 / 5, 1 / 3),  # two exchanges in forward, two in backward, and those that are repeated
    "ring": (1 / 4, 1 / 4, 1 / 5),  # K and V travel in both; dK and dV in backward, in float32
    "kv_gather": (1 / 4, 1 / 4, 1 / 5),
    "remap": (1 / 2, 2 / 5, 1 / 3),
    "tensor": (1 / 2, 1 / 3, 1 / 3),  # recomputing repeats a whole forward
    "expert": (1 / 2, 1 / 3, 1 / 3),
    "expert_latency": (3 / 5, 3 / 8, 3 / 8),  # forward also exchanges how many tokens there are
    "expert_network": (1 / 2, 1 / 3, 1 / 3),
    "gather": (1 / 2, 1 / 2, 1 / 2),  # once for forward and once for backward; gradients are reduced in backward
    "network": (1 / 3, 1 / 3, 1 / 3),
    "fixed": (1 / 2, 1 / 2, 1 / 3),
}
_COLUMN = {Checkpoint.SELECTIVE: 1, Checkpoint.FULL: 2, Checkpoint.STAGE: 2}
FORWARD = {c: [round(_UNITS * _SHARES.get(n, (0, 0, 0))[_COLUMN.get(c, 0)]) for n in COST_COLUMNS] for c in Checkpoint}
"""Share of each column that is forward, in units of 1/1260, by checkpoint."""


def forward_with(shares: Mapping[str, float], checkpoint: Checkpoint) -> list[int]:
    """Share of each column that is forward, as `FORWARD` has them, but for these columns."""
    found = list(FORWARD[checkpoint])
    for name, share in shares.items():
        found[COST_COLUMNS.index(name)] = math.floor(_UNITS * share)
    return found


_BITS = 20  # shares of a time are in units of 2**-20: products with times up to 2**43 ns (two hours) stay in int64
FULL_SHARE = 1 << _BITS


def computing_ns(parts: np.ndarray) -> np.ndarray:
    """int64[ranks]: ns in which the GPU computes."""
    return parts[:, COMPUTING].sum(axis=1)


def forward_shares(
    work: StageMicroBatch, layers: LayerRange, forward: Callable[[Checkpoint], Sequence[int]] = FORWARD.__getitem__
) -> np.ndarray:
    """int64[len(COST_COLUMNS)]: share of each column that is forward, in units of 1/1260.

    `forward` returns that where all layers do the same. A forward takes as long whatever is recomputed. So where some
    layers recompute less, shares mix by their inverses.
    """
    heavy = np.array(forward(work.checkpoint))
    if not work.lighter_layers or work.checkpoint.lighter is None:
        return heavy
    light, count = np.array(forward(work.checkpoint.lighter)), layers.stop - layers.first
    return heavy * light * count // np.maximum(1, (count - work.lighter_layers) * light + work.lighter_layers * heavy)


def forward_ns(parts: np.ndarray, total: np.ndarray, forward: np.ndarray | Sequence[int]) -> np.ndarray:
    """int64[ranks]: ns of the forward of ranks that take `total` ns, by the shares of the columns that are `forward`.

    Its longest stream, as far as the backward keeps room for its own computing: a gather that does not fit behind the
    forward is hidden by the backward.
    """
    early = parts * np.asarray(forward) // _UNITS
    compute, ring, network = (early[:, columns(stream)].sum(axis=1) for stream in STREAMS)
    ring = np.where(parts[:, COST_COLUMNS.index("ring")] > 0, ring, 0)
    late = computing_ns(parts) - computing_ns(early)
    return np.minimum(np.maximum(np.maximum(compute, ring), network), total - late)


def weights_ns(parts: np.ndarray, forward: np.ndarray | Sequence[int], matmul_share: float) -> np.ndarray:
    """int64[ranks]: ns of the weight half of the backward: as many matrix products as the forward of linear layers has.

    The head's are not among them: its chunks of logits are gone after the input half.
    """
    linear, routed = columns(("linear", "routed"))
    products = (parts[:, linear] + parts[:, routed]) * forward[linear] // _UNITS
    return products * round(matmul_share * (1 << 16)) >> 16


def forward_and_weight_cuts(
    parts: np.ndarray, load: np.ndarray, forward: np.ndarray | Sequence[int], matmul_share: float
) -> tuple[np.ndarray, np.ndarray]:
    """Where forward ends and the weight half begins, as shares of 2**-20, of ranks with these parts and this time."""
    ends, weights = (
        (time << _BITS) // np.maximum(load, 1)
        for time in (forward_ns(parts, load, forward), weights_ns(parts, forward, matmul_share))
    )
    return ends, np.maximum(FULL_SHARE - weights, ends)


def extend_for_offload(
    length: np.ndarray, forward: np.ndarray, weights: np.ndarray, copy_ns: int | np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(length, forward, weights) with forward and the input half not shorter than the copies that run beside each.

    A layer's activations are copied to host memory while the next layer computes, and back while the one behind it goes
    backward. Memory has room for two layers, so a pass waits for its copies.
    """
    ends = [length * share >> _BITS for share in (forward, weights)]
    early = np.maximum(ends[0], copy_ns)
    late = early + np.maximum(ends[1] - ends[0], copy_ns)
    longer = late + length - ends[1]
    if np.array_equal(longer, length):
        return length, forward, weights
    return longer, -(-(early << _BITS) // np.maximum(longer, 1)), -(-(late << _BITS) // np.maximum(longer, 1))


def scale(time: np.ndarray | int, share: int) -> np.ndarray | int:
    """A time multiplied with a share in units of 2**-20."""
    return time * share >> _BITS


def share_between(time: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The part of a time from one share to another, in units of 2**-20; parts that follow each other add up."""
    return (time * high >> _BITS) - (time * low >> _BITS)
