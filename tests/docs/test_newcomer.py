"""A newcomer's path from an empty folder: the wheel of this tree in a fresh environment, docs/fine-tuning.md run by it.

The environment has Seqloom from the wheel alone, and everything else from the one that runs the tests.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import NamedTuple

import pytest

from support.chromium import Chromium, chromium

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(600)]


class Newcomer(NamedTuple):
    """An empty folder, and the commands of an environment."""

    folder: Path
    commands: Path

    def run(self, *words: str) -> str:
        """Run a command in the folder and return what it prints."""
        usual = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        path = f"{self.commands}:{usual['PATH']}"
        done = subprocess.run(words, cwd=self.folder, env=usual | {"PATH": path}, capture_output=True, text=True)
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def newcomer(tmp_path_factory) -> Newcomer:
    """Install the wheel; nothing of this tree is on the path."""
    made = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    built = subprocess.run([*pip, "wheel", "--no-deps", "-w", made, ROOT], capture_output=True, text=True)
    if built.returncode and "No matching distribution" in built.stderr:
        pytest.skip("no package index is reached, and hatchling builds the wheel")
    assert built.returncode == 0, built.stderr
    [wheel] = made.glob("seqloom-*.whl")
    venv.create(made / "venv", with_pip=False)
    python = made / "venv" / "bin" / "python"
    where = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip())
    subprocess.run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], check=True)
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")  # its own .pth files are not read
    return Newcomer(tmp_path_factory.mktemp("empty"), python.parent)


@pytest.fixture(scope="module")
def said(newcomer) -> list[str]:
    """Run the page's blocks in the folder; what each has printed."""
    printed = []
    for language, block in FENCE.findall((ROOT / "docs" / "fine-tuning.md").read_text()):
        if language == "toml":
            (newcomer.folder / re.match(r"# (\S+)", block)[1]).write_text(block)
            printed.append("")
        elif language == "python":
            (newcomer.folder / "block.py").write_text(block)  # ranks are processes that import the file
            printed.append(newcomer.run("python", "block.py"))
        else:
            printed.append(newcomer.run("bash", "-eu", "-c", block))
    return printed


def test_the_wheel_is_what_runs(newcomer):
    where = newcomer.run("python", "-c", "import seqloom; print(seqloom.__file__)").strip()
    assert Path(where).is_relative_to(newcomer.commands.parent), where
    assert newcomer.run("seqloom", "--version").startswith("seqloom ")


def test_chats_are_planned_a_model_is_tuned_and_answers(newcomer, said):
    assert "that no plan can beat" in said[2] and "tokens/s" in said[2], said[2]
    steps = [json.loads(line) for line in (newcomer.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [step["loss"] for step in steps if "measured_ms" in step]
    assert len(losses) == 30 and losses[-1] < 0.5 < losses[0]
    assert said[3].strip() == "yes", "what the merged model generates after from_pretrained"


@pytest.mark.skipif(chromium() is None, reason="no Chromium here; on Debian: apt-get install chromium")
def test_the_report_of_the_run_opens_in_a_browser(newcomer, said):
    with Chromium() as browser:
        page = browser.open(newcomer.folder / "run" / "report.html", width=1200, height=900)
        figure = "document.querySelector('[data-figure={}] b').textContent"
        assert page.evaluate(figure.format("steps")) == "30"
        assert float(page.evaluate(figure.format("final_loss"))) < 0.5
        assert page.problems() == []
