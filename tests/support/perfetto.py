"""The rules of Chrome's JSON traces, which Perfetto expects: fields of every event, nesting, order, arrows."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

FIELDS = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
    "M": {"name", "pid", "args"},
    "C": {"name", "ts", "pid", "args"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
}


def check_trace(content: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Assert every rule; return the slices of every (process, thread), in order."""
    tracks, named, arrows = defaultdict(list), set(), defaultdict(list)
    counters: dict[tuple[int, str], float] = {}
    for event in content["traceEvents"]:
        assert FIELDS[event["ph"]] <= set(event), event
        assert event.get("ts", 0) >= 0 and event.get("dur", 0) >= 0, event
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
        elif event["ph"] == "M" and event["name"] == "thread_name":
            named.add((event["pid"], event["tid"]))
        elif event["ph"] in "sf":
            arrows[event["id"]].append(event)
        elif event["ph"] == "C":
            key = event["pid"], event["name"]
            assert counters.get(key, -1) < event["ts"], event
            counters[key] = event["ts"]
            assert all(isinstance(value, float | int) for value in event["args"].values())
    assert set(tracks) <= named
    for own in tracks.values():
        end = 0.0
        for event in own:  # neither overlap nor go back: begin and end are balanced in any order of nesting
            assert event["ts"] >= end - 1e-6, event
            end = event["ts"] + event["dur"]
    for own in arrows.values():
        assert [event["ph"] for event in own] == ["s", "f"]
        assert own[0]["ts"] <= own[1]["ts"]
        for event in own:
            inside = (each for each in tracks[event["pid"], event["tid"]] if each["ts"] <= event["ts"])
            assert any(event["ts"] <= each["ts"] + each["dur"] + 1e-6 for each in inside), event
    return tracks
