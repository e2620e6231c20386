"""Draw docs/timelines.svg, the picture of the README: one batch under one fixed degree and under a plan of its own.

    python docs/timelines.py

Each row is a GPU, time runs to the right, the colour is the degree of the group at work, white is waiting.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

import seqloom as sl
from seqloom.describe import lengths_from
from seqloom.planners import make_plan
from seqloom.simulate import Simulation, simulate

CLUSTER, MODEL, PROFILE = "8x8xA100-40G", "gpt-7b", "flexsp-a100"
SEQUENCES, LONGEST = 512, 192 * 1024
WIDTH, ROW, LEFT, TOP, GAP = 900, 3, 12, 34, 46
"""Pixels: of the slower step, of a GPU, and around the charts."""
COLOURS = {1: "#b8c4d6", 2: "#8fb3d9", 4: "#5b93c7", 8: "#2f6fae", 16: "#3aa37c", 32: "#e0a030", 64: "#d1495b"}
"""By degree; degrees between two powers of two take the lower one's."""


def chart(simulation: Simulation, title: str, top: int, pixels_per_ns: float) -> list[str]:
    """Draw one step: a bar for every run of work of a GPU in groups of one colour."""
    lines = [f'<text x="{LEFT}" y="{top - 8}" class="title">{title}</text>']
    right = LEFT + simulation.step_ns * pixels_per_ns
    lines.append(f'<rect x="{LEFT}" y="{top}" width="{right - LEFT:.1f}" height="{ROW * 64}" class="frame"/>')
    events = simulation.events
    degrees = np.maximum(events.degree, 1)
    for rank in range(64):
        own = events.rank == rank
        runs: list[list[float]] = []
        for start, stop, degree in zip(events.start[own], events.stop[own], degrees[own], strict=True):
            colour = 1 << (int(degree).bit_length() - 1)
            if runs and runs[-1][2] == colour and start - runs[-1][1] < 1e6:
                runs[-1][1] = stop
            else:
                runs.append([start, stop, colour])
        y = top + rank * ROW
        for start, stop, colour in runs:
            x, width = LEFT + start * pixels_per_ns, (stop - start) * pixels_per_ns
            if width >= 0.2:
                lines.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW}" fill="{COLOURS[int(colour)]}"/>'
                )
    return lines


def legend(top: int) -> list[str]:
    """Draw one square per degree."""
    lines = [f'<text x="{LEFT}" y="{top}" class="small">GPUs per sequence group:</text>']
    for place, (degree, colour) in enumerate(COLOURS.items()):
        x = LEFT + 200 + 56 * place
        lines.append(f'<rect x="{x}" y="{top - 10}" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{x + 17}" y="{top}" class="small">{degree}</text>')
    lines.append(f'<text x="{LEFT + 200 + 56 * len(COLOURS)}" y="{top}" class="small">white: waiting</text>')
    return lines


def draw() -> str:
    """Return the picture as SVG."""
    lengths = lengths_from("wikipedia", seed=0, count=SEQUENCES, max_length=LONGEST)
    lengths = lengths[lengths <= LONGEST][:SEQUENCES]
    cost = sl.cost_model(CLUSTER, MODEL, profile=PROFILE, max_length=LONGEST)
    static, auto = (simulate(make_plan(name, lengths, cost), cost) for name in ("static", "auto"))
    scale = WIDTH / static.step_ns
    second = TOP + 64 * ROW + GAP
    bottom = second + 64 * ROW + 26
    faster = static.step_ns / auto.step_ns
    body = [
        *chart(static, f"One degree for the whole run: {static.step_ns / 1e9:.2f} s", TOP, scale),
        *chart(auto, f"A plan for this step: {auto.step_ns / 1e9:.2f} s, {faster:.2f}x as fast", second, scale),
        *legend(bottom),
    ]
    style = (
        ".title{font:600 15px sans-serif;fill:#222}.small{font:13px sans-serif;fill:#444}"
        ".frame{fill:#fff;stroke:#ccc;stroke-width:.5}rect{shape-rendering:crispEdges}"
    )
    size = f'viewBox="0 0 {WIDTH + 2 * LEFT} {bottom + 14}"'
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    return "\n".join(
        [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f"<style>{style}</style>", background, *body, "</svg>", ""]
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw())
