"""Documents and prices of `bench_pipeline_tail`: one layer a stage, one rate for all it computes, units with a fee."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import numpy as np
from common import K

from seqloom.cost import CostModel, Profile
from seqloom.cost.memory import pp_rank_bytes
from seqloom.cost.profile import Curve, LinkRate, Links
from seqloom.describe import Cluster, ModelSpec
from seqloom.plan import Checkpoint
from seqloom.planners.pipeline.stage_layout import StageLayout

HOSTS, DOCUMENTS = 8, 256
LONGEST, OVERHEAD = 128 * K, 512
WIDTH, TFLOPS = 4096, 400.0
MODEL = ModelSpec("layers", HOSTS, WIDTH, 32, 32, 128, 8 * WIDTH // 3, gated=True, vocabulary=2, tied=False)
PARAMETERS = (MODEL.matmul_parameters - MODEL.head_parameters) // HOSTS
PLENTY_GIB = 1e5


def lengths_of(seed: int) -> np.ndarray:
    """A step's documents."""
    sigma = math.log(56 / 2) / statistics.NormalDist().inv_cdf(0.99)
    drawn = np.random.default_rng(seed).lognormal(math.log(2 * K), sigma, DOCUMENTS)
    lengths = np.clip(drawn.astype(np.int64), 32, LONGEST)
    if seed % 2 == 0:
        lengths[:2] = LONGEST, 90 * K
    return lengths


def priced(budget_gib: float) -> CostModel:
    """The prices above, with so much memory."""
    free, flat = LinkRate(1e9, 0.0, 0.0), Curve((K,), (TFLOPS,), (TFLOPS,))
    whole = Cluster.parse(f"1x{HOSTS}xH100")
    cluster = replace(whole, intra=replace(whole.intra, latency_us=0.0))
    own = {"matmul_tflops": TFLOPS, "memory_efficiency": 1e6, "attention": flat, "tile": flat}
    own |= {"intra": Links(free, free, free), "layer_us": 6 * PARAMETERS * OVERHEAD / (TFLOPS * 1e6)}
    own |= dict.fromkeys(("round_us", "ring_step_us", "piece_us", "prefix_us", "step_us"), 0.0)
    profile = replace(Profile.load("h100"), **own)
    return CostModel(cluster, MODEL, profile, "none", budget_gib, LONGEST, stages=HOSTS)


def budget(memory: float, longest: int) -> float:
    """GiB of so many times the longest document."""
    cost = priced(PLENTY_GIB)
    layout = StageLayout.of(cost, HOSTS)
    state = max(pp_rank_bytes(cost, shares, layout.shard_group_size(cost)) for shares in layout.ranges_by_pp_rank)
    held = cost.memory.activation_bytes(layout.layer_ranges[0], Checkpoint.NONE).held
    kept = memory * longest * (held + 2 * WIDTH * 2)
    return (state + kept + longest * 2 * WIDTH * 4) / 2**30


def ideal_ns(lengths: np.ndarray) -> float:
    """The work of one stage, without overhead."""
    own = lengths.astype(np.float64)
    return (6 * PARAMETERS * own.sum() + 7 * WIDTH * (own**2).sum()) / (TFLOPS * 1e3)
