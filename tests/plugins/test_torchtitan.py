"""torchtitan's real trainer under plans: losses and gradient norms are those of its plain run of one process."""

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from support.pages import python_blocks

pytestmark = [pytest.mark.plugins, pytest.mark.distributed]
SCRIPT = Path(__file__).with_name("titan_run.py")


def run(ranks: int, *words: str) -> list[tuple[float, float]]:
    """Loss and norm of every step of a run on so many processes."""
    torchrun = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    done = subprocess.run([*torchrun, str(SCRIPT), *words], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4_000:]
    return [tuple(each) for each in json.loads(done.stdout.splitlines()[-1])]


@pytest.fixture(scope="module")
def plain() -> list[tuple[float, float]]:
    """The run of torchtitan alone, every document in a row of its own."""
    found = run(1, "plain")
    assert len(found) == 3 and found[0][0] > found[-1][0] > 0
    return found


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (1, ["auto"]),
        (2, ["auto"]),
        (2, ["static:2", "--chunks", "2", "--recompute"]),
        (4, ["zones", "--chunks", "8"]),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "-".join(value).replace("--", ""),
)
def test_planned_runs_are_the_plain_one(plain, ranks, words):
    found = run(ranks, *words)
    for (loss, norm), (expected, expected_norm) in zip(found, plain, strict=True):
        assert loss == pytest.approx(expected, rel=2e-6) and norm == pytest.approx(expected_norm, rel=5e-6)


def test_a_checkpoint_goes_on_with_the_next_step_although_rows_were_read_ahead():
    whole, resumed = run(2, "auto"), run(2, "auto", "--stop-after", "1")
    assert len(whole) == 3 and [*chain(*resumed)] == pytest.approx([*chain(*whole)], rel=1e-12)


def test_what_is_refused():
    done = subprocess.run([sys.executable, "-W", "ignore", str(SCRIPT), "refusals"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4_000:]
    said = done.stdout.splitlines()
    for words in (
        "parallelism.context_parallel_degree = 2: parameters are sharded over all ranks",
        "SeqloomTrainer with compile with model",
        "SeqloomTrainer with CUDA graphs",
        "SeqloomTrainer with validator",
        "attention ScaledDotProductAttention.Config with window_size (-1, 0) of a layer",
        "attention VarlenAttention.Config with window_size (7, 0) of a layer",
        "batches of the data loader with image",
    ):
        assert any(words in line for line in said), (words, said)


def test_the_page_makes_a_config_that_is_accepted(tmp_path):
    [block] = python_blocks(Path(__file__).parents[2] / "docs" / "how-to" / "torchtitan.md")
    (tmp_path / "page.py").write_text(
        f"{block}\nfrom seqloom.integrations.torchtitan import SeqloomTrainer, check_config, model_spec_of\n"
        "config = llama3_planned()\ncheck_config(config)\n"
        "spec = model_spec_of(config.model_spec.model, 'page')\n"
        "print(isinstance(config, SeqloomTrainer.Config), spec.layers, spec.heads, spec.head_dim, spec.ffn)\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "page.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4_000:]
    assert done.stdout.splitlines()[-1] == "True 6 16 16 768"
