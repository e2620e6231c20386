"""The table of actions as the rules see it: of a plan's pipeline, or of a schedule that is not in a plan yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from seqloom.errors import violation
from seqloom.plan.action import Action, ActionKind
from seqloom.plan.limits import Reduce
from seqloom.plan.pipeline import Pipeline

if TYPE_CHECKING:
    from seqloom.plan.plan import Plan


Row = tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """One row of actions per host."""

    name: str
    """How errors name it, for example ``pipeline 0``."""
    pp_ranks: tuple[int, ...]
    """The host of every stage."""
    rounds: int
    rows: tuple[Row, ...]
    piece_pairs: tuple[tuple[int, int], ...] = ()
    """(early, late) rounds that hold neighbouring pieces of one document; empty where no rule asks for them."""

    @property
    def width(self) -> int:
        """Number of hosts."""
        return max(self.pp_ranks, default=-1) + 1

    def here(self, host: int) -> str:
        """Name a host in an error."""
        return f"{self.name} host {host}"

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """Return the stages that a host runs."""
        return tuple(stage for stage, own in enumerate(self.pp_ranks) if own == pp_rank)

    def lanes(self) -> Iterator[Lane]:
        """Yield every stage's part of its host's row, in the order of the stages."""
        positions: list[dict[tuple[ActionKind, int | None], int]] = [{} for _ in self.pp_ranks]
        for row in self.rows:
            for k, action in enumerate(row):
                positions[action.stage][action.kind, action.round] = k
        for s, at in enumerate(positions):
            yield Lane(self, s, self.rows[self.pp_ranks[s]], at)


class Lane(NamedTuple):
    """One stage's part of its host's row."""

    table: Table
    stage: int
    row: Row
    at: dict[tuple[ActionKind, int | None], int]
    """Where in the row the stage has which action."""

    @property
    def pp_rank(self) -> int:
        """The host whose row it is."""
        return self.table.pp_ranks[self.stage]

    @property
    def here(self) -> str:
        """Name of the host in an error."""
        return self.table.here(self.pp_rank)

    def backward(self, number: int) -> int:
        """Return where the stage makes the gradient of its input: at B or I."""
        whole = self.at.get((ActionKind.B, number))
        return self.at[ActionKind.I, number] if whole is None else whole

    def expect(self, first: int, second: int, must: str, rule: str = "order") -> None:
        """Refuse a row in which `first` comes after `second`."""
        if first > second:
            early, late = self.row[second], self.row[first]
            value = f"{self.here} has {early} (action {second}) before {late} (action {first})"
            raise violation(rule, value, must, f"put {late} before {early}", (self.pp_rank, second))


def tables(plan: Plan) -> Iterator[Table]:
    """Yield the tables of a plan's pipelines, without links."""
    for p, pipeline in enumerate(plan.pipelines):
        number = {ranks: host for host, ranks in enumerate(pipeline.ranks_by_pp_rank)}
        hosts = tuple(number[stage.ranks] for stage in pipeline.stages)
        yield Table(f"pipeline {p}", hosts, len(pipeline.rounds), pipeline.actions)


# ---- merged: plan.check_actions
# Rules about the table of actions: every round once on every stage, in an order that ends.
#
# `complete` and `ordered` are about any table, so a schedule is held to the same rules before it is in a plan.


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
        raise violation("table", value, must, f"give {table.width}")
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
            raise violation(
                "table",
                f"{here} has the action {action}",
                must,
                f"use {example}, for example",
                _place(table, host, action),
            )
        if times > 1 and action.kind not in (UNSHARD, RESHARD):
            value = f"{here} has {action} {times} times"
            raise violation(
                "table", value, "every action happens once", "remove the others", _place(table, host, action)
            )


def _complete(table: Table, host: int, count: Counter[Action], s: int) -> None:
    for r in range(table.rounds):
        found = tuple(count[Action(s, kind, r)] for kind in (F, B, I, W))
        if found not in ((1, 1, 0, 0), (1, 0, 1, 1)):
            present = [Action(s, kind, r) for kind in (F, B, I, W) if count[Action(s, kind, r)]]
            value = f"{table.here(host)} has {' '.join(map(str, present)) or 'nothing'} for round {r} of stage {s}"
            must = "every stage has for every round one F and one B, or one F, one I and one W"
            at = _place(table, host, present[0]) if present else None
            raise violation("table", value, must, f"use {Action(s, F, r)} and {Action(s, B, r)}", at)


def _place(table: Table, host: int, action: Action) -> tuple[int, int]:
    return host, table.rows[host].index(action)


def order(plan: Plan) -> None:
    """Forwards of a stage ascend, F comes before B, I before W, and pieces of a document go backward in reverse.

    Where two stages that follow each other are on one host, its row also runs them one after the other.
    """
    for current, pipeline in zip(tables(plan), plan.pipelines, strict=True):
        ordered(replace(current, piece_pairs=tuple(sorted(_chained(plan, pipeline)))))


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
            raise violation("order", value, must, "sort them", (lane.pp_rank, at[F, wrong]))
        for r in rounds:
            if (B, r) in at:
                lane.expect(at[F, r], at[B, r], "a round's F comes before its B")
            else:
                lane.expect(at[F, r], at[I, r], "a round's F comes before its I")
                lane.expect(at[I, r], at[W, r], "a round's I comes before its W")
        for early, late in table.piece_pairs:
            must = "all pieces of one document go forward before the first of them goes backward"
            lane.expect(at[F, late], lane.backward(early), must)
            must = "pieces of one document go backward in reverse order"
            lane.expect(lane.backward(late), lane.backward(early), must)
        if before is not None and before.pp_rank == lane.pp_rank:
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
        for document, start, stop in current.by_stage[0].spans():
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
    return violation("reduce", value, must, f"{verb} {Action(lane.stage, REDUCE, nearest)}")


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
            raise violation("shards", value, must, way_out, (lane.pp_rank, k))
        if action.kind in (UNSHARD, RESHARD):
            gathered = action.kind == UNSHARD


# ---- merged: plan.check_messages
# Rules about messages between hosts: each sent and received once, in one order, and never in a circle.


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
    hosts, s = lane.table.pp_ranks, lane.stage
    ahead = s + 1 < len(hosts) and hosts[s + 1] != hosts[s]
    behind = s > 0 and hosts[s - 1] != hosts[s]
    for kind, wanted in ((SEND_F, ahead), (RECV_B, ahead), (RECV_F, behind), (SEND_B, behind)):
        numbers = sorted(number for own, number in lane.at if own == kind and number is not None)
        if numbers != (list(range(lane.table.rounds)) if wanted else []):
            value = f"{lane.here} has {kind} of stage {s} for rounds {numbers}"
            must = "a stage sends to and receives from its neighbours on other hosts once per round, and nobody else"
            raise violation("messages", value, must, f"{'add or remove' if wanted else 'remove'} {kind} actions")


def _same_order(table: Table) -> None:
    """Compare what is sent with what is received, by kind and pair of hosts."""
    host = table.pp_ranks
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
                raise violation("messages", value, must, f"put {early} before {late}")


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
        host = table.pp_ranks[awaited.stage] if awaited is not None else host
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
    return violation("deadlock", value, must, way_out, (circle[0], at[circle[0]]))
