"""Traces of steps in Chrome's JSON, which ui.perfetto.dev and chrome://tracing open.

A node is a process of the trace. A rank has a thread for its actions, and one each for messages that it sends and
receives, since slices of one thread may not overlap. NICs are counters. The simulated and the measured step of a plan
stand below each other in one file, both from time 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from seqloom.simulate import Simulation
from seqloom.simulate.events import EventKind

THREADS = ("", "send", "receive")
"""Of a rank: what it computes and waits for, messages to other stages, messages from them."""
SENDS, RECEIVES = (EventKind.SEND_F, EventKind.SEND_B), (EventKind.RECV_F, EventKind.RECV_B)
NAMES = {
    EventKind.STEP: "reduction, optimiser",
    EventKind.ALL_GATHER: "all-gather",
    EventKind.REDUCE_SCATTER: "reduce-scatter",
}
_US = 1e3
"""Nanoseconds of a microsecond, the unit of the format."""


class MeasuredSlice(NamedTuple):
    """What a rank did in a part of a measured step; stage and round are -1 where they make no sense."""

    rank: int
    name: str
    start_ns: float  # since the rank began the step
    stop_ns: float
    stage: int = -1
    round: int = -1


def save_trace(
    path: Path, simulation: Simulation, measured: Sequence[MeasuredSlice] = (), title: str = "seqloom"
) -> None:
    """Write the simulated step, and the measured one if there is one, to a .json file."""
    events = [*simulated_events(simulation), *measured_events(measured, simulation)]
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"title": title}}
    path.write_text(json.dumps(content, allow_nan=False, separators=(",", ":")) + "\n", encoding="utf-8")


def simulated_events(simulation: Simulation) -> Iterator[dict[str, Any]]:
    """Yield the events of a simulated step: names, slices, arrows from SEND to RECV, counters of NICs."""
    events, node_size = simulation.events, simulation.node_size
    messages = bool(events.is_message.any())
    yield from _names(range(simulation.ranks), simulation, "predicted", 0, THREADS if messages else THREADS[:1])
    columns = (getattr(events, name).tolist() for name in ("rank", "start", "stop", "kind", "comm", "degree"))
    places = (getattr(events, name).tolist() for name in ("pipeline", "stage", "round", "group"))
    ends: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {}
    for rank, start, stop, code, comm, degree, *place in zip(*columns, *places, strict=True):
        kind = EventKind(code)
        thread = 1 if kind in SENDS else 2 if kind in RECEIVES else 0
        where = {"pid": rank // node_size, "tid": _thread(rank, thread)}
        known = zip(("pipeline", "stage", "round", "group"), place, strict=True)
        arguments = {name: value for name, value in known if value >= 0}
        arguments |= {"GPUs of the group": degree} if degree else {}
        arguments |= {"exposed communication us": comm / _US} if comm else {}
        name = NAMES.get(kind) or _action_name(kind.name, place[1], place[2])
        yield _slice(name, "message" if thread else "predicted", start, stop, where, arguments)
        if thread:
            time = {"ts": (start if thread == 1 else stop) / _US}
            ends.setdefault(_message_id(kind, place), ([], []))[thread - 1].append(time | where)
    yield from _arrows(ends)
    yield from _nic_counters(simulation)


def measured_events(slices: Sequence[MeasuredSlice], simulation: Simulation) -> Iterator[dict[str, Any]]:
    """Yield the events of a measured step, as processes of their own below the simulated ones."""
    first, node_size = len(simulation.nic_busy_ns), simulation.node_size
    yield from _names(sorted({each.rank for each in slices}), simulation, "measured", first, THREADS[:1])
    for each in sorted(slices, key=lambda each: (each.rank, each.start_ns)):
        where = {"pid": first + each.rank // node_size, "tid": _thread(simulation.ranks + each.rank, 0)}
        known = {"stage": each.stage, "round": each.round}
        arguments = {name: value for name, value in known.items() if value >= 0}
        name = _action_name(each.name, each.stage, each.round)
        yield _slice(name, "measured", each.start_ns, each.stop_ns, where, arguments)


def _action_name(name: str, stage: int, number: int) -> str:
    """Write an action as plans do, ``0F3``, where it has a stage and a round."""
    return f"{stage}{name}{number}" if stage >= 0 and number >= 0 else name


def _thread(rank: int, kind: int) -> int:
    return len(THREADS) * rank + kind + 1


def _slice(
    name: str, category: str, start: float, stop: float, where: dict[str, int], arguments: dict[str, Any]
) -> dict[str, Any]:
    times = {"ts": start / _US, "dur": (stop - start) / _US}
    return {"name": name, "cat": category, "ph": "X", **times, **where, "args": arguments}


def _message_id(kind: EventKind, place: Sequence[int]) -> str:
    """Name a message by its pipeline, the stage that sends it, its round and its direction."""
    pipeline, stage, number, _ = place
    forward = kind in (EventKind.SEND_F, EventKind.RECV_F)
    sender = stage if kind in SENDS else stage - 1 if forward else stage + 1
    return f"{pipeline}.{sender}.{number}.{'F' if forward else 'B'}"


def _arrows(ends: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]]) -> Iterator[dict[str, Any]]:
    """Yield an arrow from every rank that sends a message to the rank at the same place of the receiving stage."""
    for message, (senders, receivers) in ends.items():
        for k, (sender, receiver) in enumerate(zip(senders, receivers, strict=False)):  # stages may differ in ranks
            about = {"name": "message", "cat": "message", "id": f"{message}.{k}"}
            yield {**about, "ph": "s", **sender}
            yield {**about, "ph": "f", "bp": "e", **receiver}


def _nic_counters(simulation: Simulation) -> Iterator[dict[str, Any]]:
    """Yield how many of a node's NICs are in use, as a share, wherever that changes."""
    nics = simulation.nics
    share = nics.busy / np.maximum(nics.stop - nics.start, 1)
    for node in np.unique(nics.node).tolist():
        own = nics.node == node
        times = np.concatenate([nics.start[own], nics.stop[own]])
        changes = np.concatenate([share[own], -share[own]])
        at, place = np.unique(times, return_inverse=True)
        use = np.cumsum(np.bincount(place, changes, minlength=len(at)))
        for time, value in zip(at.tolist(), use.tolist(), strict=True):
            counter = {"name": "NICs in use", "ph": "C", "ts": time / _US, "pid": node}
            yield counter | {"args": {"share": round(max(value, 0.0), 6)}}


def _names(
    ranks: Iterable[int], simulation: Simulation, word: str, first: int, threads: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the names and the order of nodes and ranks; `first` is the first node's process."""
    ranks, shift = list(ranks), 0 if word == "predicted" else simulation.ranks
    for node in sorted({rank // simulation.node_size for rank in ranks}):
        about = {"pid": first + node, "ts": 0, "ph": "M"}
        yield {"name": "process_name", **about, "args": {"name": f"{word}, node {node}"}}
        yield {"name": "process_sort_index", **about, "args": {"sort_index": first + node}}
    for rank in ranks:
        for kind, name in enumerate(threads):
            where = {"pid": first + rank // simulation.node_size, "tid": _thread(shift + rank, kind)}
            about = {**where, "ts": 0, "ph": "M"}
            yield {"name": "thread_name", **about, "args": {"name": f"rank {rank} {name}".strip()}}
            yield {"name": "thread_sort_index", **about, "args": {"sort_index": where["tid"]}}
