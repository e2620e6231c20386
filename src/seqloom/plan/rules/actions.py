"""Rules about the table of actions: every round once on every stage, in an order that ends.

A pipeline rank (pp_rank) is the set of ranks that runs one or more stages; its row holds their actions in order. The
rules work on an `ActionTable`, so a schedule is held to the same rules before it is part of a plan.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from seqloom.errors import PlanError, violation
from seqloom.plan.action import Action, ActionKind, B, F, I, W
from seqloom.plan.limits import Reduce
from seqloom.plan.pipeline import Pipeline, StageChain

if TYPE_CHECKING:
    from seqloom.plan.plan import Plan

UNSHARD, RESHARD, REDUCE = ActionKind.UNSHARD, ActionKind.RESHARD, ActionKind.REDUCE
SEND_F, RECV_F = ActionKind.SEND_F, ActionKind.RECV_F
SEND_B, RECV_B = ActionKind.SEND_B, ActionKind.RECV_B
_PEERS = {SEND_F: RECV_F, SEND_B: RECV_B, RECV_F: SEND_F, RECV_B: SEND_B}

Row = tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class ActionTable:
    """One row of actions per pipeline rank.

    Attributes:
        name: how errors name the table, for example ``pipeline 0``.
        pp_ranks: the pipeline rank of every stage.
        rounds: how many rounds (of a schedule: units) there are.
        piece_pairs: (early, late) rounds that hold neighbouring pieces of one document.
        heads: stages without layers, the last ones; see `StageChain`.
    """

    name: str
    pp_ranks: tuple[int, ...]
    rounds: int
    rows: tuple[Row, ...]
    piece_pairs: tuple[tuple[int, int], ...] = ()
    heads: int = 0

    @property
    def pp_size(self) -> int:
        """Number of pipeline ranks."""
        return max(self.pp_ranks, default=-1) + 1

    @property
    def chain(self) -> StageChain:
        """Which stage hands its output to which."""
        return StageChain(len(self.pp_ranks), self.heads)

    def other_sides(self, action: Action) -> tuple[Action, ...]:
        """Return the RECVs of a SEND, or the SENDs of a RECV, of stages on other pipeline ranks; () for others."""
        kind, chain = _PEERS.get(action.kind), self.chain
        if kind is None:
            return ()
        forward = action.kind in (SEND_F, RECV_B)
        peers = chain.following(action.stage) if forward else (chain.previous(action.stage),)
        here = self.pp_ranks[action.stage]
        return tuple(Action(s, kind, action.round) for s in peers if s >= 0 and self.pp_ranks[s] != here)

    def here(self, pp_rank: int) -> str:
        """Name a pipeline rank in an error."""
        return f"{self.name} pp_rank {pp_rank}"

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """Return the stages that a pipeline rank runs."""
        return tuple(stage for stage, own in enumerate(self.pp_ranks) if own == pp_rank)

    def by_stage(self) -> Iterator[StageActions]:
        """Yield every stage's actions, in the order of the stages."""
        positions: list[dict[tuple[ActionKind, int | None], int]] = [{} for _ in self.pp_ranks]
        for row in self.rows:
            for k, action in enumerate(row):
                positions[action.stage][action.kind, action.round] = k
        for s, at in enumerate(positions):
            yield StageActions(self, s, self.rows[self.pp_ranks[s]], at)


class StageActions(NamedTuple):
    """One stage's actions in the row of its pipeline rank; `at` maps (kind, round) to the place in the row."""

    table: ActionTable
    stage: int
    row: Row
    at: dict[tuple[ActionKind, int | None], int]

    @property
    def pp_rank(self) -> int:
        """The pipeline rank that runs the stage."""
        return self.table.pp_ranks[self.stage]

    @property
    def here(self) -> str:
        """Name of the pipeline rank in an error."""
        return self.table.here(self.pp_rank)

    def input_backward(self, number: int) -> int:
        """Return where the stage computes the gradient of its input: at B or I."""
        whole = self.at.get((B, number))
        return self.at[I, number] if whole is None else whole

    def check_before(self, first: int, second: int, must: str, rule: str = "order") -> None:
        """Refuse a row in which the action at `first` comes after the one at `second`."""
        if first > second:
            early, late = self.row[second], self.row[first]
            value = f"{self.here} has {early} (action {second}) before {late} (action {first})"
            raise violation(rule, value, must, f"put {late} before {early}", (self.pp_rank, second))


def tables(plan: Plan) -> Iterator[ActionTable]:
    """Yield the tables of a plan's pipelines, without pairs of pieces."""
    for p, pipeline in enumerate(plan.pipelines):
        number = {ranks: pp_rank for pp_rank, ranks in enumerate(pipeline.ranks_by_pp_rank)}
        pp_ranks = tuple(number[stage.ranks] for stage in pipeline.stages)
        yield ActionTable(f"pipeline {p}", pp_ranks, len(pipeline.rounds), pipeline.actions, (), pipeline.chain.heads)


def table(plan: Plan) -> None:
    """Every pp_rank has a row; every stage has there exactly one F and one B (or one I and one W) for every round."""
    for current in tables(plan):
        check_complete(current)


def check_complete(table: ActionTable) -> None:
    """Check the rule "table" of one table."""
    if len(table.rows) != table.pp_size:
        value = f"{table.name} has {len(table.rows)} rows of actions for {table.pp_size} pp_ranks"
        must = "one row per pp_rank, that is, per distinct ranks of the stages"
        raise violation("table", value, must, f"give {table.pp_size}")
    for pp_rank, row in enumerate(table.rows):
        count = Counter(row)
        _check_known(table, pp_rank, count)
        for s in table.stages_of(pp_rank):
            _check_rounds(table, pp_rank, count, s)


def _check_known(table: ActionTable, pp_rank: int, count: Counter[Action]) -> None:
    """Refuse actions of other pipeline ranks and rounds, and repeated ones."""
    stages, rounds, here = table.stages_of(pp_rank), table.rounds, table.here(pp_rank)
    row = table.rows[pp_rank]
    for action, times in count.items():
        step_wide = action.round is None and action.kind in (UNSHARD, RESHARD, REDUCE)
        known = step_wide or (action.round is not None and 0 <= action.round < rounds)
        if action.stage not in stages or not known:
            names = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
            must = f"its row holds actions of {names} for rounds 0 to {rounds - 1}"
            way_out = f"use {Action(stages[0], action.kind, 0 if rounds else None)}, for example"
            raise violation("table", f"{here} has the action {action}", must, way_out, (pp_rank, row.index(action)))
        if times > 1 and action.kind not in (UNSHARD, RESHARD):
            value, at = f"{here} has {action} {times} times", (pp_rank, row.index(action))
            raise violation("table", value, "every action happens once", "remove the others", at)


def _check_rounds(table: ActionTable, pp_rank: int, count: Counter[Action], s: int) -> None:
    for r in range(table.rounds):
        found = tuple(count[Action(s, kind, r)] for kind in (F, B, I, W))
        if found not in ((1, 1, 0, 0), (1, 0, 1, 1)):
            present = [Action(s, kind, r) for kind in (F, B, I, W) if count[Action(s, kind, r)]]
            value = f"{table.here(pp_rank)} has {' '.join(map(str, present)) or 'nothing'} for round {r} of stage {s}"
            must = "every stage has for every round one F and one B, or one F, one I and one W"
            at = (pp_rank, table.rows[pp_rank].index(present[0])) if present else None
            raise violation("table", value, must, f"use {Action(s, F, r)} and {Action(s, B, r)}", at)


def order(plan: Plan) -> None:
    """Forwards of a stage ascend, F comes before B, I before W, and pieces of a document go backward in reverse.

    Where two stages that follow each other are on one pp_rank, its row also runs them one after the other.
    """
    for current, pipeline in zip(tables(plan), plan.pipelines, strict=True):
        check_order(replace(current, piece_pairs=tuple(sorted(_piece_pairs(plan, pipeline)))))


def check_order(table: ActionTable) -> None:
    """Check the rule "order" of one table."""
    rounds, stages = range(table.rounds), [*table.by_stage()]
    for stage in stages:
        at, previous = stage.at, table.chain.previous(stage.stage)
        forwards = [action.round for action in stage.row if action.kind == F and action.stage == stage.stage]
        if forwards != list(rounds):
            value = f"{stage.here} runs the forwards of stage {stage.stage} in the order {forwards}"
            wrong = next(number for place, number in enumerate(forwards) if place != number)
            must = "rounds are totally ordered, forwards run in that order"
            raise violation("order", value, must, "sort them", (stage.pp_rank, at[F, wrong]))
        for r in rounds:
            for first, second in [(F, B)] if (B, r) in at else [(F, I), (I, W)]:
                stage.check_before(at[first, r], at[second, r], f"a round's {first} comes before its {second}")
        for early, late in () if table.chain.is_head(stage.stage) else table.piece_pairs:
            must = "all pieces of one document go forward before the first of them goes backward"
            stage.check_before(at[F, late], stage.input_backward(early), must)
            must = "pieces of one document go backward in reverse order"
            stage.check_before(stage.input_backward(late), stage.input_backward(early), must)
        before = stages[previous] if previous >= 0 else None
        if before is not None and before.pp_rank == stage.pp_rank:
            must = f"stages {before.stage} and {stage.stage} are on one pp_rank, which runs one after the other"
            for r in rounds:
                stage.check_before(before.at[F, r], at[F, r], must)
                stage.check_before(stage.input_backward(r), before.input_backward(r), must)


def _piece_pairs(plan: Plan, pipeline: Pipeline) -> set[tuple[int, int]]:
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
    needed = "one REDUCE per round of" if per_round else "one REDUCE at the end of"
    for stage in (stage for current in tables(plan) for stage in current.by_stage()):
        rounds, s = range(stage.table.rounds), stage.stage
        wanted: set[int | None] = {*rounds} if per_round else {None}
        found = {number for kind, number in stage.at if kind == REDUCE}
        if found != wanted:
            names = sorted(str(Action(s, REDUCE, number)) for number in found)
            value = f"{stage.here} has {' '.join(names) or f'no REDUCE for stage {s}'}"
            nearest = min(wanted ^ found, key=lambda number: -1 if number is None else number)
            way_out = f"{'add' if nearest in wanted else 'remove'} {Action(s, REDUCE, nearest)}"
            raise violation("reduce", value, f"reduce '{plan.reduce}' needs {needed} stage {s}", way_out)
        for r in rounds:
            backward = stage.at[(B, r) if (B, r) in stage.at else (W, r)]
            after = stage.at[REDUCE, r if per_round else None]
            stage.check_before(backward, after, "gradients are reduced after the backward that makes them", "reduce")


def shards(plan: Plan) -> None:
    """UNSHARD and RESHARD, where a stage has them, alternate, and all its computation lies between."""
    for stage in (stage for current in tables(plan) for stage in current.by_stage()):
        own = [(k, action) for k, action in enumerate(stage.row) if action.stage == stage.stage]
        unsharded = not any(action.kind in (UNSHARD, RESHARD) for _, action in own)  # for good, without either
        for k, action in own:
            if action.kind == UNSHARD if unsharded else action.kind in (F, B, I, W, RESHARD):
                state = "gathered" if unsharded else "not gathered"
                value = f"{stage.here} has {action} (action {k}) while parameters are {state}"
                must = "UNSHARD and RESHARD of a stage alternate, and its computation lies between them"
                way_out = f"put {Action(stage.stage, RESHARD if unsharded else UNSHARD)} before it"
                raise violation("shards", value, must, way_out, (stage.pp_rank, k))
            if action.kind in (UNSHARD, RESHARD):
                unsharded = action.kind == UNSHARD


def messages(plan: Plan) -> None:
    """Stages that follow each other on two pp_ranks send every round once, after making it, and receive it before use.

    Between two pp_ranks, what goes forward is received in the order in which it is sent, whatever stages it belongs
    to, and so is what goes backward: messages of one kind need no tags.
    """
    for current in tables(plan):
        check_messages(current)


def check_messages(table: ActionTable) -> None:
    """Check the rule "messages" of one table."""
    must = "a message is received before it is used and made before it is sent"
    for stage in table.by_stage():
        _check_peers(stage)
        for r in range(table.rounds):
            forward, backward = stage.at[F, r], stage.input_backward(r)
            for kind, used in ((RECV_F, forward), (RECV_B, backward)):
                stage.check_before(stage.at.get((kind, r), -1), used, must, "messages")
            for kind, made in ((SEND_F, forward), (SEND_B, backward)):
                stage.check_before(made, stage.at.get((kind, r), len(stage.row)), must, "messages")
    if table.pp_size > 1:
        _check_message_order(table)


def _check_peers(stage: StageActions) -> None:
    """Check which rounds a stage sends and receives."""
    s, other_sides = stage.stage, stage.table.other_sides
    to_next, from_last = (bool(other_sides(Action(s, kind, 0))) for kind in (SEND_F, RECV_F))
    for kind, wanted in ((SEND_F, to_next), (RECV_B, to_next), (RECV_F, from_last), (SEND_B, from_last)):
        numbers = sorted(number for own, number in stage.at if own == kind and number is not None)
        if numbers != (list(range(stage.table.rounds)) if wanted else []):
            value = f"{stage.here} has {kind} of stage {s} for rounds {numbers}"
            must = "a stage sends to and receives from its neighbours on other pp_ranks once per round, and nobody else"
            raise violation("messages", value, must, f"{'add or remove' if wanted else 'remove'} {kind} actions")


def _check_message_order(table: ActionTable) -> None:
    """Compare what is sent with what is received, by kind and pair of pipeline ranks."""
    sent: dict[tuple[ActionKind, int, int], list[tuple[Action, Action]]] = defaultdict(list)  # SENDs with their RECVs
    received: dict[tuple[ActionKind, int, int], list[tuple[Action, Action]]] = defaultdict(list)
    for pp_rank, row in enumerate(table.rows):
        for action in row:
            if action.kind in (SEND_F, SEND_B):
                for peer in table.other_sides(action):
                    sent[action.kind, pp_rank, table.pp_ranks[peer.stage]].append((action, peer))
            else:
                for peer in table.other_sides(action):
                    received[peer.kind, table.pp_ranks[peer.stage], pp_rank].append((peer, action))
    for (kind, sender, receiver), actions in sent.items():
        for first, second in zip(actions, received[kind, sender, receiver], strict=True):
            if first != second:
                (send, early), (_, late) = first, second
                value = (
                    f"{table.here(sender)} sends {send} before {second[0]}, pp_rank {receiver} receives {late} first"
                )
                way = "forward" if kind == SEND_F else "backward"
                must = f"what one pp_rank sends another {way} arrives in that order"
                raise violation("messages", value, must, f"put {early} before {late}")


def deadlock(plan: Plan) -> None:
    """All rows can be run to their end when a receive waits for its send."""
    for current in tables(plan):
        if current.pp_size > 1:
            check_messages_end(current)


def check_messages_end(table: ActionTable) -> None:
    """Check the rule "deadlock" of a table with messages: a RECV waits for its SENDs."""

    def sends_of(action: Action) -> tuple[Action, ...]:
        return table.other_sides(action) if action.kind in (RECV_F, RECV_B) else ()

    check_ends(table, sends_of, "a receive waits for its send")


def check_ends(table: ActionTable, awaits: Callable[[Action], Sequence[Action]], rule: str) -> None:
    """Check the rule "deadlock" of one table: its rows together have an order that ends.

    `awaits` returns the actions of the table that an action waits for; `rule` says the same in words.
    """
    rows, at = table.rows, [0] * len(table.rows)
    done: set[Action] = set()
    moved = True
    while moved:
        moved = False
        for pp_rank, row in enumerate(rows):
            while at[pp_rank] < len(row) and done.issuperset(awaits(row[at[pp_rank]])):
                done.add(row[at[pp_rank]])
                at[pp_rank] += 1
                moved = True
    if any(k < len(row) for k, row in zip(at, rows, strict=True)):
        raise _deadlock(table, at, lambda action: next((a for a in awaits(action) if a not in done), None), rule)


def _deadlock(table: ActionTable, at: list[int], awaits: Callable[[Action], Action | None], rule: str) -> PlanError:
    """Name the cycle: every stopped pp_rank waits for an action that another stopped one has not reached."""
    pp_rank = next(k for k, row in enumerate(table.rows) if at[k] < len(row))
    path: list[int] = []
    while pp_rank not in path:
        path.append(pp_rank)
        awaited = awaits(table.rows[pp_rank][at[pp_rank]])
        pp_rank = table.pp_ranks[awaited.stage] if awaited is not None else pp_rank
    cycle = path[path.index(pp_rank) :]
    waiting = [table.rows[k][at[k]] for k in cycle]
    words = [f"{action} (pp_rank {k}, action {at[k]})" for k, action in zip(cycle, waiting, strict=True)]
    links = [
        f"waits for {awaits(action)}, which comes after {words[(k + 1) % len(words)]}"
        for k, action in enumerate(waiting)
    ]
    value = f"{table.name} stops: {words[0]} {', which '.join(links)}"
    must = f"{rule}, so the rows together must have an order that ends"
    way_out = f"move {waiting[0]} later in its row, or {awaits(waiting[0])} earlier"
    return violation("deadlock", value, must, way_out, (cycle[0], at[cycle[0]]))
