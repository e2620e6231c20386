"""What training steps are measured on: configurations of transformers, packs of random tokens; and what is found."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, Qwen3Config

from seqloom.models.loss import IGNORED

COMMON = {"tie_word_embeddings": True, "max_position_embeddings": 131_072, "head_dim": 128}
QWEN = {"vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}
LLAMA = {"vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
LLAMA_8B = {"vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32}
SMALL = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8}
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3-1.7b": lambda: Qwen3Config(**COMMON | QWEN | HEADS),
    "llama-1.3b": lambda: LlamaConfig(**COMMON | LLAMA | HEADS),  # Llama 3.2 1B with heads of 128 instead of 64
    "llama3-8b": lambda: LlamaConfig(
        **COMMON | LLAMA_8B | {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False}
    ),
    "small": lambda: LlamaConfig(**COMMON | SMALL | {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "tiny": lambda: Qwen3Config(**COMMON | TINY | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}),
}


class Pack(NamedTuple):
    """Documents, one after the other; ids and labels int64[tokens] on the host, labels shifted."""

    lengths: list[int]
    ids: torch.Tensor
    labels: torch.Tensor

    @classmethod
    def drawn(cls, lengths: list[int], vocabulary: int, device: torch.device) -> Pack:
        """Random tokens, pinned for a GPU."""
        ids = torch.randint(vocabulary, (sum(lengths),))
        labels = ids.roll(-1).index_fill(0, torch.tensor(list(accumulate(lengths))) - 1, IGNORED)
        return cls(lengths, *((x.pin_memory() if device.type == "cuda" else x) for x in (ids, labels)))

    @property
    def valid(self) -> int:
        """Labels that count."""
        return len(self.ids) - len(self.lengths)


class Step(NamedTuple):
    """What a step took and found."""

    seconds: float
    loss: float
    norm: float
    peak_gib: float
