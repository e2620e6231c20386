"""Same hash everywhere: plain and compiled, one thread and many, another process with another hash seed."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from seqloom.describe import sample
from seqloom.planners.compiled import COMPILED
from seqloom.planners.registry import make_plan
from support.strategies import roomy_cost_model

CASES = [
    (name, cluster, profile, sharding, seed)
    for seed, sharding in enumerate(("full", "hybrid", "none"))
    for name in ("flex", "adaptive")
    for cluster, profile in (("1x8xA100-40G", "flexsp-a100"), ("2x3xH100", None))
]


def plan_hash(case):
    """Hash of one seeded batch's plan."""
    name, cluster, profile, sharding, seed = case
    cost = roomy_cost_model(cluster, "gpt-7b" if profile else "qwen3-0.6b", profile, sharding, 1)
    options = {"evaluations": 12} if name == "flex" else {}
    return make_plan(name, sample("commoncrawl", 14, seed=seed, max_length=12_000), cost, **options).hash


def elsewhere(*, plain, hash_seed):
    """Whether kernels were compiled, and all hashes, in a fresh process."""
    block = "sys.modules['numba'] = None; " if plain else ""
    code = f"import runpy, sys; {block}runpy.run_path({__file__!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def here():
    return [plan_hash(case) for case in CASES]


def test_there_are_different_plans(here):
    assert len(CASES) == 12 and len(set(here)) >= 8


def test_plain_and_compiled_agree(here):
    assert elsewhere(plain=True, hash_seed="0") == [False, here]


def test_another_process_with_another_hash_seed_agrees(here):
    assert elsewhere(plain=False, hash_seed="4711") == [COMPILED, here]


def test_many_threads_agree(here):
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(plan_hash, CASES * 3)) == here * 3


def test_threads_may_share_one_cost_model():
    cost = roomy_cost_model("2x8xA100-40G", "gpt-7b", "flexsp-a100", "hybrid", 1)
    several = [sample("wikipedia", 60, seed=seed, max_length=20_000) for seed in range(6)]
    alone = [make_plan("flex", lengths, cost).hash for lengths in several]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda lengths: make_plan("flex", lengths, cost).hash, several)) == alone


def test_lengths_may_be_any_whole_numbers(here):
    cost = roomy_cost_model("1x8xA100-40G", "gpt-7b", "flexsp-a100", "full", 1)
    lengths = [5_000, 70, 900]
    kinds = [lengths, tuple(lengths), np.array(lengths, np.int32), np.array(lengths, np.uint16)]
    assert len({make_plan("flex", kind, cost).hash for kind in kinds}) == 1


if __name__ == "__main__":
    print(json.dumps([COMPILED, [plan_hash(case) for case in CASES]]))
