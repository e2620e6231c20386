"""TODO."""

from seqloom.attention.context_parallel.kv_cache import KVCache

__all__ = [
    "KVCache",
]
