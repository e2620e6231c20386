"""Routed transfers where waiting is done by streams, as with NCCL: stages run on a stream of their own, in order."""

from collections import defaultdict, deque

import numpy as np
import pytest
import torch

from seqloom.dist.routed import RoutedHandle, RoutedTransfer
from seqloom.layout import Move, Route

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
NODE, UNIT = 4, 64
LATE = 50_000_000
"""Cycles that a stream sleeps before it writes: who does not wait for it reads what was there before."""


class Mailboxes:
    """Messages between ranks that are run one after the other, each on streams of its own."""

    def __init__(self):
        self.boxes = defaultdict(deque)

    def of(self, rank):
        return InStream(rank, self.boxes)


class InStream:
    """A transport like NCCL's: an exchange runs on its own stream, behind the caller's; so does waiting."""

    waits_in_stream = True

    def __init__(self, rank, boxes):
        self.rank, self.boxes, self.stream = rank, boxes, torch.cuda.Stream()

    def exchange(self, sends, receives):
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for peer, tensor in sends:
                torch.cuda._sleep(LATE)
                copy, done = tensor.clone(), torch.cuda.Event()
                done.record()
                self.boxes[self.rank, peer].append((copy, done))
            for peer, tensor in receives:
                copy, done = self.boxes[peer, self.rank].popleft()
                done.wait()
                torch.cuda._sleep(LATE)
                tensor.copy_(copy)
        return self

    def wait(self):
        torch.cuda.current_stream().wait_stream(self.stream)


@pytest.mark.parametrize("slices", [1, 3])
def test_stages_follow_each_other_on_the_stream(slices):
    """Ranks 0 and 2 of one node send to ranks 4 and 7 of the other through proxies 0, 1, 4 and 5."""
    boxes = [(0, 4, 0, 0, 800), (2, 7, 1, 0, 801), (2, 4, 1, 100, 300)]
    move, route = Move(*np.array(boxes, dtype=np.int64).T), Route((0, 1, 4, 5), slices)
    device, mail, handles, found = torch.device("cuda"), Mailboxes(), [], {}
    truth = {item: torch.randint(256, (801, UNIT), dtype=torch.uint8) for item in (0, 1)}
    for rank in (2, 0, 1, 5, 4, 7):  # every rank after those it receives from
        sent = {}
        for item in {box[2] for box in boxes if box[0] == rank}:
            sent[item] = torch.zeros(801, UNIT, dtype=torch.uint8, device=device)
            torch.cuda._sleep(LATE)
            sent[item].copy_(truth[item].to(device))
        runs = [box for box in boxes if box[1] == rank]
        rooms = {
            item: torch.zeros(stop - start, UNIT, dtype=torch.uint8, device=device) for *_, item, start, stop in runs
        }
        passage = RoutedTransfer.of(move, route, NODE, rank)
        handles.append(RoutedHandle(passage, mail.of(rank), sent, rooms, unit=UNIT, device=device))
        for *_, item, start, stop in runs:
            found[rank, item] = (rooms[item], truth[item][start:stop])
    for handle in handles:
        handle.wait()
    for room, wanted in found.values():
        assert torch.equal(room.clone().cpu(), wanted)
