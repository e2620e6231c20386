"""Draws docs/report.png, the report in the README, and docs/reports/*.png, the reports of docs/report.md.

    python docs/report_picture.py

The README's is the same batch under three planners: a sampler with a seed, so the figures are the same on any machine.
Those of the page are the heads of five commands' reports, as a browser shows them. Needs Chromium.
"""

import shlex
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.append(str(DOCS.parent / "tests"))

from seqloom.api import cost_model, evaluate_planners  # noqa: E402
from seqloom.cli.shared import Source, Workload, save_report  # noqa: E402
from support.chromium import Chromium  # noqa: E402

LONGEST, SEQUENCES, WIDTH, HEIGHT = 131_072, 512, 1200, 900
_PLACE = "--cluster 2x8xH200 --model llama3-8b"
_LENGTHS = "--lengths commoncrawl --max-length 131072 --batch-size 128"
_TINY = "--set run.output=run --set run.steps=6 --set data.sequences=4 --set evaluation.every=0"
COMMANDS = {
    "plan": f"plan {_LENGTHS} {_PLACE} --out plan.json --html plan.html --json",
    "compare": f"compare {_LENGTHS} {_PLACE} --planners static,flex,zones --html compare.html --json",
    "simulate": "simulate plan.json --html simulate.html --json",
    "train": f"train {DOCS.parent / 'recipes' / 'tiny-cpu.toml'} --ranks 2 {_TINY} --json",
    "demo": "demo --no-train --html demo.html --json",
}
"""Commands that write a report, in the order in which they can run in one folder."""
FILES = {name: f"{name}.html" for name in COMMANDS} | {"train": "run/report.html"}


def draw(target: Path) -> dict[str, str]:
    """Write the picture, from the head of the page to the end of its timeline, and return what it shows."""
    cost = cost_model("8x8xH200", "llama3-8b", sharding="hybrid", max_length=LONGEST)
    workload = Workload.by_count(Source("commoncrawl", 0, LONGEST), SEQUENCES)
    [row] = evaluate_planners(["static", "flex", "auto"], workload.batches, cost)
    row = {name: replace(one, planning_ns=None) for name, one in row.items()}  # planning times differ from run to run
    with tempfile.TemporaryDirectory() as folder, Chromium() as browser:
        path = Path(folder) / "report.html"
        save_report(path, cost, row, *workload.notes())
        page = browser.open(path, width=WIDTH, height=HEIGHT)
        end = page.evaluate("document.querySelector('#lengths').getBoundingClientRect().top + scrollY")
        page.screenshot(target, height=end - 20)
        figure = "document.querySelector('[data-figure={}] b').textContent"
        shown = {
            "step": page.evaluate(figure.format("step_ms")),
            "above the bound": page.evaluate(figure.format("gap")),
        }
        return {"chosen": page.evaluate("document.querySelector('#step').dataset.name"), **shown}


def draw_heads(target: Path) -> None:
    """Run the five commands and write the head of each report, as wide as the README's."""
    with tempfile.TemporaryDirectory() as folder, Chromium() as browser:
        for name, command in COMMANDS.items():
            words = [sys.executable, "-m", "seqloom", *shlex.split(command)]
            subprocess.run(words, cwd=folder, check=True, stdout=subprocess.DEVNULL)
            page = browser.open(Path(folder) / FILES[name], width=WIDTH, height=HEIGHT)
            page.screenshot(target / f"{name}.png", height=HEIGHT)
            page.close()


if __name__ == "__main__":
    print(draw(DOCS / "report.png"))
    draw_heads(DOCS / "reports")
