"""Tutorials and how-tos are run as written: each page in a folder of its own, which has nothing but `recipes/`."""

import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDES = sorted(path for folder in ("tutorials", "how-to") for path in (ROOT / "docs" / folder).glob("*.md"))
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUICK = ("unknown-gpu",)
"""Pages that take a second or two; the others are in the longer set."""
MAKES = {
    "see-the-problem": ["problem.html"],
    "plan-your-data": ["plan.html", "plan.json"],
    "train-tiny": ["run/report.html", "run/checkpoints/step-00000008"],
    "one-box": ["box.json", "run/model/config.json"],
    "two-nodes": ["run/report.html"],
    "calibrate": ["machine.json"],
    "read-a-timeline": ["planners.html", "plan.html", "plan-trace.json"],
    "hang": ["run/trace-2.json"],
    "trainer": ["run/checkpoint-6/model.safetensors"],
    "trl": ["run/checkpoint-4/adapter_model.safetensors", "run/checkpoint-4/model.safetensors"],
    "accelerate": ["state/model.safetensors"],
    "resume-elsewhere": ["run/checkpoints/step-00000008", "again/checkpoints/step-00000008"],
}
"""What a reader has in the folder afterwards, as the page says."""


def guides() -> list:
    slow = [pytest.mark.slow, pytest.mark.distributed]
    return [pytest.param(path, id=path.stem, marks=[] if path.stem in QUICK else slow) for path in GUIDES]


@pytest.mark.parametrize("page", guides())
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_page_runs(page: Path, tmp_path: Path, run_block):
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    for language, block in FENCE.findall(page.read_text()):
        if language == "toml":
            (tmp_path / re.match(r"# (\S+)", block)[1]).write_text(block)
        else:
            run_block(language, block)
    assert [name for name in MAKES.get(page.stem, []) if not (tmp_path / name).exists()] == []
