"""What a token leaves in a layer, in elements: values kept for backward, values elementwise work touches."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from seqloom.describe import ModelSpec


class LayerValues(NamedTuple):
    """One token in one layer."""

    kept: int  # values that backward reads when nothing is recomputed
    touched: int  # values that elementwise work reads or writes in a forward


@lru_cache(maxsize=64)
def layer_values(model: ModelSpec, tensor: int = 1) -> tuple[LayerValues, ...]:
    """One entry per layer, of a token of a rank whose weights are split over ``tensor`` ranks."""
    return tuple(_layer(model, feed_forward, tensor) for feed_forward in feed_forward_values(model))


def feed_forward_values(model: ModelSpec) -> tuple[LayerValues, ...]:
    """One entry per layer, of its feed-forward half without norm and residual."""
    sparse = frozenset(model.moe_layers)
    by_kind = {False: _dense(model), True: _experts(model)}
    return tuple(by_kind[layer in sparse] for layer in range(model.layers))


def query_width(model: ModelSpec) -> int:
    """Values per token of all query heads together."""
    return model.heads * model.head_dim


def kv_width(model: ModelSpec) -> int:
    """Values per token of all key heads together; the values' are as many."""
    return model.kv_heads * model.head_dim


def _layer(model: ModelSpec, feed_forward: LayerValues, tensor: int) -> LayerValues:
    """Attention and feed-forward with their norms and residuals.

    Kept: both halves' input and its norm; q, k, v; and the attention output twice, since with Ulysses the backward of
    attention reads it as the kernel left it, and the projection after it as it came back. Touched: a norm reads and
    writes, a residual reads two and writes one, rotary reads and writes q and k.

    Tensor ranks keep the norms as they gathered them, of all tokens of the team; of their own heads and their own
    part of the feed-forward they keep all these tokens, which is as much as all of it for their own tokens.
    """
    query, kv = query_width(model), kv_width(model)
    return LayerValues(
        kept=(2 + 2 * tensor) * model.hidden + 3 * query + 2 * kv + feed_forward.kept,
        touched=10 * model.hidden + 2 * (query + kv) + feed_forward.touched,
    )


def _dense(model: ModelSpec) -> LayerValues:
    matrices = 3 if model.gated else 2
    return LayerValues(kept=matrices * model.ffn, touched=matrices * model.ffn)


def _experts(model: ModelSpec) -> LayerValues:
    """A token passes its active experts and the shared one, through a copy in the experts' order and back."""
    width = model.active_experts * model.expert_ffn + model.shared_ffn
    copies = 2 * model.active_experts * model.hidden
    matrices = 3 if model.gated else 2
    return LayerValues(kept=matrices * width + copies, touched=matrices * width + 2 * copies)
