"""docs/cost-model.md is run, and says what the code says."""

import re
import shutil
from pathlib import Path

import pytest

from seqloom.cost import feedback

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cost-model.md").read_text()
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_page_names_every_factor_and_the_numbers_of_the_code():
    table = PAGE.split("## Factors")[1].split("Let f0")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(feedback.Factors._fields)
    assert (
        f"latest {feedback.WINDOW} steps count" in PAGE
        and f"change by {100 * feedback.ADOPTED_CHANGE:g} % or more" in PAGE
    )
    assert f"{100 * feedback.LEAST_NOISE:g} % at least" in PAGE
    assert f"`spread` = {feedback.PRIOR_SPREAD}" in PAGE and feedback.ADOPTED_ERROR == 0.9 and feedback.ITERATIONS == 6


def test_the_example_finds_what_it_says(capsys):
    block = next(text for language, text in FENCE.findall(PAGE) if language == "python")
    exec(block, names := {})
    assert names["refit"](names["steps"]) == pytest.approx(names["true"], rel=0.05)
    assert "attention" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.distributed
def test_the_page_runs(tmp_path, run_block):
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    for language, block in FENCE.findall(PAGE):
        run_block(language, block)
