"""Rules about messages between hosts: each sent and received once, in one order, and never in a circle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from seqloom.plan.action import Action, ActionKind
from seqloom.plan.check_actions import Lane, each_lane
from seqloom.plan.error import broken
from seqloom.plan.pipeline import Pipeline

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
    for lane in each_lane(plan):
        _once(lane)
        for r in range(len(lane.pipeline.rounds)):
            must = "a message is received before it is used and made before it is sent"
            forward, backward = lane.at[F, r], lane.backward(r)
            for kind, used in ((RECV_F, forward), (RECV_B, backward)):
                lane.expect(lane.at.get((kind, r), -1), used, must, "messages")
            for kind, made in ((SEND_F, forward), (SEND_B, backward)):
                lane.expect(made, lane.at.get((kind, r), len(lane.row)), must, "messages")
    for p, pipeline in enumerate(plan.pipelines):
        if len(pipeline.actions) > 1:
            _same_order(p, pipeline)


def _once(lane: Lane) -> None:
    """Check which rounds a stage sends and receives."""
    stages, s = lane.pipeline.stages, lane.stage
    ahead = s + 1 < len(stages) and stages[s + 1].ranks != stages[s].ranks
    behind = s > 0 and stages[s - 1].ranks != stages[s].ranks
    for kind, wanted in ((SEND_F, ahead), (RECV_B, ahead), (RECV_F, behind), (SEND_B, behind)):
        numbers = sorted(number for own, number in lane.at if own == kind and number is not None)
        if numbers != (list(range(len(lane.pipeline.rounds))) if wanted else []):
            value = f"{lane.here} has {kind} of stage {s} for rounds {numbers}"
            must = "a stage sends to and receives from its neighbours on other hosts once per round, and nobody else"
            raise broken("messages", value, must, f"{'add or remove' if wanted else 'remove'} {kind} actions")


def _same_order(p: int, pipeline: Pipeline) -> None:
    """Compare what is sent with what is received, by kind and pair of hosts."""
    host = [pipeline.host_of(s) for s in range(len(pipeline.stages))]
    sent: dict[tuple[ActionKind, int, int], list[Action]] = {}
    received: dict[tuple[ActionKind, int, int], list[Action]] = {}
    for h, row in enumerate(pipeline.actions):
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
                value = (
                    f"pipeline {p} host {sender} sends {first} before {second}, host {receiver} receives {late} first"
                )
                must = (
                    f"what one host sends another {'forward' if kind == SEND_F else 'backward'} arrives in that order"
                )
                raise broken("messages", value, must, f"put {early} before {late}")


def deadlock(plan: Plan) -> None:
    """All rows can be run to their end when a receive waits for its send."""
    for p, pipeline in enumerate(plan.pipelines):
        if len(pipeline.actions) > 1:
            at = _run(pipeline.actions)
            if any(k < len(row) for k, row in zip(at, pipeline.actions, strict=True)):
                raise _stuck(p, pipeline, at)


def _run(rows: tuple[tuple[Action, ...], ...]) -> list[int]:
    """Run all rows as far as they go; return where each one stands."""
    at = [0] * len(rows)
    sent: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for h, row in enumerate(rows):
            while at[h] < len(row):
                action = row[at[h]]
                if action.kind in _SENDS:
                    sent.add(action)
                elif action.kind in _RECEIVES and other_side(action) not in sent:
                    break
                at[h] += 1
                moved = True
    return at


def _stuck(p: int, pipeline: Pipeline, at: list[int]) -> Exception:
    """Name the circle: every stopped host waits for a send that another stopped host has not come to."""
    host = next(h for h, row in enumerate(pipeline.actions) if at[h] < len(row))
    path: list[int] = []
    while host not in path:
        path.append(host)
        awaited = other_side(pipeline.actions[host][at[host]])
        host = pipeline.host_of(awaited.stage) if awaited is not None else host
    circle = path[path.index(host) :]
    waiting = [pipeline.actions[h][at[h]] for h in circle]
    words = [f"{action} (host {h}, action {at[h]})" for h, action in zip(circle, waiting, strict=True)]
    links = [
        f"waits for {other_side(action)}, which comes after {words[(k + 1) % len(words)]}"
        for k, action in enumerate(waiting)
    ]
    value = f"pipeline {p} stops: {words[0]} {', which '.join(links)}"
    must = "a receive waits for its send, so the rows together must have an order that ends"
    return broken("deadlock", value, must, f"move {waiting[0]} later in its row, or {other_side(waiting[0])} earlier")
