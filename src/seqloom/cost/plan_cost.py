"""The time of a round, rank by rank, card by card: several groups per rank, local work behind rings, remapping.

    exposed(g) = max(0, ring(g) - attention(g) - steps(g))         messages of a ring that its own work does not hide
    filler     = attention of the rank's groups of one rank         which hides them instead
    T(rank)    = fixed + sum of lane 0 over its groups + max(0, sum of exposed - filler),
                 and not below parameter gather + reduction + sum of network

``fixed``, gather and reduction count once, however many groups a rank has. For a rank in one group all this is
`Parts.total_ns`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, fields
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from seqloom.cost.analytic import AnalyticEngine
from seqloom.cost.communication import nic_load
from seqloom.cost.memory import free_bytes
from seqloom.cost.resharding import dp_cp_size, exposed_reshard_ns, one_stage_bytes, unshard_ns, unshard_times_by_stage
from seqloom.cost.shapes import STREAMS, CostBreakdown, MemoryPolicy
from seqloom.errors import SeqloomError
from seqloom.plan import Group, LayerRange, Sharding

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from seqloom.cost.communication import RemapTimes
    from seqloom.cost.model import CostModel
    from seqloom.plan import Pipeline, Plan, StageMicroBatch


COST_COLUMNS = tuple(field.name for field in fields(CostBreakdown))
"""The parts, in the order of the columns of every table of parts."""
ONCE = ("fixed", "gather", "reduce")
"""Parts that a rank has once in a round."""
BY_RANK = ("linear", "head", "remap")
"""Parts that follow the linear layout where a round has one, not the groups."""


def scale_to_layers(part: LayerRange, table: np.ndarray) -> np.ndarray:
    """Times of a stage's part of the model, in a table of columns `NAMES`: by its layers; the head all or nothing.

    Stages of as many layers are alike; rounding down, they lack less than a nanosecond each of the whole. What a
    round costs without tokens is shared like the rest: a profile does not say which of it is per layer.
    """
    own = table * (part.stop - part.first) // part.model_layers
    head = COST_COLUMNS.index("head")
    own[:, head] = table[:, head] if part.has_head else 0
    return own


@dataclass(frozen=True, slots=True, eq=False)
class RoundTimes:
    """One round (or one stage's share of it). ns, int64. Members are pairs of a group and one of its ranks.

    Members come in the order of the groups; a rank that only has tokens in linear layers is a member with group -1.
    """

    parts: np.ndarray  # [ranks, len(NAMES)] summed over the rank's groups
    rank_ns: np.ndarray  # [ranks] forward and backward; 0 for ranks without work
    nic_ns: np.ndarray  # [nodes, nics] how long each card is taken, by all groups together
    link_ns: np.ndarray  # [ranks] how long each NVLink port is taken
    member_rank: np.ndarray  # [members]
    member_group: np.ndarray  # [members] index in `Work.groups`
    member_ns: np.ndarray  # [members] a rank's members add up to its `rank_ns`

    def part(self, name: str) -> np.ndarray:
        """int64[ranks] ns of one part, as named in `Parts`."""
        return self.parts[:, COST_COLUMNS.index(name)]

    @property
    def busy_ns(self) -> np.ndarray:
        """int64[ranks] ns that a rank, its NVLink port or the busiest NIC of its node takes, whichever is longest."""
        nics = np.repeat(self.nic_ns.max(axis=1), len(self.rank_ns) // len(self.nic_ns))
        return np.maximum(np.maximum(self.rank_ns, self.link_ns), nics)

    def component_ns(self, component: np.ndarray) -> np.ndarray:
        """int64[components] ns of ranks that wait for each other.

        Args:
            component: int64[n] component of every rank, -1 of ranks that take no part.
        """
        times, at_work = np.zeros(component.max(initial=-1) + 1, dtype=np.int64), np.flatnonzero(component >= 0)
        np.maximum.at(times, component[at_work], self.busy_ns[at_work])
        return times


def round_times(
    cost: CostModel,
    work: StageMicroBatch,
    policy: MemoryPolicy,
    stage: LayerRange | None = None,
    priced: Sequence[CostBreakdown] | None = None,
) -> RoundTimes:
    """Price a round; see `CostModel.round_times`."""
    parts_of = cost.group_costs(work.groups, policy) if priced is None else priced
    groups = [[getattr(parts, name) for name in COST_COLUMNS] for parts in parts_of]
    table = np.array(groups, dtype=np.int64).reshape(-1, len(COST_COLUMNS))
    degrees = np.array([len(group.ranks) for group in work.groups], dtype=np.int64)
    group = np.repeat(np.arange(len(degrees)), degrees)
    rank = np.array([rank for each in work.groups for rank in each.ranks], dtype=np.int64)
    cards = _card_ns(cost, work, policy, table[:, COST_COLUMNS.index("network")])
    links = np.zeros(cost.ranks, dtype=np.int64)
    by_rank = None
    if work.linear is not None:
        by_rank, remap = _by_rank(cost, work, policy)
        cards, links = cards + remap.card, links + remap.link
        idle = np.setdiff1d(np.flatnonzero(by_rank.any(axis=1)), rank)
        alone = cost.group_cost(Group(tuple(range(cost.tensor)), cost.tensor, 1, ()), policy)
        lone = np.array([getattr(alone, name) for name in COST_COLUMNS], dtype=np.int64)
        table = np.concatenate([table, lone[None, :]])  # the last row: a group of nothing
        table[:, _columns(BY_RANK)] = 0
        group = np.concatenate([group, np.full(len(idle), len(table) - 1)])
        rank = np.concatenate([rank, idle])
        degrees = np.append(degrees, 0)
    if stage is not None:
        table = scale_to_layers(stage, table)
        cards, links = (taken * (stage.stop - stage.first) // stage.model_layers for taken in (cards, links))
        by_rank = None if by_rank is None else scale_to_layers(stage, by_rank)
    parts = rank_costs(table, rank, group, cost.ranks)
    if by_rank is not None:
        parts += by_rank
    rank_ns, member_ns = rank_times(parts, table, rank, group, degrees == 1)
    links = links + parts[:, COST_COLUMNS.index("link")]
    group = np.where(degrees[group] > 0, group, -1)
    return RoundTimes(parts, rank_ns, cards, links, rank, group, member_ns)


def _columns(names: Iterable[str]) -> list[int]:
    return [COST_COLUMNS.index(name) for name in names]


def rank_costs(table: np.ndarray, rank: np.ndarray, group: np.ndarray, ranks: int) -> np.ndarray:
    """int64[ranks, len(NAMES)]: parts of every rank, over all groups that it is in.

    Args:
        table: int64[groups, len(NAMES)].
        rank: int64[members] of every pair of a group and one of its ranks.
        group: int64[members]
        ranks: how many there are.
    """
    parts = np.zeros((ranks, len(COST_COLUMNS)), dtype=np.int64)
    np.add.at(parts, rank, table[group])
    once = _columns(ONCE)
    parts[:, once] = 0
    np.maximum.at(parts, (rank[:, None], np.array(once)[None, :]), table[group][:, once])
    return parts


def rank_times(
    parts: np.ndarray, table: np.ndarray, rank: np.ndarray, group: np.ndarray, local: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(int64[ranks], int64[members]) ns by the formula above.

    What a rank has once is its first member's, what no filler hides that of the ring it belongs to (fillers hide the
    first rings first), and waiting for the network that of the last member.
    """
    column = {name: table[:, COST_COLUMNS.index(name)] for name in COST_COLUMNS}
    serial = table[:, _columns(name for name in STREAMS[0] if name not in ONCE)].sum(axis=1)
    exposed = np.maximum(column["ring"] - column["attention"] - column["steps"], 0)
    filler = np.zeros(len(parts), dtype=np.int64)
    np.add.at(filler, rank, np.where(local, column["attention"], 0)[group])
    order = np.argsort(rank, kind="stable")
    first = np.append(True, rank[order][1:] != rank[order][:-1]) if len(order) else np.zeros(0, dtype=bool)
    before, upto = _running(exposed[group][order], first)
    hidden = filler[rank[order]]
    member = serial[group][order] + np.maximum(upto - hidden, 0) - np.maximum(before - hidden, 0)
    own = parts[:, _columns(("fixed", *BY_RANK))].sum(axis=1)
    of_groups = np.zeros(len(parts), dtype=np.int64)
    np.add.at(of_groups, rank, table[:, _columns(BY_RANK)].sum(axis=1)[group])
    member[first] += (own - of_groups)[rank[order][first]]
    total = np.zeros(len(parts), dtype=np.int64)
    np.add.at(total, rank[order], member)
    floor = parts[:, _columns(STREAMS[2])].sum(axis=1)
    last = np.append(first[1:], True) if len(first) else first
    member[last] += np.maximum(floor - total, 0)[rank[order][last]]
    member_ns = np.empty_like(member)
    member_ns[order] = member
    return np.where(np.isin(np.arange(len(parts)), rank), np.maximum(total, floor), 0), member_ns


def _running(values: np.ndarray, first: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums within every run that begins at `first`: before each entry, and with it."""
    upto = np.cumsum(values)
    start = np.flatnonzero(first)
    base = np.repeat((upto - values)[start], np.diff(np.append(start, len(values))))
    return upto - values - base, upto - base


def _by_rank(cost: CostModel, work: StageMicroBatch, policy: MemoryPolicy) -> tuple[np.ndarray, RemapTimes]:
    """(int64[ranks, len(NAMES)] linear, head and remap of a round with a linear layout, its remapping)."""
    linear, attention = work.linear_layout(), work.attention_layout()
    held = np.stack([np.bincount(layout.rank, layout.sizes, cost.ranks) for layout in (linear, attention)])
    parts = np.zeros((cost.ranks, len(COST_COLUMNS)), dtype=np.int64)
    for name, rates in cost.engine.layout_token_ns(policy, work.remap).items():
        parts[:, COST_COLUMNS.index(name)] = np.rint(np.array(rates) @ held).astype(np.int64)
    remap = cost.engine.remap_times(work, attention, linear)
    parts[:, COST_COLUMNS.index("remap")] = np.where(held.any(axis=0), remap.time, 0)
    return parts, remap


def _card_ns(cost: CostModel, work: StageMicroBatch, policy: MemoryPolicy, network: np.ndarray) -> np.ndarray:
    """int64[nodes, nics]: how long the groups of a round take each card. Direct traffic is the sender's own card's."""
    cluster = cost.cluster
    taken = np.zeros((cluster.nodes, cluster.nics_per_node), dtype=np.int64)
    for k in np.flatnonzero(network):
        group = work.groups[k]
        shape, reach = cost.shape_and_traffic(group)
        heads, keys, team = (flow.network for flow in cost.engine.flows(shape, policy, reach))
        route = group.route if shape.routed else None
        load = nic_load(group.ranks, shape, cluster.nic_of_gpu, route, cost.tensor)
        share = (heads * load.ulysses + keys * load.sharing + team * load.team) / (heads + keys + team)
        taken[load.node, load.card] += (int(network[k]) * share).astype(np.int64)
    return taken


def tokens_on_ranks(cost: CostModel, work: StageMicroBatch) -> np.ndarray:
    """int64[ranks]: tokens that every rank holds, in whole granules and evenly over its groups.

    Several groups add up; where linear layers have a layout of their own, the larger of both counts.
    """
    tokens, granule = np.zeros(cost.ranks, dtype=np.int64), cost.pad_multiple
    for group in work.groups:
        held = sum(-(-stop // granule) - -(-start // granule) for _, start, stop in group.spans) * granule
        tokens[list(group.ranks)] += -(-held // group.degree)
    if work.linear is None:
        return tokens
    return np.maximum(tokens, np.bincount(work.linear.rank, work.linear.sizes, cost.ranks).astype(np.int64))


# -- the clock of a step --------------------------------------------------------
#
# Rounds are totally ordered and there is no barrier between them. The ranks of a shard group wait for each other in
# every round (they meet in every parameter gather), and a group that touches several shard groups joins them. So a
# component of joined shard groups starts a round when all of them are free and ends it with its slowest rank; shard
# groups that no group touches run on. The event engine of the simulator is the referee of this closed form.


def join_shard_groups(touched: Iterable[Iterable[int]]) -> list[list[int]]:
    """Merge sets of shard groups that have one in common: the components of a round, ascending.

    Args:
        touched: numbers of the shard groups that each group of the round (with its proxies) touches.
    """
    parent: dict[int, int] = {}

    def root(i: int) -> int:
        while parent.setdefault(i, i) != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for shard_groups in touched:
        first = None
        for i in shard_groups:
            first = root(i) if first is None else first
            parent[root(i)] = first
    components: dict[int, list[int]] = defaultdict(list)
    for i in sorted(parent):
        components[root(i)].append(i)
    return list(components.values())


def finish_round(ready: np.ndarray, slowest: np.ndarray, joined: Iterable[Sequence[int]]) -> np.ndarray:
    """int64[shard groups, ...] ns at which every shard group ends a round.

    Args:
        ready: int64[shard groups, ...] ns at which each is free; further axes are independent steps.
        slowest: int64[shard groups, ...] ns of its slowest rank in the round, 0 where it takes no part.
        joined: components of the round, see `join_shard_groups`; shard groups in none of them run by themselves.
    """
    done = ready + slowest
    for component in joined:
        if len(component) > 1:
            done[component] = ready[component].max(axis=0) + slowest[component].max(axis=0)
    return done


def finish_times(slowest: np.ndarray, joined: Sequence[Iterable[Sequence[int]]]) -> np.ndarray:
    """int64[shard groups, ...] ns at which every shard group has run all rounds, from 0 on.

    Args:
        slowest: int64[rounds, shard groups, ...] as in `finish_round`.
        joined: components of every round.
    """
    ready = np.zeros(slowest.shape[1:], dtype=np.int64)
    for times, components in zip(slowest, joined, strict=True):
        ready = finish_round(ready, times, components)
    return ready


def round_components(
    work: StageMicroBatch, shard_group_of: dict[int, int], meeting: tuple[int, ...] = ()
) -> tuple[np.ndarray, list[list[int]]]:
    """(int64[ranks] component of every rank at work, else -1; shard groups of every component).

    Args:
        work: the groups of a round, with their proxies; ranks that have tokens in linear layers only work too.
        shard_group_of: number of every rank's shard group.
        meeting: ranks that meet before and after every pass, in one component.
    """
    parties = [group.participants for group in work.groups]
    if work.linear is not None:
        parties += [(rank,) for rank in np.unique(work.linear.rank).tolist()]
    parties += [meeting] * bool(meeting)
    joined = join_shard_groups({shard_group_of[rank] for rank in party} for party in parties)
    number = {i: k for k, shard_groups in enumerate(joined) for i in shard_groups}
    component = np.full(max(shard_group_of) + 1, -1, dtype=np.int64)
    for party in parties:
        component[list(party)] = number[shard_group_of[party[0]]]
    return component, joined


def plan_ns(cost: CostModel, plan: Plan) -> int:
    """Step time of a plan of one-stage pipelines: latest finish of a shard group, plus what a step costs once."""
    _require_one_stage(plan)
    shard_group_of = {rank: i for i, shard_group in enumerate(plan.shard_groups) for rank in shard_group}
    ready = np.zeros(len(plan.shard_groups), dtype=np.int64)
    overhead, shades = 0, []
    for pipeline in plan.pipelines:
        own, shortest = cost.with_tensor(pipeline.stages[0].tensor), []
        together = _together(cost, pipeline)
        for work in _works(pipeline):  # pipelines are on disjoint shard groups, so their order is free
            policy = MemoryPolicy(work.checkpoint, plan.reduce, bool(together))
            overhead = max(overhead, own.step_overhead_ns(policy))
            component, joined = round_components(work, shard_group_of, together)
            times = own.round_times(work, policy).component_ns(component)
            shortest.append(int(times.min()))
            slowest = np.zeros_like(ready)
            slowest[list(chain.from_iterable(joined))] = np.repeat(times, list(map(len, joined)))
            ready = finish_round(ready, slowest, joined)
        shades.append((shortest[0], shortest[-1]) if shortest else (0, 0))
        if together:
            ready[list({shard_group_of[rank] for rank in together})] += unshard_ns(cost, pipeline)
    return int(ready.max(initial=0)) + overhead + exposed_reshard_ns(cost, plan.pipelines, shades)


def plan_memory(cost: CostModel, plan: Plan) -> np.ndarray:
    """int64[ranks]: peak bytes of every rank over the rounds."""
    _require_one_stage(plan)
    peak = idle_memory(cost, plan)
    for pipeline in plan.pipelines:
        peak = np.maximum(peak, pipeline_memory(cost, plan, pipeline))
    return peak


def idle_memory(cost: CostModel, plan: Plan) -> np.ndarray:
    """int64[ranks]: bytes of ranks in no stage: under free sharding, their part of the optimiser's state."""
    own = 0
    if plan.sharding == Sharding.FREE and isinstance(cost.engine, AnalyticEngine):
        memory = cost.engine.memory
        own = free_bytes(0, memory.parameters, memory.owners)
    return np.full(cost.ranks, own, dtype=np.int64)


def pipeline_memory(cost: CostModel, plan: Plan, pipeline: Pipeline) -> np.ndarray:
    """int64[ranks]: peak bytes of the ranks of a pipeline of one stage over its rounds, 0 of all others.

    Where parameters are sharded over all ranks, a single pipeline is all there is.
    """
    own, peak = cost.with_tensor(pipeline.stages[0].tensor), np.zeros(cost.ranks, dtype=np.int64)
    together = _together(cost, pipeline)
    for work in _works(pipeline):
        policy = MemoryPolicy(work.checkpoint, plan.reduce)
        tokens = tokens_on_ranks(own, work)
        if together:
            used = one_stage_bytes(own, dp_cp_size(pipeline.stages[0]), work.checkpoint, tokens)
        else:
            used = own.fixed_bytes(policy) + np.ceil(tokens * own.token_bytes(policy)).astype(np.int64)
        peak = np.maximum(peak, used)
    if len(plan.pipelines) > 1 or plan.sharding == Sharding.FREE:
        peak[np.setdiff1d(np.arange(cost.ranks), pipeline.ranks)] = 0
    return peak


def _together(cost: CostModel, pipeline: Pipeline) -> tuple[int, ...]:
    """Ranks of the only stage where they meet in every pass, because parameters are gathered for it; else ()."""
    return pipeline.stages[0].ranks if unshard_times_by_stage(cost, pipeline) else ()


def _require_one_stage(plan: Plan) -> None:
    for pipeline in plan.pipelines:
        if len(pipeline.stages) != 1:
            raise SeqloomError(
                f"a pipeline of {len(pipeline.stages)} stages has no closed form; simulate the plan instead"
            )


def _works(pipeline: Pipeline) -> list[StageMicroBatch]:
    """The work of every round."""
    return [current.by_stage[0] for current in pipeline.rounds]
