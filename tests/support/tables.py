"""Tables of actions for tests: orders of computations, and the messages that they need."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from seqloom.plan import Action, ActionKind, Pipeline, Reduce, Round, Stage

F, B, I, W = ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W  # noqa: E741 - the field's names

Table = tuple[tuple[Action, ...], ...]


def greedy_order(
    stages: int, rounds: Sequence[Round], split: Sequence[bool], first: Sequence[tuple[ActionKind, int]]
) -> Iterator[Action]:
    """Yield the computations of all stages, one after the other, in an order that respects every dependency.

    Args:
        stages: number of stages.
        rounds: rounds of the pipeline.
        split: stages with I and W instead of B.
        first: kinds and stages; of all that is ready, what stands here first is done next.
    """
    later = later_pieces(rounds)
    done: set[tuple[ActionKind, int, int]] = set()

    def ready(kind: ActionKind, stage: int, r: int) -> bool:
        if kind == W:
            return (I, stage, r) in done
        if kind == F:
            return (r == 0 or (F, stage, r - 1) in done) and (stage == 0 or (F, stage - 1, r) in done)
        after = [(stage, other) for other in later[r]] + ([(stage + 1, r)] if stage + 1 < stages else [])
        return (F, stage, r) in done and all((B, *place) in done or (I, *place) in done for place in after)

    waiting = {(kind, stage): _rounds(kind, len(rounds), split[stage]) for kind, stage in first}
    while any(waiting.values()):
        choices = ((kind, stage, r) for (kind, stage), numbers in waiting.items() for r in numbers)
        kind, stage, r = next(choice for choice in choices if ready(*choice))
        waiting[kind, stage].remove(r)
        done.add((kind, stage, r))
        yield Action(stage, kind, r)


def _rounds(kind: ActionKind, rounds: int, split: bool) -> list[int]:
    wanted = kind == F or (kind == B) != split
    return list(range(rounds)) if wanted else []


def later_pieces(rounds: Sequence[Round]) -> list[set[int]]:
    """Return, for every round, the rounds with the next pieces of its documents."""
    later: list[set[int]] = [set() for _ in rounds]
    last: dict[int, int] = {}
    for r, current in enumerate(rounds):
        for span in current.by_stage[0].spans():
            if span.document in last:
                later[last[span.document]].add(r)
            last[span.document] = r
    return later


def rows_in_order(stages: Sequence[Stage], order: Iterable[Action]) -> Table:
    """Cut an order of all computations into the rows of the hosts; every message is received as soon as sent.

    Rows made like this end: run side by side they can always follow the one order they come from.
    """
    rows, host = _empty(stages)
    for action in order:
        rows[host[action.stage]].append(action)
        message = _message(action, host)
        if message is not None:
            send, receive = message
            rows[host[send.stage]].append(send)
            rows[host[receive.stage]].append(receive)
    return tuple(map(tuple, rows))


def rows_with_messages(stages: Sequence[Stage], rows: Sequence[str]) -> Table:
    """Add messages to rows of computations, such as "0F0 2F0": received where used, sent where made.

    Such rows may wait for each other for ever.
    """
    lowered, host = _empty(stages)
    actions = [[Action.parse(word) for word in row.split()] for row in rows]
    needs = {}
    for action in (action for row in actions for action in row):
        message = _message(action, host)
        if message is not None:
            needs[message[1].stage, action.kind == F, action.round] = message
    for row, own in zip(lowered, actions, strict=True):
        for action in own:
            received = needs.get((action.stage, action.kind == F, action.round)) if action.kind in (F, B, I) else None
            made = _message(action, host)
            row += [received[1]] if received else []
            row.append(action)
            row += [made[0]] if made else []
    return tuple(map(tuple, lowered))


def _empty(stages: Sequence[Stage]) -> tuple[list[list[Action]], list[int]]:
    """Return an empty row per host, and the host of every stage."""
    line = Pipeline(tuple(stages), (), ())
    return [[] for _ in line.ranks_by_pp_rank], [line.pp_rank_of(s) for s in range(len(stages))]


def _message(action: Action, host: list[int]) -> tuple[Action, Action] | None:
    """Return SEND and RECV of what a computation makes, where it leaves the host."""
    forward = action.kind == F
    other = action.stage + (1 if forward else -1)
    if action.kind not in (F, B, I) or not 0 <= other < len(host) or host[other] == host[action.stage]:
        return None
    kinds = (ActionKind.SEND_F, ActionKind.RECV_F) if forward else (ActionKind.SEND_B, ActionKind.RECV_B)
    return Action(action.stage, kinds[0], action.round), Action(other, kinds[1], action.round)


def completed(stages: Sequence[Stage], table: Table, reduce: Reduce, *, unshard: bool = False) -> Table:
    """Add the reductions and, if wanted, UNSHARD and RESHARD around every stage's computations."""
    rows, host = _empty(stages)
    for h, row in enumerate(table):
        working = [(k, action.stage) for k, action in enumerate(row) if action.kind in (F, B, I, W)]
        first = {stage: k for k, stage in reversed(working)}
        last = {stage: k for k, stage in working}
        for k, action in enumerate(row):
            if unshard and k == first[action.stage]:
                rows[h].append(Action(action.stage, ActionKind.UNSHARD))
            rows[h].append(action)
            if action.kind in (B, W) and reduce == Reduce.ROUND:
                rows[h].append(Action(action.stage, ActionKind.REDUCE, action.round))
            if unshard and k == last[action.stage]:
                rows[h].append(Action(action.stage, ActionKind.RESHARD))
        if reduce == Reduce.STEP:
            rows[h] += [Action(s, ActionKind.REDUCE) for s in range(len(stages)) if host[s] == h]
    return tuple(map(tuple, rows))
