"""Time of rounds and plans, rank by rank and NIC by NIC, from the same integers that planners compare.

A rank may be in several groups of a round, and local documents hide the messages of rings:

    exposed(g) = max(0, ring(g) - attention(g) - steps(g))     messages of a ring that its own attention does not hide
    filler     = attention of the rank's groups of one rank     which hides them instead
    T(rank)    = fixed + compute stream of its groups + max(0, sum of exposed - filler),
                 and not below parameter gather + reduction + sum of network

``fixed``, gather and reduction count once, however many groups a rank has. For a rank in one group all this is
`CostBreakdown.total_ns`.

Rounds are totally ordered and there is no barrier between them. The ranks of a shard group wait for each other in every
round (they meet in every parameter gather), and a group that touches several shard groups joins them. So a component of
joined shard groups starts a round when all of them are free and ends it with its slowest rank; shard groups that no
group touches run on. `finish_times` is this clock; the event engine of the simulator is its referee.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from seqloom.cost.communication import nic_load, nodes_and_nics, remap_times
from seqloom.cost.forward_backward import extend_for_offload, forward_and_weight_cuts, forward_shares
from seqloom.cost.resharding import exposed_reshard_ns, unshard_ns, unshard_times_by_stage
from seqloom.cost.shapes import BY_SPEED, COST_COLUMNS, STREAMS, MemoryPolicy, columns
from seqloom.errors import SeqloomError
from seqloom.plan import Checkpoint, Group, LayerRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from seqloom.cost.model import CostModel
    from seqloom.plan import Pipeline, Plan, StageMicroBatch

ONCE = ("fixed", "gather", "reduce", "expert_latency")
"""Parts that a rank has once in a round."""
BY_LINEAR_LAYOUT = ("linear", "head", "remap", "routed", "expert", "expert_network")
"""Parts that follow the linear layout where a round has one, not the groups."""
BY_EP_GROUP = ("routed", "expert", "expert_network")
"""Parts that follow the tokens of all ranks of an EP group."""


# -- a round --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class RoundTimes:
    """One round (or one stage's share of it). ns, int64. Members are pairs of a group and one of its ranks.

    Members come in the order of the groups; a rank that only has tokens in linear layers is a member with group -1.
    """

    parts: np.ndarray  # [ranks, len(COST_COLUMNS)] summed over the rank's groups
    rank_ns: np.ndarray  # [ranks] forward and backward; 0 for ranks without work
    nic_ns: np.ndarray  # [nodes, nics] how long each NIC is occupied, by all groups together
    link_ns: np.ndarray  # [ranks] how long each NVLink port is occupied
    member_rank: np.ndarray  # [members]
    member_group: np.ndarray  # [members] index in `StageMicroBatch.groups`
    member_ns: np.ndarray  # [members] a rank's members add up to its `rank_ns`

    @property
    def busy_ns(self) -> np.ndarray:
        """int64[ranks] ns that a rank, its NVLink port or the busiest NIC of its node takes, whichever is longest."""
        nics = np.repeat(self.nic_ns.max(axis=1), len(self.rank_ns) // len(self.nic_ns))
        return np.maximum(np.maximum(self.rank_ns, self.link_ns), nics)

    def component_ns(self, component: np.ndarray) -> np.ndarray:
        """int64[components] ns of ranks that wait for each other; the component of ranks that take no part is -1."""
        times, at_work = np.zeros(component.max(initial=-1) + 1, dtype=np.int64), np.flatnonzero(component >= 0)
        np.maximum.at(times, component[at_work], self.busy_ns[at_work])
        return times


def round_times(
    cost: CostModel,
    work: StageMicroBatch,
    policy: MemoryPolicy,
    layers: LayerRange | None = None,
    priced: np.ndarray | None = None,
) -> RoundTimes:
    """Price a round: every rank in all its groups, every NIC and NVLink port.

    Groups may share ranks, and tokens may have a layout of their own in linear layers. Without `layers` it is the whole
    model's. If costs of its groups are known, `priced` has them: int64[groups, len(COST_COLUMNS)].
    """
    policy = cost.priced_policy(policy)
    table = group_table(cost, work.groups, policy, work, layers) if priced is None else priced
    cost = cost if layers is None else cost.for_layers(layers)
    degrees = np.array([len(group.ranks) for group in work.groups], dtype=np.int64)
    group = np.repeat(np.arange(len(degrees)), degrees)
    rank = np.array([rank for each in work.groups for rank in each.ranks], dtype=np.int64)
    nics = _nic_ns(cost, work, policy, table[:, COST_COLUMNS.index("network")])
    links = np.zeros(cost.ranks, dtype=np.int64)
    by_layout = np.zeros((cost.ranks, len(COST_COLUMNS)), dtype=np.int64)
    if work.linear is not None:
        by_layout, remap_nics, links = _linear_layout_costs(cost, work, policy)
        if work.lighter_layers:
            lighter = replace(work, checkpoint=_lighter(policy).checkpoint)
            light = _linear_layout_costs(cost, lighter, _lighter(policy))
            both = zip((by_layout, remap_nics, links), light, strict=True)
            by_layout, remap_nics, links = (mix_layers(cost, work, layers, *pair) for pair in both)
        nics = nics + remap_nics
        idle = np.setdiff1d(np.flatnonzero(by_layout.any(axis=1)), rank)
        empty = cost.group_costs([Group(tuple(range(cost.tensor)), cost.tensor, 1, ())], policy)
        table = np.concatenate([table, empty])  # the last row: a group of nothing
        table[:, columns(BY_LINEAR_LAYOUT)] = 0
        group = np.concatenate([group, np.full(len(idle), len(table) - 1)])
        rank = np.concatenate([rank, idle])
        degrees = np.append(degrees, 0)
    if layers is not None:
        table, by_layout = (scale_to_layers(cost, layers, each) for each in (table, by_layout))
        nics, links = (taken * (layers.stop - layers.first) // cost.model.layers for taken in (nics, links))
    parts = rank_costs(table, rank, group, cost.ranks) + by_layout
    parts = expert_costs(cost, parts, policy, layers, work.lighter_layers)
    if cost.speeds:
        routed = columns(("routed",))
        parts[:, routed] = np.rint(parts[:, routed] * cost.speeds.slowness[:, None]).astype(np.int64)
    if cost.expert > 1:  # those of a rank, for its first member
        table = table.copy()
        table[:, columns(BY_EP_GROUP)] = 0
    rank_ns, member_ns = rank_times(parts, table, rank, group, degrees == 1)
    nics = nics + _expert_nic_ns(cost, parts)
    links = links + parts[:, COST_COLUMNS.index("link")]
    return RoundTimes(parts, rank_ns, nics, links, rank, np.where(degrees[group] > 0, group, -1), member_ns)


def group_table(
    cost: CostModel,
    groups: Sequence[Group],
    policy: MemoryPolicy,
    work: StageMicroBatch,
    layers: LayerRange | None = None,
) -> np.ndarray:
    """int64[groups, len(COST_COLUMNS)] ns: `group_costs` with the work's lighter layers.

    Of the whole model, or where its layers differ of these alone; `scale_to_layers` takes what is theirs. Where the
    whole model is run forward again, its head is too.
    """
    cost = cost if layers is None else cost.for_layers(layers)
    table = cost.group_costs(groups, policy)
    whole = layers is None or (layers.has_embedding and layers.has_head)
    if work.checkpoint == Checkpoint.STAGE and whole:
        head = COST_COLUMNS.index("head")
        table[:, head] += table[:, head] // 3
    if not work.lighter_layers:
        return table
    return mix_layers(cost, work, layers, table, cost.group_costs(groups, _lighter(policy)))


def mix_layers(
    cost: CostModel, work: StageMicroBatch, layers: LayerRange | None, heavy: np.ndarray, light: np.ndarray
) -> np.ndarray:
    """Costs of a stage some of whose layers recompute less: both, each in proportion to its layers."""
    count = cost.model.layers if layers is None else layers.stop - layers.first
    return heavy - (heavy - light) * work.lighter_layers // count


def _lighter(policy: MemoryPolicy) -> MemoryPolicy:
    """The policy of layers that recompute less."""
    lighter = policy.checkpoint.lighter
    assert lighter is not None  # the rule "lighter"
    return policy._replace(checkpoint=lighter)


def scale_to_layers(cost: CostModel, layers: LayerRange, table: np.ndarray) -> np.ndarray:
    """Costs of a stage, from a table by `cost` of the whole model or of these layers; the head all or nothing.

    Stages of as many layers cost the same; rounding down, they lack less than a nanosecond each of the whole. The cost
    of a round without tokens is shared like the rest: a profile does not say which of it is per layer.
    """
    own = table * (layers.stop - layers.first) // cost.model.layers
    head = COST_COLUMNS.index("head")
    own[:, head] = table[:, head] if layers.has_head else 0
    return own


def rank_costs(table: np.ndarray, rank: np.ndarray, group: np.ndarray, ranks: int) -> np.ndarray:
    """int64[ranks, len(COST_COLUMNS)]: costs of every rank, over all groups that it is in.

    `table` is int64[groups, len(COST_COLUMNS)]; `rank` and `group`, int64[members], name the pairs of a group and one
    of its ranks.
    """
    parts = np.zeros((ranks, len(COST_COLUMNS)), dtype=np.int64)
    np.add.at(parts, rank, table[group])
    once = columns(ONCE)
    parts[:, once] = 0
    np.maximum.at(parts, (rank[:, None], np.array(once)[None, :]), table[group][:, once])
    return parts


def rank_times(
    parts: np.ndarray, table: np.ndarray, rank: np.ndarray, group: np.ndarray, local: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(int64[ranks], int64[members]) ns by the formula above.

    What a rank has once counts for its first member, exposed messages for the ring they belong to (fillers hide the
    first rings first), and waiting for the network for the last member.

    `parts` has those of every rank, with what follows the linear layout; `local` marks the groups of one rank.
    """
    column = {name: table[:, index] for index, name in enumerate(COST_COLUMNS)}
    serial = table[:, columns(name for name in STREAMS[0] if name not in ONCE)].sum(axis=1)
    exposed = np.maximum(column["ring"] - column["attention"] - column["steps"], 0)[group]
    filler, of_groups, total = np.zeros((3, len(parts)), dtype=np.int64)
    np.add.at(filler, rank, np.where(local, column["attention"], 0)[group])
    before, hidden = sums_before(rank, exposed), filler[rank]
    member = serial[group] + np.maximum(before + exposed - hidden, 0) - np.maximum(before - hidden, 0)
    first, last = np.full((2, len(parts)), -1)
    first[rank[::-1]], last[rank] = np.arange(len(rank))[::-1], np.arange(len(rank))
    at_work = np.flatnonzero(last >= 0)
    by_layout = [name for name in BY_LINEAR_LAYOUT if name in STREAMS[0]]
    own = parts[:, columns(("fixed", "expert_latency", *by_layout))].sum(axis=1)
    np.add.at(of_groups, rank, table[:, columns(by_layout)].sum(axis=1)[group])
    member[first[at_work]] += (own - of_groups)[at_work]
    np.add.at(total, rank, member)
    waiting = np.maximum(parts[:, columns(STREAMS[2])].sum(axis=1) - total, 0)
    member[last[at_work]] += waiting[at_work]
    total[at_work] += waiting[at_work]
    return total, member


def sums_before(rank: np.ndarray, values: np.ndarray) -> np.ndarray:
    """int64[members]: sum of the values of the rank's earlier members."""
    order = np.argsort(rank, kind="stable")
    sums = np.cumsum(values[order]) - values[order]
    _, first = np.unique(rank[order], return_index=True)
    before = np.empty_like(sums)
    before[order] = sums - np.repeat(sums[first], np.diff(np.append(first, len(rank))))
    return before


def expert_costs(
    cost: CostModel, parts: np.ndarray, policy: MemoryPolicy, layers: LayerRange | None, lighter_layers: int = 0
) -> np.ndarray:
    """Costs of ranks, int64[ranks, len(COST_COLUMNS)], whose experts get the tokens of all ranks of their EP group.

    `parts` charges every rank for its own tokens as if it had the mean of its EP group. The busiest rank computes the
    mean times the imbalance, and exchanges what it sends or what it receives, whichever is more. Where that is few
    tokens for each expert, reading the weights takes longer than the products.
    """
    routed, *exchanges = columns(BY_EP_GROUP)
    times = cost.engine.expert_times(policy)
    if times is None or not parts[:, routed].any():
        return parts
    parts, size = parts.copy(), cost.expert
    if size > 1:
        own = parts[:, [routed, *exchanges]].reshape(-1, size, 3)
        parts[:, [routed, *exchanges]] = np.repeat(-(-own.sum(axis=1) // size), size, axis=0)
        sent = np.ceil(own[:, :, 1:] / times.imbalance).astype(np.int64).reshape(-1, 2)
        parts[:, exchanges] = np.maximum(parts[:, exchanges], sent)
    every = times.weights_ns
    if lighter_layers:
        count = cost.model.layers if layers is None else layers.stop - layers.first
        light = cost.engine.expert_times(_lighter(policy))
        assert light is not None
        every -= (every - light.weights_ns) * lighter_layers / count
    if layers is not None:
        every *= (layers.stop - layers.first) / cost.model.layers
    served = parts[:, routed]
    reading = np.minimum(times.reading * served, every)
    parts[:, routed] += np.rint(np.maximum(reading - times.products * served, 0)).astype(np.int64)
    return parts


def _linear_layout_costs(
    cost: CostModel, work: StageMicroBatch, policy: MemoryPolicy
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(int64[ranks, len(COST_COLUMNS)] linear, head and remap; remapping on NICs; on NVLink ports)."""
    linear, attention = work.linear_layout(), work.attention_layout()
    held = np.stack([np.bincount(layout.rank, layout.sizes, cost.ranks) for layout in (linear, attention)])
    parts = np.zeros((cost.ranks, len(COST_COLUMNS)), dtype=np.int64)
    for name, rates in cost.engine.layout_token_ns(policy, work.remap).items():
        slowness = cost.speeds.slowness if cost.speeds and name in BY_SPEED else 1.0
        parts[:, COST_COLUMNS.index(name)] = np.rint(np.array(rates) @ held * slowness).astype(np.int64)
    remap, nics, links = remap_times(work, attention, linear, cost.links)
    parts[:, COST_COLUMNS.index("remap")] = np.where(held.any(axis=0), remap, 0)
    return parts, nics, links


def _nic_ns(cost: CostModel, work: StageMicroBatch, policy: MemoryPolicy, network: np.ndarray) -> np.ndarray:
    """int64[nodes, nics]: how long the groups of a round occupy each NIC; direct traffic, the sender's own."""
    cluster = cost.cluster
    taken = np.zeros((cluster.nodes, cluster.nics_per_node), dtype=np.int64)
    for k in np.flatnonzero(network):
        group = work.groups[k]
        shape, traffic = cost.shape_and_traffic(group)
        flows = [flow.network for flow in cost.engine.flows(shape, policy, traffic)]
        route = group.route if shape.routed else None
        places, loads = nic_load(group.ranks, shape, cluster.nic_of_gpu, route, cost.tensor)
        heads, keys, tensor, mixers = (flow * load for flow, load in zip(flows, loads, strict=True))
        share = (heads + keys + tensor + mixers) / sum(flows)
        taken[places] += (int(network[k]) * share).astype(np.int64)
    return taken


def _expert_nic_ns(cost: CostModel, parts: np.ndarray) -> np.ndarray:
    """int64[nodes, nics]: how long tokens for experts of other nodes occupy each NIC, of all ranks near it."""
    nics, cluster = np.zeros(cost.cluster.nodes * cost.cluster.nics_per_node, dtype=np.int64), cost.cluster
    np.add.at(nics, nodes_and_nics(range(cost.ranks), cluster.nic_of_gpu)[1], parts[:, columns(("expert_network",))[0]])
    return nics.reshape(cluster.nodes, cluster.nics_per_node)


def component_passes(
    cost: CostModel, work: StageMicroBatch, layers: LayerRange, times: RoundTimes, component: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(length, forward, weights) int64[components]: ns of a micro-batch on a stage, and where its passes end.

    Forward ends, and the weight half begins, at these shares of 2**-20 of the length, by the rank that works longest.
    `round_components` tells who waits for whom. What is offloaded is copied to host memory beside the forward, and back
    beside the backward.
    """
    rank, load = times.member_rank, times.rank_ns
    member = component[rank]
    components = range(component.max() + 1)
    slowest = np.array([rank[member == k][load[rank[member == k]].argmax()] for k in components], dtype=np.int64)
    engine = cost.for_layers(layers).engine
    shares = forward_shares(work, layers, engine.forward)
    cuts = forward_and_weight_cuts(times.parts[slowest], load[slowest], shares, engine.matmul_share)
    length = times.component_ns(component)
    if not work.offload:
        return length, *cuts
    tokens, at_work = np.zeros(len(length), dtype=np.int64), np.flatnonzero(component >= 0)
    np.maximum.at(tokens, component[at_work], tokens_on_ranks(cost, work)[at_work])
    size = cost.memory.host_bytes(layers, work.checkpoint, work.offloaded_layers)
    return extend_for_offload(length, *cuts, cost.engine.copy_ns(size * tokens))


def tokens_on_ranks(cost: CostModel, work: StageMicroBatch) -> np.ndarray:
    """int64[ranks]: tokens that every rank holds, padded and evenly over the ranks of a group.

    Several groups add up; where linear layers have a layout of their own, the larger of both counts.
    """
    tokens, pad = np.zeros(cost.ranks, dtype=np.int64), cost.pad_multiple
    for group in work.groups:
        held = sum(-(-stop // pad) - -(-start // pad) for _, start, stop in group.spans) * pad
        tokens[list(group.ranks)] += -(-held // group.degree)
    if work.linear is None:
        return tokens
    return np.maximum(tokens, np.bincount(work.linear.rank, work.linear.sizes, cost.ranks).astype(np.int64))


# -- the clock of a step --------------------------------------------------------


def join_shard_groups(touched: Iterable[Iterable[int]]) -> list[list[int]]:
    """Merge the sets of shard groups that groups of a round touch, where they have one in common: its components."""
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
    """int64[shard groups, ...] ns at which every shard group ends a round; further axes are independent steps.

    Each is free at `ready`, and `slowest` is the time of its slowest rank in the round, 0 where it takes no part. Shard
    groups in none of the components that are `joined` run by themselves.
    """
    done = ready + slowest
    for component in joined:
        if len(component) > 1:
            done[component] = ready[component].max(axis=0) + slowest[component].max(axis=0)
    return done


def finish_times(slowest: np.ndarray, joined: Sequence[Iterable[Sequence[int]]]) -> np.ndarray:
    """int64[shard groups, ...] ns at which every shard group has run all rounds; see `finish_round`."""
    ready = np.zeros(slowest.shape[1:], dtype=np.int64)
    for times, components in zip(slowest, joined, strict=True):
        ready = finish_round(ready, times, components)
    return ready


def round_components(
    work: StageMicroBatch, shard_group_of: dict[int, int], meeting: tuple[int, ...] = ()
) -> tuple[np.ndarray, list[list[int]]]:
    """(int64[ranks] component of every rank at work, else -1; shard groups of every component).

    Proxies of groups, and ranks that have tokens in linear layers only, work too. Ranks `meeting` before and after
    every pass are in one component.
    """
    together = [group.participants for group in work.groups]
    if work.linear is not None:
        together += [(rank,) for rank in np.unique(work.linear.rank).tolist()]
    together += [meeting] * bool(meeting)
    joined = join_shard_groups({shard_group_of[rank] for rank in ranks} for ranks in together)
    number = {i: k for k, shard_groups in enumerate(joined) for i in shard_groups}
    component = np.full(max(shard_group_of) + 1, -1, dtype=np.int64)
    for ranks in together:
        component[list(ranks)] = number[shard_group_of[ranks[0]]]
    return component, joined


# -- plans ----------------------------------------------------------------------


class ExpertShares(NamedTuple):
    """What experts take of a step, as shares of the time of all ranks."""

    compute: float  # experts that the router chose, on the ranks that have them
    exchange: float  # dispatch and combine: tokens to the experts and back


def expert_shares(cost: CostModel, plan: Plan, step_ns: int) -> ExpertShares:
    """Shares of experts in a step of so many ns; of ranks without tokens in a round, those of their EP group too."""
    compute = exchange = 0
    for pipeline in plan.pipelines:
        resident = len(pipeline.stages) > 1 or bool(unshard_times_by_stage(cost, pipeline))
        for current in pipeline.rounds if cost.model.experts else ():
            for stage, layers, work in zip(pipeline.stages, pipeline.layer_ranges, current.by_stage, strict=True):
                policy = MemoryPolicy(work.checkpoint, plan.reduce, resident)
                parts = round_times(cost.for_stage(stage), work, policy, layers).parts
                compute += int(parts[:, columns(("routed",))].sum())
                exchange += int(parts[:, columns(("expert", "expert_latency"))].sum())
    every = max(1, step_ns) * cost.ranks
    return ExpertShares(compute / every, exchange / every)


def plan_ns(cost: CostModel, plan: Plan) -> int:
    """Step time of a plan of one-stage pipelines: latest finish of a shard group, plus what a step costs once."""
    if (most := max((len(pipeline.stages) for pipeline in plan.pipelines), default=1)) > 1:
        raise SeqloomError(f"a pipeline of {most} stages has no closed form; simulate the plan instead")
    shard_group_of = {rank: i for i, shard_group in enumerate(plan.shard_groups) for rank in shard_group}
    ready = np.zeros(len(plan.shard_groups), dtype=np.int64)
    overlap_windows = []
    for pipeline in plan.pipelines:  # they are on disjoint shard groups, so their order is free
        own, shortest = cost.for_stage(pipeline.stages[0]), []
        meeting = pipeline.stages[0].ranks if unshard_times_by_stage(cost, pipeline) else ()
        for current in pipeline.rounds:
            work = current.by_stage[0]
            policy = MemoryPolicy(work.checkpoint, plan.reduce, bool(meeting))
            component, joined = round_components(work, shard_group_of, meeting)
            times = _component_ns(own, work, policy, pipeline.layer_ranges[0], component)
            shortest.append(int(times.min()))
            slowest = np.zeros_like(ready)
            slowest[list(chain.from_iterable(joined))] = np.repeat(times, list(map(len, joined)))
            ready = finish_round(ready, slowest, joined)
        overlap_windows.append((shortest[0], shortest[-1]) if shortest else (0, 0))
        if meeting:
            ready[list({shard_group_of[rank] for rank in meeting})] += unshard_ns(cost, pipeline)
    exposed = exposed_reshard_ns(cost, plan.pipelines, overlap_windows)
    return int(ready.max(initial=0)) + step_overhead(plan, cost)[0] + exposed


def round_ns(cost: CostModel, plan: Plan, pipeline: Pipeline, work: StageMicroBatch) -> int:
    """ns of the longest component of a round of a pipeline of one stage; it need not be one of the plan's."""
    shard_group_of = {rank: i for i, shard_group in enumerate(plan.shard_groups) for rank in shard_group}
    meeting = pipeline.stages[0].ranks if unshard_times_by_stage(cost, pipeline) else ()
    component, _ = round_components(work, shard_group_of, meeting)
    own, policy = cost.for_stage(pipeline.stages[0]), MemoryPolicy(work.checkpoint, plan.reduce, bool(meeting))
    return int(_component_ns(own, work, policy, pipeline.layer_ranges[0], component).max())


def _component_ns(
    cost: CostModel, work: StageMicroBatch, policy: MemoryPolicy, layers: LayerRange, component: np.ndarray
) -> np.ndarray:
    """int64[components] ns of a round, with copies that its passes wait for."""
    times = round_times(cost, work, policy)
    if not work.offload:
        return times.component_ns(component)
    return component_passes(cost, work, layers, times, component)[0]


def step_overhead(plan: Plan, cost: CostModel) -> tuple[int, int]:
    """(ns, of that communication) of the end of a step on the slowest pipeline rank, whatever the rounds."""
    costs = [(0, 0)]
    for pipeline in plan.pipelines:
        if len(pipeline.stages) > 1:
            for pp_rank, ranks in enumerate(pipeline.ranks_by_pp_rank):
                stages = pipeline.stages_of(pp_rank)  # of one tensor degree, or priced by that of the first
                own = cost.for_stage(pipeline.stages[stages[0]])
                narrowest = min(map(len, plan.shard_groups_of(pipeline, pp_rank)))
                costs.append(own.stage_overhead_ns([pipeline.layer_ranges[s] for s in stages], len(ranks), narrowest))
            continue
        own, resident = cost.for_stage(pipeline.stages[0]), bool(unshard_times_by_stage(cost, pipeline))
        for checkpoint in {current.by_stage[0].checkpoint for current in pipeline.rounds}:
            policy = own.priced_policy(MemoryPolicy(checkpoint, plan.reduce, resident))
            costs.append((own.step_overhead_ns(policy), round(own.engine.step_overhead(policy)[1])))
    return max(costs)
