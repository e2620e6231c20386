"""Traces follow the rules of their format, and hold every event of a simulated or measured step."""

import json

import pytest

import seqloom as sl
from seqloom.view.trace import MeasuredSlice, save_trace
from support.perfetto import check_trace

LENGTHS = [512, 700, 1_300, 900, 4_096, 260, 33_000, 2_048, 800, 610, 12_000, 5_500] * 2


@pytest.fixture(params=["adaptive", "zones", "pipeline:4"])
def simulation(request):
    plan = sl.plan(LENGTHS, cluster="2x4xH200", model="llama3-8b", planner=request.param)
    return sl.simulate(plan, cluster="2x4xH200", model="llama3-8b")


def written(path, *args):
    save_trace(path, *args)
    return json.loads(path.read_text())


def test_every_event_is_a_slice_of_its_rank(simulation, tmp_path):
    content = written(tmp_path / "trace.json", simulation)
    tracks = check_trace(content)
    slices = [event for own in tracks.values() for event in own]
    events = simulation.events
    assert len(slices) == len(events)
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(simulation.step_ns / 1e3)
    assert sum(event["dur"] for event in slices) == pytest.approx((events.stop - events.start).sum() / 1e3)
    arrows = [event for event in content["traceEvents"] if event["ph"] == "s"]
    assert bool(arrows) == bool(events.is_message.any())
    used = [event["args"]["share"] for event in content["traceEvents"] if event["ph"] == "C"]
    assert bool(used) == bool(len(simulation.nics))


def test_predicted_and_measured_stand_in_one_file(simulation, tmp_path):
    measured = [MeasuredSlice(rank, "F", 1e6 * k, 1e6 * k + 5e5, 0, k) for rank in range(8) for k in range(3)]
    measured.append(MeasuredSlice(0, "optimiser", 4e6, 5e6))
    content = written(tmp_path / "trace.json", simulation, measured, "step 3")
    tracks = check_trace(content)
    own = [event for events in tracks.values() for event in events if event["cat"] == "measured"]
    assert len(own) == 25 and own[0]["name"] == "0F0" and own[0]["args"] == {"stage": 0, "round": 0}
    names = {event["args"]["name"] for event in content["traceEvents"] if event["name"] == "process_name"}
    assert names == {"predicted, node 0", "predicted, node 1", "measured, node 0", "measured, node 1"}
    assert content["otherData"] == {"title": "step 3"}


def test_a_broken_trace_fails_the_check(simulation, tmp_path):
    content = written(tmp_path / "trace.json", simulation)
    slices = [event for event in content["traceEvents"] if event["ph"] == "X"]
    slices[0]["dur"] += 10 * simulation.step_ns
    with pytest.raises(AssertionError):
        check_trace(content)
