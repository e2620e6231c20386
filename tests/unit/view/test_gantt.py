"""Gantt charts of steps and schedules: every line as wide as asked, idle visible, marks explained, in any terminal."""

import re
from itertools import product

import numpy as np
import pytest

from seqloom.schedules import Times, build_schedule, simulate_schedule
from seqloom.simulate import EventKind, EventTable, NicTable, Simulation
from seqloom.view import Gantt, ScheduleChart
from seqloom.view.gantt import colour, occupancy
from support.console import text_of


def simulation_of(rows, ranks, step, node_size=8, nics=()):
    """``rows``: (rank, start, stop, degree, kind); ``nics``: (node, start, stop, busy)."""
    rank, start, stop, degree, kind = np.array(sorted(rows), dtype=np.int64).reshape(-1, 5).T
    none = np.zeros_like(rank)
    events = EventTable(rank, start, stop, kind, none, none, none, degree, none, none)
    zeros = np.zeros(ranks, dtype=np.int64)
    nodes = -(-ranks // node_size)
    nics = NicTable(*np.array(nics, dtype=np.int64).reshape(-1, 4).T)
    return Simulation(
        step, 0, node_size, events, (), zeros, zeros, zeros, zeros, zeros, np.zeros((nodes, 2), np.int64), zeros, nics
    )


def four_ranks():
    rows = [(rank, 0, 500, 4, EventKind.F) for rank in range(4)]
    rows += [(0, 500, 1000, 1, EventKind.F), (1, 500, 600, 1, EventKind.F)]
    rows += [(2, 500, 800, 16, EventKind.F), (2, 0, 1000, 0, EventKind.SEND_F)]
    rows += [(3, 900, 1000, 0, EventKind.STEP)]
    return simulation_of(rows, 4, 1000, 4)


def test_network_cards_of_several_nodes():
    rows = [(rank, 0, 1000, 4, EventKind.F) for rank in range(4)]
    nics = [(0, 0, 500, 500), (0, 500, 1000, 100), (1, 0, 500, 10)]
    lines = text_of(Gantt(simulation_of(rows, 4, 1000, 2, nics), width=29)).splitlines()
    assert lines[3:6] == [
        "rank 3 │44444444444444444444│",
        "NICs 0 │##########----------│",
        "NICs 1 │····················│",
    ]
    joined = text_of(Gantt(simulation_of(rows, 4, 1000, 2, nics), width=29, rows=1)).splitlines()
    assert joined[1] == " NICs 0-1 │########---------│"
    alone = text_of(Gantt(simulation_of(rows, 4, 1000, 4, nics), width=29))
    assert "NICs" not in alone  # one node: nothing leaves it


def test_without_colours():
    lines = text_of(Gantt(four_ranks(), width=29, rows=8)).splitlines()
    assert lines == [
        "rank 0 │44444444441111111111│",
        "rank 1 │444444444411········│",
        "rank 2 │4444444444aaaaaa····│",
        "rank 3 │4444444444········==│",
        "        0               1 us",
        "degree  1  4  a 16  = end of ",
        "step  · idle",
    ]


def test_ascii():
    text = text_of(Gantt(four_ranks(), width=49), ascii_only=True)
    assert text.isascii()
    assert text.splitlines()[1] == "rank 1 |" + "4" * 20 + "1" * 4 + "." * 16 + "|"


def test_colours_show_the_share_at_work_as_height():
    text = text_of(Gantt(four_ranks(), width=29, rows=2), colours="truecolor")
    assert "█" in text and "\x1b[" in text and "ranks 0-1" in text
    half = next(line for line in text.splitlines() if "ranks 0-1" in line)
    assert "▄" in half  # one of two ranks works in the second half


def test_no_colour_by_wish_of_the_user():
    text = text_of(Gantt(four_ranks(), width=29), colours="truecolor", no_color=True)
    assert "4444444444" in text


@pytest.mark.parametrize(("width", "rows"), [*product([20, 40, 80, 200], [1, 3, 20]), (80, 4000)])
def test_a_thousand_ranks(width, rows):
    events = [(rank, 0, 100 + rank, 8, EventKind.F) for rank in range(1024)]
    simulation = simulation_of(events, 1024, 1200)
    lines = text_of(Gantt(simulation, rows=rows), width=width).splitlines()
    bars = [line for line in lines if "│" in line]
    assert len(bars) <= max(rows, 1) and len(bars) == {1: 1, 3: 3, 20: 19, 4000: 1024}[rows]
    assert len(set(map(len, bars))) == 1
    assert max(map(len, lines)) <= width or width == 20
    if width >= 40:
        assert {len(bar) for bar in bars} == {width}
    label = bars[0].split("│")[0].strip()
    assert label == {1: "nodes 0-127", 3: "nodes 0-42", 20: "nodes 0-6", 4000: "rank 0"}[rows]


def test_cells_count_rank_time():
    grid = occupancy(four_ranks(), 2, 10)
    assert grid.labels == ("ranks 0-1", "ranks 2-3") and grid.degrees == (0, 1, 4, 16)
    assert grid.share.sum(axis=1)[0] == pytest.approx([1] * 6 + [0.5] * 4)
    assert grid.share[1, 0] == pytest.approx([0] * 9 + [0.5])  # the message is not drawn
    assert grid.share.sum() * 2 * 100 == pytest.approx(4 * 500 + 500 + 100 + 300 + 100)


def test_nothing_happened():
    simulation = simulation_of([], 2, 100, 2)
    lines = text_of(Gantt(simulation, width=30)).splitlines()
    assert lines[0] == "rank 0 │" + "·" * 21 + "│"


def test_a_degree_has_one_colour_in_every_chart():
    assert len({colour(1 << power) for power in range(8)}) == 8
    assert colour(3) not in {colour(2), colour(4)}


def drawn(name, micro_batches, width=80, colours=None, times=(1, 1, 1)):
    schedule = build_schedule(name, 2, micro_batches)
    return text_of(
        ScheduleChart(schedule, simulate_schedule(schedule, Times.uniform(schedule, *times))), width, colours=colours
    )


def test_a_short_schedule_shows_every_action():
    assert drawn("1f1b", 2).splitlines() == [
        "pp_rank 0 | 0F0 0F1  .   .  0B0  -   .  0B1  -",
        "pp_rank 1 |  .  1F0 1B0  -  1F1 1B1  -   .   .",
        "F forward  B backward  . idle",
    ]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_long_one_shows_what_most_of_every_moment_is(width):
    first, second, *legend = drawn("zb-h1", 300, width, times=(1, 2, 1)).splitlines()
    assert len(first) == len(second) <= width
    assert set(first[11:]) <= set(" FIW.") and "I" in second
    assert " ".join(" ".join(legend).split()) == "F forward I its input half W its weight half . idle"


def test_time_is_to_scale():
    marks = drawn("gpipe", 500, 89, times=(1, 2, 1)).splitlines()[0].removeprefix("pp_rank 0 | ")
    assert marks.count("F") * 3 == pytest.approx(marks.count("B"), rel=0.1)  # a backward takes three forwards
    assert marks == "".join(sorted(marks, reverse=True))


def test_colours_do_not_change_the_text():
    coloured = drawn("zb-h1", 3, colours="truecolor")
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == drawn("zb-h1", 3)
