"""Resharding once per step: parameters against the moves of the layouts, box by box, and its exposed time."""

from dataclasses import replace

import numpy as np
import pytest

from seqloom.cost import CostModel, MemoryPolicy
from seqloom.cost.plan_cost import round_times
from seqloom.cost.resharding import exposed_reshard_ns, reshard_times, resident_parameters
from seqloom.describe import Cluster, ModelSpec
from seqloom.layout import Layout, Span
from seqloom.layout.move import reshard_moves_of_rank
from seqloom.plan import (
    Action,
    ActionKind,
    Checkpoint,
    Group,
    Limits,
    Pipeline,
    Plan,
    Reduce,
    Round,
    Sharding,
    Stage,
    StageMicroBatch,
)
from seqloom.simulate import predicted_ns, simulate

LAYERS = 4
SPEC = ModelSpec("small", LAYERS, 64, 8, 8, 16, 256, True, 512, False)
MATRICES = [(128, 64, 0), (128, 64, 0), (128, 64, 0), (64, 128, 1), (256, 64, 0), (256, 64, 0), (64, 256, 1)]
"""Rows, columns and cut of a layer's q, k, v, o, gate, up, down; its two norms are whole."""
WEIGHTS = (
    [(512, 64, None, "embedding")]
    + [(*shape, layer) for layer in range(LAYERS) for shape in [*MATRICES, (64, 1, None), (64, 1, None)]]
    + [(64, 1, None, "head"), (512, 64, None, "head")]
)


def cost_of(cluster, **changes):
    cost = CostModel(Cluster.parse(cluster), SPEC, sharding="free")
    profile = replace(cost.profile, **changes)
    return CostModel(cost.cluster, SPEC, profile, sharding="free")


def owners(ranks):
    """Every rank has an equal run of the rows of every weight."""
    return Layout.of(
        [
            (rank, item, rank * rows // ranks, (rank + 1) * rows // ranks, 0, columns)
            for item, (rows, columns, *_) in enumerate(WEIGHTS)
            for rank in range(ranks)
        ]
    )


def needed(pipelines):
    """What ranks compute with: weights of their layers, each its slice."""
    boxes = []
    for pipeline in pipelines:
        for stage in pipeline:
            for item, (rows, columns, cut, home) in enumerate(WEIGHTS):
                first, stop = stage.layers
                here = {"embedding": first == 0, "head": stop == LAYERS}
                if not (here[home] if isinstance(home, str) else first <= home < stop):
                    continue
                for place, rank in enumerate(stage.ranks):
                    share = [(0, rows), (0, columns)]
                    if cut is not None:
                        part = (rows, columns)[cut] // stage.tensor
                        index = place % stage.tensor
                        share[cut] = (index * part, (index + 1) * part)
                    boxes.append((rank, item, *share[0], *share[1]))
    return Layout.of(boxes)


def empty(stages):
    """Pipepipelines of these stages, without rounds."""
    return [Pipeline(tuple(pipeline), (), ((),) * len({stage.ranks for stage in pipeline})) for pipeline in stages]


WHOLE = [[Stage(tuple(range(8)), (0, 4))]]
STAGED = [[Stage((0, 1), (0, 3)), Stage((2, 3), (3, 4))], [Stage((4, 5, 6, 7), (0, 4))]]
SPLIT = [[Stage((0, 1, 2, 3), (0, 4), 2)], [Stage((4, 5), (0, 2), 2), Stage((6, 7), (2, 4), 1)]]
IDLE = [[Stage((2, 3), (0, 4), 2)]]


def counted(pipelines, size):
    """Parameters of every rank, shares of others in what its node shares, and of every node: element by element."""
    rank, others, node, goal = np.zeros(8), np.zeros(8), np.zeros(8 // size), needed(pipelines)
    boxes = np.stack(goal.columns(), axis=1)
    for item, (rows, columns, *_) in enumerate(WEIGHTS):
        has = np.zeros((8, rows, columns), dtype=bool)
        for owner, _, *box in boxes[goal.item == item]:
            has[owner, box[0] : box[1], box[2] : box[3]] = True
        for place in range(8 // size):
            near = has[place * size : (place + 1) * size]
            many = near.sum(axis=0)
            node[place] += (many > 0).sum()
            for k, own in enumerate(near, place * size):
                rank[k] += own.sum()
                others[k] += (1 - 1 / many[own]).sum()
    return rank, others, node


@pytest.mark.parametrize("pipelines", [WHOLE, STAGED, SPLIT, IDLE], ids=["whole", "staged", "split", "idle"])
@pytest.mark.parametrize("cluster", ["8xH100", "2x4xH100"])
def test_elements_are_those_of_the_moves(cluster, pipelines):
    """Ranks that have whole weights get just what the formulas say, tensor ranks together."""
    cost = cost_of(cluster)
    size = cost.node_size
    held, _ = resident_parameters(cost, pipelines, [frozenset()] * len(pipelines))
    for found, wanted in zip(held, counted(pipelines, size), strict=True):
        assert found == pytest.approx(wanted)
    moves = [reshard_moves_of_rank(rank, owners(8), needed(pipelines), node_size=size) for rank in range(8)]
    came, went = np.zeros((2, 8))
    for rank, (move, *_) in enumerate(moves):
        across = move.sender // size != move.receiver // size
        came[rank], went[rank] = (move.sizes[across & (end == rank)].sum() for end in (move.receiver, move.sender))
    assert came.reshape(-1, size).sum(axis=1) == pytest.approx(held.node * (8 - size) / 8)
    assert went.reshape(-1, size).sum(axis=1) == pytest.approx((held.node.sum() - held.node) * size / 8)
    assert (len(moves[0]) == 2) == (size < 8 and held.others.any())
    if pipelines is WHOLE:
        assert came == pytest.approx((held.rank - held.others) * (8 - size) / 8)
        for rank, (first, *second) in enumerate(moves):
            near = first.remote & (first.sender // size == first.receiver // size)
            for end in ("receiver", "sender"):
                assert first.sizes[near & (getattr(first, end) == rank)].sum() == held.rank[rank] * (size - 1) / 8
                for move in second:
                    onward = move.sizes[getattr(move, end) == rank].sum()
                    assert onward == pytest.approx(held.others[rank] * (8 - size) / 8)


def test_resharding_takes_as_long_as_its_busiest_nic_and_link():
    one, two = cost_of("8xH100"), cost_of("2x4xH100")
    parameters = SPEC.parameters()
    buckets = LAYERS + 2
    intra, network = one.profile.intra.all_to_all, two.profile.network.all_to_all
    links = one.cluster.intra, two.cluster.nic
    latency = [
        (link.latency_us + rate.call_us + hops * rate.hop_us) * 1e3
        for link, rate, hops in zip((*links, links[0]), (intra, network, intra), (3, 3, 2), strict=True)
    ]
    for size, way in ((2, "before"), (4, "after")):
        near, far = (size / (link.gb_s * rate.efficiency) for link, rate in zip(links, (intra, network), strict=True))
        whole = parameters * 7 / 8 * near
        assert getattr(reshard_times(one, empty(WHOLE)), way) == pytest.approx(whole + buckets * latency[0])
        # A NIC for every GPU: one quarter of the other node's half, then the other quarters from this node.
        hops = parameters / 8 * far + parameters * 3 / 8 * near
        assert getattr(reshard_times(two, empty(WHOLE)), way) == pytest.approx(hops + buckets * sum(latency[1:]))
        apart = [[Stage((rank,), (k, k + 1)) for k, rank in enumerate((0, 1, 4, 5))]]
        table = 512 * 64
        most = (table + SPEC.layer_parameters(0) + 64) * 4 / 8 * far  # nobody shares: one hop, the last stage's
        assert getattr(reshard_times(two, empty(apart)), way) == pytest.approx(most + buckets * latency[1])
    first = 512 * 64 + SPEC.layer_parameters(0)
    lead = first * 7 / 8 * 2 / (links[0].gb_s * intra.efficiency) + 2 * latency[0]
    assert reshard_times(one, empty(WHOLE)).first == pytest.approx(lead)


def test_a_tied_table_is_there_once_and_moves_with_the_embedding():
    tied = CostModel(Cluster.parse("4xH100"), replace(SPEC, tied=True), sharding="free")
    ends = [[Stage((0, 1), (0, 1)), Stage((2, 3), (1, 3)), Stage((0, 1), (3, 4))]]
    apart = [[Stage((0, 1), (0, 2)), Stage((2, 3), (2, 4))]]
    layer, table = SPEC.layer_parameters(0), 512 * 64
    held, _ = resident_parameters(tied, ends, [frozenset()])
    assert held.rank.tolist() == [2 * layer + table + 64] * 2 + [2 * layer] * 2
    held, early = (each.rank for each in resident_parameters(tied, apart, [frozenset()]))
    assert held.tolist() == [2 * layer + table] * 2 + [2 * layer + table + 64] * 2
    assert early.tolist() == [layer + table] * 2 + [table] * 2


def test_exposed_time():
    """A fifth of the first round, one half of the last, 3 of 4 layers; the first layer's share never."""
    cost = cost_of("8xH100")
    row = (Action(0, ActionKind.F, 0), Action(0, ActionKind.B, 0))
    pipelines = [replace(empty(WHOLE)[0], actions=(row,))]
    times = reshard_times(cost, pipelines)
    assert exposed_reshard_ns(cost, pipelines, [(0, 0)]) == round(times.before + times.after)
    assert exposed_reshard_ns(cost, pipelines, [(1000, 0)]) == round(times.before - 150 + times.after)
    assert exposed_reshard_ns(cost, pipelines, [(0, 1000)]) == round(times.before + times.after - 375)
    assert exposed_reshard_ns(cost, pipelines, [(10**9, 10**9)]) == round(times.first + times.last)
    halves = [replace(pipelines[0], actions=((Action(0, ActionKind.I, 0), Action(0, ActionKind.W, 0)),))]
    assert exposed_reshard_ns(cost, halves, [(10**9, 10**9)]) == round(times.first + times.after)
    slow = cost_of("8xH100", overlap=0.5)
    bare = times.first + times.last
    assert exposed_reshard_ns(slow, pipelines, [(10**9, 10**9)]) == round(
        bare + (times.before + times.after - bare) / 2
    )


@pytest.mark.parametrize("sharding", ["full", "hybrid", "none"])
def test_nothing_moves_under_other_shardings_or_on_one_rank(sharding):
    other = CostModel(Cluster.parse("8xH100"), SPEC, sharding=sharding)
    assert reshard_times(other, empty(WHOLE)) == (0, 0, 0, 0)
    assert reshard_times(cost_of("1xH100"), empty([[Stage((0,), (0, 4))]])) == (0, 0, 0, 0)


def test_a_step_has_its_exposed_time():
    """Closed form, prediction and simulation say the same, and name it as communication at the step's end."""
    cost = cost_of("8xH100")
    works = [
        StageMicroBatch((Group((k, k + 1), 2, 1, (Span(d, 0, 5000),)),), Checkpoint.NONE) for d, k in enumerate((0, 2))
    ]
    rounds = tuple(Round((work,)) for work in works)
    pipeline = Pipeline.single(range(8), LAYERS, rounds, Reduce.STEP, tensor=2)
    limits = Limits(8, 8, 8, ((Checkpoint.NONE, 10**6),))
    plan = Plan(limits, Sharding.FREE, Reduce.STEP, (5000, 5000), (pipeline,))
    plan.validate()
    found, split = simulate(plan, cost), cost.with_tensor(2)
    policy = MemoryPolicy(Checkpoint.NONE, Reduce.STEP)
    time = round_times(split, works[0], policy).busy_ns[:2].max()
    moved = exposed_reshard_ns(cost, plan.pipelines, [(time, time)])
    end = cost.step_overhead_ns(policy) + moved
    assert found.step_ns == predicted_ns(plan, cost) == cost.plan_ns(plan) == time + end
    assert found.end_ns == end and (found.comm_ns >= moved).all() and moved > 0
