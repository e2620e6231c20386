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
_RECV = {ActionKind.SEND_F: ActionKind.RECV_F, ActionKind.SEND_B: ActionKind.RECV_B}
_SEND = {receive: send for send, receive in _RECV.items()}


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
    messages: dict[tuple[MicroBatchKey, int], int] = field(default_factory=dict)  # by sender and receiving stage
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
            _add_row(graph, pipeline, number, row, unshards)
        _wait_for_documents(graph, number, pipeline)
    return graph


def _add_messages(graph: TaskGraph, cost: CostModel, pipeline: Pipeline, number: int) -> None:
    """Add a task for every message, provided that its SEND has a RECV and the other way round."""
    sent: dict[tuple[int, int, ActionKind, int], Action] = {}  # by stage, other stage, SEND_F or SEND_B, round
    received: dict[tuple[int, int, ActionKind, int], Action] = {}
    for action in (action for row in pipeline.actions for action in row):
        if action.round is None:
            continue
        for other in _other_stages(pipeline, action):
            if action.kind in _RECV:
                sent[action.stage, other, action.kind, action.round] = action
            else:
                received[other, action.stage, _SEND[action.kind], action.round] = action
    for key in sorted(sent.keys() ^ received.keys()):
        sender, receiver, kind, r = key
        missing = f"{_name(number, Action(sender, kind, r))} is never received; add its RECV"
        if key in received:
            missing = f"{_name(number, received[key])} is never sent; add {Action(sender, kind, r)}"
        raise SeqloomError(f"{missing}: every message is sent once and received once, by neighbours")
    pp_rank = [pipeline.pp_rank_of(stage) for stage in range(len(pipeline.stages))]

    @cache
    def price(r: int, early: int, late: int) -> int:
        head = pipeline.chain.is_head(late)  # which gets a part of what the early one has
        works = [pipeline.rounds[r].by_stage[stage] for stage in ((late,) if head else (early, late))]
        tokens = max(int(tokens_on_ranks(cost, work).max()) for work in works)  # of the fullest rank of both stages
        return cost.stage_message_ns(tokens, pipeline.stages[early], pipeline.stages[late])

    for stage, other, kind, r in sorted(sent):
        ns = price(r, min(stage, other), max(stage, other))
        task = graph.engine.add(ns, links=((number, pp_rank[stage], "out"), (number, pp_rank[other], "in")))
        sender, receiver = MicroBatchKey(number, stage, r), MicroBatchKey(number, other, r)
        ends = ((sender, kind.value), (receiver, _RECV[kind].value))
        graph.links.append(LinkTask(ends, False, ns, task, _name(number, Action(stage, kind, r))))
        graph.messages[sender, other] = task


def _other_stages(pipeline: Pipeline, action: Action) -> tuple[int, ...]:
    """Stages on other pipeline ranks that a SEND goes to, or a RECV comes from; () for other actions."""
    chain, own = pipeline.chain, pipeline.stages[action.stage].ranks
    if action.kind in (ActionKind.SEND_F, ActionKind.RECV_B):
        return tuple(s for s in chain.following(action.stage) if pipeline.stages[s].ranks != own)
    if action.kind in (ActionKind.SEND_B, ActionKind.RECV_F):
        return tuple(s for s in (chain.previous(action.stage),) if s >= 0 and pipeline.stages[s].ranks != own)
    return ()


def _add_row(
    graph: TaskGraph, pipeline: Pipeline, p: int, row: tuple[Action, ...], unshards: dict[int, UnshardTimes]
) -> None:
    """Add the tasks of one pipeline rank. A receive is remembered per shard group until its next action."""
    engine, times = graph.engine, graph.times
    awaited: dict[int, set[int]] = {}
    for action, move in zip(row, shard_collectives(row, frozenset(unshards)), strict=True):
        if move is None and action.round is None:
            continue
        key = MicroBatchKey(p, action.stage, action.round or 0)
        components = times[key].shard_groups
        everyone = [number for shard_groups in components for number in shard_groups]
        if move is not None:
            ns = unshards[action.stage].of(move)
            task = engine.add(ns, streams=everyone)
            graph.links.append(LinkTask(((key, move.name),), True, ns, task, _name(p, action)))
        elif action.kind in COMPUTING:
            own = times[key].action(action.kind)
            graph.computing.append(ComputeTasks(key, action.kind, own, len(engine)))
            for shard_groups, ns in zip(components, own.duration.tolist(), strict=True):
                after = set().union(*(awaited.pop(number, ()) for number in shard_groups))
                engine.add(ns, streams=shard_groups, after=after)
        elif action.kind in _RECV:
            before = set(engine.last(everyone)).union(*(awaited.get(number, ()) for number in everyone))
            for other in _other_stages(pipeline, action):
                engine.require(graph.messages[key, other], before)
        elif action.kind in _SEND:
            messages = {graph.messages[key._replace(stage=o), key.stage] for o in _other_stages(pipeline, action)}
            for number in everyone:
                awaited.setdefault(number, set()).update(messages)


def _wait_for_documents(graph: TaskGraph, number: int, pipeline: Pipeline) -> None:
    """Let every document wait for itself, from one stage to the next (or back) on the same pipeline rank."""
    local = [pair for pair in pipeline.chain.pairs() if len({pipeline.stages[s].ranks for s in pair}) == 1]
    if not local:
        return
    own = (tasks for tasks in graph.computing if tasks.key.pipeline == number and tasks.kind != ActionKind.W)
    first = {(tasks.key, tasks.kind == ActionKind.F): tasks.first for tasks in own}
    for pair in local:
        for r, current in enumerate(pipeline.rounds):
            keys = [MicroBatchKey(number, s, r) for s in pair]
            early, late = (_components(current.by_stage[key.stage], graph.times[key]) for key in keys)
            component_of = dict(early)
            for document, component in late:
                graph.engine.require(first[keys[1], True] + component, [first[keys[0], True] + component_of[document]])
                if (keys[0], False) in first:  # not of a step that only runs forward
                    up = [first[key, False] for key in keys]
                    graph.engine.require(up[0] + component_of[document], [up[1] + component])


def _components(work: StageMicroBatch, times: MicroBatchTimes) -> list[tuple[int, int]]:
    """Pairs of a document and the component that works on it; of a head stage several may have one document."""
    starts = np.unique(times.group, return_index=True)[1][-len(work.groups) :]  # -1, ranks without a group, is first
    of_group = times.component[starts].tolist() if work.groups else []
    found = ((span.document, k) for group, k in zip(work.groups, of_group, strict=True) for span in group.spans)
    return [*dict.fromkeys(found)]
