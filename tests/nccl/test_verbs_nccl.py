"""Every verb of the transport over NCCL, on every channel, and how many communicators there are."""

import pytest
import torch

from seqloom.dist import Channel, P2PTensor
from support.programs import DTYPES, every_verb, expected_of, run_program


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [4])
def test_every_verb(nccl_pool, device, ranks, dtype):
    program = every_verb(dtype)
    for rank, received in enumerate(nccl_pool.run(run_program, program, device, ranks=ranks)):
        expected = expected_of(program, rank)
        assert len(received) == len(expected)
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(received, expected, strict=True))


def on_all_channels(transport, device):
    """Send a number to the next rank on every channel, all at once."""
    following, previous = ((transport.rank + step) % transport.ranks for step in (1, -1))
    handles, received = [], []
    for channel in Channel:
        given, taken = (torch.full((3,), 10.0 * transport.rank + channel, device=device) for _ in range(2))
        exchange = transport.on(channel).exchange([P2PTensor(following, given)], [P2PTensor(previous, taken)])
        handles.append((exchange, given))
        received.append(taken)
    for exchange, _ in handles:
        exchange.wait()
    return [each[0].item() for each in received]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_channels(nccl_pool, device, ranks):
    for rank, found in enumerate(nccl_pool.run(on_all_channels, device, ranks=ranks)):
        assert found == [10.0 * ((rank - 1) % ranks) + channel for channel in Channel]


def broadcast(transport):
    return transport.broadcast(b"plan" * 1000 if transport.rank == 0 else None)


@pytest.mark.parametrize("ranks", [2, 8])
def test_bytes_go_to_all(nccl_pool, ranks):
    assert nccl_pool.run(broadcast, ranks=ranks) == [b"plan" * 1000] * ranks
