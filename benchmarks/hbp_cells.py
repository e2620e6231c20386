"""What HBP's evaluation ran: models, GPU-days, evenness of steps; and a stand-in for its lengths."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from common import K

from seqloom.describe import ModelSpec

LONGEST, STEPS, TOLERANCE = 128 * K, 8, 0.1
LONG_SHARE, CHAT = 0.045, (6.2, 1.1)
DEGREES = (1, 8)
QWEN: dict[str, Any] = {"kv_heads": 8, "head_dim": 128, "gated": True, "vocabulary": 152_064, "tied": False}
DEEPSEEK_V2 = ModelSpec(
    "deepseek-v2-236b",
    **{"layers": 60, "hidden": 5120, "heads": 128, "kv_heads": 128, "head_dim": 192, "ffn": 12_288, "gated": True},
    **{"vocabulary": 102_400, "tied": False, "latent": 512, "rotated": 64, "value_dim": 128, "query_latent": 1536},
    **{"experts": 160, "active_experts": 6, "expert_ffn": 1536, "shared_ffn": 3072},
    moe_layers=tuple(range(1, 60)),
)


class Cell(NamedTuple):
    """A row of the published table."""

    model: ModelSpec
    nodes: int  # of eight H100
    plain: float  # GPU-days
    hbp: float


CELLS = (
    Cell(ModelSpec.load("llama3-8b"), 4, 5.22, 3.73),
    Cell(ModelSpec("qwen2.5-32b", layers=64, hidden=5120, heads=40, ffn=27_648, **QWEN), 4, 21.3, 16.0),
    Cell(ModelSpec.load("llama3-70b"), 4, 44.4, 31.1),
    Cell(ModelSpec("qwen2.5-72b", layers=80, hidden=8192, heads=64, ffn=29_568, **QWEN), 4, 47.1, 33.7),
    Cell(DEEPSEEK_V2, 32, 57.1, 23.8),
)


EVENNESS = {
    "plain": {"abr": 0.506, "cr": 1.0},
    "hbp": {"abr": 0.002, "cr": 0.173, "dbr": 0.001},
    "flexsp": {"abr": 0.36, "cr": 0.171, "dbr": 0.064},
}
"""Of steps of Llama 3.1 8B, published: imbalance of attention work and of tokens, share of tokens that communicate.

Of plain packs all tokens communicate, since 128K take several GPUs. `flexsp` is the authors' run of its released code.
"""
FLEXSP_GAIN = 5.22 / 4.35


def drawn(tokens: int, steps: int, seed: int) -> np.ndarray:
    """Return documents of so many steps, int64[n]."""
    generator, most = np.random.default_rng(seed), steps * tokens // K
    chats = np.clip(generator.lognormal(*CHAT, most), 16, 32 * K)
    long = generator.uniform(1 * K, LONGEST, most)
    lengths = np.where(generator.random(most) < LONG_SHARE, long, chats).astype(np.int64)
    count = int(np.searchsorted(lengths.cumsum(), steps * tokens, side="right"))
    return lengths[:count]


def in_order(lengths: np.ndarray, tokens: int) -> list[np.ndarray]:
    """Return batches of at most so many tokens, in data order."""
    return np.split(lengths, np.flatnonzero(np.diff((lengths.cumsum() - 1) // tokens)) + 1)
