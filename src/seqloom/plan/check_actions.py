"""Rules about the table of actions: every round once on every stage, in an order that ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from seqloom.plan.action import Action, ActionKind
from seqloom.plan.error import broken
from seqloom.plan.limits import Reduce
from seqloom.plan.pipeline import Pipeline

if TYPE_CHECKING:
    from seqloom.plan.plan import Plan

F, B, W = ActionKind.F, ActionKind.B, ActionKind.W
I = ActionKind.I  # noqa: E741 - the field's name for the input half of a backward
UNSHARD, RESHARD, REDUCE = ActionKind.UNSHARD, ActionKind.RESHARD, ActionKind.REDUCE
_WITHOUT_ROUND = frozenset((UNSHARD, RESHARD, REDUCE))

Row = tuple[Action, ...]


class Lane(NamedTuple):
    """One stage's part of its host's row."""

    here: str
    pipeline: Pipeline
    stage: int
    row: Row
    at: dict[tuple[ActionKind, int | None], int]
    """Where in the row the stage has which action."""

    def backward(self, number: int) -> int:
        """Return where the stage makes the gradient of its input: at B or I."""
        whole = self.at.get((B, number))
        return self.at[I, number] if whole is None else whole

    def expect(self, first: int, second: int, must: str, rule: str = "order") -> None:
        """Refuse a row in which `first` comes after `second`."""
        if first > second:
            early, late = self.row[second], self.row[first]
            value = f"{self.here} has {early} (action {second}) before {late} (action {first})"
            raise broken(rule, value, must, f"put {late} before {early}")


def each_lane(plan: Plan) -> Iterator[Lane]:
    """Yield the lanes of the whole plan, pipeline by pipeline, in the order of the stages."""
    for p, pipeline in enumerate(plan.pipelines):
        positions: list[dict[tuple[ActionKind, int | None], int]] = [{} for _ in pipeline.stages]
        for row in pipeline.actions:
            for k, action in enumerate(row):
                positions[action.stage][action.kind, action.round] = k
        for s, at in enumerate(positions):
            h = pipeline.host_of(s)
            yield Lane(f"pipeline {p} host {h}", pipeline, s, pipeline.actions[h], at)


def table(plan: Plan) -> None:
    """Every host has a row; every stage has there exactly one F and one B (or one I and one W) for every round."""
    for p, pipeline in enumerate(plan.pipelines):
        hosts = len(pipeline.hosts)
        if len(pipeline.actions) != hosts:
            value = f"pipeline {p} has {len(pipeline.actions)} rows of actions for {hosts} hosts"
            must = "one row per host, that is, per distinct ranks of the stages"
            raise broken("table", value, must, f"give {hosts}")
        for h, row in enumerate(pipeline.actions):
            count = Counter(row)
            _known(f"pipeline {p} host {h}", count, pipeline.stages_of(h), len(pipeline.rounds))
            for s in pipeline.stages_of(h):
                _complete(f"pipeline {p} host {h}", count, s, len(pipeline.rounds))


def _known(here: str, count: Counter[Action], stages: tuple[int, ...], rounds: int) -> None:
    """Refuse actions of other hosts and rounds, and repeated ones."""
    for action, times in count.items():
        known = action.round is None if action.kind in _WITHOUT_ROUND else False
        if action.stage not in stages or not (known or (action.round is not None and 0 <= action.round < rounds)):
            names = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
            must = f"its row holds actions of {names} for rounds 0 to {rounds - 1}"
            example = Action(stages[0], action.kind, 0 if rounds else None)
            raise broken("table", f"{here} has the action {action}", must, f"use {example}, for example")
        if times > 1 and action.kind not in (UNSHARD, RESHARD):
            value = f"{here} has {action} {times} times"
            raise broken("table", value, "every action happens once", "remove the others")


def _complete(here: str, count: Counter[Action], s: int, rounds: int) -> None:
    for r in range(rounds):
        found = tuple(count[Action(s, kind, r)] for kind in (F, B, I, W))
        if found not in ((1, 1, 0, 0), (1, 0, 1, 1)):
            present = [str(Action(s, kind, r)) for kind in (F, B, I, W) if count[Action(s, kind, r)]]
            value = f"{here} has {' '.join(present) or 'nothing'} for round {r} of stage {s}"
            must = "every stage has for every round one F and one B, or one F, one I and one W"
            raise broken("table", value, must, f"use {Action(s, F, r)} and {Action(s, B, r)}")


def order(plan: Plan) -> None:
    """Forwards of a stage ascend, F comes before B, I before W, and pieces of a document go backward in reverse.

    Where two stages that follow each other are on one host, its row also runs them one after the other.
    """
    links = {id(pipeline): _chained(plan, pipeline) for pipeline in plan.pipelines}
    before: Lane | None = None
    for lane in each_lane(plan):
        at = lane.at
        forwards = [action.round for action in lane.row if action.kind == F and action.stage == lane.stage]
        rounds = range(len(lane.pipeline.rounds))
        if forwards != list(rounds):
            value = f"{lane.here} runs the forwards of stage {lane.stage} in the order {forwards}"
            raise broken("order", value, "rounds are totally ordered, forwards run in that order", "sort them")
        for r in rounds:
            if (B, r) in at:
                lane.expect(at[F, r], at[B, r], "a round's F comes before its B")
            else:
                lane.expect(at[F, r], at[I, r], "a round's F comes before its I")
                lane.expect(at[I, r], at[W, r], "a round's I comes before its W")
        for early, late in links[id(lane.pipeline)]:
            must = "pieces of one document go backward in reverse order"
            lane.expect(lane.backward(late), lane.backward(early), must)
        if before is not None and lane.stage > 0 and before.here == lane.here:
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
    for lane in each_lane(plan):
        rounds = range(len(lane.pipeline.rounds))
        wanted = set(rounds) if per_round else {None}
        found = {number for kind, number in lane.at if kind == REDUCE}
        if found != wanted:
            names = [str(Action(lane.stage, REDUCE, number)) for number in found]
            value = f"{lane.here} has {' '.join(sorted(names)) or f'no REDUCE for stage {lane.stage}'}"
            must = f"reduce 'step' needs one REDUCE at the end of stage {lane.stage}"
            if per_round:
                must = f"reduce 'round' needs one REDUCE per round of stage {lane.stage}"
            nearest = min(wanted ^ found, key=lambda number: -1 if number is None else number)
            verb = "add" if nearest in wanted else "remove"
            raise broken("reduce", value, must, f"{verb} {Action(lane.stage, REDUCE, nearest)}")
        for r in rounds:
            backward = lane.at[(B, r) if (B, r) in lane.at else (W, r)]
            after = lane.at[REDUCE, r if per_round else None]
            lane.expect(backward, after, "gradients are reduced after the backward that makes them", "reduce")


def shards(plan: Plan) -> None:
    """UNSHARD and RESHARD, where a stage has them, alternate, and all its computation lies between."""
    for lane in each_lane(plan):
        own = [(k, action) for k, action in enumerate(lane.row) if action.stage == lane.stage]
        if not any(action.kind in (UNSHARD, RESHARD) for _, action in own):
            continue
        gathered = False
        for k, action in own:
            wrong = (action.kind == UNSHARD and gathered) or (action.kind in (F, B, I, W, RESHARD) and not gathered)
            if wrong:
                state = "gathered" if gathered else "not gathered"
                value = f"{lane.here} has {action} (action {k}) while parameters are {state}"
                must = "UNSHARD and RESHARD of a stage alternate, and its computation lies between them"
                way_out = f"put {Action(lane.stage, RESHARD if gathered else UNSHARD)} before it"
                raise broken("shards", value, must, way_out)
            if action.kind in (UNSHARD, RESHARD):
                gathered = action.kind == UNSHARD
