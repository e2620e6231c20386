"""Why a plan places documents as it does: for every class of documents its zone, its shape, and the next best choice.

Everything follows from the plan and the cost model, so it serves plans of any planner. `CutThresholds` says from which
length on a document may be cut inside a node, and across nodes: by prices, never by constants.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from seqloom.cost import CostModel, CostTables, GroupShape, MemoryPolicy
from seqloom.cost.resharding import unshard_times_by_stage
from seqloom.errors import SeqloomError
from seqloom.plan import Plan, StageMicroBatch
from seqloom.simulate import simulate

ZONES = ("inter-node", "intra-node", "local")
SINGLE_RANK = GroupShape(1, 1)
SHORTEST, OCTAVES, STEPS = 128, 14, 16
"""Lengths at which thresholds compare prices: so many steps per octave."""


@dataclass(frozen=True, slots=True)
class CutThresholds:
    """Lengths in tokens from which on a cut pays, or is forced; None where no document may be, or has to be, cut so.

    A cut costs rank-time: exchanges, shorter kernels, more launches. It *pays* where that is no more than the
    break-even, the share of rank-time that would otherwise be lost; it is *forced* where one rank (or one node) has not
    enough memory, or would still be at work when the round ends. Routed shapes count: a faster network lowers the
    thresholds.
    """

    break_even: float  # What a cut may cost, as a share of the uncut document's rank-time
    intra_pays: int | None
    intra_forced: int | None
    inter_pays: int | None
    inter_forced: int | None


class PlacementKey(NamedTuple):
    """What documents of one class have in common."""

    octave: int  # Lengths from ``2**octave`` to below ``2**(octave + 1)`` tokens
    zone: str
    shape: GroupShape
    remapped: str  # Where tokens change to another layout for linear layers; empty if nowhere
    reason: str  # cheapest; memory, time: whole it would not fit, or end late; not cheapest: for balance, or by rule


@dataclass(frozen=True, slots=True)
class DocumentClass:
    """Documents placed in the same way for the same reason.

    Costs are the mean of the class, in rank-ns: time on every rank that works on a document.
    """

    placement: PlacementKey
    documents: int
    shortest: int
    longest: int
    cost_ns: int
    whole_ns: int  # The same on one rank, whether it holds it or not
    next_best: str  # For most of them, the cheapest other shape that fits and ends in time; empty if none
    next_ns: int | None

    def as_dict(self) -> dict[str, Any]:
        """The class for a report in JSON; times in ms."""
        key = self.placement
        return {
            "lengths": [self.shortest, self.longest],
            "documents": self.documents,
            "zone": key.zone,
            "shape": str(key.shape),
            "method": method_name(key.shape),
            "routed": key.shape.routed,
            "remapped": key.remapped or None,
            "reason": key.reason,
            "rank_ms": self.cost_ns / 1e6,
            "whole_rank_ms": self.whole_ns / 1e6,
            "next_best": self.next_best or None,
            "next_best_rank_ms": None if self.next_ns is None else self.next_ns / 1e6,
        }


@dataclass(frozen=True, slots=True)
class Explanation:
    """The thresholds of the zones, and the classes of documents, longest first."""

    thresholds: CutThresholds
    classes: tuple[DocumentClass, ...]

    def as_dict(self) -> dict[str, Any]:
        """The explanation for a report in JSON."""
        return {"bounds": asdict(self.thresholds), "classes": [one.as_dict() for one in self.classes]}


def method_name(shape: GroupShape) -> str:
    """What a shape does, in words."""
    if shape.degree == 1:
        return "whole"
    parts = [f"ulysses {shape.ulysses}"] if shape.ulysses > 1 else []
    parts += [f"{shape.method.value} {shape.ring}"] if shape.ring > 1 else []
    kinds = {"routed": shape.routed, "latents": shape.latent, "states": shape.states}
    return ", ".join([" x ".join(parts), *(name for name, holds in kinds.items() if holds)])


def explain(plan: Plan, cost: CostModel) -> Explanation:
    """Say why every class of documents is where it is; for plans whose pipelines have one stage and whole weights."""
    if any(len(pipeline.stages) != 1 for pipeline in plan.pipelines):
        raise SeqloomError("a plan with pipelines of several stages cannot be explained; explain one of one stage")
    if any(pipeline.stages[0].tensor > 1 for pipeline in plan.pipelines):
        raise SeqloomError("a plan that splits weights over ranks cannot be explained; explain one of tensor degree 1")
    if any(unshard_times_by_stage(cost, pipeline) for pipeline in plan.pipelines):
        raise SeqloomError(
            "a plan that gathers parameters for every pass cannot be explained; explain one in which they stay"
        )
    rounds = simulate(plan, cost).rounds
    works = [plan.pipelines[entry.pipeline].rounds[entry.round].by_stage[0] for entry in rounds]
    priced: dict[PlacementKey, list[DocumentClass]] = defaultdict(list)
    for entry, work in zip(rounds, works, strict=True):
        for one in _priced_documents(work, MemoryPolicy(work.checkpoint, plan.reduce), entry.time_ns, cost):
            priced[one.placement].append(one)
    classes = sorted(map(_merged, priced.values()), key=lambda one: (-one.longest, -one.shortest, one.placement))
    spent = sum(one.cost_ns for rows in priced.values() for one in rows)
    idle = max(0, cost.ranks * cost.plan_ns(plan) - spent) / spent
    first = MemoryPolicy(works[0].checkpoint, plan.reduce)
    return Explanation(cut_thresholds(cost, first, max(entry.time_ns for entry in rounds), idle), tuple(classes))


def _merged(rows: list[DocumentClass]) -> DocumentClass:
    """The class of these single documents; of their next best choices the most frequent one is named."""
    [(next_best, _)] = Counter(row.next_best for row in rows if row.next_best).most_common(1) or [("", 0)]
    others = [row.next_ns for row in rows if row.next_ns is not None]
    return DocumentClass(
        placement=rows[0].placement,
        documents=len(rows),
        shortest=min(row.shortest for row in rows),
        longest=max(row.longest for row in rows),
        cost_ns=sum(row.cost_ns for row in rows) // len(rows),
        whole_ns=sum(row.whole_ns for row in rows) // len(rows),
        next_best=next_best,
        next_ns=sum(others) // len(others) if others else None,
    )


def _priced_documents(
    work: StageMicroBatch, policy: MemoryPolicy, round_ns: int, cost: CostModel
) -> Iterator[DocumentClass]:
    """Every span of a round as a class of its own: where it is, and what it costs there and elsewhere."""
    shapes_of = [GroupShape.of(group) for group in work.groups]
    grouped = zip(work.groups, shapes_of, strict=True)
    spans = [(span.tokens, shape, group) for group, shape in grouped for span in group.spans]
    used = {shape for _, shape, _ in spans}
    shapes = tuple(dict.fromkeys([SINGLE_RANK, *cost.shapes, *sorted(used - set(cost.shapes))]))
    tables = cost.tables(np.array([tokens for tokens, _, _ in spans]), policy, shapes)
    rank_ns = tables.cost[:2].max(axis=0) * tables.degree[:, None]
    fits = tables.tokens[None, :] <= tables.degree[:, None] * tables.capacity
    ends = tables.cost[:2].max(axis=0) + tables.fixed[:2].max(axis=0)[:, None] <= round_ns
    remapped = "" if work.linear is None else work.remap.value
    for k, (tokens, shape, group) in enumerate(spans):
        own = shapes.index(shape)
        others = np.flatnonzero(fits[:, k] & ends[:, k] & (np.arange(len(shapes)) != own))
        best = int(others[rank_ns[others, k].argmin()]) if len(others) else None
        cheapest = best is None or rank_ns[own, k] <= rank_ns[best, k]
        reasons = {"memory": not fits[0, k], "time": not ends[0, k], "cheapest": cheapest}
        reason = next((name for name, holds in reasons.items() if holds), "not cheapest")
        zone = ZONES[group.order_key(cost.node_size)]
        key = PlacementKey(tokens.bit_length() - 1, zone, shape, remapped, reason)
        other, other_ns = ("", None) if best is None else (method_name(shapes[best]), int(rank_ns[best, k]))
        yield DocumentClass(key, 1, tokens, tokens, int(rank_ns[own, k]), int(rank_ns[0, k]), other, other_ns)


def cut_thresholds(cost: CostModel, policy: MemoryPolicy, round_ns: int, break_even: float) -> CutThresholds:
    """The thresholds of one cost model and policy, for a round that ends after ``round_ns``."""
    steps = SHORTEST * 2 ** (np.arange(OCTAVES * STEPS) / STEPS)
    tables = cost.tables(np.unique(cost.padded_lengths(np.rint(steps).astype(np.int64))), policy)
    local = tables.degree == 1
    inside = (tables.degree > 1) & (tables.degree <= cost.node_size)
    across = tables.degree > cost.node_size
    return CutThresholds(
        break_even=break_even,
        intra_pays=_pays(tables, inside, local, break_even),
        intra_forced=_forced(tables, local, round_ns) if inside.any() else None,
        inter_pays=_pays(tables, across, local | inside, break_even),
        inter_forced=_forced(tables, local | inside, round_ns) if across.any() else None,
    )


def _pays(tables: CostTables, wide: np.ndarray, narrow: np.ndarray, break_even: float) -> int | None:
    """The shortest length whose cheapest wide shape costs no more than the break-even above its cheapest narrow one."""
    if not wide.any():
        return None
    spent = tables.cost[:2].max(axis=0) * tables.degree[:, None]
    pays = spent[wide].min(axis=0) <= (1 + break_even) * spent[narrow].min(axis=0)
    return int(tables.tokens[pays.argmax()]) if pays.any() else None


def _forced(tables: CostTables, narrow: np.ndarray, round_ns: int) -> int | None:
    """The shortest length that no narrow shape holds, or ends in time."""
    fits = tables.tokens[None, :] <= tables.degree[:, None] * tables.capacity
    ends = (tables.cost[:2] + tables.fixed[:2, :, None]).max(axis=0) <= round_ns
    held = (fits & ends)[narrow].any(axis=0)
    return None if held.all() else int(tables.tokens[(~held).argmax()])
