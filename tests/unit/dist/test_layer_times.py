"""Phases inside layers: what counts to which of them, and that a transport that is measured does what it did."""

import time

import pytest
import torch

from seqloom.dist import P2PTensor, SingleRankTransport, run_ranks
from seqloom.dist.layer_times import LayerSeconds, LayerTimes, TimedTransport
from seqloom.engine.executor import run_step
from seqloom.engine.rank_actions import bind_plan
from seqloom.layout import Span
from seqloom.params.interface import ReplicatedParameters
from seqloom.plan import Group
from support.steps import Step, one_stage_plan, tiny_spec

CPU = torch.device("cpu")
torch.set_num_threads(1)


class Slow:
    """An exchange whose end takes a while."""

    def wait(self):
        time.sleep(0.03)

    def done(self):
        return True


class SlowTransport(SingleRankTransport):
    """A transport whose messages take a while."""

    def all_reduce(self, tensor, block):
        time.sleep(0.02)

    def exchange(self, sends, receives):
        return Slow()


def test_messages_in_attention_are_no_attention():
    times = LayerTimes(CPU)
    transport = TimedTransport(SlowTransport(), times)
    times.start()
    with times.attention():
        transport.all_reduce(torch.zeros(1), (0,))
        time.sleep(0.01)
    with times.attention():
        exchange = transport.exchange([], [])
        time.sleep(0.04)  # hidden behind it
        assert exchange.done()
        exchange.wait()
    transport.all_reduce(torch.zeros(1), (0,))
    with times.loss(7):
        time.sleep(0.01)
    times.stop()
    found = times.seconds()
    assert found.attention == pytest.approx(0.05, abs=0.02) and found.exchange == pytest.approx(0.07, abs=0.02)
    assert found.loss >= 0.01 and found.loss_tokens == 7 and found.complete


def test_nothing_is_measured_outside_of_a_step_and_losses_alone_where_that_is_asked_for():
    times = LayerTimes(CPU, complete=False)
    transport = TimedTransport(SlowTransport(), times)
    with times.attention(), times.loss(3):
        transport.all_reduce(torch.zeros(1), (0,))
    times.start()
    with times.attention():
        transport.all_reduce(torch.zeros(1), (0,))
    times.stop()
    assert times.seconds() == LayerSeconds()


def test_a_transport_that_is_measured_sends_what_it_sent():
    def body(transport):
        times = LayerTimes(CPU)
        timed = TimedTransport(transport, times)
        assert (timed.rank, timed.ranks, timed.waits_in_stream) == (transport.rank, 2, transport.waits_in_stream)
        times.start()
        other, here = 1 - timed.rank, torch.full((2,), float(timed.rank))
        arrived, gathered, swapped = torch.empty(2), torch.empty(4), torch.empty(2)
        timed.exchange([P2PTensor(other, here)], [P2PTensor(other, arrived)]).wait()
        timed.all_gather(gathered, here, (0, 1))
        timed.all_to_all(swapped, here.clone(), [1, 1], [1, 1], (0, 1))
        timed.all_reduce(here, (0, 1))
        told = timed.broadcast(b"plan" if timed.rank == 0 else None)
        times.stop()
        assert times.seconds().exchange > 0
        return arrived.tolist(), gathered.tolist(), swapped.tolist(), here.tolist(), told

    for rank, found in enumerate(run_ranks(2, body)):
        assert found == ([1.0 - rank] * 2, [0.0, 0.0, 1.0, 1.0], [0.0, 1.0], [1.0, 1.0], b"plan")


def test_a_step_has_its_phases():
    step = Step((64, 9, 33), tiny_spec())
    groups = [
        Group((0, 1), 2, 1, (Span(0, 0, 64),)),
        Group((0,), 1, 1, (Span(1, 0, 9),)),
        Group((1,), 1, 1, (Span(2, 0, 33),)),
    ]
    plan = one_stage_plan([groups], ranks=2)

    def body(transport):
        parameters = ReplicatedParameters(step.model_adapter(), transport)
        result = run_step(bind_plan(plan, transport), parameters, step.rows(), step.valid)
        return result, result.layers

    for rank, (result, layers) in enumerate(run_ranks(2, body)):
        inside = result.forward_s + result.backward_s
        assert layers.attention > 0 and layers.exchange > 0 and layers.complete
        assert layers.attention + layers.exchange + layers.loss < inside
        assert layers.loss_tokens == result.tokens == (41, 65)[rank]
