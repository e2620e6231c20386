"""Charts on a `Picture`: a simulated step, lengths of a batch, planners below each other, a schedule of actions.

Time runs to the right; every row is a rank, a node's NICs or a pp_rank. In a step the colour is the degree of the group
at work, fainter in forward than in backward; the page shows through where ranks wait.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from seqloom.plan import Plan
from seqloom.schedules.schedule import Schedule
from seqloom.schedules.timing import ScheduleMetrics
from seqloom.simulate import Simulation
from seqloom.simulate.events import EventKind, EventTable
from seqloom.view.format import duration, percent, tokens
from seqloom.view.gantt import ACTION_NAMES
from seqloom.view.picture import (
    ACTIONS,
    END_COLOUR,
    NIC_COLOUR,
    Bars,
    Line,
    Picture,
    Words,
    degree_colour,
    round_ticks,
    time_ticks,
)
from seqloom.view.tables import buckets

LEFT, RIGHT = 84, 24
"""Pixels beside a chart: labels of its rows, and room for the last label of its axis."""
RANKS_HEIGHT, NICS_HEIGHT, MOST_ROW = 320, 72, 18
"""Pixels of all ranks, of all NICs, and of one row at most; every row has at least one pixel."""
FORWARD_OPACITY = 0.5
PALE = frozenset((EventKind.F, EventKind.W))
"""Drawn pale: forward, and the weight half of a backward, so that it is told from the input half."""
NIC_LEVELS = 8
"""Shades of NICs in use."""


@dataclass(frozen=True, slots=True, eq=False)
class RankRuns:
    """Events of neighbouring ranks as one: what the ranks of a group do together, from first to last rank."""

    events: EventTable  # of the first rank of each run
    ranks: np.ndarray  # int64[runs], neighbouring ranks that do the same


def rank_runs(simulation: Simulation) -> RankRuns:
    """Join the events of neighbouring ranks of a group that have the same times; messages are left out."""
    events = simulation.events.where(~simulation.events.is_message)
    names = ("start", "stop", "kind", "comm", "round", "group", "degree", "pipeline", "stage")
    events = events.where(np.lexsort((events.rank, *(getattr(events, name) for name in names))))
    same = events.rank[1:] == events.rank[:-1] + 1
    for column in (getattr(events, name) for name in names):
        same &= column[1:] == column[:-1]
    first = np.flatnonzero(np.concatenate([[True], ~same])) if len(events) else np.zeros(0, dtype=np.int64)
    return RankRuns(events.where(first), np.diff(np.append(first, len(events))))


def round_edges(simulation: Simulation) -> list[tuple[int, int, int]]:
    """Return (round, start, stop) in ns of rounds that come one after the other on all ranks; [] where they do not."""
    events = simulation.events
    own = events.where((events.round >= 0) & ~events.is_message)
    if len(np.unique(own.pipeline)) != 1:
        return []
    numbers = np.unique(own.round)
    edges = [(int(own.start[own.round == n].min()), int(own.stop[own.round == n].max()), int(n)) for n in numbers]
    edges.sort()
    apart = all(before[1] <= after[0] for before, after in pairwise(edges))
    return [(n, start, stop) for start, stop, n in edges] if apart else []


def add_timeline(
    picture: Picture, simulation: Simulation, *, stop_ns: int | None = None, bound_ns: int | None = None
) -> None:
    """Add a simulated step: a row per rank, a row per node with NICs, rounds above and a time axis below.

    Args:
        picture: is extended by the chart.
        simulation: the step.
        stop_ns: where the axis ends; None: with the step.
        bound_ns: a dashed line at the lower bound; None: no line.
    """
    stop_ns = max(stop_ns or simulation.step_ns, 1)
    left, top, scale = LEFT, picture.height + 14, (picture.width - LEFT - RIGHT) / stop_ns
    row, nodes = min(MOST_ROW, max(1.0, RANKS_HEIGHT / simulation.ranks)), len(simulation.nic_busy_ns)
    gap = 3.0 if 1 < nodes <= 64 else 0.0
    node_height = row * simulation.node_size + gap
    bottom = top + nodes * node_height - gap
    for number, start, stop in round_edges(simulation):
        x, width = left + start * scale, (stop - start) * scale
        picture.add(Line(x, top - 12, x, bottom))
        if width > 16:
            picture.add(Words(x + 4, top - 3, f"round {number}" if width > 60 else str(number), "small"))
    _add_row_labels(picture, simulation, top, row, node_height)
    runs = rank_runs(simulation)
    _add_bars(picture, runs, left, top, scale, row, (simulation.node_size, gap))
    bottom = _add_nics(picture, simulation, left, bottom + 8, scale)
    _add_time_axis(picture, left, top, bottom, scale, stop_ns)
    if bound_ns is not None:
        x = left + bound_ns * scale
        picture.add(Line(x, top - 12, x, bottom + 4, "bound"))
        picture.add(Words(x - 4, top - 3, "bound", "small", "end"))
    end = left + simulation.step_ns * scale
    picture.add(Line(end, top - 12, end, bottom))
    picture.height = bottom + 30


def _add_row_labels(picture: Picture, simulation: Simulation, top: float, row: float, node_height: float) -> None:
    """Name ranks where a row is high enough for words, else nodes, else some of the nodes."""
    nodes = len(simulation.nic_busy_ns)
    if row >= 11:
        for rank in range(simulation.ranks):
            y = top + (rank // simulation.node_size) * (node_height - row * simulation.node_size) + (rank + 0.5) * row
            picture.add(Words(LEFT - 8, y + 4, f"rank {rank}", "small", "end"))
        return
    every = max(1, int(np.ceil(14 / node_height)))
    for node in range(0, nodes, every):
        label = f"node {node}" if nodes > 1 else f"ranks 0-{simulation.ranks - 1}"
        picture.add(Words(LEFT - 8, top + (node + 0.5 * min(every, 1)) * node_height + 4, label, "small", "end"))


def _add_bars(
    picture: Picture,
    runs: RankRuns,
    left: float,
    top: float,
    scale: float,
    row: float,
    nodes: tuple[int, float],
) -> None:
    """Add the bars of a step, by colour; `nodes` is the ranks of a node and the gap between nodes in pixels."""
    events, (node_size, gap) = runs.events, nodes
    last = events.rank + runs.ranks - 1
    y = top + events.rank * row + events.rank // node_size * gap
    below = top + (last + 1) * row + last // node_size * gap
    margin = 1.0 if row >= 5 else 0.0
    boxes = np.stack(
        [left + events.start * scale, y, (events.stop - events.start) * scale, np.maximum(below - y - margin, 0.5)],
        axis=1,
    )
    pale = np.isin(events.kind, list(PALE))
    for degree in np.unique(events.degree).tolist():
        for shade, opacity in ((True, FORWARD_OPACITY), (False, 1.0)):
            chosen = (events.degree == degree) & (pale == shade)
            if chosen.any():
                picture.add(Bars(boxes[chosen], degree_colour(degree), opacity))


def _add_nics(picture: Picture, simulation: Simulation, left: float, top: float, scale: float) -> float:
    """Add a row per node whose shade is the share of time in which its NICs are in use; return where they end."""
    nics, nodes = simulation.nics, len(simulation.nic_busy_ns)
    if nodes == 1 or not len(nics):
        return top - 8
    row = min(8.0, max(1.0, NICS_HEIGHT / nodes))
    use = np.clip(nics.busy / np.maximum(nics.stop - nics.start, 1), 0, 1)
    level = np.ceil(use * NIC_LEVELS).astype(np.int64)
    boxes = np.stack(
        [
            left + nics.start * scale,
            top + nics.node * row,
            (nics.stop - nics.start) * scale,
            np.full(len(nics), max(row - 1, 0.8)),
        ],
        axis=1,
    )
    for number in np.unique(level).tolist():
        picture.add(Bars(boxes[level == number], NIC_COLOUR, number / NIC_LEVELS))
    picture.add(Words(LEFT - 8, top + nodes * row / 2 + 4, "NICs by node", "small", "end"))
    return top + nodes * row


def _add_time_axis(picture: Picture, left: float, top: float, bottom: float, scale: float, stop_ns: float) -> None:
    for time, label in zip(*time_ticks(stop_ns), strict=True):
        x = left + time * scale
        picture.add(Line(x, bottom, x, bottom + 5))
        picture.add(Words(x, bottom + 18, label, "small", "middle"))
    picture.add(Line(left, bottom, left + stop_ns * scale, bottom))


def step_legend(simulations: Sequence[Simulation]) -> list[tuple[str, str, float]]:
    """Return the entries of a legend for these steps: (colour, words, opacity)."""
    degrees = sorted({int(degree) for each in simulations for degree in np.unique(each.events.degree)} - {0})
    named: dict[str, list[int]] = {}
    for degree in degrees:
        named.setdefault(degree_colour(degree), []).append(degree)
    entries = [("", "ranks per group:", 1.0)]
    entries += [(colour, ", ".join(map(str, own)), 1.0) for colour, own in named.items()]
    middle = degree_colour(degrees[len(degrees) // 2]) if degrees else END_COLOUR
    entries += [(middle, "forward (fainter)", FORWARD_OPACITY), (middle, "backward", 1.0)]
    if any((each.events.kind == EventKind.STEP).any() for each in simulations):
        entries.append((END_COLOUR, "reduction, optimiser", 1.0))
    if any(len(each.nic_busy_ns) > 1 and len(each.nics) for each in simulations):
        entries.append((NIC_COLOUR, "NICs in use", 1.0))
    return entries


def add_histogram(picture: Picture, lengths: Sequence[int]) -> None:
    """Add the lengths of a batch: share of sequences and share of tokens per power of two, to one scale."""
    found = buckets(lengths)
    most = max((max(bucket[1:3]) for bucket in found), default=1.0)
    left, top, height = LEFT, picture.height + 16, 92
    pitch = min(64.0, (picture.width - LEFT - RIGHT) / max(len(found), 1))
    bar = pitch * 0.36
    for share in round_ticks(most, 4):
        y = top + height * (1 - share / most)
        picture.add(Line(left, y, left + pitch * len(found), y))
        picture.add(Words(left - 8, y + 4, f"{100 * share:.3g} %", "small", "end"))
    for k, colour in ((1, "#56b4e9"), (2, "#d55e00")):
        boxes = [
            (left + pitch * (n + 0.5) + (k - 2) * bar, top + height * (1 - bucket[k] / most), bar - 1, height)
            for n, bucket in enumerate(found)
        ]
        array = np.array(boxes)
        array[:, 3] = top + height - array[:, 1]
        picture.add(Bars(array, colour))
    for n, bucket in enumerate(found):
        picture.add(Words(left + pitch * (n + 0.5), top + height + 14, tokens(bucket.low), "small", "middle"))
    picture.height = top + height + 28
    names = ("share of sequences", "share of tokens, by length: from so many tokens to twice as many")
    picture.legend([("#56b4e9", names[0], 1.0), ("#d55e00", names[1], 1.0)])


def plan_picture(plan: Plan, simulation: Simulation, bound_ns: int | None, notes: Sequence[str]) -> Picture:
    """Draw a plan: lengths of its documents, and the timeline of its step with the lower bound; `notes` come first."""
    picture = Picture(f"A step of {len(plan.documents):,} sequences on {simulation.ranks} ranks")
    gap = "" if bound_ns is None else f", {percent(simulation.step_ns / bound_ns - 1)} % above the bound"
    picture.heading(f"{picture.title}: {duration(simulation.step_ns)}{gap}", *notes)
    add_histogram(picture, plan.documents)
    add_timeline(picture, simulation, bound_ns=bound_ns)
    picture.legend(step_legend([simulation]))
    return picture


def comparison_picture(
    title: str, steps: Mapping[str, tuple[Simulation, int | None]], notes: Sequence[str] = ()
) -> Picture:
    """Draw the steps of several planners below each other, on one time axis; each with its own lower bound."""
    picture = Picture(title)
    picture.heading(title, *notes)
    longest = max(simulation.step_ns for simulation, _ in steps.values())
    first = next(iter(steps.values()))[0].step_ns
    for number, (name, (simulation, bound_ns)) in enumerate(steps.items()):
        words = f"{name}: {duration(simulation.step_ns)}"
        words += f", {first / simulation.step_ns:.2f}x as fast" if number else ""
        picture.add(Words(20, picture.height + 10, words, "title"))
        picture.height += 18
        add_timeline(picture, simulation, stop_ns=longest, bound_ns=bound_ns)
    picture.legend(step_legend([simulation for simulation, _ in steps.values()]))
    return picture


def schedule_picture(schedule: Schedule, metrics: ScheduleMetrics, notes: Sequence[str]) -> Picture:
    """Draw a schedule as a Gantt chart: a row per pp_rank, a bar per action with its unit, peak memory at the end.

    With several stages per pp_rank the later ones are paler, as is usual for interleaved schedules.
    """
    timing, memory_width = metrics.timing, 96
    picture = Picture(f"Schedule {schedule.name}")
    picture.heading(f"{schedule.name}: bubble {percent(metrics.bubble)} %, {metrics.step_time:.6g} a step", *notes)
    rows, row = len(schedule.rows), min(26.0, max(4.0, 420 / len(schedule.rows)))
    left, top = LEFT, picture.height + 16
    scale = (picture.width - left - memory_width) / max(timing.makespan, 1)
    bottom = top + rows * row
    chunk_of = _chunks(schedule)
    boxes: dict[tuple[str, int], list[tuple[float, float, float, float]]] = {}
    words = []
    for h, actions in enumerate(schedule.rows):
        y = top + h * row
        for action, start, stop in zip(actions, timing.start[h], timing.stop[h], strict=True):
            box = left + start * scale, y + 0.5, max((stop - start) * scale - 0.5, 0.2), row - 1
            boxes.setdefault((action.kind.value, chunk_of[action.stage]), []).append(box)
            label, style = (
                str(action.round),
                "on" if action.kind.value in "FI" and not chunk_of[action.stage] else "ink",
            )
            if box[2] >= 7 * len(label) + 2 and row >= 12:
                words.append(Words(box[0] + box[2] / 2, y + row / 2 + 4, label, style, "middle"))
        if row >= 11 or h % int(np.ceil(12 / row)) == 0:
            picture.add(Words(left - 8, y + row / 2 + 4, f"pp_rank {h}", "small", "end"))
            picture.add(Words(picture.width - 12, y + row / 2 + 4, f"{metrics.peak_memory[h]:.4g}", "small", "end"))
    picture.add(Words(picture.width - 12, top - 4, "peak memory", "small", "end"))
    chunks = max(chunk_of, default=0) + 1
    for (kind, chunk), own in sorted(boxes.items()):
        picture.add(Bars(np.array(own), ACTIONS[kind], 1 - 0.45 * chunk / max(chunks - 1, 1)))
    picture.add(*words)
    unit = timing.makespan / metrics.makespan if metrics.makespan else 1
    for tick in round_ticks(metrics.makespan, 12):
        x = left + tick * unit * scale
        picture.add(Line(x, bottom, x, bottom + 5), Words(x, bottom + 18, f"{tick:g}", "small", "middle"))
    picture.add(Line(left, bottom, left + timing.makespan * scale, bottom))
    picture.add(Words(left, bottom + 34, "time, in units of --times; memory in micro-batches", "small"))
    picture.height = bottom + 44
    kinds = [kind for kind in ACTIONS if any(kind == own for own, _ in boxes)]
    legend = [(ACTIONS[kind], ACTION_NAMES[kind], 1.0) for kind in kinds]
    picture.legend(legend + [("", "paler: later stages of a pp_rank", 1.0)] * (chunks > 1))
    return picture


def _chunks(schedule: Schedule) -> list[int]:
    """Return of every stage how many stages its pp_rank has before it."""
    seen: dict[int, int] = {}
    found = []
    for pp_rank in schedule.pp_ranks:
        found.append(seen.get(pp_rank, 0))
        seen[pp_rank] = found[-1] + 1
    return found
