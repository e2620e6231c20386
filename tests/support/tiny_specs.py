"""Model files for tests: shapes that train in milliseconds, as TOML."""

from __future__ import annotations

TINY = """
layers = 2
hidden = 16
heads = 4
kv_heads = 2
head_dim = 4
ffn = 24
gated = true
vocabulary = 257
tied = true
"""
"""Two layers on bytes, with grouped heads and a tied head."""
