"""Attention over packed documents that are spread over ranks: by heads (Ulysses), by positions (ring), or both."""

from seqloom.attention.api import attention, attention_with_lse, latent_attention, packed_attention
from seqloom.attention.context_parallel import KVCache
from seqloom.attention.latent import LatentShape
from seqloom.attention.masks import Segments
from seqloom.attention.plan import AttentionSpec, attention_builds, prepare_attention

__all__ = [
    "AttentionSpec",
    "KVCache",
    "LatentShape",
    "Segments",
    "attention",
    "attention_builds",
    "attention_with_lse",
    "latent_attention",
    "packed_attention",
    "prepare_attention",
]
