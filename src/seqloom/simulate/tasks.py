"""Messages between stages: how many tokens move, and how long it takes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel
from seqloom.cost.plan_cost import tokens_on_ranks
from seqloom.cost.profile import AnalyticProfile
from seqloom.cost.resharding import UnshardTimes, unshard_times_by_stage
from seqloom.errors import SeqloomError
from seqloom.plan import Action, ActionKind, Pipeline, Plan, Stage, StageMicroBatch
from seqloom.plan.pipeline import ShardCollective, shard_collectives
from seqloom.simulate.engine import Engine
from seqloom.simulate.windows import ActionTimes, MicroBatchKey, MicroBatchTimes

ACTIVATION_BYTES = 2  # bf16, forward (hidden states) and backward (their gradients)


def round_message_ns(cost: CostModel, pipeline: Pipeline, number: int, stage: int) -> int:
    """Time of one message of round `number` between `stage` and the next one, either way.

    tokens of the fullest rank of both stages x hidden width x 2 bytes, over the network card's share of a
    rank when the stages lie in different nodes, else over the link inside the node. An additive profile has
    no figures for links: there messages are free.
    """
    work = pipeline.rounds[number].by_stage
    tokens = max(int(tokens_on_ranks(cost, share).max()) for share in work[stage : stage + 2])
    here, there = pipeline.stages[stage : stage + 2]
    return stage_message_ns(cost, tokens, here, there)


def stage_message_ns(cost: CostModel, tokens: int, here: Stage, there: Stage) -> int:
    """Time of a message of so many tokens per rank between two stages."""
    profile = cost.profile
    if not isinstance(profile, AnalyticProfile):
        return 0
    size = tokens * cost.model.hidden * ACTIVATION_BYTES
    nodes = Counter(rank // cost.node_size for rank in here.ranks)
    if len(nodes.keys() | _nodes(there, cost)) == 1:
        rate, link, share = profile.intra.p2p, cost.cluster.intra, 1.0
    else:
        rate, link = profile.network.p2p, cost.cluster.nic
        share = _card_share(cost, max(nodes.values()))
    time = size / (link.gb_s * rate.efficiency * share)  # bytes / (1e9 bytes/s) = ns
    return math.ceil(time + (link.latency_us + rate.call_us + profile.handover_us) * 1e3)


def _nodes(stage: Stage, cost: CostModel) -> set[int]:
    return {rank // cost.node_size for rank in stage.ranks}


def _card_share(cost: CostModel, senders: int) -> float:
    """Network cards per rank when `senders` ranks of a node send at once: at most those near the rank."""
    cards = cost.cluster.nics_per_node
    return min(max(1.0, cards / cost.cluster.gpus_per_node), cards / senders)


# ---- merged: simulate.translate
# From a plan's tables of actions to tasks of the engine.
#
# F, B, I, W    a task per component of the round's window, on the streams of its shard groups: a round starts when
#               all ranks of the shard groups it joins are free, and ranks without tokens take part with no work. Ranks
#               of a host run its row in order, whatever stages the actions belong to.
# SEND, RECV    one task per message, on the outgoing link of one host and the incoming link of the other. It
#               starts when the sender has made it; the sender works on. A receiver waits for it where its row
#               says RECV. A stage hands a round over as a whole. Between two stages of one host there is no
#               message: the later one waits for the documents of the earlier one and takes them in no time.
# REDUCE, UNSHARD, RESHARD
#               no tasks: a round's gathers and reductions are part of its price (they run behind it), and what
#               is reduced once per step is part of the step's end. Where free sharding gathers a stage for every
#               pass: a task on the streams of all its ranks for every gather, and for every sum of gradients


WORKING = frozenset((ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W))
_TO_NEXT = {ActionKind.SEND_F: 1, ActionKind.SEND_B: -1}
_FROM = {ActionKind.RECV_F: (-1, ActionKind.SEND_F), ActionKind.RECV_B: (1, ActionKind.SEND_B)}


class ComputeTasks(NamedTuple):
    """An action that works, and its tasks: one per component, numbered from `first`."""

    place: MicroBatchKey
    kind: ActionKind
    phase: ActionTimes
    first: int


class P2PTask(NamedTuple):
    """A message between stages and its task."""

    sender: MicroBatchKey
    receiver: MicroBatchKey
    kind: ActionKind  # SEND_F or SEND_B
    ns: int
    task: int


class UnshardTask(NamedTuple):
    """A move of parameters or gradients for one pass, and its task."""

    place: MicroBatchKey
    action: Action
    move: ShardCollective
    ns: int
    task: int


@dataclass(slots=True)
class TaskGraph:
    """A translated plan: the engine with its tasks, and what each task stands for."""

    engine: Engine = field(default_factory=Engine)
    steps: list[ComputeTasks] = field(default_factory=list)
    messages: list[P2PTask] = field(default_factory=list)
    gatherings: list[UnshardTask] = field(default_factory=list)

    def name(self, task: int) -> str:
        """Name a task for a message to the user."""
        for message in self.messages:
            if message.task == task:
                return _called(message.sender.pipeline, message.sender.stage, message.kind, message.sender.round)
        for gathering in self.gatherings:
            if gathering.task == task:
                return f"{gathering.action} of pipeline {gathering.place.pipeline}"
        step = self.steps[bisect_right(self.steps, task, key=lambda entry: entry.first) - 1]
        return _called(step.place.pipeline, step.place.stage, step.kind, step.place.round)


def _called(pipeline: int, stage: int, kind: ActionKind, number: int | None) -> str:
    return f"{Action(stage, kind, number)} of pipeline {pipeline}"


def build_tasks(plan: Plan, cost: CostModel, windows: dict[MicroBatchKey, MicroBatchTimes]) -> TaskGraph:
    """Turn every row of actions into tasks. Pipelines have no ranks in common, so their order is free."""
    program = TaskGraph()
    for number, pipeline in enumerate(plan.pipelines):
        messages = {}
        for message in _messages(program.engine, cost, pipeline, number):
            program.messages.append(message)
            messages[message.sender.stage, message.kind, message.sender.round] = message.task
        passes = unshard_times_by_stage(cost, pipeline)
        for row in pipeline.actions:
            _row(program, windows, number, row, messages, passes)
        _hand_over(program, windows, number, pipeline)
    return program


def _messages(engine: Engine, cost: CostModel, pipeline: Pipeline, number: int) -> Iterator[P2PTask]:
    """Yield a message for every SEND, provided that it has a RECV and the other way round."""
    sends: set[tuple[int, ActionKind, int]] = set()
    receives: dict[tuple[int, ActionKind, int], Action] = {}
    for action in (action for row in pipeline.actions for action in row):
        if action.round is None:
            continue
        if action.kind in _TO_NEXT:
            sends.add((action.stage, action.kind, action.round))
        elif action.kind in _FROM:
            back, kind = _FROM[action.kind]
            receives[action.stage + back, kind, action.round] = action
    for stage, kind, r in sorted(sends ^ receives.keys()):
        missing = f"{Action(stage, kind, r)} of pipeline {number} is never received; add its RECV"
        if (stage, kind, r) in receives:
            waiting = receives[stage, kind, r]
            missing = f"{waiting} of pipeline {number} is never sent; add {Action(stage, kind, r)}"
        raise SeqloomError(f"{missing}: every message is sent once and received once, by neighbours")
    host = [pipeline.pp_rank_of(stage) for stage in range(len(pipeline.stages))]
    price = cache(partial(round_message_ns, cost, pipeline))
    for stage, kind, r in sorted(sends):
        other = stage + _TO_NEXT[kind]
        ns = price(r, min(stage, other))
        links = ((number, host[stage], "out"), (number, host[other], "in"))
        task = engine.add(ns, links=links)
        yield P2PTask(MicroBatchKey(number, stage, r), MicroBatchKey(number, other, r), kind, ns, task)


def _row(
    program: TaskGraph,
    windows: dict[MicroBatchKey, MicroBatchTimes],
    pipeline: int,
    row: tuple[Action, ...],
    messages: dict[tuple[int, ActionKind, int], int],
    passes: dict[int, UnshardTimes],
) -> None:
    """Add the tasks of one host. A receive is remembered per shard group until the shard group's next action."""
    engine = program.engine
    awaited: dict[int, set[int]] = {}
    for action, move in zip(row, shard_collectives(row, frozenset(passes)), strict=True):
        if move is not None:
            _gathering(program, windows, MicroBatchKey(pipeline, action.stage, action.round or 0), action, move, passes)
            continue
        if action.round is None:
            continue
        place = MicroBatchKey(pipeline, action.stage, action.round)
        if action.kind in WORKING:
            phase = windows[place].phase(action.kind)
            program.steps.append(ComputeTasks(place, action.kind, phase, len(engine)))
            for shard_groups, ns in zip(windows[place].shard_groups, phase.duration.tolist(), strict=True):
                after = set().union(*(awaited.pop(shard_group, ()) for shard_group in shard_groups))
                engine.add(ns, streams=shard_groups, after=after)
        elif action.kind in _TO_NEXT or action.kind in _FROM:
            joined = [shard_group for shard_groups in windows[place].shard_groups for shard_group in shard_groups]
            if action.kind in _TO_NEXT:
                before = set(engine.last(joined)).union(*(awaited.get(shard_group, ()) for shard_group in joined))
                engine.require(messages[action.stage, action.kind, action.round], before)
                continue
            back, kind = _FROM[action.kind]
            for shard_group in joined:
                awaited.setdefault(shard_group, set()).add(messages[action.stage + back, kind, action.round])


def _gathering(
    program: TaskGraph,
    windows: dict[MicroBatchKey, MicroBatchTimes],
    place: MicroBatchKey,
    action: Action,
    move: ShardCollective,
    passes: dict[int, UnshardTimes],
) -> None:
    """Add the task of a move for one pass: all ranks of the stage meet."""
    ns = passes[place.stage].of(move)
    streams = [shard_group for shard_groups in windows[place].shard_groups for shard_group in shard_groups]
    program.gatherings.append(UnshardTask(place, action, move, ns, program.engine.add(ns, streams=streams)))


def _hand_over(
    program: TaskGraph, windows: dict[MicroBatchKey, MicroBatchTimes], number: int, pipeline: Pipeline
) -> None:
    """Let every document wait for itself, from one stage to the next (or back) on the same host."""
    local = {s for s in range(1, len(pipeline.stages)) if pipeline.stages[s].ranks == pipeline.stages[s - 1].ranks}
    if not local:
        return
    own = (step for step in program.steps if step.place.pipeline == number and step.kind != ActionKind.W)
    first = {(step.place, step.kind == ActionKind.F): step.first for step in own}
    for s in local:
        for r, current in enumerate(pipeline.rounds):
            places = (MicroBatchKey(number, s - 1, r), MicroBatchKey(number, s, r))
            early, late = (_components(current.by_stage[p.stage], windows[p]) for p in places)
            for document, component in early.items():
                down = [first[place, True] for place in places]
                up = [first[place, False] for place in places]
                program.engine.require(down[1] + late[document], [down[0] + component])
                program.engine.require(up[0] + component, [up[1] + late[document]])


def _components(work: StageMicroBatch, window: MicroBatchTimes) -> dict[int, int]:
    """Return the component of every document of a round."""
    starts = np.unique(window.group, return_index=True)[1][-len(work.groups) :]  # -1, ranks without a group, is first
    of_group = window.component[starts].tolist()
    return {span.document: k for group, k in zip(work.groups, of_group, strict=True) for span in group.spans}
