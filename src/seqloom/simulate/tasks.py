"""From a plan's tables of actions to tasks of the engine.

F, B, I, W    a task per component of the micro-batch, on the streams of its shard groups: a round starts when all ranks
              of the shard groups it joins are free, and ranks without tokens take part with no work. Ranks run the row
              of their pipeline rank in order, whatever stages the actions belong to.
SEND, RECV    one task per message, on the outgoing link of one pipeline rank and the incoming link of the other. It
              starts when the sender has computed it; the sender works on. A receiver waits for it where its row says
              RECV. A stage hands over a round as a whole. Between two stages of one pipeline rank there is no message:
              the later one waits for the documents of the earlier one.
REDUCE, UNSHARD, RESHARD
              no tasks: a round's gathers and reductions are part of its price (they run behind it), and what is reduced
              once per step is part of the step's end. Where free sharding unshards a stage for every pass: a task on
              the streams of all its ranks for every gather of parameters, and for every sum of gradients.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel
from seqloom.cost.plan_cost import tokens_on_ranks
from seqloom.cost.resharding import UnshardTimes, unshard_times_by_stage
from seqloom.errors import SeqloomError
from seqloom.plan import Action, ActionKind, Pipeline, Plan, StageMicroBatch
from seqloom.plan.pipeline import shard_collectives
from seqloom.simulate.engine import Engine
from seqloom.simulate.microbatch import ActionTimes, MicroBatchKey, MicroBatchTimes

COMPUTING = frozenset((ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W))
_TO = {ActionKind.SEND_F: (1, ActionKind.RECV_F), ActionKind.SEND_B: (-1, ActionKind.RECV_B)}
_FROM = {receive: (-step, send) for send, (step, receive) in _TO.items()}


class ComputeTasks(NamedTuple):
    """F, B, I or W of a micro-batch, and its tasks: one per component, numbered from `first`."""

    key: MicroBatchKey
    kind: ActionKind
    times: ActionTimes
    first: int


class LinkTask(NamedTuple):
    """A message between stages, or a gather or sum of a stage that is unsharded for a pass."""

    ends: tuple[tuple[MicroBatchKey, str], ...]  # stages whose ranks it concerns, and names of their events
    exposed: bool  # whether ranks wait for it
    ns: int
    task: int
    name: str  # for a message to the user


@dataclass(slots=True)
class TaskGraph:
    """The engine with the tasks of a plan, and what each task stands for."""

    times: dict[MicroBatchKey, MicroBatchTimes]
    engine: Engine = field(default_factory=Engine)
    messages: dict[tuple[MicroBatchKey, ActionKind], int] = field(default_factory=dict)  # by sender and kind of SEND
    computing: list[ComputeTasks] = field(default_factory=list)
    links: list[LinkTask] = field(default_factory=list)

    def name(self, task: int) -> str:
        """Name a task for a message to the user."""
        named = {link.task: link.name for link in self.links}
        if task in named:
            return named[task]
        tasks = self.computing[bisect_right(self.computing, task, key=lambda entry: entry.first) - 1]
        return _name(tasks.key.pipeline, Action(tasks.key.stage, tasks.kind, tasks.key.round))


def _name(pipeline: int, action: Action) -> str:
    return f"{action} of pipeline {pipeline}"


def build_tasks(plan: Plan, cost: CostModel, times: dict[MicroBatchKey, MicroBatchTimes]) -> TaskGraph:
    """Turn every row of actions into tasks. Pipelines have no ranks in common, so their order is free."""
    graph = TaskGraph(times)
    for number, pipeline in enumerate(plan.pipelines):
        _add_messages(graph, cost, pipeline, number)
        unshards = unshard_times_by_stage(cost, pipeline)
        for row in pipeline.actions:
            _add_row(graph, number, row, unshards)
        _wait_for_documents(graph, number, pipeline)
    return graph


def _add_messages(graph: TaskGraph, cost: CostModel, pipeline: Pipeline, number: int) -> None:
    """Add a task for every SEND, provided that it has a RECV and the other way round."""
    sends: set[tuple[int, ActionKind, int]] = set()  # stage, SEND_F or SEND_B, round
    receives: dict[tuple[int, ActionKind, int], Action] = {}
    for action in (action for row in pipeline.actions for action in row):
        if action.round is None:
            continue
        if action.kind in _TO:
            sends.add((action.stage, action.kind, action.round))
        elif action.kind in _FROM:
            back, kind = _FROM[action.kind]
            receives[action.stage + back, kind, action.round] = action
    for key in sorted(sends ^ receives.keys()):
        missing = f"{_name(number, Action(*key))} is never received; add its RECV"
        if key in receives:
            missing = f"{_name(number, receives[key])} is never sent; add {Action(*key)}"
        raise SeqloomError(f"{missing}: every message is sent once and received once, by neighbours")
    pp_rank = [pipeline.pp_rank_of(stage) for stage in range(len(pipeline.stages))]

    @cache
    def price(r: int, stage: int) -> int:
        works = pipeline.rounds[r].by_stage[stage : stage + 2]
        tokens = max(int(tokens_on_ranks(cost, work).max()) for work in works)  # of the fullest rank of both stages
        return cost.stage_message_ns(tokens, *pipeline.stages[stage : stage + 2])

    for stage, kind, r in sorted(sends):
        step, receive = _TO[kind]
        other = stage + step
        ns = price(r, min(stage, other))
        task = graph.engine.add(ns, links=((number, pp_rank[stage], "out"), (number, pp_rank[other], "in")))
        sender, receiver = MicroBatchKey(number, stage, r), MicroBatchKey(number, other, r)
        ends = ((sender, kind.value), (receiver, receive.value))
        graph.links.append(LinkTask(ends, False, ns, task, _name(number, Action(stage, kind, r))))
        graph.messages[sender, kind] = task


def _add_row(graph: TaskGraph, pipeline: int, row: tuple[Action, ...], unshards: dict[int, UnshardTimes]) -> None:
    """Add the tasks of one pipeline rank. A receive is remembered per shard group until its next action."""
    engine, times = graph.engine, graph.times
    awaited: dict[int, set[int]] = {}
    for action, move in zip(row, shard_collectives(row, frozenset(unshards)), strict=True):
        if move is None and action.round is None:
            continue
        key = MicroBatchKey(pipeline, action.stage, action.round or 0)
        components = times[key].shard_groups
        everyone = [number for shard_groups in components for number in shard_groups]
        if move is not None:
            ns = unshards[action.stage].of(move)
            task = engine.add(ns, streams=everyone)
            graph.links.append(LinkTask(((key, move.name),), True, ns, task, _name(pipeline, action)))
        elif action.kind in COMPUTING:
            own = times[key].action(action.kind)
            graph.computing.append(ComputeTasks(key, action.kind, own, len(engine)))
            for shard_groups, ns in zip(components, own.duration.tolist(), strict=True):
                after = set().union(*(awaited.pop(number, ()) for number in shard_groups))
                engine.add(ns, streams=shard_groups, after=after)
        elif action.kind in _TO:
            before = set(engine.last(everyone)).union(*(awaited.get(number, ()) for number in everyone))
            engine.require(graph.messages[key, action.kind], before)
        elif action.kind in _FROM:
            back, kind = _FROM[action.kind]
            message = graph.messages[key._replace(stage=action.stage + back), kind]
            for number in everyone:
                awaited.setdefault(number, set()).add(message)


def _wait_for_documents(graph: TaskGraph, number: int, pipeline: Pipeline) -> None:
    """Let every document wait for itself, from one stage to the next (or back) on the same pipeline rank."""
    local = {s for s in range(1, len(pipeline.stages)) if pipeline.stages[s].ranks == pipeline.stages[s - 1].ranks}
    if not local:
        return
    own = (tasks for tasks in graph.computing if tasks.key.pipeline == number and tasks.kind != ActionKind.W)
    first = {(tasks.key, tasks.kind == ActionKind.F): tasks.first for tasks in own}
    for s in local:
        for r, current in enumerate(pipeline.rounds):
            keys = (MicroBatchKey(number, s - 1, r), MicroBatchKey(number, s, r))
            early, late = (_components(current.by_stage[key.stage], graph.times[key]) for key in keys)
            down, up = ([first[key, forward] for key in keys] for forward in (True, False))
            for document, component in early.items():
                graph.engine.require(down[1] + late[document], [down[0] + component])
                graph.engine.require(up[0] + component, [up[1] + late[document]])


def _components(work: StageMicroBatch, times: MicroBatchTimes) -> dict[int, int]:
    starts = np.unique(times.group, return_index=True)[1][-len(work.groups) :]  # -1, ranks without a group, is first
    of_group = times.component[starts].tolist()
    return {span.document: k for group, k in zip(work.groups, of_group, strict=True) for span in group.spans}
