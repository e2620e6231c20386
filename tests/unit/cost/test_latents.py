"""Latents (MLA): what they cost, where planners let them travel, and what explanations say of it."""

from dataclasses import replace

import numpy as np
import pytest

from seqloom.api import evaluate
from seqloom.cost import CostModel, GroupShape
from seqloom.cost.communication import remap_exchanges
from seqloom.cost.compute import forward_flops
from seqloom.cost.memory import kv_cache_bytes
from seqloom.describe import Cluster, ModelSpec
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group, LayerRange, Method, Plan, Remap
from seqloom.planners.explain import explain
from seqloom.planners.pipeline.planner import plan_pipeline
from seqloom.planners.registry import PlannerChoice

LITE, MINI = ModelSpec.load("deepseek-v2-lite"), ModelSpec.load("minicpm3-4b")
K = 1024


def test_expansion_by_hand():
    """16 heads of 192, latents of 576: a token's keys and values are 2 x 3072 values, products of a row of 576."""
    compute = CostModel(Cluster.parse("1x8xH200"), LITE).engine.compute
    product = 2 * 576 * 2 * 3072 / (compute.matmul_tflops * 1e3)
    ring, ulysses = GroupShape(1, 4, latent=True), GroupShape(4, 1, latent=True)
    assert compute.expansion(ring, Checkpoint.NONE) == pytest.approx(4 * product)
    assert compute.expansion(ulysses, Checkpoint.SELECTIVE) == pytest.approx(4 * product / 4)
    assert compute.expansion(ulysses, Checkpoint.FULL) == pytest.approx(5 * product / 4)
    once = 2 * LITE.expansion_parameters / (compute.matmul_tflops * 1e3)
    assert compute.unexpanded(ring, Checkpoint.NONE) == pytest.approx(3 * once / 4)
    assert compute.unexpanded(ring, Checkpoint.FULL) == pytest.approx(4 * once / 4)
    plain = GroupShape(1, 4)
    assert compute.expansion(plain, Checkpoint.NONE) == compute.expansion_matrix(plain) == 0


def test_a_token_has_fewer_values_on_the_way():
    links = CostModel(Cluster.parse("2x8xH200"), LITE).links
    ring, none = GroupShape(1, 16), Checkpoint.NONE
    ratio = links.ring_bytes(ring, none) / links.ring_bytes(ring._replace(latent=True), none)
    assert ratio == pytest.approx(2 * 16 * 192 / 576)
    assert remap_exchanges(LITE, Remap.ATTENTION, none) == (2 * (2 * 3072 + 2 * 3072), 4)
    assert remap_exchanges(LITE, Remap.ATTENTION, none, latent=True) == (2 * (2 * 3072 + 576), 4)


def test_attention_counts_the_widths_of_keys_and_values():
    wide = replace(LITE, latent=0, rotated=0, value_dim=0)
    tokens = np.array([1000.0])
    pairs = LITE.layers * 1000 * 1000 / 2
    own, other = (forward_flops(tokens, model) - 2 * model.matmul_parameters * tokens for model in (LITE, wide))
    assert own[0] == pytest.approx(2 * 16 * (192 + 128) * pairs) and other[0] == pytest.approx(4 * 16 * 192 * pairs)


def test_a_document_in_pieces_keeps_latents():
    cost, layers = CostModel(Cluster.parse("1x8xH200"), LITE), LayerRange(0, 27, 27)
    group = Group((0, 1, 2, 3), 2, 2, ())
    keys, gradients = kv_cache_bytes(cost, layers, group, 1000)
    latents, theirs = kv_cache_bytes(cost, layers, replace(group, latent=True), 1000)
    assert (keys, gradients) == (2 * 27 * 500 * 2 * 8 * 192, 4 * 27 * 500 * 2 * 8 * 192)
    assert (latents, theirs) == (2 * 27 * 500 * 576, 4 * 27 * 500 * 576)


@pytest.fixture(scope="module")
def across_nodes():
    """The cost model of nodes whose network is slow beside them, documents, and their plan."""
    cost = CostModel(Cluster.parse("4x8xH100"), LITE, max_length=128 * K, capacity=8 * K)
    return cost, PlannerChoice("flex").plan(np.array([64 * K, 100 * K, *[2 * K] * 40]), cost)


def shapes_of(plan):
    works = [work for line in plan.pipelines for current in line.rounds for work in current.by_stage]
    return [GroupShape.of(group) for work in works for group in work.groups]


def test_latents_travel_between_nodes_and_the_explanation_says_so(across_nodes):
    cost, plan = across_nodes
    plan.validate()
    assert any(shape.latent and shape.degree > 8 for shape in shapes_of(plan))
    assert not any(shape.latent for shape in shapes_of(plan) if shape.degree == 1)
    assert Plan.from_json(plan.to_json()) == Plan.from_text(plan.to_text()) == plan
    assert evaluate(plan, cost).gap >= 0
    latent = [one for one in explain(plan, cost).classes if one.placement.shape.latent]
    assert latent and all(one.as_dict()["method"].endswith("latents") for one in latent)


def test_a_plan_without_latents_is_slower_there(across_nodes):
    cost, plan = across_nodes
    sent = CostModel(Cluster.parse("4x8xH100"), LITE, max_length=128 * K, capacity=8 * K)
    sent.shapes = tuple(shape for shape in sent.engine.shapes if not shape.latent)
    other = PlannerChoice("flex").plan(np.array(plan.documents), sent)
    assert cost.plan_ns(other) > 1.05 * cost.plan_ns(plan)


def test_keys_and_values_travel_where_that_is_cheaper():
    """In a node, whose links are fast, a ring of a long document hides them behind attention."""
    cost = CostModel(Cluster.parse("1x8xH200"), LITE)
    rings = [GroupShape(1, 8), GroupShape(1, 8, latent=True)]
    plain, latent = cost.tables([512 * K], cost.policies[0], rings).cost[:, :, 0].max(axis=0)
    assert plain < latent


def test_pieces_of_a_pipeline_keep_latents():
    cost = CostModel(Cluster.parse("1x8xH200"), MINI, max_length=256 * K, stages=4, capacity=16 * K)
    plan = plan_pipeline(np.array([256 * K, 4 * K, 4 * K]), cost, stages=4)
    plan.validate()
    in_pieces = {
        GroupShape.of(group).latent
        for line in plan.pipelines
        for current in line.rounds
        for group in current.groups
        if any(span.tokens < plan.documents[span.document] for span in group.spans)
    }
    assert in_pieces == {True}
    assert evaluate(plan, cost).peak_memory_gib * 2**30 <= cost.budget_bytes


def test_every_shape_stands_with_latents_and_without():
    with_latents, without = (
        CostModel(Cluster.parse("2x8xH100"), model).engine.shapes
        for model in (MINI, replace(MINI, latent=0, rotated=0, value_dim=0, query_latent=0))
    )
    assert not any(shape.latent for shape in without)
    assert {shape._replace(latent=False) for shape in with_latents} == {*without}
    assert len(with_latents) == 2 * len(without)
    assert str(GroupShape(2, 8, Method.GATHER, True, True)) == "u2g8 routed latent"
    assert GroupShape.of(Group((0, 1), 2, 1, (Span(0, 0, 4),), latent=True)) == GroupShape(2, 1, latent=True)
