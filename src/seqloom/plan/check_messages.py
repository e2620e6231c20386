"""Rules about messages between hosts: each sent and received once, in one order, and never in a circle."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from seqloom.plan.action import Action, ActionKind
from seqloom.plan.error import broken
from seqloom.plan.table import Lane, Row, Table, tables

if TYPE_CHECKING:
    from seqloom.plan.plan import Plan

F = ActionKind.F
SEND_F, RECV_F = ActionKind.SEND_F, ActionKind.RECV_F
SEND_B, RECV_B = ActionKind.SEND_B, ActionKind.RECV_B
_SENDS = {SEND_F: (1, RECV_F), SEND_B: (-1, RECV_B)}
_RECEIVES = {RECV_F: (-1, SEND_F), RECV_B: (1, SEND_B)}


def other_side(action: Action) -> Action | None:
    """Return the RECV of a SEND and the SEND of a RECV; None for other actions."""
    step = _SENDS.get(action.kind) or _RECEIVES.get(action.kind)
    return None if step is None else Action(action.stage + step[0], step[1], action.round)


def messages(plan: Plan) -> None:
    """Stages that follow each other on two hosts send and receive every round once, after making and before using it.

    Between two hosts, what goes forward is received in the order in which it is sent, whatever stages it belongs
    to, and so is what goes backward: messages of one kind need no labels.
    """
    for current in tables(plan):
        matched(current)


def matched(table: Table) -> None:
    """Check the rule "messages" of one table."""
    must = "a message is received before it is used and made before it is sent"
    for lane in table.lanes():
        _once(lane)
        for r in range(table.rounds):
            forward, backward = lane.at[F, r], lane.backward(r)
            for kind, used in ((RECV_F, forward), (RECV_B, backward)):
                lane.expect(lane.at.get((kind, r), -1), used, must, "messages")
            for kind, made in ((SEND_F, forward), (SEND_B, backward)):
                lane.expect(made, lane.at.get((kind, r), len(lane.row)), must, "messages")
    if table.width > 1:
        _same_order(table)


def _once(lane: Lane) -> None:
    """Check which rounds a stage sends and receives."""
    hosts, s = lane.table.hosts, lane.stage
    ahead = s + 1 < len(hosts) and hosts[s + 1] != hosts[s]
    behind = s > 0 and hosts[s - 1] != hosts[s]
    for kind, wanted in ((SEND_F, ahead), (RECV_B, ahead), (RECV_F, behind), (SEND_B, behind)):
        numbers = sorted(number for own, number in lane.at if own == kind and number is not None)
        if numbers != (list(range(lane.table.rounds)) if wanted else []):
            value = f"{lane.here} has {kind} of stage {s} for rounds {numbers}"
            must = "a stage sends to and receives from its neighbours on other hosts once per round, and nobody else"
            raise broken("messages", value, must, f"{'add or remove' if wanted else 'remove'} {kind} actions")


def _same_order(table: Table) -> None:
    """Compare what is sent with what is received, by kind and pair of hosts."""
    host = table.hosts
    sent: dict[tuple[ActionKind, int, int], list[Action]] = {}
    received: dict[tuple[ActionKind, int, int], list[Action]] = {}
    for h, row in enumerate(table.rows):
        for action in row:
            peer = other_side(action)
            if peer is None:
                continue
            if action.kind in _SENDS:
                sent.setdefault((action.kind, h, host[peer.stage]), []).append(action)
            else:
                received.setdefault((peer.kind, host[peer.stage], h), []).append(peer)
    for (kind, sender, receiver), actions in sent.items():
        for first, second in zip(actions, received[kind, sender, receiver], strict=True):
            if first != second:
                early, late = other_side(first), other_side(second)
                value = f"{table.here(sender)} sends {first} before {second}, host {receiver} receives {late} first"
                way = "forward" if kind == SEND_F else "backward"
                must = f"what one host sends another {way} arrives in that order"
                raise broken("messages", value, must, f"put {early} before {late}")


def deadlock(plan: Plan) -> None:
    """All rows can be run to their end when a receive waits for its send."""
    for current in tables(plan):
        if current.width > 1:
            ending(current, send_of, "a receive waits for its send")


def send_of(action: Action) -> Action | None:
    """Return what a RECV waits for."""
    return other_side(action) if action.kind in _RECEIVES else None


def ending(table: Table, awaits: Callable[[Action], Action | None], rule: str) -> None:
    """Check the rule "deadlock" of one table: its rows together have an order that ends.

    Args:
        table: that holds every action that another one awaits.
        awaits: what an action waits for that is in another row, if anything.
        rule: the same in words.
    """
    at = _run(table.rows, awaits)
    if any(k < len(row) for k, row in zip(at, table.rows, strict=True)):
        raise _stuck(table, at, awaits, rule)


def _run(rows: tuple[Row, ...], awaits: Callable[[Action], Action | None]) -> list[int]:
    """Run all rows as far as they go; return where each one stands."""
    at = [0] * len(rows)
    done: set[Action | None] = {None}
    moved = True
    while moved:
        moved = False
        for h, row in enumerate(rows):
            while at[h] < len(row) and awaits(row[at[h]]) in done:
                done.add(row[at[h]])
                at[h] += 1
                moved = True
    return at


def _stuck(table: Table, at: list[int], awaits: Callable[[Action], Action | None], rule: str) -> Exception:
    """Name the circle: every stopped host waits for what another stopped host has not come to."""
    host = next(h for h, row in enumerate(table.rows) if at[h] < len(row))
    path: list[int] = []
    while host not in path:
        path.append(host)
        awaited = awaits(table.rows[host][at[host]])
        host = table.hosts[awaited.stage] if awaited is not None else host
    circle = path[path.index(host) :]
    waiting = [table.rows[h][at[h]] for h in circle]
    words = [f"{action} (host {h}, action {at[h]})" for h, action in zip(circle, waiting, strict=True)]
    links = [
        f"waits for {awaits(action)}, which comes after {words[(k + 1) % len(words)]}"
        for k, action in enumerate(waiting)
    ]
    value = f"{table.name} stops: {words[0]} {', which '.join(links)}"
    must = f"{rule}, so the rows together must have an order that ends"
    way_out = f"move {waiting[0]} later in its row, or {awaits(waiting[0])} earlier"
    return broken("deadlock", value, must, way_out, (circle[0], at[circle[0]]))
