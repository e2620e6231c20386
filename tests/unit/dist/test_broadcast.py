"""Bytes from one rank to all."""

import pytest

from seqloom.dist import run_ranks
from seqloom.dist.transport import broadcast_bytes
from seqloom.errors import SeqloomError
from support.transports import CountingTransport


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(256)) * 9], ids=len)
def test_everybody_gets_the_bytes_of_the_root(world, payload):
    for root in {0, world - 1}:

        def body(transport, root=root):
            return broadcast_bytes(transport, payload if transport.rank == root else None, root=root)

        assert run_ranks(world, body, strict=True) == [payload] * world


def test_no_rank_is_asked_more_than_once_per_hop():
    def body(transport):
        counting = CountingTransport(transport)
        broadcast_bytes(counting, b"plan" if transport.rank == 0 else None)
        return counting.traffic("exchange").calls

    assert max(run_ranks(8, body)) == 2 * 3, "size and content, three hops each"


def test_only_the_root_gives_bytes():
    with pytest.raises(SeqloomError, match="rank 0 gave nothing to a broadcast from rank 0"):
        run_ranks(1, lambda transport: broadcast_bytes(transport, None))
    with pytest.raises(SeqloomError, match="gave 1 bytes to a broadcast from rank 1"):
        run_ranks(2, lambda transport: broadcast_bytes(transport, b"x", root=1))
