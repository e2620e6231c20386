"""docs/training.md is run, one block after the other in one folder, and says what the code says."""

import json
import os
import re
import shutil
from dataclasses import fields
from pathlib import Path

import pytest

from seqloom.dist import run_in_mlp_layout
from seqloom.errors import LeftEarly
from seqloom.integrations.transformers.layers import MLP_NAMES
from seqloom.models.loss import CHUNK
from seqloom.plan import Checkpoint, Remap, Sharding
from seqloom.profiling.verify import TOLERANCE
from seqloom.train.config import Run
from seqloom.train.launch import WATCHED_NCCL
from seqloom.train.logging import StepRecord
from seqloom.train.trainer import FIRST_PATIENCE_S, PATIENCE_S
from seqloom.train.watchdog import EXIT_FAILED

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "training.md").read_text()
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
pytestmark = pytest.mark.distributed


@pytest.mark.slow  # test_readme runs the same commands
def test_the_page_runs(tmp_path, run_block):
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    blocks = FENCE.findall(PAGE)
    assert [language for language, _ in blocks] == ["sh", "python", "python"]
    for language, block in blocks:
        run_block(language, block)
    made = {path.name for path in (tmp_path / "build" / "tiny-cpu").iterdir()}
    listed = set(re.findall(r"^ {6}([\w.]+)", PAGE, re.MULTILINE))
    assert made == listed == {".lock", "checkpoints", "metrics.jsonl", "model", "report.html"}


def test_every_figure_of_a_step_is_explained():
    table = PAGE.split("## Metrics")[1].split("## GPUs")[0]
    for name in (*(field.name for field in fields(StepRecord)), "tokens_per_second"):
        assert f"`{name}`" in table, name


def test_choices_and_numbers_are_those_of_the_code():
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.split("## The loss")[0], re.MULTILINE)
    assert rows == [*Sharding, *(kind for kind in Checkpoint if kind != Checkpoint.PROFILE)]
    assert f"({PATIENCE_S:g} s; the first may\ntake {FIRST_PATIENCE_S:g}" in PAGE
    assert f"`run.timeout_s` seconds ({Run(Path(), steps=1).timeout_s})" in PAGE
    assert f"exit code {LeftEarly.exit_code} (`EX_TEMPFAIL`" in PAGE and LeftEarly.exit_code == os.EX_TEMPFAIL
    assert all(f"`{name}={value}`" in PAGE for name, value in WATCHED_NCCL.items())
    assert f"exit code is {EXIT_FAILED}" in PAGE and f"{CHUNK:,} tokens at a time" in PAGE
    assert [f"{limit:g}" in ("1e-09", "1e-05") for limit in TOLERANCE.values()] == [True, True]
    assert "1e-9, or 1e-5" in PAGE


def test_where_rounds_remap():
    table = PAGE.split("## Two layouts")[1].split("## Compiled layers")[0]
    assert re.findall(r"^\| (?:the )?(\w+) \|", table, re.MULTILINE) == [
        kind.upper() if kind == "mlp" else kind for kind in Remap
    ]
    assert all(f"`{name}`" in table for name in MLP_NAMES[:3]) and run_in_mlp_layout.__name__ in table


def test_the_table_of_memory_is_that_of_the_committed_result():
    result = json.loads((ROOT / "benchmarks" / "results" / "gpu_memory.json").read_text())["figures"]
    found = {(row["cluster"], row["model"], row["in_host_memory"]): row for row in result["predicted"]}
    names = {"Qwen3-1.7B, one H200": ("1x1xH200", "qwen3-1.7b"), "Llama-3-8B, one H200": ("1x1xH200", "llama3-8b")}
    names |= {"Qwen3-1.7B, eight H200": ("1x8xH200", "qwen3-1.7b"), "Llama-3-8B, eight H200": ("1x8xH200", "llama3-8b")}
    for name, key in names.items():
        longest = [found[*key, kind]["longest"] for kind in ("nothing", "activations", "optimiser", "both")]
        assert f"| {name} | {' | '.join(f'{each:,}' if each else 'none' for each in longest)} |" in PAGE
    seconds = {kind: found["1x1xH200", "qwen3-1.7b", kind]["steps"] for kind in ("nothing", "activations", "optimiser")}
    long = [f"{seconds[kind]['262144']['seconds']:.1f} s" for kind in ("nothing", "activations")]
    short = [f"{seconds[kind]['65536']['seconds']:.1f} s" for kind in ("nothing", "optimiser")]
    assert all(each in PAGE for each in (*long, *short)) and result["measured"] is None
