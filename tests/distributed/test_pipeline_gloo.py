"""Stages as real processes: messages on lanes, and the numbers of one process."""

import torch

from seqloom.comm import Lane, Way
from seqloom.plan import Checkpoint, Group, Limits, Pipeline, Plan, Reduce, Round, Sharding, Span, Work
from seqloom.plan.schedules import schedule_of
from seqloom.runtime.fsdp import Sharded
from seqloom.testing.pipelines import stages_on
from seqloom.testing.steps import Step, tiny_spec

STEP = Step((13, 10, 6), tiny_spec(layers=4, tied=True))


def early(transport):
    """Every rank receives from all others on both lanes before anybody sends; what it got, by peer and lane."""
    me, others = transport.rank, [peer for peer in range(transport.ranks) if peer != transport.rank]
    ways = [Way(lane, *pair) for lane in Lane for peer in others for pair in ((me, peer), (peer, me))]
    transport.connect(ways)
    rooms = {(peer, lane, k): torch.empty(k + 1) for peer in others for lane in Lane for k in range(2)}
    waiting = [transport.receive(room, peer, lane) for (peer, lane, _), room in rooms.items()]
    total = torch.ones(1)
    transport.all_reduce(total, tuple(range(transport.ranks)))  # is not held up
    kinds = [(lane, k) for lane in reversed(Lane) for k in range(2)]
    sent = [torch.full((k + 1,), 100.0 * me + 10 * list(Lane).index(lane) + k) for lane, k in kinds]
    handles = [
        transport.send(each, peer, lane)
        for peer in reversed(others)
        for each, (lane, _) in zip(sent, kinds, strict=True)
    ]
    for handle in (*waiting, *handles):
        handle.wait()
        assert handle.done()
    return {(peer, list(Lane).index(lane), k): room.unique().tolist() for (peer, lane, k), room in rooms.items()}


def test_messages_arrive_in_order_and_ways_do_not_wait_for_each_other(gloo_pool):
    for me, found in enumerate(gloo_pool.run(early, ranks=3)):
        assert len(found) == 8
        for (peer, lane, k), values in found.items():
            assert peer != me and values == [100.0 * peer + 10 * lane + k]


def planned(name, hosts, width, pieces, sharding):
    """A document is a sequence of the schedule; rounds keep something else in turn."""
    schedule = schedule_of(name, hosts, len(STEP.lengths), pieces)
    stages, rounds = stages_on(schedule.hosts, width, STEP.spec.layers), []
    ulysses = min(width, STEP.spec.heads)
    for number, (document, piece, count) in enumerate(schedule.units):
        low, high = (STEP.lengths[document] * (piece + k) // count for k in (0, 1))
        spans, kind = (Span(document, low, high),), list(Checkpoint)[number % 4]
        rounds.append(Round(tuple(Work((Group(s.ranks, ulysses, width // ulysses, spans),), kind) for s in stages)))
    limits = Limits(hosts * width, hosts * width, STEP.spec.heads, tuple((kind, 10**6) for kind in Checkpoint))
    line = Pipeline(stages, tuple(rounds), schedule.rows_of_plan())
    plan = Plan(limits, sharding, Reduce.STEP, STEP.lengths, (line,), name)
    plan.validate()
    return plan


def run(transport, plan, sharded):
    def make(network, own):
        return Sharded(network, own, plan.sharding)

    return STEP.spread(plan, transport, make) if sharded else STEP.spread(plan, transport)


def test_stages_of_two_ranks_with_documents_in_pieces_and_a_split_backward(gloo_pool):
    plan = planned("seq1f1b-zb", 4, 2, 2, Sharding.FULL)
    assert max(each.worst(STEP.alone()) for each in gloo_pool.run(run, plan, False, ranks=8)) < 1e-9


def test_one_stage_of_sharded_layers_does_both_halves_of_a_backward_at_once(gloo_pool):
    plan = planned("seq1f1b-zb", 1, 8, 2, Sharding.FULL)
    assert max(each.worst(STEP.alone()) for each in gloo_pool.run(run, plan, True, ranks=8)) < 1e-9
