"""TODO."""

from seqloom.attention.context_parallel.kv_cache import Carry

__all__ = [
    "Carry",
]
