"""Messages between the hosts of a schedule, placed so that they add no waiting and cannot deadlock.

A SEND follows what makes it. A RECV comes directly before what uses it, or earlier where a message that was sent
after it is used before it: what one host sends another arrives in the order in which it is sent, whether it goes
forward or backward. That costs nothing: who waits for the later message waits for the earlier one too.
"""

from __future__ import annotations

from collections.abc import Sequence

from seqloom.plan.action import Action, ActionKind

F, B, W = ActionKind.F, ActionKind.B, ActionKind.W
I = ActionKind.I  # noqa: E741 - the field's name for the input half of a backward
_MAKES = {F: (1, ActionKind.SEND_F, ActionKind.RECV_F), B: (-1, ActionKind.SEND_B, ActionKind.RECV_B)}
_MAKES[I] = _MAKES[B]

Rows = tuple[tuple[Action, ...], ...]


def with_messages(hosts: Sequence[int], rows: Rows) -> Rows:
    """Return rows of computation with the messages that they need.

    Args:
        hosts: host of every stage.
        rows: F, B, I and W per host, in an order that ends.
    """
    used = [_used_at(row) for row in rows]
    sends: list[dict[int, Action]] = [{} for _ in rows]
    receives: list[dict[int, list[Action]]] = [{} for _ in rows]
    for h, row in enumerate(rows):
        channels: dict[int, list[tuple[int, Action]]] = {}
        for k, action in enumerate(row):
            step, send, receive = _MAKES.get(action.kind, (0, F, F))
            peer = action.stage + step
            if step == 0 or not 0 <= peer < len(hosts) or hosts[peer] == h:
                continue
            sends[h][k] = Action(action.stage, send, action.round)
            arrival = Action(peer, receive, action.round)
            channels.setdefault(hosts[peer], []).append((used[hosts[peer]][arrival], arrival))
        for receiver, sent in channels.items():
            _receive(sent, receives[receiver])
    return tuple(tuple(_joined(row, sends[h], receives[h])) for h, row in enumerate(rows))


def _used_at(row: Sequence[Action]) -> dict[Action, int]:
    """Return where a row uses which RECV, had it one."""
    return {Action(a.stage, _MAKES[a.kind][2], a.round): k for k, a in enumerate(row) if a.kind in _MAKES}


def _receive(sent: list[tuple[int, Action]], into: dict[int, list[Action]]) -> None:
    """Place the receives from one host: before their use, and never after one that was sent later."""
    latest = [place for place, _ in sent]
    for k in range(len(latest) - 2, -1, -1):
        latest[k] = min(latest[k], latest[k + 1])
    for place, (_, arrival) in zip(latest, sent, strict=True):
        into.setdefault(place, []).append(arrival)


def _joined(row: Sequence[Action], sends: dict[int, Action], receives: dict[int, list[Action]]) -> list[Action]:
    joined: list[Action] = []
    for k, action in enumerate(row):
        joined += receives.get(k, [])
        joined.append(action)
        if k in sends:
            joined.append(sends[k])
    return joined
