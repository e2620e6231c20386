"""A plan's pipelines in a few characters: for logs, tables and metrics."""

from __future__ import annotations

from collections import Counter

from seqloom.plan.pipeline import Pipeline
from seqloom.plan.plan import Plan


def outline(plan: Plan) -> str:
    """Name the pipelines of a plan side by side, those with most ranks first; equal ones are counted.

    A pipeline is tensor degree x stages / ranks, where groups of ranks that follow each other count as stages:
    ``2x2/4, 1x1/2 x 2`` has two stages of two ranks that split the weights, and two pairs of ranks.
    """
    counts = Counter((len(line.ranks), _name(line)) for line in plan.pipelines)
    largest_first = sorted(counts.items(), key=lambda each: (-each[0][0], each[0][1]))
    return ", ".join(f"{name} x {count}" if count > 1 else name for (_, name), count in largest_first)


def _name(line: Pipeline) -> str:
    tensors = dict.fromkeys(str(stage.tensor) for stage in line.stages)
    return f"{'-'.join(tensors)}x{len(line.hosts)}/{len(line.ranks)}"
