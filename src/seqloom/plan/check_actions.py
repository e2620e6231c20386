"""Rules about the table of actions: every round once on every stage, in an order that ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from seqloom.plan.action import Action, ActionKind
from seqloom.plan.error import broken
from seqloom.plan.limits import Reduce
from seqloom.plan.pipeline import Pipeline

if TYPE_CHECKING:
    from seqloom.plan.plan import Plan

F, B, W = ActionKind.F, ActionKind.B, ActionKind.W
I = ActionKind.I  # noqa: E741 - the field's name for the input half of a backward
SEND_F, RECV_F = ActionKind.SEND_F, ActionKind.RECV_F
SEND_B, RECV_B = ActionKind.SEND_B, ActionKind.RECV_B
UNSHARD, RESHARD, REDUCE = ActionKind.UNSHARD, ActionKind.RESHARD, ActionKind.REDUCE
_WITHOUT_ROUND = frozenset((UNSHARD, RESHARD, REDUCE))

Row = tuple[Action, ...]
Positions = dict[tuple[ActionKind, int | None], int]


def _rows(plan: Plan) -> Iterator[tuple[str, Pipeline, int, Row]]:
    for p, pipeline in enumerate(plan.pipelines):
        for s, row in enumerate(pipeline.actions):
            yield f"pipeline {p} stage {s}", pipeline, s, row


def _positions(row: Row) -> Positions:
    return {(action.kind, action.round): k for k, action in enumerate(row)}


def _rounds_of(row: Row, kind: ActionKind) -> list[int]:
    return [action.round for action in row if action.kind == kind and action.round is not None]


def table(plan: Plan) -> None:
    """Every stage has a row, with exactly one F and one B (or one I and one W) for every round."""
    for p, pipeline in enumerate(plan.pipelines):
        if len(pipeline.actions) != len(pipeline.stages):
            value = f"pipeline {p} has {len(pipeline.actions)} rows of actions for {len(pipeline.stages)} stages"
            raise broken("table", value, "one row per stage", f"give {len(pipeline.stages)}")
    for here, pipeline, s, row in _rows(plan):
        count = Counter(row)
        rounds = len(pipeline.rounds)
        for action, times in count.items():
            known = action.round is None if action.kind in _WITHOUT_ROUND else False
            if action.stage != s or not (known or (action.round is not None and 0 <= action.round < rounds)):
                value = f"{here} has the action {action}"
                must = f"its row holds actions of stage {s} for rounds 0 to {rounds - 1}"
                raise broken("table", value, must, f"use {Action(s, action.kind, 0 if rounds else None)}, for example")
            if times > 1 and action.kind not in (UNSHARD, RESHARD):
                value = f"{here} has {action} {times} times"
                raise broken("table", value, "every action happens once", "remove the others")
        for r in range(rounds):
            halves = (count[Action(s, I, r)], count[Action(s, W, r)])
            if (count[Action(s, F, r)], count[Action(s, B, r)], *halves) not in ((1, 1, 0, 0), (1, 0, 1, 1)):
                present = [str(Action(s, kind, r)) for kind in (F, B, I, W) if count[Action(s, kind, r)]]
                value = f"{here} has {' '.join(present) or 'nothing'} for round {r}"
                must = "every round has one F and one B, or one F, one I and one W"
                raise broken("table", value, must, f"use {Action(s, F, r)} and {Action(s, B, r)}")


def order(plan: Plan) -> None:
    """Forwards ascend, F comes before B (and I before W), and pieces of a document go backward in reverse."""
    chained = [_chained(plan, pipeline) for pipeline in plan.pipelines]
    links = {id(pipeline): pairs for pipeline, pairs in zip(plan.pipelines, chained, strict=True)}
    for here, pipeline, _, row in _rows(plan):
        at = _positions(row)
        forwards = _rounds_of(row, F)
        if forwards != sorted(forwards):
            value = f"{here} runs forwards in the order {forwards}"
            raise broken("order", value, "rounds are totally ordered, forwards run in that order", "sort them")
        for r in range(len(pipeline.rounds)):
            if (B, r) in at:
                _expect(here, row, at[F, r], at[B, r], "a round's F comes before its B")
            else:
                _expect(here, row, at[F, r], at[I, r], "a round's F comes before its I")
                _expect(here, row, at[I, r], at[W, r], "a round's I comes before its W")
        for early, late in links[id(pipeline)]:
            first = at[(B, late) if (B, late) in at else (I, late)]
            second = at[(B, early) if (B, early) in at else (I, early)]
            _expect(here, row, first, second, "pieces of one document go backward in reverse order")


def _expect(here: str, row: Row, first: int, second: int, must: str, rule: str = "order") -> None:
    if first > second:
        value = f"{here} has {row[second]} (action {second}) before {row[first]} (action {first})"
        raise broken(rule, value, must, f"put {row[first]} before {row[second]}")


def _chained(plan: Plan, pipeline: Pipeline) -> set[tuple[int, int]]:
    """Return the pairs of rounds that hold neighbouring pieces of one document."""
    last: dict[int, int] = {}
    pairs = set()
    for r, current in enumerate(pipeline.rounds):
        for document, start, stop in current.work[0].spans():
            if start > 0:
                pairs.add((last[document], r))
            if stop < plan.documents[document]:
                last[document] = r
    return pairs


def reduce(plan: Plan) -> None:
    """Gradients are reduced after the backward: of every round, or of the last, as the plan says."""
    for here, pipeline, s, row in _rows(plan):
        at = _positions(row)
        per_round = plan.reduce == Reduce.ROUND
        rounds = range(len(pipeline.rounds))
        wanted = set(rounds) if per_round else {None}
        found = {number for kind, number in at if kind == REDUCE}
        if found != wanted:
            names = [str(Action(s, REDUCE, number)) for number in found]
            value = f"{here} has {' '.join(sorted(names)) or 'no REDUCE'}"
            must = (
                "reduce 'round' needs one REDUCE per round"
                if per_round
                else "reduce 'step' needs one REDUCE at the end"
            )
            nearest = min(wanted ^ found, key=lambda number: -1 if number is None else number)
            verb = "add" if nearest in wanted else "remove"
            raise broken("reduce", value, must, f"{verb} {Action(s, REDUCE, nearest)}")
        for r in rounds:
            backward = at[(B, r) if (B, r) in at else (W, r)]
            after = at[REDUCE, r if per_round else None]
            _expect(
                here,
                row,
                backward,
                after,
                "gradients are reduced after the backward that makes them",
                "reduce",
            )


def shards(plan: Plan) -> None:
    """UNSHARD and RESHARD, where a row has them, alternate, and all computation lies between."""
    for here, _, s, row in _rows(plan):
        if not any(action.kind in (UNSHARD, RESHARD) for action in row):
            continue
        gathered = False
        for k, action in enumerate(row):
            wrong = (action.kind == UNSHARD and gathered) or (action.kind in (F, B, I, W, RESHARD) and not gathered)
            if wrong:
                state = "gathered" if gathered else "not gathered"
                value = f"{here} has {action} (action {k}) while parameters are {state}"
                must = "UNSHARD and RESHARD alternate, and computation lies between them"
                raise broken("shards", value, must, f"put {Action(s, RESHARD if gathered else UNSHARD)} before it")
            if action.kind in (UNSHARD, RESHARD):
                gathered = action.kind == UNSHARD


def messages(plan: Plan) -> None:
    """Neighbours send and receive every round once, in one order, after making and before using it."""
    for here, pipeline, s, row in _rows(plan):
        at = _positions(row)
        first, last = s == 0, s == len(pipeline.stages) - 1
        expected = {SEND_F: not last, RECV_B: not last, RECV_F: not first, SEND_B: not first}
        for kind, wanted in expected.items():
            numbers = _rounds_of(row, kind)
            if sorted(numbers) != (list(range(len(pipeline.rounds))) if wanted else []):
                value = f"{here} has {kind} for rounds {numbers}"
                must = "a stage sends to and receives from its neighbours once per round, and nobody else"
                raise broken("messages", value, must, f"{'add or remove' if wanted else 'remove'} {kind} actions")
        for r in range(len(pipeline.rounds)):
            backward = (B, r) if (B, r) in at else (I, r)
            pairs = [
                ((RECV_F, r), (F, r)),
                ((F, r), (SEND_F, r)),
                ((RECV_B, r), backward),
                (backward, (SEND_B, r)),
            ]
            for before, after in pairs:
                if before in at and after in at:
                    must = "a message is received before it is used and made before it is sent"
                    _expect(here, row, at[before], at[after], must, "messages")
    for p, pipeline in enumerate(plan.pipelines):
        for s in range(len(pipeline.stages) - 1):
            for sends, receives in (((s, SEND_F), (s + 1, RECV_F)), ((s + 1, SEND_B), (s, RECV_B))):
                sent = _rounds_of(pipeline.actions[sends[0]], sends[1])
                got = _rounds_of(pipeline.actions[receives[0]], receives[1])
                if sent != got:
                    value = f"pipeline {p} stage {sends[0]} sends {sent}, stage {receives[0]} receives {got}"
                    must = "two stages send and receive in the same order"
                    raise broken("messages", value, must, f"receive in the order {sent}")


def deadlock(plan: Plan) -> None:
    """All rows can be run to their end when a receive waits for its send."""
    for p, pipeline in enumerate(plan.pipelines):
        if len(pipeline.stages) == 1:
            continue
        stuck = _run(pipeline.actions)
        if stuck:
            grid = ", ".join(f"stage {s} at {action} (action {k})" for s, k, action in stuck)
            must = "a receive waits for its send, so the rows together must have an order that ends"
            way_out = f"move {stuck[0][2]} later in its row, or the send it waits for earlier"
            raise broken("deadlock", f"pipeline {p} stops with {grid}", must, way_out)


def _run(rows: tuple[Row, ...]) -> list[tuple[int, int, Action]]:
    """Run all rows as far as they go; return where each unfinished one stands."""
    at = [0] * len(rows)
    sent: set[tuple[int, ActionKind, int | None]] = set()
    awaited = {RECV_F: (-1, SEND_F), RECV_B: (1, SEND_B)}
    moved = True
    while moved:
        moved = False
        for s, row in enumerate(rows):
            while at[s] < len(row):
                action = row[at[s]]
                if action.kind in (SEND_F, SEND_B):
                    sent.add((s, action.kind, action.round))
                elif action.kind in awaited:
                    back, kind = awaited[action.kind]
                    if (s + back, kind, action.round) not in sent:
                        break
                at[s] += 1
                moved = True
    return [(s, k, rows[s][k]) for s, k in enumerate(at) if k < len(rows[s])]
