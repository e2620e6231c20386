"""Draw docs/timelines.svg, the picture of the README: one batch under one fixed degree and under a plan of its own.

python docs/timelines.py
"""

from __future__ import annotations

from pathlib import Path

import seqloom as sl
from seqloom.describe import drop_longer, lengths_from
from seqloom.planners import make_plan
from seqloom.simulate import simulate
from seqloom.view import Picture, comparison_picture

CLUSTER, MODEL, PROFILE = "8x8xA100-40G", "gpt-7b", "flexsp-a100"
SEQUENCES, LONGEST = 512, 192 * 1024
NAMES = {"static": "One degree for the whole run", "auto": "A plan for this step"}


def draw() -> Picture:
    """Plan, simulate and draw both steps."""
    drawn = lengths_from("wikipedia", seed=0, count=SEQUENCES, max_length=LONGEST)
    lengths = drop_longer(drawn, LONGEST)[0][:SEQUENCES]
    cost = sl.cost_model(CLUSTER, MODEL, profile=PROFILE, max_length=LONGEST)
    bound = sl.lower_bound(lengths, cost)
    steps = {words: (simulate(make_plan(name, lengths, cost), cost), bound) for name, words in NAMES.items()}
    return comparison_picture(f"One step of {SEQUENCES} sequences on {cost.ranks} GPUs", steps)


if __name__ == "__main__":
    draw().save(Path(__file__).with_suffix(".svg"))
