"""Attention over packed documents that are spread over ranks: by heads, by positions, or both."""

from __future__ import annotations

from seqloom.attention.bound import ModelCall, prepare_attention, warm_up_attention
from seqloom.attention.carry import Carry
from seqloom.attention.packed import packed_attention
from seqloom.attention.segments import Segments
from seqloom.attention.unified import attention, attention_with_lse

__all__ = [
    "Carry",
    "ModelCall",
    "Segments",
    "attention",
    "attention_with_lse",
    "packed_attention",
    "prepare_attention",
    "warm_up_attention",
]
