"""Stages that are unsharded for every pass: times and bytes against the layouts that training moves between."""

from dataclasses import replace

import numpy as np
import pytest

from seqloom.cost import CostModel, MemoryPolicy
from seqloom.cost.plan_cost import round_times
from seqloom.cost.resharding import exposed_reshard_ns, resident_parameters, unshard_times
from seqloom.describe import Cluster, ModelSpec
from seqloom.layout import move_between
from seqloom.plan import Action, Checkpoint, LayerRange, Reduce, Stage, Weight, compute_layout
from seqloom.plan.pipeline import ShardCollective, reshard_after_forward_stages, shard_collectives
from seqloom.planners.bounds import plan_bound
from seqloom.simulate import EventKind, predicted_ns, simulate
from support.shapes import Shape, gathered_per_pass, shaped_plan

LAYERS = 4
SPEC = ModelSpec("small", LAYERS, 64, 8, 8, 16, 256, True, 512, False)
MATRICES = [(128, 64, 0), (128, 64, 0), (128, 64, 0), (64, 128, 1), (256, 64, 0), (256, 64, 0), (64, 256, 1)]
"""Rows, columns and cut of a layer's q, k, v, o, gate, up, down; its two norms are whole."""
WEIGHTS = [
    Weight("table", 512, 64, ("embedding",)),
    *(
        Weight(f"{layer}.{number}", rows, columns, (layer,), cut)
        for layer in range(LAYERS)
        for number, (rows, columns, cut) in enumerate([*MATRICES, (64, 1, None), (64, 1, None)])
    ),
    Weight("norm", 64, 1, ("head",)),
    Weight("head", 512, 64, ("head",)),
]
LENGTHS = (9000, 5000, 4000, 1000, 700)
SHAPES = {
    "one stage": (Shape(1, 1, 4),),
    "tensor ranks": (Shape(1, 2, 2), Shape(1, 1, 2, 2)),
    "two stages": (Shape(2, 1, 2),),
    "a document in pieces": (Shape(2, 2, 2, 1, 2),),
    "halves": (Shape(2, 1, 4, 1, 1, "zb-h1"),),
}


def cost_of(cluster="8xH100"):
    return CostModel(Cluster.parse(cluster), SPEC, sharding="free")


def plans(name, kept=None):
    """The plan of a name with parameters that stay, and gathered for every pass; every round keeps `kept`."""
    whole = shaped_plan(LENGTHS, SHAPES[name], ranks=8, layers=LAYERS, heads=8)
    if kept is not None:
        lines = [
            replace(
                line,
                rounds=tuple(
                    replace(each, by_stage=tuple(replace(work, checkpoint=kept) for work in each.by_stage))
                    for each in line.rounds
                ),
            )
            for line in whole.pipelines
        ]
        whole = replace(whole, pipelines=tuple(lines))
    return whole, gathered_per_pass(whole, range(LAYERS))


def moved_ns(cost, layouts, ranks, size):
    """ns on the busiest link or NIC of a move among some ranks, elements of so many bytes."""
    move = move_between(*(layout.restrict(ranks) for layout in layouts))
    node, cluster, profile = cost.node_size, cost.cluster, cost.profile
    inside = move.remote & (move.sender // node == move.receiver // node)
    across = move.remote & ~inside
    link = np.bincount(move.receiver[inside], move.sizes[inside], cost.ranks).max()
    nic = np.bincount(move.receiver[across], move.sizes[across], cost.ranks).max()  # a NIC for every GPU
    near = size * link / (cluster.intra.gb_s * profile.intra.all_to_all.efficiency)
    far = size * nic / (cluster.nic.gb_s * profile.network.all_to_all.efficiency)
    return max(near, far), bool(across.any())


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("cluster", ["8xH100", "2x4xH100"])
def test_a_pass_takes_what_its_moves_take(cluster, tensor):
    cost, plan = cost_of(cluster), plans("one stage")[0]
    stage = Stage(tuple(range(8)), (0, LAYERS), tensor)
    pipeline = replace(plan.pipelines[0], stages=(stage,))
    layouts = compute_layout(WEIGHTS, [pipeline], [(0, 0)]), compute_layout(WEIGHTS, [pipeline])
    times = unshard_times(cost, stage, LayerRange(0, LAYERS, LAYERS))
    hops = (8 // tensor - 1).bit_length()
    for size, found in ((2, times.gather), (4, times.sum)):
        columns = [moved_ns(cost, layouts, range(first, 8, tensor), size) for first in range(tensor)]
        busiest, crosses = max(columns)
        link = cost.cluster.nic if crosses else cost.cluster.intra
        rate = (cost.profile.network if crosses else cost.profile.intra).all_to_all
        latency = (link.latency_us + rate.call_us + hops * rate.hop_us) * 1e3
        assert found == pytest.approx(busiest + (LAYERS + 2) * latency, abs=1)


def test_nobody_to_share_with_moves_nothing():
    assert unshard_times(cost_of(), Stage((0, 1), (0, 2), 2), LayerRange(0, 2, LAYERS)) == (0, 0)


def test_what_every_action_moves():
    gather, add = ShardCollective.ALL_GATHER, ShardCollective.REDUCE_SCATTER

    def moves(text, stages=(0,)):
        return list(shard_collectives([Action.parse(each) for each in text.split()], frozenset(stages)))

    whole = "0UNSHARD0 0F0 0RESHARD0 0UNSHARD0 0B0 0RESHARD0 0REDUCE"
    assert moves(whole) == [gather, None, None, gather, None, add, None]
    assert moves(whole, ()) == [None] * 7
    assert moves("0UNSHARD0 0F0 0F1 0B1 0B0 0REDUCE 0RESHARD0") == [gather, None, None, None, None, add, None]
    halves = "0UNSHARD0 0F0 0I0 0RESHARD0 0UNSHARD0 0W0 0RESHARD0 0REDUCE"
    assert moves(halves) == [gather, None, None, add, gather, None, None, add]


def test_one_stage_adds_two_gathers_and_a_sum_to_every_round():
    cost = cost_of()
    whole, plan = plans("one stage")
    line = plan.pipelines[0]
    times = unshard_times(cost, line.stages[0], line.layer_ranges[0])
    rounds = len(line.rounds)

    def exposed(pipeline):
        """Of the step's own moves, what shows: rounds hide nothing of shares, which a pass waits for."""
        step = [
            round_times(cost, r.by_stage[0], MemoryPolicy(r.by_stage[0].checkpoint, Reduce.STEP, resident=True))
            for r in pipeline.rounds
        ]
        ends = [int(each.busy_ns[:4].max()) for each in (step[0], step[-1])]
        return exposed_reshard_ns(cost, [pipeline], [tuple(ends)])

    more = rounds * (2 * times.gather + times.sum) + exposed(line) - exposed(whole.pipelines[0])
    assert predicted_ns(plan, cost) == predicted_ns(whole, cost) + more
    assert exposed_reshard_ns(cost, [line], [(10**9, 10**9)]) == exposed_reshard_ns(cost, [line], [(0, 0)])


@pytest.mark.parametrize("name", SHAPES)
def test_simulation_and_prediction_agree_with_the_actions(name):
    cost = cost_of()
    whole, plan = plans(name)
    found = simulate(plan, cost)
    assert found.step_ns == predicted_ns(plan, cost) > predicted_ns(whole, cost)
    assert (found.busy_ns + found.comm_ns + found.idle_ns == found.step_ns).all()
    assert found.step_ns >= plan_bound(plan, cost)
    spent = dict.fromkeys(range(8), 0)
    for line in plan.pipelines:
        for pp_rank, row in enumerate(line.actions):
            for action, move in zip(row, shard_collectives(row, reshard_after_forward_stages(line)), strict=True):
                if move is not None:
                    own = unshard_times(cost, line.stages[action.stage], line.layer_ranges[action.stage]).of(move)
                    spent |= {rank: spent[rank] + own for rank in line.ranks_by_pp_rank[pp_rank]}
    events = found.events
    chosen = np.isin(events.kind, (EventKind.ALL_GATHER, EventKind.REDUCE_SCATTER))
    taken = np.bincount(events.rank[chosen], (events.stop - events.start)[chosen], 8)
    assert taken.tolist() == list(spent.values())


@pytest.mark.parametrize("kept", [Checkpoint.NONE, Checkpoint.FULL])
@pytest.mark.parametrize("name", ["one stage", "tensor ranks", "two stages"])
def test_memory_is_what_the_layouts_hold(name, kept):
    """Shares of parameters and gradients for the step; copies in a pass; gradients of the head, and of a layer."""
    cost = cost_of()
    _, plan = plans(name, kept)
    per_pass = [(number, stage) for number, line in enumerate(plan.pipelines) for stage in range(len(line.stages))]
    layouts = compute_layout(WEIGHTS, plan.pipelines, per_pass), compute_layout(WEIGHTS, plan.pipelines)
    shares, copies = (np.bincount(layout.rank, layout.sizes, 8) for layout in layouts)
    homes = np.array([[4 * (own in weight.used_by) for own in ("embedding", 0, "head")] for weight in WEIGHTS])
    table, layer, head = (np.bincount(layouts[1].rank, layouts[1].sizes * each[layouts[1].item], 8) for each in homes.T)
    head -= 4 * 64 * (head > 0)  # the norm's gradient comes in the backward
    found = simulate(plan, cost).peak_memory
    for line in plan.pipelines:
        for stage, own in enumerate(line.stages):
            memory, layers = cost.with_tensor(own.tensor).memory, line.layer_ranges[stage]
            each = memory.activation_bytes(layers, kept)
            row = [action for action in line.actions[line.pp_rank_of(stage)] if str(action.kind) in "FB"]
            for rank in own.ranks:
                most = live = 0.0
                for action in row:
                    tokens = sum(s.stop - s.start for s in line.rounds[action.round].by_stage[stage].spans())
                    tokens = -(-tokens // len(own.ranks))
                    if action.kind == "F":
                        live += each.held * tokens
                        most = max(most, live + each.forward * tokens)
                    else:
                        own_layer = layer.max() if own.tensor == 1 else layer[rank]  # layers are alike
                        most = max(most, live + each.backward * tokens + own_layer)
                        live -= each.held * tokens
                        ends = table[rank] + (4 * 64 if head[rank] else 0)
                        most = max(most, live + each.backward * tokens + own_layer + ends)
                state = memory.working_bytes(layers) + 6 * shares[rank] + 2 * copies[rank] + head[rank]
                assert found[rank] == pytest.approx(state + most, abs=1)


def test_shares_are_what_a_step_brings():
    whole, plan = plans("tensor ranks")
    shared = [reshard_after_forward_stages(line) for line in plan.pipelines]
    held, _ = resident_parameters(cost_of("2x4xH100"), [line.stages for line in plan.pipelines], shared)
    layout = compute_layout(WEIGHTS, plan.pipelines, [(0, 0), (1, 0)])
    assert held.rank.tolist() == np.bincount(layout.rank, layout.sizes, 8).tolist()
    assert not held.others.any() and held.node.tolist() == held.rank.reshape(2, 4).sum(axis=1).tolist()
    assert not reshard_after_forward_stages(whole.pipelines[0])
