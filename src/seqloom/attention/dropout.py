"""Random numbers without state, and the dropout of attention weights that no plan changes.

Whether an element is dropped is a hash of what it is, not of where it is computed:

    seed of the step, document, position of the token in it      `token_keys`
    number of the module (the layer, for attention)              `module_keys`
    feature; of attention weights the head, then the position    `keep_mask`
    of the key

So the weight of a query and a key is dropped, or not, on any rank of any group, in any tile of a ring, in any piece,
forward and backward. With D = 0 where it is dropped and 1 / (1 - p) elsewhere, out = (D * P) v and the log-sum-exp is
that of P: partial results are merged as without dropout. In the backward dv = (D * P)^T dout and
dS = P * (D * (dout v^T) - rowsum(dout * out)).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

BITS = 32
LOW = (1 << BITS) - 1
BLOCK = 1 << 22
"""Elements whose random numbers exist at once, outside of compiled layers."""

Tokens = tuple[torch.Tensor, torch.Tensor]
"""Document and position of every row of a buffer, int64[rows]."""


@dataclass(frozen=True, slots=True)
class HeadDropout:
    """Dropout of the attention weights of some heads in one layer.

    Attributes:
        p: share of the weights that is dropped.
        seed: of the step.
        layer: number in the model.
        first_head: the number in the model of the first of these heads.
    """

    p: float
    seed: int
    layer: int
    first_head: int = 0

    def from_head(self, head: int) -> HeadDropout:
        """Return the same for heads from `head` on."""
        return replace(self, first_head=head)

    def of_rows(self, queries: Tokens, keys: Tokens) -> WeightDropout:
        """Return what is dropped between the rows of two buffers. A query sees keys of its own document only."""
        return WeightDropout(self, module_keys(token_keys(self.seed, *queries), self.layer), keys[1])


@dataclass(frozen=True, slots=True, eq=False)
class WeightDropout:
    """Which attention weights are dropped between the rows of a query buffer and of a key buffer.

    Attributes:
        heads: that the rows are of.
        query_keys: int64[query rows], random numbers of the queries.
        key_positions: int64[key rows], of the keys in their documents.
    """

    heads: HeadDropout
    query_keys: torch.Tensor
    key_positions: torch.Tensor

    def mask(self, queries: slice, keys: slice, heads: int, dtype: torch.dtype) -> torch.Tensor:
        """Return 0 for weights that are dropped and 1 / (1 - p) for the others, [heads, queries, keys]."""
        numbers, first = mixed32(self.key_positions[keys]), self.heads.first_head
        by_head = (module_keys(self.query_keys[queries], first + head) for head in range(heads))
        return torch.stack([keep_mask(each, numbers, self.heads.p, dtype) for each in by_head])


# -- random numbers ---------------------------------------------------------------------------------------------------
# Products wrap around at 64 bits, as unsigned ones do: torch has no shift of unsigned numbers.

GOLDEN, FIRST, SECOND = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
"""Constants of SplitMix64, as signed numbers."""
SEEDS = (1 << 63) - 1
"""Bits of a seed that count."""


def token_keys(seed: int, documents: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return a random number for every token of a step, int64[tokens]."""
    keys = _mixed64(torch.full_like(documents, seed & SEEDS))
    for each in (documents, positions):
        keys = _mixed64(keys + GOLDEN * (each + 1))
    return keys


def module_keys(keys: torch.Tensor, number: int) -> torch.Tensor:
    """Return the keys of one module, or of one head of it, for the tokens with these keys, int64[tokens]."""
    return _mixed64(keys + GOLDEN * torch.full((), number + 1, dtype=torch.int64, device=keys.device))


def keep_mask(keys: torch.Tensor, numbers: torch.Tensor, p: float, dtype: torch.dtype) -> torch.Tensor:
    """Return 0 for what is dropped, with probability `p`, and 1 / (1 - p) for what is kept, [tokens, columns].

    Args:
        keys: of the tokens.
        numbers: `mixed32` of what tells columns apart: a feature, or the position of a key.
        p: share that is dropped.
        dtype: of the result.
    """
    scale = 1 / (1 - p) if p < 1 else 0.0
    if torch.compiler.is_compiling():
        return _kept(keys, numbers, p).to(dtype) * scale
    with torch.no_grad():
        blocks = keys.split(max(1, BLOCK // max(len(numbers), 1)))
        return torch.cat([_kept(each, numbers, p) for each in blocks]).to(dtype) * scale


def _kept(keys: torch.Tensor, numbers: torch.Tensor, p: float) -> torch.Tensor:
    low, high = (keys & LOW)[:, None], ((keys >> BITS) & LOW)[:, None]
    drawn = mixed32((mixed32(low ^ numbers) + high) & LOW)
    return drawn >= drop_threshold(p)


def drop_threshold(p: float) -> int:
    """Return the least 32-bit number that is kept."""
    return min(round(p * (1 << BITS)), LOW)


def _mixed64(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's last step."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * FIRST
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * SECOND
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def mixed32(x: torch.Tensor) -> torch.Tensor:
    """Mix 32 bits, which int64 holds, so that each depends on all."""
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & LOW
    x = ((x ^ (x >> 15)) * 0x846CA68B) & LOW
    return x ^ (x >> 16)
