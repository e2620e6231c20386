"""A schedule in the terminal: the grid where it fits, else one mark per moment; every kind of action explained."""

import re
from io import StringIO

import pytest
from rich.console import Console

from seqloom.schedules import Times, build_schedule, simulate_schedule
from seqloom.view import schedule_chart


def drawn(name, micro_batches, width=80, colours=None, times=(1, 1, 1)):
    schedule = build_schedule(name, 2, micro_batches)
    console = Console(
        file=StringIO(), width=width, color_system=colours, force_terminal=colours is not None, legacy_windows=False
    )
    console.print(schedule_chart(schedule, simulate_schedule(schedule, Times.uniform(schedule, *times))))
    return console.file.getvalue()


def test_a_short_schedule_shows_every_action():
    assert drawn("1f1b", 2).splitlines() == [
        "host 0 | 0F0 0F1  .   .  0B0  -   .  0B1  -",
        "host 1 |  .  1F0 1B0  -  1F1 1B1  -   .   .",
        "F forward  B backward  . idle",
    ]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_long_one_shows_what_most_of_every_moment_is(width):
    first, second, *legend = drawn("zb-h1", 300, width, times=(1, 2, 1)).splitlines()
    assert len(first) == len(second) <= width
    assert set(first[8:]) <= set(" FIW.") and "I" in second
    assert " ".join(" ".join(legend).split()) == "F forward I its input half W its weight half . idle"


def test_time_is_to_scale():
    marks = drawn("gpipe", 500, 89, times=(1, 2, 1)).splitlines()[0].removeprefix("host 0 | ")
    assert marks.count("F") * 3 == pytest.approx(marks.count("B"), rel=0.1)  # a backward takes three forwards
    assert marks == "".join(sorted(marks, reverse=True))


def test_colours_do_not_change_the_text():
    coloured = drawn("zb-h1", 3, colours="truecolor")
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == drawn("zb-h1", 3)
