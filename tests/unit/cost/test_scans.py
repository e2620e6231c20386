"""Layers that scan: where ranks pass states and where they exchange tokens for heads, by price."""

from dataclasses import replace

import numpy as np
import pytest

from seqloom.api import evaluate
from seqloom.cost import CostModel, GroupShape
from seqloom.describe import Cluster, ModelSpec
from seqloom.plan import Plan
from seqloom.planners.explain import explain
from seqloom.planners.registry import PlannerChoice

K = 1024
HYBRID = replace(
    ModelSpec.load("qwen3-1.7b"),
    name="hybrid",
    windows=(0, 0, 0, None) * 7,
    mixer_layers=tuple(layer for layer in range(28) if layer % 4 != 3),
    mixer_parameters=33_718_464,
    mixer_values=32_832,
    mixer_exchange=16_448,
    mixer_heads=32,
    mixer_flops=5_832_704,
    mixer_halo=24_576,
    mixer_state=32 * 128 * 256,
    mixer_run_flops=11_075_584,
    mixer_join_flops=32 * 2 * 128**3,
)
"""The delta rule of Qwen3-Next in three of four layers of a small model."""


@pytest.fixture(scope="module")
def cost():
    """Four nodes."""
    return CostModel(Cluster.parse("4x8xH100"), HYBRID, max_length=512 * K)


def test_states_are_as_many_however_long_a_document_is(cost):
    states, heads = GroupShape(8, 4, states=True), GroupShape(8, 4)
    policy, lengths = cost.policies[0], [32 * K, 64 * K, 512 * K, 1024 * K]
    priced = cost.tables(lengths, policy, (heads, states)).cost[0]
    assert priced[0, 0] < priced[1, 0] and priced[0, 2] > priced[1, 2]
    parts = [
        cost.document_ns(np.array(lengths), [(each, cost.aligned_traffic(each))], policy) for each in (heads, states)
    ]
    exchanged = [each["ulysses"][0] for each in parts]
    attention = cost.links.ulysses(heads, cost.aligned_traffic(heads), policy.checkpoint).time
    less = [own - attention * length for own, length in zip(exchanged[1], lengths, strict=True)]
    assert max(less) - min(less) <= 2 and exchanged[0][3] > 1.9 * exchanged[0][2]


def test_a_plan_passes_states_of_long_documents_between_nodes(cost):
    lengths = np.array([512 * K, *[3 * K] * 60])
    plan = PlannerChoice("flex").plan(lengths, cost)
    plan.validate()
    groups = [group for current in plan.pipelines[0].rounds for group in current.groups]
    assert {group.states for group in groups if group.degree > 8} == {True}
    assert not any(group.states for group in groups if group.degree == 1)
    assert Plan.from_json(plan.to_json()) == Plan.from_text(plan.to_text()) == plan
    assert evaluate(plan, cost).gap >= 0
    long = next(one for one in explain(plan, cost).classes if one.longest == 512 * K)
    assert long.as_dict()["method"].endswith("states")


def test_heads_are_exchanged_inside_a_node():
    """There links are fast, and finding states takes the delta rule nearly twice the operations."""
    cost = CostModel(Cluster.parse("1x8xH200"), HYBRID)
    for length in (32 * K, 512 * K):
        forms = (GroupShape(8, 1), GroupShape(8, 1, states=True))
        heads, states = cost.tables([length], cost.policies[0], forms).cost[:, :, 0].max(axis=0)
        assert heads < states


def test_pieces_of_a_pipeline_pass_no_states():
    cost = CostModel(Cluster.parse("2x8xH100"), HYBRID, max_length=256 * K, stages=2, capacity=16 * K)
    plan = PlannerChoice("pipeline:2").plan(np.array([256 * K, 4 * K]), cost)
    plan.validate()
    spans = [(span, group) for current in plan.pipelines[0].rounds for group in current.groups for span in group.spans]
    assert not any(group.states for span, group in spans if span.tokens < plan.documents[span.document])
