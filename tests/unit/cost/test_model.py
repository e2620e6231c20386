"""The cost model as a whole: capacity, submeshes, tensor parallel degrees, and what it refuses."""

from dataclasses import replace

import numpy as np
import pytest

from seqloom.api import cost_model
from seqloom.cost import CostModel, MemoryPolicy, Profile
from seqloom.describe import Cluster, ModelSpec
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group, Reduce
from seqloom.planners import make_plan

SPEC = ModelSpec("small", 9, 1024, 8, 4, 128, 4096, True, 32000, False)
LENGTHS = np.array([100, 200, 1_500, 40, 300, 310, 90, 1_000])


@pytest.fixture(scope="module")
def small():
    return CostModel(Cluster.parse("2x4xH100"), SPEC, sharding="free")


def test_a_smaller_capacity_binds_every_plan():
    free = cost_model("1x4xH200", "llama3-8b")
    tight = cost_model("1x4xH200", "llama3-8b", capacity=600)
    assert {tight.capacity(policy) for policy in tight.policies} == {600}
    for name in ("static", "flex"):
        plan = make_plan(name, LENGTHS, tight)
        fullest = max(-(-group.tokens // group.degree) for group in plan.pipelines[0].rounds[0].groups)
        assert fullest <= 600
        assert len(plan.pipelines[0].rounds) > len(make_plan(name, LENGTHS, free).pipelines[0].rounds)


def test_memory_is_the_limit_anyway():
    free = cost_model("1x4xH200", "llama3-8b")
    loose = cost_model("1x4xH200", "llama3-8b", capacity=10**12)
    assert [loose.capacity(v) for v in loose.policies] == [free.capacity(v) for v in free.policies]


def test_a_capacity_below_a_token_is_refused():
    with pytest.raises(SeqloomError, match="a capacity of 0 tokens; give 1 or more"):
        cost_model("1x4xH200", "llama3-8b", capacity=0)


def test_documents_padded_beyond_what_integers_of_nanoseconds_hold_are_refused():
    profile = replace(Profile.load("flexsp-a100"), pad_multiple=2**31)
    with pytest.raises(SeqloomError, match="a document of 2,147,483,648 tokens of gpt-7b takes more than 1,125,900 s"):
        CostModel(Cluster.parse("8x8xA100-40G"), ModelSpec.load("gpt-7b"), profile)


def test_submeshes_are_built_once(small):
    cost = small
    group, policy = Group((0, 1, 2, 3), 2, 2, (Span(0, 0, 40_000),)), MemoryPolicy(Checkpoint.NONE, Reduce.STEP)
    assert cost.with_tensor(1) is cost and cost.for_submesh(8) is cost
    two, part = cost.with_tensor(2), cost.for_submesh(4, 2)
    assert cost.with_tensor(2) is two is two.with_tensor(2) and two.with_tensor(1) is cost
    assert part is cost.for_submesh(4, 2) and part.cluster_cost is cost and part.for_submesh(8, 2) is two
    assert (part.ranks, part.node_size, part.tensor) == (4, 4, 2) and "tensor 2" in repr(part)
    assert all(shape.ulysses % 2 == 0 and not shape.routed for shape in (*two.shapes, *part.shapes))
    assert {shape.degree for shape in part.shapes} == {2, 4}
    again = CostModel(cost.cluster, SPEC, sharding="free", tensor=1)
    assert again.shapes == cost.shapes and again.group_cost(group, policy) == cost.group_cost(group, policy)


def test_groups_of_a_submesh_are_groups_of_the_cluster_wherever_it_lies():
    cost = CostModel(Cluster.parse("4x8xH100"), SPEC, sharding="free")
    assert {shape.degree for shape in cost.for_submesh(6).shapes} == {1, 2, 3, 6}
    assert {shape.degree for shape in cost.for_submesh(16).shapes} == {1, 2, 4, 8, 16}
    assert cost.for_submesh(2).cluster.nics_per_node == 2 and cost.for_submesh(16).cluster.nodes == 2


@pytest.mark.parametrize(
    ("ranks", "tensor", "way"),
    [
        (8, 3, "model small: tensor degree 3.*4 kv heads.*use 2"),
        (8, 0, "tensor degree 0.*use 1"),
        (8, 8, "tensor degree 8.*use 4"),
        (3, 2, "tensor degree 2 on 3 ranks.*use 1"),
        (6, 2, "6 ranks of cluster 2x4xH100.*use 4 ranks"),
        (9, 1, "9 ranks of cluster.*use 8 ranks"),
    ],
)
def test_refusals_name_the_nearest_choice(small, ranks, tensor, way):
    with pytest.raises(SeqloomError, match=way):
        small.for_submesh(ranks, tensor)


def test_tensor_ranks_have_whole_experts_each():
    sizes = {"experts": 4, "active_experts": 2, "expert_ffn": 64}
    experts = ModelSpec("e", 2, 64, 8, 8, 8, 0, True, 100, False, **sizes)
    assert experts.tensor_degrees == SPEC.tensor_degrees == (1, 2, 4)
    assert replace(experts, shared_ffn=6).tensor_degrees == (1, 2)
    assert replace(experts, moe_layers=(1,), ffn=3).tensor_degrees == (1,)
    with pytest.raises(SeqloomError, match="8 kv heads and experts 4; use 4"):
        CostModel(Cluster.parse("8xH100"), experts, tensor=8)
    whole, half = (experts.layer_parameters(0, tensor) for tensor in (1, 2))
    router, norms = 64 * 4, 2 * 64
    assert half == (whole - router - norms) // 2 + router + norms


def test_published_constants_have_no_tensor_parallelism():
    gpt = (Cluster.parse("2x8xA100-40G"), ModelSpec.load("gpt-7b"), "flexsp-a100")
    with pytest.raises(SeqloomError, match="no constants for tensor degree 2"):
        CostModel(*gpt, tensor=2)
    with pytest.raises(SeqloomError, match="no constants for sharding free"):
        CostModel(*gpt, sharding="free")
