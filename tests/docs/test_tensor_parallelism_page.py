"""docs/tensor-parallelism.md: its commands run, and say what the page says of them."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from seqloom.cost import CostModel
from seqloom.cost.memory import GIB, pp_rank_bytes
from seqloom.describe import Cluster, ModelSpec
from seqloom.plan import LayerRange

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tensor-parallelism.md").read_text()
PLANS, RUNS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_planning_commands_run(run_block):
    said = " ".join(run_block("sh", PLANS).split())
    assert "no plan with tensor degree 2 can beat" in said and "on these stages with tensor degree 2" in said
    assert "speed-up" in said


@pytest.mark.slow
def test_what_a_cut_vocabulary_saves_is_what_the_cost_model_says():
    """GiB before any token, beside a vocabulary of one token more, which no degree divides."""
    rows = [
        [each.strip() for each in row.split("|")[1:-1]] for row in re.findall(r"^\|.*\d+\.\d \|.*$", PAGE, re.MULTILINE)
    ]
    assert len(rows) == 7
    vocabulary, llama = 0, ModelSpec.load("llama3-8b")
    for model, where, degree, *figures in rows:
        vocabulary = int(model.split()[-1 - model.endswith("tokens")].replace(",", "")) if model else vocabulary
        ranks, sharding = int(where.split(",")[0]), where.split("`")[1]
        cluster, found = Cluster.parse(f"{ranks // 8}x8xH200"), []
        for odd in (1, 0):
            spec = replace(llama, vocabulary=vocabulary + odd)
            cost = CostModel(cluster, spec, sharding=sharding, tensor=int(degree))
            if "stages" in where:
                found.append(pp_rank_bytes(cost, [LayerRange(24, 32, 32)], ranks // 4))
            else:
                found.append(min(map(cost.memory.fixed_bytes, cost.policies)))
        assert figures[:2] == [f"{each / GIB:.1f}" for each in found], (model, where)


@pytest.mark.slow
@pytest.mark.distributed
def test_the_training_commands_run(run_block, tmp_path):
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    said = run_block("sh", RUNS)
    assert said.count(" same ") == 2 and "differs" not in said
    assert "4 steps, loss" in said and (tmp_path / "tensor" / "metrics.jsonl").exists()
