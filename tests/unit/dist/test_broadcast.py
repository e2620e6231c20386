"""Bytes from one rank to all."""

import pytest

from seqloom.dist import run_ranks
from seqloom.errors import SeqloomError


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(256)) * 9], ids=len)
def test_everybody_gets_the_bytes_of_the_root(world, payload):
    for root in {0, world - 1}:

        def body(transport, root=root):
            return transport.broadcast(payload if transport.rank == root else None, root=root)

        assert run_ranks(world, body, strict=True) == [payload] * world


def test_only_the_root_gives_bytes():
    with pytest.raises(SeqloomError, match="rank 0 gave nothing to a broadcast from rank 0"):
        run_ranks(1, lambda transport: transport.broadcast(None))
    with pytest.raises(SeqloomError, match="gave 1 bytes to a broadcast from rank 1"):
        run_ranks(2, lambda transport: transport.broadcast(b"x", root=1))
