"""Relays in two hops on a stream of their own: ranks as threads on one device, whose exchanges wait for all streams."""

import pytest
import torch

from seqloom.dist import Ranks, Resharder
from seqloom.plan import Pipeline, Stage, Weight, compute_layout, optimiser_layout
from support.resharding import ReshardCase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
WEIGHTS = (
    Weight("table", 999, 64, ("embedding", "head")),
    *(Weight(f"{layer}.{cut}", 512, 512, (layer,), cut) for layer in range(4) for cut in (0, 1, None)),
    Weight("norm", 512, 1, ("head",)),
)
LINES = [[Stage((0, 1, 2, 3), (0, 4), 2)], [Stage((4,), (0, 4))], [Stage((5,), (0, 3)), Stage((6,), (3, 4))]]
CASE = ReshardCase(8, WEIGHTS, tuple(Pipeline(tuple(line), (), ()) for line in LINES))


class InStream:
    """A transport like NCCL's in what it says: the caller's stream waits. Here all streams do."""

    waits_in_stream = True

    def __init__(self, transport):
        self._transport = transport

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def exchange(self, sends, receives):
        torch.cuda.synchronize()
        return _Waiting(self._transport.exchange(sends, receives))


class _Waiting:
    def __init__(self, handle):
        self._handle = handle

    def wait(self):
        self._handle.wait()
        torch.cuda.synchronize()


def on_gpu(held):
    return {weight: each.cuda() for weight, each in held.items()}


def body(transport):
    """Values there and gradients back, three times; what was given is dropped, and its memory used again, at once."""
    layouts = optimiser_layout(WEIGHTS, CASE.ranks), compute_layout(WEIGHTS, CASE.pipelines)
    resharder = Resharder(WEIGHTS, *layouts, InStream(transport), device="cuda", node_size=4)
    buckets, found = range(len(resharder.buckets)), []
    for turn in range(3):
        masters = on_gpu(CASE.kept(CASE.wholes(turn), transport.rank))
        copies = {}
        for flight in [resharder.start_copy(bucket, masters, torch.float32) for bucket in buckets]:
            copies |= flight.wait()
        started = []
        for bucket in reversed(buckets):
            given = {weight: each * 2 for weight, each in copies.items() if weight in resharder.buckets[bucket]}
            started.append(resharder.start_reduce(bucket, given, torch.float32))
            sizes = [each.numel() for each in given.values()]
            del given
            for size in sizes:
                torch.full((size,), torch.nan, device="cuda")
        sums = {}
        for flight in started:
            sums |= flight.wait()
        found.append([{weight: each.cpu() for weight, each in held.items()} for held in (copies, sums)])
    return found


def test_values_and_sums_are_there_when_the_stream_has_waited():
    copied = [torch.zeros(weight.rows, weight.columns) for weight in WEIGHTS]
    for rank in range(CASE.ranks):
        for weight, numbers in CASE.used(CASE.numbers(), rank).items():
            copied[weight].view(-1)[numbers.flatten()] += 1
    with Ranks(CASE.ranks) as ranks:
        results = ranks.run(body)
    for rank, turns in enumerate(results):
        for turn, (copies, sums) in enumerate(turns):
            wholes = CASE.wholes(turn)
            totals = [2 * whole * times for whole, times in zip(wholes, copied, strict=True)]
            for found, wanted in ((copies, CASE.used(wholes, rank)), (sums, CASE.kept(totals, rank))):
                assert found.keys() == wanted.keys()
                for weight in wanted:
                    torch.testing.assert_close(found[weight], wanted[weight], rtol=1e-6, atol=1e-6)
