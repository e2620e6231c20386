"""Training steps over two nodes: a long document is spread over all ranks, and routing makes the step faster."""

import time

import numpy as np
import pytest
import torch

from seqloom.engine.executor import run_step
from seqloom.engine.rank_actions import bind_plan
from seqloom.layout import Route, Span
from seqloom.models.adapter import ModelAdapter
from seqloom.params.interface import ReplicatedParameters
from seqloom.plan import Group, Method
from support.hosts import fastest
from support.steps import Found, Step, one_stage_plan, tiny_spec

pytestmark = pytest.mark.cluster

NODE = 4
LONG = 768
SPEC = tiny_spec(hidden=4, heads=8, kv_heads=8, head_dim=32, ffn=8)  # few parameters, many keys and values
STEP = Step((LONG, *range(60, 68)), SPEC)
ROUTE = Route(tuple(range(8)), slices=2)


def planned(ulysses, ring, method, route):
    """The long document over all ranks, a short one on each."""
    wide = Group(tuple(range(8)), ulysses, ring, (Span(0, 0, LONG),), method, route)
    local = [Group((rank,), 1, 1, (Span(1 + rank, 0, STEP.lengths[1 + rank]),)) for rank in range(8)]
    return one_stage_plan([[wide, *local]], ranks=8, heads=8, node_size=NODE)


def stepped(transport, step, plan):
    """Run a step. Returns its seconds and what it found."""
    parameters = ReplicatedParameters(ModelAdapter.of(step.model()), transport)
    bound, rows, valid = bind_plan(plan, transport), step.rows(), step.valid
    transport.all_reduce(torch.ones(1), tuple(range(transport.ranks)))
    start = time.perf_counter()
    result = run_step(bound, parameters, rows, valid)
    seconds = time.perf_counter() - start
    return seconds, Found(result.loss, result.gradient_norm, dict(parameters.full_gradients()))


def measured(hosts, pool, plan):
    """Seconds of the slowest rank, what all ranks found, and the bytes of every nic of every node."""
    before = np.array(hosts.bytes_sent())
    seconds, found = zip(*pool.run(stepped, STEP, plan), strict=True)
    return max(seconds), found, np.array(hosts.bytes_sent()) - before


@pytest.fixture(scope="module")
def alone():
    """What one process finds."""
    return STEP.alone()


def agree(alone, plain, through):
    """What routed ranks found is right, and bit for bit what they find without routes."""
    assert max(each.worst(alone) for each in through) < 1e-12
    for one, other in zip(plain, through, strict=True):
        assert one.loss == other.loss and one.norm == other.norm
        assert all(torch.equal(each, other.gradients[name]) for name, each in one.gradients.items())


def level(sent):
    """Whether the nics of a node carry the same within 10 %; gradients, which are not routed, are in it."""
    return bool((abs(sent / sent.mean(axis=1, keepdims=True) - 1) < 0.1).all())


@pytest.mark.parametrize(
    ("ulysses", "ring", "idle", "faster"),
    [
        (1, 8, 3, 1.5),  # rank 3 sends to 4, rank 7 to 0: three nics of four have nothing to do
        (2, 4, 2, 1.05),  # two rings
    ],
)
def test_a_step_is_faster_with_routes_and_finds_the_same(hosts, pool, figures, alone, ulysses, ring, idle, faster):
    """Without routes a step takes at least as long as its busiest nic, whatever its computing hides."""
    plans = [planned(ulysses, ring, Method.RING, route) for route in (None, ROUTE)]
    (_, plain, before), (_, through, after) = (measured(hosts, pool, plan) for plan in plans)
    agree(alone, plain, through)
    assert level(after) and ((before < 0.1 * before.max()).sum(axis=1) == idle).all()
    assert before.max() / after.max() > 0.85 * 4 / (4 - idle)
    direct = hosts.seconds(before.max())
    ratio = direct / fastest(lambda: measured(hosts, pool, plans[1])[0], direct / faster)
    figures[f"a step with {LONG} tokens over ulysses {ulysses} x ring {ring}"] = ratio
    assert ratio > faster


def test_gathered_keys_and_values_cross_once_for_a_whole_node(hosts, pool, alone):
    """Direct, all nics have work, but carry what four ranks want four times."""
    plans = [planned(1, 8, Method.GATHER, route) for route in (None, ROUTE)]
    (_, plain, before), (_, through, after) = (measured(hosts, pool, plan) for plan in plans)
    agree(alone, plain, through)
    assert level(before) and level(after) and after.sum() < 0.6 * before.sum(), (before, after)
