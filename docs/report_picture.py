"""Draws docs/report.png, the report in the README: the same batch under three planners, as a browser shows it.

    python docs/report_picture.py

The input is fixed: a sampler with a seed, so the figures are the same on any machine. Needs Chromium.
"""

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


if __name__ == "__main__":
    print(draw(DOCS / "report.png"))
