"""Plans whose rounds have a second layout, for linear layers: any that shard groups allow, and a plain one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from hypothesis import strategies as st

from seqloom.layout import Layout
from seqloom.plan import Plan, Remap, Round, StageMicroBatch

Box = tuple[int, int, int, int]
"""Rank, document, start and stop."""


def with_layout(work: StageMicroBatch, move: Callable[[Box], Sequence[Box]], remap: Remap) -> StageMicroBatch:
    """Give a work the linear layout in which every box of its attention layout is what `move` makes of it."""
    columns = (column.tolist() for column in work.attention_layout().columns())
    boxes = [moved for box in zip(*columns, strict=True) for moved in move(box) if moved[2] < moved[3]]
    return replace(work, linear=Layout.of(boxes), remap=remap)


def with_works(plan: Plan, change: Callable[[StageMicroBatch], StageMicroBatch]) -> Plan:
    """Return a plan of one stage with the work of every round changed."""
    line = plan.pipelines[0]
    rounds = tuple(Round((change(each.by_stage[0]),)) for each in line.rounds)
    changed = replace(plan, pipelines=(replace(line, rounds=rounds),))
    changed.validate()
    return changed


@st.composite
def with_linear_layouts(draw: st.DrawFn, plan: Plan) -> Plan:
    """Give rounds of a plan any linear layout that its shard groups allow, and remap around attention or the MLP."""
    shard_groups = {rank: shard_group for shard_group in plan.shard_groups for rank in shard_group}

    def move(box: Box) -> list[Box]:
        rank, document, start, stop = box
        inner = draw(st.sets(st.integers(start + 1, stop - 1), max_size=2)) if stop - start > 1 else set()
        pieces = pairwise([start, *sorted(inner), stop])
        return [(draw(st.sampled_from(shard_groups[rank])), document, low, high) for low, high in pieces]

    def change(work: StageMicroBatch) -> StageMicroBatch:
        return with_layout(work, move, draw(st.sampled_from(Remap))) if draw(st.booleans()) else work

    return with_works(plan, change)


def shifted(plan: Plan, remap: Remap) -> Plan:
    """Return the plan with linear layouts in which half of what a rank holds is on the next of its shard group."""
    onward = {
        rank: shard_group[(k + 1) % len(shard_group)]
        for shard_group in plan.shard_groups
        for k, rank in enumerate(shard_group)
    }

    def move(box: Box) -> list[Box]:
        rank, document, start, stop = box
        middle = (start + stop) // 2
        return [(rank, document, start, middle), (onward[rank], document, middle, stop)]

    return with_works(plan, lambda work: with_layout(work, move, remap))
