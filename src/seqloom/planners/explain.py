"""Why a plan places documents as it does: for every class of documents its zone, its shape, and the next best choice.

Everything is derived from the plan and the cost model, so it serves plans of any planner.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from seqloom.cost import CostModel, GroupShape, MemoryPolicy
from seqloom.cost.resharding import unshard_times_by_stage
from seqloom.errors import SeqloomError
from seqloom.plan import Group, Plan, StageMicroBatch
from seqloom.planners.zones.search import ZoneBounds, zone_bounds
from seqloom.simulate import simulate

ZONES = ("inter-node", "intra-node", "local")
WHOLE = GroupShape(1, 1)


class Placement(NamedTuple):
    """Where documents of one octave of lengths are: what makes them a class."""

    octave: int
    """Lengths from ``2**octave`` to below ``2**(octave + 1)`` tokens."""
    zone: str
    shape: GroupShape
    remapped: str
    """Where tokens change to another layout for linear layers; empty if nowhere."""
    reason: str
    """cheapest; memory, time: whole it would not fit, or end late; not cheapest: for balance, or by rule."""


class Figures(NamedTuple):
    """One placed document. Costs are rank-ns: time on every rank that works on it."""

    tokens: int
    cost_ns: int
    whole_ns: int
    next_best: str
    next_ns: int


@dataclass(frozen=True, slots=True)
class DocumentClass:
    """Documents that were placed alike for the same reason. Costs are rank-ns, the mean of the class."""

    placement: Placement
    documents: int
    shortest: int
    longest: int
    cost_ns: int
    whole_ns: int
    """The same on one rank, whether it holds it or not."""
    next_best: str
    """For most of them, the cheapest other shape that fits and ends in time; empty if there is none for any."""
    next_ns: int | None

    def as_dict(self) -> dict[str, Any]:
        """The class for a report in JSON; times in ms."""
        place = self.placement
        return {
            "lengths": [self.shortest, self.longest],
            "documents": self.documents,
            "zone": place.zone,
            "shape": str(place.shape),
            "method": method_name(place.shape),
            "routed": place.shape.routed,
            "remapped": place.remapped or None,
            "reason": place.reason,
            "rank_ms": self.cost_ns / 1e6,
            "whole_rank_ms": self.whole_ns / 1e6,
            "next_best": self.next_best or None,
            "next_best_rank_ms": None if self.next_ns is None else self.next_ns / 1e6,
        }


@dataclass(frozen=True, slots=True)
class Explanation:
    """The bounds of the zones, and the classes of documents, longest first."""

    bounds: ZoneBounds
    classes: tuple[DocumentClass, ...]

    def as_dict(self) -> dict[str, Any]:
        """The explanation for a report in JSON."""
        return {"bounds": self.bounds.as_dict(), "classes": [one.as_dict() for one in self.classes]}


def method_name(shape: GroupShape) -> str:
    """What a shape does, in words."""
    if shape.degree == 1:
        return "whole"
    parts = [f"ulysses {shape.ulysses}"] if shape.ulysses > 1 else []
    parts += [f"{shape.method.value} {shape.ring}"] if shape.ring > 1 else []
    return " x ".join(parts) + (", routed" if shape.routed else "")


def shape_of(group: Group) -> GroupShape:
    """The shape of a group, as the cost tables list it."""
    return GroupShape(group.ulysses, group.ring, group.method, group.route is not None)


def explain(plan: Plan, cost: CostModel) -> Explanation:
    """Say why every class of documents is where it is; for plans whose pipelines have one stage and whole weights.

    Args:
        plan: a plan made for this cost model.
    """
    if any(len(pipeline.stages) != 1 for pipeline in plan.pipelines):
        raise SeqloomError("a plan with pipelines of several stages cannot be explained; explain one of one stage")
    if any(pipeline.stages[0].tensor > 1 for pipeline in plan.pipelines):
        raise SeqloomError("a plan that splits weights over ranks cannot be explained; explain one of tensor degree 1")
    if any(unshard_times_by_stage(cost, pipeline) for pipeline in plan.pipelines):
        raise SeqloomError(
            "a plan that gathers parameters for every pass cannot be explained; explain one in which they stay"
        )
    times = [(entry.pipeline, entry.round, entry.time_ns) for entry in simulate(plan, cost).rounds]
    seen: dict[Placement, list[Figures]] = defaultdict(list)
    spent = 0
    for pipeline, index, round_ns in times:
        work = plan.pipelines[pipeline].rounds[index].work[0]
        for placement, figures in _placed(work, MemoryPolicy(work.checkpoint, plan.reduce), round_ns, cost):
            seen[placement].append(figures)
            spent += figures.cost_ns
    classes = [_class(placement, rows) for placement, rows in seen.items()]
    classes.sort(key=lambda one: (-one.longest, -one.shortest, one.placement))
    longest_round = max(time for _, _, time in times)
    first = plan.pipelines[times[0][0]].rounds[times[0][1]].work[0]
    total = cost.ranks * cost.plan_ns(plan)
    bounds = zone_bounds(
        cost, MemoryPolicy(first.checkpoint, plan.reduce), longest_round, max(0, total - spent) / spent
    )
    return Explanation(bounds, tuple(classes))


def _class(placement: Placement, rows: list[Figures]) -> DocumentClass:
    """The class of these documents; of their next best choices the most frequent one is named."""
    [(next_best, _)] = Counter(row.next_best for row in rows if row.next_best).most_common(1) or [("", 0)]
    others = [row.next_ns for row in rows if row.next_best]
    return DocumentClass(
        placement=placement,
        documents=len(rows),
        shortest=min(row.tokens for row in rows),
        longest=max(row.tokens for row in rows),
        cost_ns=sum(row.cost_ns for row in rows) // len(rows),
        whole_ns=sum(row.whole_ns for row in rows) // len(rows),
        next_best=next_best,
        next_ns=sum(others) // len(others) if others else None,
    )


def _placed(
    work: StageMicroBatch, policy: MemoryPolicy, round_ns: int, cost: CostModel
) -> Iterator[tuple[Placement, Figures]]:
    """Every span of a round: its placement, and what it costs there and elsewhere."""
    spans = [(span.tokens, shape_of(group), group) for group in work.groups for span in group.spans]
    used = {shape for _, shape, _ in spans}
    shapes = tuple(dict.fromkeys([WHOLE, *cost.shapes, *sorted(used - set(cost.shapes))]))
    lengths = np.array([tokens for tokens, _, _ in spans])
    tables = cost.tables(lengths, policy, shapes)
    time = tables.cost[:2].max(axis=0)
    rank_ns = time * tables.degree[:, None]
    fits = tables.tokens[None, :] <= tables.degree[:, None] * tables.capacity
    ends = time + tables.fixed[:2].max(axis=0)[:, None] <= round_ns
    remapped = "" if work.linear is None else work.remap.value
    for k, (tokens, shape, group) in enumerate(spans):
        own = shapes.index(shape)
        open_to = np.flatnonzero(fits[:, k] & ends[:, k] & (np.arange(len(shapes)) != own))
        best = int(open_to[rank_ns[open_to, k].argmin()]) if len(open_to) else None
        placement = Placement(
            octave=tokens.bit_length() - 1,
            zone=ZONES[group.turn(cost.node_size)],
            shape=shape,
            remapped=remapped,
            reason=_reason(bool(fits[0, k]), bool(ends[0, k]), best is None or rank_ns[own, k] <= rank_ns[best, k]),
        )
        other, other_ns = ("", 0) if best is None else (str(shapes[best]), int(rank_ns[best, k]))
        yield placement, Figures(tokens, int(rank_ns[own, k]), int(rank_ns[0, k]), other, other_ns)


def _reason(whole_fits: bool, whole_ends: bool, cheapest: bool) -> str:
    """Why a document is in its shape and not in another."""
    if not whole_fits:
        return "memory"
    if not whole_ends:
        return "time"
    return "cheapest" if cheapest else "not cheapest"
