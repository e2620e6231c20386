"""A run with a rank that is slower than the others: it is found, and gets less."""

from pathlib import Path
from statistics import median

import pytest

from seqloom.train.config import Config
from seqloom.train.launch import train_on_processes
from seqloom.train.logging import read_steps
from support.slow_rank import SLOW_FAMILY, SLOW_RANK, SLOW_SPEED

ROOT = Path(__file__).parents[2]
STEPS, RANKS = 24, 4


@pytest.mark.slow
@pytest.mark.distributed
def test_a_slow_rank_is_found_within_twenty_steps_and_gets_less(tmp_path):
    spec = tmp_path / "small.toml"
    shape = "layers = 2\nhidden = 32\nheads = 4\nkv_heads = 2\nhead_dim = 8\nffn = 64\ngated = true\n"
    spec.write_text(shape + "vocabulary = 257\ntied = true\n")
    changes = [f"run.output={tmp_path / 'run'}", f"run.steps={STEPS}", f"run.ranks={RANKS}", f"model.spec={spec}"]
    changes += ["evaluation.every=0", "checkpoint.every=0", "checks.every=0", "data.sequences=24", "plan.planner=zones"]
    changes += ["plan.capacity=4096", "run.timeout_s=300", "data.max_length=512"]
    config = Config.load(ROOT / "recipes" / "tiny-cpu.toml", overrides=changes)
    train_on_processes(config, RANKS, model_family=SLOW_FAMILY)
    records = read_steps(tmp_path / "run" / "metrics.jsonl")
    found = [record.slowest for record in records]
    assert found[-1] == pytest.approx(SLOW_SPEED, abs=0.04) and found[0] is None
    first = next(step for step, speed in enumerate(found) if speed is not None)
    assert first < 20
    early, late = (
        median(each.measured_ms / each.tokens for each in part) for part in (records[1:first], records[first + 2 :])
    )
    print(f"{1e3 * early:.0f} us per token before the rank is found, {1e3 * late:.0f} after")
    # Perfect plans take 4 / 3.7 of the time of equal ranks, unaware ones 1 / 0.7: a quarter less, but for what a step
    # takes beside its tokens.
    assert late < 0.87 * early
    notes = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert f"rank {SLOW_RANK} 1 -> 0." in notes
