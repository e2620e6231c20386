"""Stages: pieces add up to documents, stages to the model; parameters, the step's end and memory of a stage."""

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqloom.cost import CostModel, MemoryPolicy
from seqloom.cost.memory import kv_cache_bytes, stage_parameters
from seqloom.cost.plan_cost import scale_to_layers
from seqloom.cost.shapes import COST_COLUMNS
from seqloom.describe import Cluster, ModelSpec
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group, LayerRange, Reduce

LENGTH = 20_000


@cache
def cost_of(tied=False, learned=False, profile=None, cluster="2x4xH100"):
    shape = (9, 1024, 8, 4, 128, 4096, True, 32000, tied)
    return CostModel(Cluster.parse(cluster), ModelSpec("small", *shape, learned_positions=learned), profile)


def policy(checkpoint=Checkpoint.NONE):
    return MemoryPolicy(checkpoint, Reduce.STEP, resident=True)


edges = st.lists(st.integers(1, LENGTH - 1), max_size=5, unique=True).map(lambda inner: [0, *sorted(inner), LENGTH])
checkpoints = st.sampled_from([Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL, Checkpoint.STAGE])


@given(edges, st.sampled_from([(1, 1), (4, 1), (2, 2), (1, 4), (2, 4)]), checkpoints)
def test_pieces_add_up_to_their_document_and_to_what_a_ring_sends_again(edges, shape, checkpoint):
    cost, own = cost_of(), policy(checkpoint)
    ranks = tuple(range(shape[0] * shape[1]))

    def parts(*spans):
        return cost.group_costs([Group(ranks, *shape, (span,)) for span in spans], own)

    fixed = np.array(cost.group_cost(Group(ranks, *shape, ()), own))
    whole = parts(Span(0, 0, LENGTH))[0] - fixed
    pieces = parts(*(Span(0, a, b) for a, b in pairwise(edges))) - fixed
    again = pieces.sum(axis=0) - whole
    prefix = sum(edges[1:-1])
    added = {name: again[COST_COLUMNS.index(name)] for name in COST_COLUMNS}
    dearer = {name for name, value in added.items() if value}
    assert dearer <= {"attention", "ring", "steps", "network", "link", "kv_gather"}
    forwards = 1.5 if checkpoint in (Checkpoint.FULL, Checkpoint.STAGE) else 1.0
    mib = prefix * 2 * 4 // shape[0] * 128 * 4 / 2**20
    calls = (len(edges) - 2) * forwards * cost.profile.piece_us
    assert added["attention"] == pytest.approx(9 * (calls + mib * cost.profile.prefix_us) * 1e3, abs=len(edges))
    place = cost.shape_and_traffic(Group(ranks, *shape, ()))
    share = cost.engine.links.ring(place[0], place[1], Checkpoint.FULL if checkpoint == "stage" else checkpoint)
    assert added["ring"] == pytest.approx(prefix * share.time, abs=len(edges))
    assert added["network"] == pytest.approx(prefix * share.network, abs=len(edges))


@given(st.integers(1, 7), st.integers(1, 8))
def test_stages_add_up_to_the_model(first, second):
    table = np.random.default_rng(first).integers(0, 10**9, (5, len(COST_COLUMNS)))
    cuts = [0, *sorted({first, second}), 9]
    shares = [LayerRange(a, b, 9) for a, b in pairwise(cuts)]
    total = sum(scale_to_layers(share, table) for share in shares)
    assert ((table - total >= 0) & (table - total < len(shares))).all()
    assert (total[:, COST_COLUMNS.index("head")] == table[:, COST_COLUMNS.index("head")]).all()
    assert all((scale_to_layers(share, table)[:, COST_COLUMNS.index("head")] == 0).all() for share in shares[:-1])


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_of_the_stages_are_those_of_the_model(tied, learned):
    cost = cost_of(tied, learned)
    shares = [LayerRange(0, 2, 9), LayerRange(2, 7, 9), LayerRange(7, 9, 9)]
    own = [stage_parameters(cost, share) for share in shares]
    twice = cost.model.head_parameters if tied else 0  # the table is on the first and on the last stage
    assert sum(own) == cost.model.parameters(384 * 1024) + twice
    assert own[1] == sum(map(cost.model.layer_parameters, range(2, 7)))
    assert stage_parameters(cost, LayerRange(0, 9, 9)) == cost.model.parameters(384 * 1024)


def test_rounds_of_stages_gather_and_reduce_nothing():
    cost = cost_of()
    group = Group((0, 1), 2, 1, (Span(0, 0, 4096),))
    stays, gathered = (cost.group_cost(group, v) for v in (policy(), MemoryPolicy(Checkpoint.NONE, Reduce.ROUND)))
    assert (stays.gather, stays.reduce) == (0, 0) and gathered.gather > 0 and gathered.reduce > 0
    assert (stays.linear, stays.attention, stays.head) == (gathered.linear, gathered.attention, gathered.head)


def test_the_end_of_a_step_grows_with_a_stages_parameters_and_shrinks_with_its_islands():
    cost = cost_of()
    small, large = LayerRange(0, 2, 9), LayerRange(0, 6, 9)
    assert cost.stage_overhead_ns([small], 4, 4)[0] < cost.stage_overhead_ns([large], 4, 4)[0]
    assert cost.stage_overhead_ns([small, LayerRange(6, 9, 9)], 4, 4)[0] > cost.stage_overhead_ns([small], 4, 4)[0]
    sharded, apart = cost.stage_overhead_ns([small], 4, 4), cost.stage_overhead_ns([small], 4, 1)
    assert sharded[0] - sharded[1] < apart[0] - apart[1]  # the optimiser runs on a part
    assert cost.stage_overhead_ns([small], 1, 1)[1] == 0  # nobody to talk to
    additive = CostModel(Cluster.parse("1x8xA100-40G"), ModelSpec.load("gpt-7b"), "flexsp-a100", max_length=192 * 1024)
    assert additive.stage_overhead_ns([small], 4, 4) == (0, 0)


def test_what_is_kept_falls_from_choice_to_choice():
    memory, stage = cost_of().memory, LayerRange(3, 6, 9)
    order = [Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL, Checkpoint.STAGE]
    held = [memory.activation_bytes(stage, checkpoint, offload=False).held for checkpoint in order]
    assert held == sorted(held, reverse=True) and held[-1] == 2 * 1024  # the stage's input, bf16
    assert held[2] == 3 * held[3]  # one input per layer
    assert all(memory.activation_bytes(stage, checkpoint, offload=True).held == 0 for checkpoint in order)
    whole = memory.activation_bytes(stage, Checkpoint.NONE, offload=False)
    assert whole.deferred <= whole.held and whole.split == 0
    again = memory.activation_bytes(stage, Checkpoint.STAGE, offload=False)
    assert again.backward >= whole.held and again.split == again.deferred == whole.deferred


def test_only_the_last_stage_has_logits():
    cost = cost_of()
    first, last = (cost.memory.working_bytes(LayerRange(*layers, 9)) for layers in ((0, 3), (6, 9)))
    assert last - first == cost.profile.head_chunk * 32000 * 6


@pytest.mark.parametrize(("ulysses", "ring", "heads"), [(1, 1, 4), (2, 1, 2), (4, 2, 1), (8, 1, 1), (1, 4, 4)])
def test_keys_and_values_of_a_rank(ulysses, ring, heads):
    """4 key/value heads of 128 for 8 query heads, 3 layers."""
    group = Group(tuple(range(ulysses * ring)), ulysses, ring, ())
    keys, gradients = kv_cache_bytes(cost_of(), LayerRange(0, 3, 9), group, 1000)
    assert keys == 2 * 2 * heads * 128 * (1000 // ring) * 3 and gradients == 2 * keys
