"""The how-tos for trainers: their blocks are the example files, which give the same on any number of processes."""

import re
import shutil
from pathlib import Path

import pytest

from support.scripts import run_script

ROOT = Path(__file__).parents[2]
EXAMPLES = {"trainer": ["trainer"], "accelerate": ["accelerate_loop"], "trl": ["trl_sft", "trl_dpo", "trl_grpo"]}


@pytest.mark.parametrize("page", EXAMPLES)
def test_blocks_are_the_example_files(page):
    text = (ROOT / "docs" / "how-to" / f"{page}.md").read_text()
    files = [ROOT / "examples" / f"{name}.py" for name in EXAMPLES[page]]
    assert re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL) == [each.read_text() for each in files]
    assert all(f"torchrun --nproc-per-node 2 examples/{each.name}" in text for each in files)


def printed(name: str, ranks: int, folder: Path) -> list[float]:
    folder = folder / str(ranks)
    shutil.copytree(ROOT / "recipes" / "models", folder / "recipes" / "models")
    said = run_script(ROOT / "examples" / f"{name}.py", ranks, folder)
    return [float(value) for line in re.findall(r"^(?:loss|reward) (.*)", said, re.MULTILINE) for value in line.split()]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("name", [name for names in EXAMPLES.values() for name in names])
def test_examples_on_one_and_two_processes(name, tmp_path, fork_server):
    pytest.importorskip("trl")
    alone, together = (printed(name, ranks, tmp_path) for ranks in (1, 2))
    assert len(alone) == len(together) >= 4
    if name != "trl_grpo":  # whose completions are drawn rank by rank
        assert together == pytest.approx(alone, abs=2e-4)
