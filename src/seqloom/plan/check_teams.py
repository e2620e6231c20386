"""Rules about tensor degrees: teams of a stage's ranks share its weights, and its groups are made of whole teams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from seqloom.plan.check_structure import each_work, place
from seqloom.plan.error import broken
from seqloom.plan.round import Work
from seqloom.plan.stage import Stage

if TYPE_CHECKING:
    from seqloom.plan.plan import Plan


def tensor(plan: Plan) -> None:
    """The tensor degree divides a stage's ranks and the heads, and is an inner part of every group's Ulysses axis.

    A rank holds the same part of the weights in all rounds: groups keep the stage's tensor ranks together. They compute
    linear layers together, so these have no layout of their own, and slices of the weights pass keys on by themselves.
    """
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            _degree(f"pipeline {p} stage {s} has tensor degree {stage.tensor}", stage, plan.limits.heads)
    for where, stage, share in each_work(plan):
        if stage.tensor > 1:
            _groups(place(where), stage, share)


def _degree(value: str, stage: Stage, heads: int) -> None:
    """Refuse a degree that does not divide the ranks, or the query heads."""
    for on, count, what in (("on", len(stage.ranks), "ranks of the stage"), ("for", heads, "query heads")):
        if stage.tensor < 1 or count % stage.tensor:
            nearest = max((size for size in _divisors(count) if size <= stage.tensor), default=1)
            raise broken("tensor", f"{value} {on} {count} {what}", "it divides them", f"use {nearest}")


def _groups(where: str, stage: Stage, share: Work) -> None:
    degree, together = stage.tensor, _cut(stage.ranks, stage.tensor)
    if share.linear is not None:
        must = (
            f"the ranks of a team, {degree} here, compute linear layers together, on the tokens they have in attention"
        )
        way_out = "leave the linear layout out, or use tensor degree 1"
        raise broken("tensor", f"{where} has a linear layout", must, way_out)
    for g, group in enumerate(share.groups):
        name = f"{where} group {g}"
        if group.ulysses % degree:
            value = f"{name} has ulysses {group.ulysses}, tensor degree {degree}"
            must = "tensor ranks are the inner part of the Ulysses axis, ulysses is a multiple of them"
            raise broken("tensor", value, must, f"use ulysses {-(-group.ulysses // degree) * degree}")
        strange = [part for part in _cut(group.ranks, degree) if part not in together]
        if strange:
            must = f"tensor ranks are the stage's ranks cut every {degree}"
            nearest = next(part for part in together if strange[0][0] in part)
            raise broken("tensor", f"{name} has {list(strange[0])} as tensor ranks", must, f"use {list(nearest)}")
        if group.route is not None:
            must = f"keys of each of the {degree} slices of the weights go from rank to rank"
            raise broken("tensor", f"{name} has a route", must, "leave the route out, or use tensor degree 1")


def _cut(ranks: tuple[int, ...], size: int) -> dict[tuple[int, ...], None]:
    return dict.fromkeys(ranks[k : k + size] for k in range(0, len(ranks), size))


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]
