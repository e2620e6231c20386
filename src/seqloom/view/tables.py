"""Tables: the rounds of a plan, and planners side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from seqloom.plan import Group, Plan, Round
from seqloom.planners.explain import Explanation, method_name
from seqloom.simulate import Simulation
from seqloom.view.numbers import milliseconds, percent

if TYPE_CHECKING:
    from seqloom.packing import Balance


Figures = Mapping[str, Sequence[float]]
"""Figures of one planner by name (``step_ms``, ``bound_ms``, ...), each a list over the batches."""


def plan_table(plan: Plan, simulation: Simulation) -> Table:
    """Draw one row per round, and the whole step below.

    Idle and comm are shares of the rank-time that a round holds; in the last row, of all rank-time of the
    step. Groups are written count x degree, the widest first; of several stages, as far as they differ.
    """
    table = _empty(("round", "groups", "tokens", "longest", "ms", "idle %", "comm %"), left="groups")
    many = len(plan.pipelines) > 1
    for entry in simulation.rounds:
        current = plan.pipelines[entry.pipeline].rounds[entry.round]
        lengths = [span.tokens for span in current.by_stage[0].spans()]
        table.add_row(
            f"{entry.pipeline}.{entry.round}" if many else str(entry.round),
            groups_of_round(current),
            f"{sum(lengths):,}",
            f"{max(lengths, default=0):,}",
            milliseconds(entry.time_ns),
            percent(entry.idle_share),
            percent(entry.comm_share),
        )
    table.add_section()
    table.add_row(
        "step",
        f"{len(simulation.rounds)} rounds",
        f"{plan.tokens:,}",
        f"{max(plan.documents):,}",
        milliseconds(simulation.step_ns),
        percent(simulation.idle_share),
        percent(simulation.comm_share),
        style="bold",
    )
    return table


def groups_of_round(current: Round) -> str:
    """Write the groups of a round by degree: ``2x32 1x16``; stages with others after a bar."""
    texts = dict.fromkeys(degree_text(work.groups) for work in current.by_stage)
    return " | ".join(texts)


def degree_text(groups: Iterable[Group]) -> str:
    """Write how many groups there are of every degree, the widest first."""
    count = Counter(group.degree for group in groups)
    return " ".join(f"{count[degree]}x{degree}" for degree in sorted(count, reverse=True))


def comparison_table(results: Mapping[str, Figures], starred: Collection[str] = ()) -> Table:
    """Draw one row per planner, compared with the first one.

    Args:
        results: for every planner the lists over batches that ``seqloom compare --json`` prints under
            ``planners``: step_ms, bound_ms, plan_ms, rounds, comm_share, idle_share, peak_memory_gib. A plan
            that was not made here has plan_ms None.
        starred: planners with a note of their own, which their rows point to.

    Shown over several batches: means; speed-up = the first planner's steps together over the own ones;
    gap = mean of step / bound - 1; the largest memory peak.
    """
    names = ("planner", "step ms", "speed-up", "gap %", "rounds", "comm %", "idle %", "peak GiB", "plan ms")
    table = _empty(names, left="planner")
    steps = {name: figures["step_ms"] for name, figures in results.items()}
    first = sum(next(iter(steps.values()), ()))
    best = min(map(sum, steps.values()), default=0)
    for name, figures in results.items():
        own = sum(steps[name])
        gaps = [step / bound - 1 for step, bound in zip(steps[name], figures["bound_ms"], strict=True)]
        planned = [ms for ms in figures["plan_ms"] if ms is not None]
        table.add_row(
            f"{name} *" if name in starred else name,
            milliseconds(1e6 * _mean(steps[name])),
            f"{first / own:.2f}x",
            percent(_mean(gaps)),
            f"{_mean(figures['rounds']):.3g}",
            percent(_mean(figures["comm_share"])),
            percent(_mean(figures["idle_share"])),
            f"{max(figures['peak_memory_gib']):.1f}",
            milliseconds(1e6 * _mean(planned)) if planned else "-",
            style="bold" if own == best else None,
        )
    return table


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _empty(names: Sequence[str], left: str) -> Table:
    """Return a table without rows: numbers to the right, and nothing but the column `left` may fold."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, collapse_padding=True)
    for name in names:
        folds = name == left
        table.add_column(name, justify="left" if folds else "right", no_wrap=not folds, overflow="fold")
    return table


# ---- merged: view.balance
# How evenly steps use the ranks: one row per planner.


def balance_table(rows: Mapping[str, Balance]) -> Table:
    """Draw imbalance of tokens and of attention work, padding and communication in percent, and the times of steps.

    Where planners make other steps of the same documents, the last column compares them.
    """
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, collapse_padding=True)
    for name in ("planner", "DBR %", "PR %", "ABR %", "CR %", "steps", "step ms", "all ms"):
        table.add_column(name, justify="left" if name == "planner" else "right", no_wrap=True)
    for name, row in rows.items():
        shares = (row.tokens, row.padding, row.attention, row.communication)
        times = (row.step_ns, row.step_ns * row.steps)
        table.add_row(name, *map(percent, shares), f"{row.steps:,}", *map(milliseconds, times))
    return table


# ---- merged: view.explanation
# Why documents are where they are, as a table and two lines.


def explanation_table(explanation: Explanation) -> Table:
    """Draw one row per class of documents, the longest first.

    Costs are rank-milliseconds of one document (time on every rank that works on it): as placed, and in the cheapest
    other shape that memory and the round's end allow.
    """
    remapped = any(one.placement.remapped for one in explanation.classes)
    names = ["lengths", "docs", "zone", "method", "why", "rank-ms", "next best", "rank-ms"]
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, collapse_padding=True)
    for name in names[:4] + ["remap"] * remapped + names[4:]:
        left = name in ("zone", "method", "remap", "why", "next best")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "method", overflow="fold")
    for one in explanation.classes:
        place = one.placement
        table.add_row(
            f"{one.shortest:,}" if one.shortest == one.longest else f"{one.shortest:,}-{one.longest:,}",
            f"{one.documents:,}",
            place.zone.removesuffix("-node"),
            method_name(place.shape),
            *([place.remapped or "-"] if remapped else []),
            place.reason,
            milliseconds(one.cost_ns),
            one.next_best or "-",
            "-" if one.next_ns is None else milliseconds(one.next_ns),
        )
    return table


def bounds_lines(explanation: Explanation) -> list[str]:
    """Say in words from which lengths on documents may be, and have to be, cut."""
    bounds = explanation.bounds
    lost = percent(bounds.break_even)
    lines = [f"break-even: {lost} % of the work is lost to waiting and fixed costs; a cut may cost as much"]
    for zone, pays, forced in (
        ("inside a node", bounds.intra_pays, bounds.intra_forced),
        ("across nodes", bounds.inter_pays, bounds.inter_forced),
    ):
        may = "at no length" if pays is None else f"from {pays:,} tokens"
        must = "never" if forced is None else f"from {forced:,} tokens"
        lines.append(f"cut {zone}: pays {may}, forced by memory or time {must}")
    if any(one.placement.reason == "not cheapest" for one in explanation.classes):
        lines.append("not cheapest: the next best would cost less, but not level the ranks, or the planner has none")
    return lines
