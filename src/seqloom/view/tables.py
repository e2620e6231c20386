"""Tables: rounds of a plan, planners side by side, lengths of a batch, ranks of strategies, placements explained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from statistics import fmean
from string import ascii_lowercase
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from seqloom.plan import Checkpoint, Group, Plan, Round, StageMicroBatch
from seqloom.planners.explain import Explanation, method_name
from seqloom.simulate import Simulation
from seqloom.view.format import bar, milliseconds, percent, table_of, tokens

if TYPE_CHECKING:
    from seqloom.packing import Balance
    from seqloom.planners.hydraulis import ParallelConfig, Strategy

BAR_CELLS = 20
"""Cells of a full bar of the histogram, where the console is wide enough."""
BESIDE_BARS = 44
"""Characters of a row of the histogram that are not bars: label, two numbers, and what stands between."""
GROUPS_LEGEND = "groups: 2 of 4 are two groups of four ranks each"
COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")

Figures = Mapping[str, Sequence[float]]
"""Figures of one planner by name (``step_ms``, ``bound_ms``, ...), each a list over the batches."""


def plan_table(plan: Plan, simulation: Simulation) -> Table:
    """Draw one row per round, and the step below.

    Idle and comm are shares of the rank-time that a round holds; in the last row, of all rank-time of the step. Groups
    are written count of degree, the widest first; stages whose groups differ are separated by a bar. What that means,
    and what rounds recompute, if they do, stands below.
    """
    columns = ("round", "groups", "tokens", "longest", "ms", "idle %", "comm %")
    table = table_of(columns, left=("groups",), folding="groups")
    recomputed = []
    for entry in simulation.rounds:
        current = plan.pipelines[entry.pipeline].rounds[entry.round]
        lengths = [span.tokens for span in current.by_stage[0].spans()]
        name = f"{entry.pipeline}.{entry.round}" if len(plan.pipelines) > 1 else str(entry.round)
        sizes = f"{sum(lengths):,}", f"{max(lengths, default=0):,}"
        shares = percent(entry.idle_share), percent(entry.comm_share)
        table.add_row(name, groups_of_round(current), *sizes, milliseconds(entry.time_ns), *shares)
        recomputed.append((name, recompute_text(current)))
    table.add_section()
    sizes = f"{plan.tokens:,}", f"{max(plan.documents):,}"
    times = milliseconds(simulation.step_ns), percent(simulation.idle_share), percent(simulation.comm_share)
    table.add_row("step", f"{len(simulation.rounds)} rounds", *sizes, *times, style="bold")
    lines = [GROUPS_LEGEND]
    if any(text for _, text in recomputed):
        runs = [(text, [name for name, _ in run]) for text, run in groupby(recomputed, key=itemgetter(1))]
        said = [f"{names[0]}{f' to {names[-1]}' if len(names) > 1 else ''} {text}" for text, names in runs if text]
        lines.append(f"recomputed: round {'; round '.join(said)}")
    table.caption, table.caption_justify = "\n".join(lines), "left"
    return table


def recompute_text(current: Round) -> str:
    """Write the checkpointing of a round, and how many layers do something else: ``selective, 4 layers none``.

    Nothing where all is kept. Stages that do something else follow after a bar.
    """

    def text(work: StageMicroBatch) -> str:
        parts = [] if work.checkpoint in (Checkpoint.NONE, Checkpoint.PROFILE) else [str(work.checkpoint)]
        parts += [f"{work.lighter_layers} layers {work.checkpoint.lighter}"] if work.lighter_layers else []
        parts += [f"{work.offloaded_layers} layers offloaded"] if work.offload else []
        return ", ".join(parts)

    return " | ".join(filter(None, dict.fromkeys(map(text, current.by_stage))))


def groups_of_round(current: Round) -> str:
    """Write the groups of a round by degree: ``2 of 32, 1 of 16``; stages with other groups follow after a bar."""
    return " | ".join(dict.fromkeys(degree_text(work.groups) for work in current.by_stage))


def degree_text(groups: Iterable[Group]) -> str:
    """Write how many groups have each degree, the widest first."""
    count = Counter(group.degree for group in groups)
    return ", ".join(f"{count[degree]} of {degree}" for degree in sorted(count, reverse=True))


def comparison_table(results: Mapping[str, Figures], starred: Collection[str] = ()) -> Table:
    """Draw one row per planner, compared with the first one.

    Over several batches a row shows means; speed-up is the first planner's total step time over its own; gap is the
    mean of step / bound - 1; memory is the largest peak. The lists over batches are those that ``seqloom compare
    --json`` prints under ``planners``; a plan that was read from a file has plan_ms None. Rows of starred planners
    point to a note below the table. Tensor and expert degrees stand below, where one is above 1.
    """
    names = ("planner", "step ms", "speed-up", "gap %", "rounds", "comm %", "idle %", "peak GiB", "plan ms")
    table = table_of(names, left=("planner",), folding="planner")
    totals = {name: sum(figures["step_ms"]) for name, figures in results.items()}
    first = next(iter(totals.values()), 0)
    for name, figures in results.items():
        gaps = [step / bound - 1 for step, bound in zip(figures["step_ms"], figures["bound_ms"], strict=True)]
        planned = [ms for ms in figures["plan_ms"] if ms is not None]
        table.add_row(
            f"{name} *" if name in starred else name,
            milliseconds(1e6 * fmean(figures["step_ms"])),
            f"{first / totals[name]:.2f}x",
            percent(fmean(gaps)),
            f"{fmean(figures['rounds']):.3g}",
            percent(fmean(figures["comm_share"])),
            percent(fmean(figures["idle_share"])),
            f"{max(figures['peak_memory_gib']):.1f}",
            milliseconds(1e6 * fmean(planned)) if planned else "-",
            style="bold" if totals[name] == min(totals.values()) else None,
        )
    lines = []
    for kind in ("tensor", "expert"):
        degrees = {name: int(max(figures.get(kind, (1,)))) for name, figures in results.items()}
        if any(degree > 1 for degree in degrees.values()):
            same = len(set(degrees.values())) == 1
            said = [str(degree) if same else f"{name} {degree}" for name, degree in degrees.items()]
            lines.append(f"{kind} degree: {', '.join(dict.fromkeys(said))}")
    table.caption, table.caption_justify = "\n".join(lines) or None, "left"
    return table


def balance_table(rows: Mapping[str, Balance]) -> Table:
    """Draw how evenly the steps of every planner use the ranks, see `packing.Balance`; shares in percent.

    Planners may make different numbers of steps of the same documents: the last column compares their total times.
    """
    table = table_of(("planner", "DBR %", "PR %", "ABR %", "CR %", "steps", "step ms", "all ms"), left=("planner",))
    for name, row in rows.items():
        shares = (row.tokens, row.padding, row.attention, row.communication)
        times = (row.step_ns, row.step_ns * row.steps)
        table.add_row(name, *map(percent, shares), f"{row.steps:,}", *map(milliseconds, times))
    return table


def explanation_table(explanation: Explanation) -> Table:
    """Draw one row per class of documents, the longest first.

    Costs are rank-milliseconds of one document (time on every rank that works on it): as placed, and in the cheapest
    other shape that memory and the round's end allow.
    """
    remapped = any(one.placement.remapped for one in explanation.classes)
    names = ["lengths", "docs", "zone", "method", *["remap"] * remapped, "why", "rank-ms", "next best", "rank-ms"]
    table = table_of(names, left=("zone", "method", "remap", "why", "next best"), folding="method")
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
    """Say in words from which lengths on cutting a document pays, and from which memory or time force it."""
    bounds = explanation.thresholds
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


class Bucket(NamedTuple):
    """Sequences of `low` to `2 * low - 1` tokens, as shares of all sequences, tokens and attention work."""

    low: int
    sequences: float
    tokens: float
    attention: float  # by the square of the length


def buckets(lengths: Sequence[int] | np.ndarray) -> list[Bucket]:
    """Count sequences and tokens per power of two, from the shortest to the longest length, empty ones included."""
    sizes = np.asarray(lengths, dtype=np.int64)
    powers = np.array([int(size).bit_length() - 1 for size in sizes], dtype=np.int64)
    found, squares = [], sizes.astype(np.float64) ** 2
    for power in range(powers.min(initial=64), powers.max(initial=0) + 1):
        own = powers == power
        shares = own.sum() / len(sizes), sizes[own].sum() / sizes.sum(), squares[own].sum() / squares.sum()
        found.append(Bucket(1 << power, *map(float, shares)))
    return found


@dataclass(frozen=True, slots=True)
class LengthHistogram:
    """Lengths of a batch: share of sequences and share of tokens per power of two, as bars."""

    lengths: Sequence[int] | np.ndarray

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw both columns of bars to one scale, so that they can be compared."""
        table = table_of(("length", "sequences %", "", "tokens %", ""), left=("",))
        found = buckets(self.lengths)
        most = max((max(bucket[1:3]) for bucket in found), default=1.0)
        cells = max(4, min(BAR_CELLS, (options.max_width - BESIDE_BARS) // 2))
        for low, *shares in found:
            bars = [bar(share / most, cells, options.ascii_only) for share in shares]
            counts = [percent(share) for share in shares]
            table.add_row(
                f"{tokens(low)}-{tokens(2 * low)}", counts[0], f"[cyan]{bars[0]}", counts[1], f"[magenta]{bars[1]}"
            )
        yield table


@dataclass(frozen=True, slots=True)
class RankChart:
    """Ranks of strategies: a line per strategy, a letter per rank, a gap between nodes, and a legend of the letters.

    Pipelines of one parallel config have the same letter, neighbours in capital and small.
    """

    strategies: Sequence[Strategy]
    node_size: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw as many whole nodes in a line as fit."""
        configs = list(dict.fromkeys(pipe.parallel for each in self.strategies for pipe in each.pipelines))
        letters = {config: ascii_lowercase[k % len(ascii_lowercase)] for k, config in enumerate(configs)}
        styles = {config: COLOURS[k % len(COLOURS)] for k, config in enumerate(configs)}
        margin = len(str(len(self.strategies) - 1)) + 2
        per_line = max(1, (options.max_width - margin) // (self.node_size + 1)) * self.node_size
        for k, strategy in enumerate(self.strategies):
            cells = [(".", "dim")] * (max(strategy.ranks) + 1)
            for number, pipe in enumerate(sorted(strategy.pipelines, key=lambda pipe: min(pipe.ranks))):
                letter = letters[pipe.parallel]
                for rank in pipe.ranks:
                    cells[rank] = letter if number % 2 else letter.upper(), styles[pipe.parallel]
            for first in range(0, len(cells), per_line):
                line = Text(f"{k if first == 0 else '':>{margin - 2}}  ")
                for place, (letter, style) in enumerate(cells[first : first + per_line]):
                    line.append(" " if place and place % self.node_size == 0 else "")
                    line.append(letter, style)
                yield line
        yield Text("")
        for config in configs:
            yield Text.assemble((letters[config].upper(), styles[config]), (f"  {config}: {_words(config)}", "default"))


def _words(config: ParallelConfig) -> str:
    """Say what a parallel config means: ``tensor 2, 4 stages, Ulysses 2``."""
    words = [f"tensor {config.tensor}", f"{config.stages} stage" + "s" * (config.stages > 1)]
    words += [f"Ulysses {config.ulysses}"] * (config.ulysses > 1) + [f"ring {config.ring}"] * (config.ring > 1)
    return ", ".join(words + ["parameters resharded after every pass"] * config.reshard_after_forward)
