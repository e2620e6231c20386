"""Pictures: every event is drawn where and as long as it is, on an axis that can be read; files stand alone."""

import re
import sys
import xml.etree.ElementTree as ET
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import seqloom as sl
from seqloom.errors import SeqloomError
from seqloom.schedules import build_schedule
from seqloom.schedules.timing import schedule_metrics
from seqloom.simulate import simulate
from seqloom.view import Picture, comparison_picture, plan_picture, schedule_picture
from seqloom.view.charts import LEFT, MOST_ROW, RIGHT, add_timeline, rank_runs, round_edges
from seqloom.view.picture import NIC_COLOUR, Bars, Line, Words, degree_colour, round_ticks, time_ticks

LENGTHS = [512, 700, 1_300, 900, 4_096, 260, 33_000, 2_048, 800, 610, 12_000, 5_500] * 3
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module", params=["2x4xH200", "1x8xH200"])
def step(request):
    cost = sl.cost_model(request.param, "llama3-8b")
    plan = sl.plan(LENGTHS, cluster=request.param, model="llama3-8b", planner="adaptive")
    return plan, simulate(plan, cost), sl.lower_bound(LENGTHS, cost)


def test_runs_of_ranks_cover_every_event_once(step):
    _, simulation, _ = step
    runs, events = rank_runs(simulation), simulation.events.where(~simulation.events.is_message)
    covered = [
        (rank + k, start, stop, kind)
        for rank, count, start, stop, kind in zip(
            runs.events.rank, runs.ranks, runs.events.start, runs.events.stop, runs.events.kind, strict=True
        )
        for k in range(count)
    ]
    assert sorted(covered) == sorted(zip(events.rank, events.start, events.stop, events.kind, strict=True))
    assert len(runs.ranks) < len(events)


def test_bars_of_a_step_have_the_area_of_its_work(step):
    plan, simulation, bound = step
    picture = plan_picture(plan, simulation, bound, ["a & b <c>"])
    scale = (picture.width - LEFT - RIGHT) / simulation.step_ns
    timeline = Picture("timeline")
    add_timeline(timeline, simulation, bound_ns=bound)  # neither a histogram nor a legend: every bar is work or NICs
    colours = {degree_colour(degree) for degree in np.unique(simulation.events.degree).tolist()}
    bars = [shape for shape in timeline.shapes if isinstance(shape, Bars) and shape.fill in colours - {NIC_COLOUR}]
    boxes = np.concatenate([shape.boxes for shape in bars])
    runs = rank_runs(simulation)
    times = runs.events.stop - runs.events.start
    assert boxes[:, 2].sum() == pytest.approx(times.sum() * scale)
    first, last = runs.events.rank, runs.events.rank + runs.ranks - 1
    gaps = 3 * (last // simulation.node_size - first // simulation.node_size)  # pixels between the nodes of a run
    heights = runs.ranks * MOST_ROW + gaps - 1  # few ranks: rows are as high as rows get, a pixel is left free below
    assert (boxes[:, 2] * boxes[:, 3]).sum() == pytest.approx((times * heights).sum() * scale)
    assert (boxes[:, 0] + boxes[:, 2]).max() == pytest.approx(picture.width - RIGHT)
    dashed = [shape.x1 for shape in picture.shapes if isinstance(shape, Line) and shape.style == "bound"]
    assert dashed == [pytest.approx(LEFT + bound * scale)]


def test_rounds_follow_each_other(step):
    _, simulation, _ = step
    edges = round_edges(simulation)
    assert [number for number, _, _ in edges] == [entry.round for entry in simulation.rounds]
    assert all(start < stop for _, start, stop in edges)


def test_an_svg_stands_alone_and_is_escaped(step, tmp_path):
    plan, simulation, bound = step
    path = tmp_path / "plan.svg"
    plan_picture(plan, simulation, bound, ["a & b <c>"]).save(path)
    text = path.read_text()
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]
    assert "prefers-color-scheme: dark" in text and "<script" not in text
    words = [element.text for element in ET.fromstring(text).iter(f"{SVG}text")]
    assert "a & b <c>" in words and "rank 0" in words and "bound" in words
    assert any(word.endswith((" ms", " s")) for word in words)


@pytest.mark.parametrize(("suffix", "begins"), [(".png", b"\x89PNG"), (".pdf", b"%PDF")])
def test_png_and_pdf(suffix, begins, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"picture{suffix}"
    picture = Picture("three shapes")
    picture.heading("costs $5 of 10 $", "below")
    picture.add(Bars(np.array([[10.0, 40.0, 100.0, 20.0]]), "#0072b2", 0.5), Line(0, 0, 20, 20, "bound"))
    picture.add(Words(20, 50, "on it", "on", "middle"))
    picture.height = 100
    picture.save(path)
    assert path.read_bytes().startswith(begins)


def test_other_formats_and_a_missing_library_are_refused(monkeypatch, tmp_path):
    with pytest.raises(SeqloomError, match=r"ends in \.svg, \.png, \.pdf"):
        Picture("x").save(tmp_path / "x.jpg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("seqloom.view.picture.find_spec", lambda name: None)
    with pytest.raises(SeqloomError, match=r'pip install "seqloom\[pictures\]"'):
        Picture("x").save(tmp_path / "x.png")


def test_planners_share_one_time_axis(step):
    _, simulation, bound = step
    half = {"fast": (simulation, bound), "again": (simulation, None)}
    words = [shape.text for shape in comparison_picture("two", half).shapes if isinstance(shape, Words)]
    assert sum("1.00x as fast" in word for word in words) == 1
    assert words.count("bound") == 1


def test_a_schedule_is_a_gantt_chart():
    schedule = build_schedule("interleaved", stages=4, micro_batches=8, chunks=2)
    metrics = schedule_metrics(schedule, *map(Fraction, (1, 1, 1)))
    picture = schedule_picture(schedule, metrics, ["notes"])
    bars = [shape for shape in picture.shapes if isinstance(shape, Bars)]
    assert sum(len(shape.boxes) for shape in bars) == sum(map(len, schedule.rows)) + 2  # and two squares of the legend
    words = [shape.text for shape in picture.shapes if isinstance(shape, Words)]
    assert {f"pp_rank {h}" for h in range(4)} <= set(words) and "forward" in words and "peak memory" in words
    assert f"{metrics.peak_memory[0]:.4g}" in words


def test_ticks():
    assert round_ticks(7.2, 4) == [0, 2, 4, 6] and round_ticks(0) == [0]
    assert time_ticks(3.4e9)[1] == ["0", "0.5 s", "1 s", "1.5 s", "2 s", "2.5 s", "3 s"]
    for stop in (1.0, 0.37, 12.5, 1e6):
        ticks = round_ticks(stop)
        assert 3 <= len(ticks) <= 8 and ticks[-1] <= stop * (1 + 1e-9)


def test_the_picture_of_the_readme_names_its_figures():
    text = (Path(__file__).parents[3] / "docs" / "timelines.svg").read_text()
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    for seconds in re.findall(r"(\d\.\d\d) s", next(line for line in readme.splitlines() if "timelines.svg" in line)):
        assert f"{seconds} s" in text
