"""FlexSP's published constants, checked against numbers worked out by hand."""

import numpy as np
import pytest

from seqloom.cost import CostModel, GroupShape, MemoryPolicy
from seqloom.describe import Cluster, ModelSpec
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group, Reduce, Sharding

K = 1024
POLICY = MemoryPolicy(Checkpoint.PROFILE, Reduce.ROUND)


def flexsp(model="gpt-7b", cluster="8x8xA100-40G", profile="flexsp-a100", **options):
    options.setdefault("max_length", 192 * K)
    return CostModel(Cluster.parse(cluster), ModelSpec.load(model), profile, **options)


@pytest.mark.parametrize(
    ("model", "context", "sharding", "capacity"),
    [
        ("gpt-7b", 192, "full", 6449),  # (30720 - 16 * 7.117 * 1024 / 64) / 4.480441895
        ("gpt-7b", 384, "full", 6407),
        ("gpt-7b", 192, "hybrid", 3603),
        ("gpt-13b", 192, "full", 6483),
        ("gpt-30b", 192, "full", 6627),
    ],
)
def test_capacity_by_hand(model, context, sharding, capacity):
    cost = flexsp(model, sharding=sharding, max_length=context * K)
    assert cost.policies == (POLICY,)
    assert cost.capacity(POLICY) == capacity == cost.limits().capacity[0][1]


def test_time_by_hand():
    tables = flexsp().tables([1000, 4096], POLICY)
    assert tables.tokens.tolist() == [1024, 4096]
    assert tables.degree.tolist() == [1, 2, 4, 8, 16, 32, 64]
    assert tables.fixed.tolist() == [[629356300] * 7, [0] * 7, [0] * 7]
    # degree 1: 5.128e-6 * 1024^2 + 0.1839576 * 1024 ms = 5.377098... + 188.3725824 ms, no communication
    assert tables.cost[0, 0, 0] == 5377098 + 188372582
    # degree 64: a 64th of that, plus 16 * 32 * 4096 * 4096 bytes / 2^20 / (64 * 4.87) ms
    assert tables.cost[0, 6, 1] == round(86033564.672 / 64) + round(753490329.6 / 64) + 26283368
    assert not tables.cost[1:].any()
    assert (tables.cost.dtype, tables.fixed.dtype, tables.tokens.dtype) == (np.int64,) * 3


def test_other_bandwidths_only_across_nodes():
    two, four = flexsp(), flexsp(profile="flexsp-a100-4nic")
    a, b = (cost.tables([8192], POLICY).cost[0, :, 0] for cost in (two, four))
    assert (a[:4] == b[:4]).all() and (a[4:] > b[4:]).all()


def test_parameters_follow_the_context():
    at = {context: flexsp(max_length=context).memory.fixed_bytes(POLICY) for context in (4 * K, 100 * K, 192 * K)}
    assert at[4 * K] == pytest.approx(16 * 6.51 * K**3 / 64)
    assert at[100 * K] == pytest.approx(16 * (6.51 + 0.607 * 96 / 188) * K**3 / 64)
    assert flexsp(max_length=None).memory.fixed_bytes(POLICY) == pytest.approx(16 * 7.85 * K**3 / 64)
    assert flexsp(max_length=576 * K).memory.fixed_bytes(POLICY) == pytest.approx(16 * 8.583 * K**3 / 64)


def test_many_and_few_ranks():
    large = flexsp(cluster="128x8xA100-40G")
    assert [shape.degree for shape in large.shapes] == [1, 2, 4, 8, 16, 32, 64]
    small = flexsp(cluster="4xA100-40G")
    assert small.shapes == (GroupShape(1, 1), GroupShape(2, 1), GroupShape(4, 1))
    assert (large.shard_group_size, small.shard_group_size) == (1024, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "llama3-8b"}, "gpt-7b, gpt-13b, gpt-30b"),
        ({"cluster": "8x8xH200"}, "measured on A100"),
        ({"cluster": "8x4xA100-40G"}, "nodes of 8"),
        ({"sharding": "none"}, "sharding full"),
        ({"budget_gib": 1.0}, "use more GPUs"),
        ({"budget_gib": 0}, "above 0"),
        ({"sharding": "ful"}, "did you mean full"),
        ({"profile": "flexsp-a10"}, "did you mean flexsp-a100"),
        ({"max_length": 0}, "1 or more"),
    ],
)
def test_refusals_name_the_way_out(options, message):
    with pytest.raises(SeqloomError, match=message):
        flexsp(**options)


def test_group_off_the_published_table():
    cost = flexsp()
    astride = Group(tuple(range(4, 12)), 8, 1, (Span(0, 0, 8192),))
    aligned = Group(tuple(range(8, 16)), 8, 1, (Span(0, 0, 8192),))
    slow, fast = (cost.group_cost(group, POLICY).ulysses for group in (astride, aligned))
    assert slow == pytest.approx(fast * 96.5 / 10.33)
    with pytest.raises(SeqloomError, match="no constants"):
        cost.group_cost(Group(tuple(range(8)), 4, 2, (Span(0, 0, 8192),)), POLICY)
    with pytest.raises(SeqloomError, match="not possible here"):
        cost.tables([1], MemoryPolicy(Checkpoint.FULL, Reduce.ROUND))
    assert cost.sharding is Sharding.FULL
