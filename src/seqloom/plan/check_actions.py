"""Rules about the table of actions: every round once on every stage, in an order that ends.

`complete` and `ordered` are about any table, so a schedule is held to the same rules before it is in a plan.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from seqloom.plan.action import Action, ActionKind
from seqloom.plan.error import broken
from seqloom.plan.limits import Reduce
from seqloom.plan.pipeline import Pipeline
from seqloom.plan.table import Lane, Table, tables

if TYPE_CHECKING:
    from seqloom.plan.plan import Plan

F, B, W = ActionKind.F, ActionKind.B, ActionKind.W
I = ActionKind.I  # noqa: E741 - the field's name for the input half of a backward
UNSHARD, RESHARD, REDUCE = ActionKind.UNSHARD, ActionKind.RESHARD, ActionKind.REDUCE
_WITHOUT_ROUND = frozenset((UNSHARD, RESHARD, REDUCE))


def table(plan: Plan) -> None:
    """Every host has a row; every stage has there exactly one F and one B (or one I and one W) for every round."""
    for current in tables(plan):
        complete(current)


def complete(table: Table) -> None:
    """Check the rule "table" of one table."""
    if len(table.rows) != table.width:
        value = f"{table.name} has {len(table.rows)} rows of actions for {table.width} hosts"
        must = "one row per host, that is, per distinct ranks of the stages"
        raise broken("table", value, must, f"give {table.width}")
    for h, row in enumerate(table.rows):
        count = Counter(row)
        _known(table, h, count)
        for s in table.stages_of(h):
            _complete(table, h, count, s)


def _known(table: Table, host: int, count: Counter[Action]) -> None:
    """Refuse actions of other hosts and rounds, and repeated ones."""
    stages, rounds, here = table.stages_of(host), table.rounds, table.here(host)
    for action, times in count.items():
        known = action.round is None if action.kind in _WITHOUT_ROUND else False
        if action.stage not in stages or not (known or (action.round is not None and 0 <= action.round < rounds)):
            names = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
            must = f"its row holds actions of {names} for rounds 0 to {rounds - 1}"
            example = Action(stages[0], action.kind, 0 if rounds else None)
            raise broken(
                "table",
                f"{here} has the action {action}",
                must,
                f"use {example}, for example",
                _place(table, host, action),
            )
        if times > 1 and action.kind not in (UNSHARD, RESHARD):
            value = f"{here} has {action} {times} times"
            raise broken("table", value, "every action happens once", "remove the others", _place(table, host, action))


def _complete(table: Table, host: int, count: Counter[Action], s: int) -> None:
    for r in range(table.rounds):
        found = tuple(count[Action(s, kind, r)] for kind in (F, B, I, W))
        if found not in ((1, 1, 0, 0), (1, 0, 1, 1)):
            present = [Action(s, kind, r) for kind in (F, B, I, W) if count[Action(s, kind, r)]]
            value = f"{table.here(host)} has {' '.join(map(str, present)) or 'nothing'} for round {r} of stage {s}"
            must = "every stage has for every round one F and one B, or one F, one I and one W"
            at = _place(table, host, present[0]) if present else None
            raise broken("table", value, must, f"use {Action(s, F, r)} and {Action(s, B, r)}", at)


def _place(table: Table, host: int, action: Action) -> tuple[int, int]:
    return host, table.rows[host].index(action)


def order(plan: Plan) -> None:
    """Forwards of a stage ascend, F comes before B, I before W, and pieces of a document go backward in reverse.

    Where two stages that follow each other are on one host, its row also runs them one after the other.
    """
    for current, pipeline in zip(tables(plan), plan.pipelines, strict=True):
        ordered(replace(current, links=tuple(sorted(_chained(plan, pipeline)))))


def ordered(table: Table) -> None:
    """Check the rule "order" of one table."""
    rounds = range(table.rounds)
    before: Lane | None = None
    for lane in table.lanes():
        at = lane.at
        forwards = [action.round for action in lane.row if action.kind == F and action.stage == lane.stage]
        if forwards != list(rounds):
            value = f"{lane.here} runs the forwards of stage {lane.stage} in the order {forwards}"
            wrong = next(number for place, number in enumerate(forwards) if place != number)
            must = "rounds are totally ordered, forwards run in that order"
            raise broken("order", value, must, "sort them", (lane.host, at[F, wrong]))
        for r in rounds:
            if (B, r) in at:
                lane.expect(at[F, r], at[B, r], "a round's F comes before its B")
            else:
                lane.expect(at[F, r], at[I, r], "a round's F comes before its I")
                lane.expect(at[I, r], at[W, r], "a round's I comes before its W")
        for early, late in table.links:
            must = "all pieces of one document go forward before the first of them goes backward"
            lane.expect(at[F, late], lane.backward(early), must)
            must = "pieces of one document go backward in reverse order"
            lane.expect(lane.backward(late), lane.backward(early), must)
        if before is not None and before.host == lane.host:
            must = f"stages {before.stage} and {lane.stage} are on one host, which runs one after the other"
            for r in rounds:
                lane.expect(before.at[F, r], at[F, r], must)
                lane.expect(lane.backward(r), before.backward(r), must)
        before = lane


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
    per_round = plan.reduce == Reduce.ROUND
    for current in tables(plan):
        rounds = range(current.rounds)
        wanted: set[int | None] = {*rounds} if per_round else {None}
        for lane in current.lanes():
            found = {number for kind, number in lane.at if kind == REDUCE}
            if found != wanted:
                raise _unreduced(lane, found, wanted)
            for r in rounds:
                backward = lane.at[(B, r) if (B, r) in lane.at else (W, r)]
                after = lane.at[REDUCE, r if per_round else None]
                lane.expect(backward, after, "gradients are reduced after the backward that makes them", "reduce")


def _unreduced(lane: Lane, found: set[int | None], wanted: set[int | None]) -> Exception:
    names = [str(Action(lane.stage, REDUCE, number)) for number in found]
    value = f"{lane.here} has {' '.join(sorted(names)) or f'no REDUCE for stage {lane.stage}'}"
    must = f"reduce 'round' needs one REDUCE per round of stage {lane.stage}"
    if wanted == {None}:
        must = f"reduce 'step' needs one REDUCE at the end of stage {lane.stage}"
    nearest = min(wanted ^ found, key=lambda number: -1 if number is None else number)
    verb = "add" if nearest in wanted else "remove"
    return broken("reduce", value, must, f"{verb} {Action(lane.stage, REDUCE, nearest)}")


def shards(plan: Plan) -> None:
    """UNSHARD and RESHARD, where a stage has them, alternate, and all its computation lies between."""
    for current in tables(plan):
        for lane in current.lanes():
            _alternating(lane)


def _alternating(lane: Lane) -> None:
    own = [(k, action) for k, action in enumerate(lane.row) if action.stage == lane.stage]
    if not any(action.kind in (UNSHARD, RESHARD) for _, action in own):
        return
    gathered = False
    for k, action in own:
        wrong = (action.kind == UNSHARD and gathered) or (action.kind in (F, B, I, W, RESHARD) and not gathered)
        if wrong:
            state = "gathered" if gathered else "not gathered"
            value = f"{lane.here} has {action} (action {k}) while parameters are {state}"
            must = "UNSHARD and RESHARD of a stage alternate, and its computation lies between them"
            way_out = f"put {Action(lane.stage, RESHARD if gathered else UNSHARD)} before it"
            raise broken("shards", value, must, way_out, (lane.host, k))
        if action.kind in (UNSHARD, RESHARD):
            gathered = action.kind == UNSHARD
