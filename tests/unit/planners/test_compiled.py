"""Same hash everywhere: plain and compiled, one thread and many, another process; and the first plan does not wait."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import numpy as np
import pytest

from seqloom.describe import sample
from seqloom.packing import hbp
from seqloom.planners import compiled, loops
from seqloom.planners.registry import make_plan
from support.strategies import roomy_cost_model

CASES = [
    (name, cluster, profile, sharding, seed)
    for seed, sharding in enumerate(("full", "hybrid", "none"))
    for name in ("flex", "adaptive")
    for cluster, profile in (("1x8xA100-40G", "flexsp-a100"), ("2x3xH100", None))
]
needs_numba = pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")


def plan_hash(case):
    """Hash of one seeded batch's plan."""
    name, cluster, profile, sharding, seed = case
    cost = roomy_cost_model(cluster, "gpt-7b" if profile else "qwen3-0.6b", profile, sharding, 1)
    options = {"evaluations": 12} if name == "flex" else {}
    return make_plan(name, sample("commoncrawl", 14, seed=seed, max_length=12_000), cost, **options).hash


def elsewhere(**environment):
    """Run this file in a fresh process: (hashes, how long they took, stderr)."""
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return *json.loads(done.stdout), done.stderr


@pytest.fixture(scope="module")
def here():
    return [plan_hash(case) for case in CASES]


def test_there_are_different_plans(here):
    assert len(CASES) == 12 and len(set(here)) >= 8


@needs_numba
def test_plain_and_compiled_agree(here, monkeypatch):
    assert compiled.compile_loops() and compiled.kernels().decode is not loops.decode
    assert [plan_hash(case) for case in CASES] == here
    monkeypatch.setattr(compiled._State, "loaded", loops)
    assert compiled.kernels() is loops
    assert [plan_hash(case) for case in CASES] == here


@needs_numba
def test_planners_call_the_loops_with_the_types_that_were_compiled():
    assert compiled.compile_loops()
    fast = compiled.kernels()
    names = [name for name in vars(fast) if hasattr(getattr(fast, name), "signatures")]
    before = {name: len(getattr(fast, name).signatures) for name in names}
    cost = roomy_cost_model("1x8xH100", "qwen3-0.6b", None, "free", 1)
    lengths = sample("commoncrawl", 30, seed=1, max_length=12_000)
    for name in ("flex", "zones", "hydraulis"):
        make_plan(name, lengths, cost)
    hbp(lengths, cost, 1 << 17)
    assert {name: len(getattr(fast, name).signatures) for name in names} == before


def test_another_process_with_another_hash_seed_agrees(here):
    assert elsewhere(PYTHONHASHSEED="4711")[0] == here


@needs_numba
@pytest.mark.slow
def test_the_first_process_of_an_installation_does_not_wait_for_the_compiler(here, tmp_path):
    found, _, said = elsewhere(NUMBA_CACHE_DIR=str(tmp_path))
    assert found == here and said.count(compiled.ANNOUNCEMENT) == 1
    assert elsewhere(NUMBA_CACHE_DIR=str(tmp_path))[2] == ""  # one process compiles, the others keep quiet
    deadline = time.monotonic() + 300
    while list(tmp_path.rglob("*.compiling")):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert list(tmp_path.rglob("loops.decode-*"))
    assert elsewhere(NUMBA_CACHE_DIR=str(tmp_path))[0] == here


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
    began = time.perf_counter()
    print(json.dumps([[plan_hash(case) for case in CASES], time.perf_counter() - began]))
