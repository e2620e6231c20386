"""What the runtime needs to know of a model: how to call it, where its layers and its head are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from seqloom.attention import ModelCall, prepare_attention
from seqloom.comm import Context
from seqloom.errors import SeqloomError
from seqloom.models import Transformer
from seqloom.runtime.loss import CHUNK, summed_loss


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """A language model, whoever wrote it.

    Attributes:
        module: has all parameters, under the names that checkpoints use.
        layers: parts that are gathered, released and recomputed one by one; each is called with the context.
        hidden: hidden(ids int64[tokens], context) -> [tokens, hidden] after the final norm.
        head: has `weight` [vocabulary, hidden]; maybe the table of tokens.
        calls: the attention calls of the layers, each distinct one once, for `prepare`.
    """

    module: nn.Module
    layers: tuple[nn.Module, ...]
    hidden: Callable[[torch.Tensor, Context], torch.Tensor]
    head: nn.Module
    calls: tuple[ModelCall, ...] = ()

    @classmethod
    def of(cls, model: Transformer) -> Network:
        """Describe the reference model."""
        if not isinstance(model, Transformer):
            raise SeqloomError(
                f"{type(model).__name__} is not the reference transformer; for another model say what its layers, "
                "its hidden states and its head are: Network(module, layers, hidden, head)"
            )
        decoder, spec = model.model, model.spec
        calls = tuple(ModelCall(spec.heads, spec.kv_heads, spec.head_dim, each) for each in dict.fromkeys(spec.windows))
        return cls(model, tuple(decoder.layers), lambda ids, c: decoder(ids, c.positions, c), model.lm_head, calls)

    def prepare(self, context: Context, dtype: torch.dtype) -> None:
        """Do the index work of a round's attention now, so that no layer does; see `bind_plan`.

        Args:
            context: of the round; it keeps the result.
            dtype: that layers compute in.
        """
        for heads, kv_heads, dim, window, scale in self.calls:
            prepare_attention(context, heads, kv_heads, dim, dtype, window=window, scale=scale)


class LossOf(nn.Module):
    """A network from token ids to the sum of token losses, as one module: what it needs is gathered for one call."""

    def __init__(self, network: Network, chunk: int = CHUNK) -> None:
        """Wrap a network; `chunk` as in `summed_loss`."""
        super().__init__()
        self.inner = network.module
        self._calls = (network.hidden, network.head)  # in a tuple: torch sees parameters under `inner` alone
        self._chunk = chunk

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, context: Context) -> torch.Tensor:
        """Return the sum of the losses of this rank's tokens, a scalar in float32 or float64.

        Args:
            ids, labels: int64[tokens], rows as `context.spans` says; see `summed_loss`.
            context: of the round.
        """
        hidden, head = self._calls
        return summed_loss(hidden(ids, context), cast("torch.Tensor", head.weight), labels, chunk=self._chunk)
