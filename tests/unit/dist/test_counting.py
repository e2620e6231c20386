import torch

from seqloom.dist import P2PTensor, run_ranks
from support.transports import CountingTransport, Traffic


def test_calls_and_bytes_are_exact():
    def body(transport):
        counting = CountingTransport(transport)
        rank = counting.rank
        assert counting.ranks == 4
        sizes = [1 + rank + other for other in range(4)]  # the same both ways
        counting.all_to_all(torch.zeros(sum(sizes)), torch.zeros(sum(sizes)), sizes, sizes, range(4))
        sends = [P2PTensor(rank, torch.zeros(5)), P2PTensor((rank + 1) % 4, torch.zeros(3, dtype=torch.bfloat16))]
        receives = [P2PTensor(rank, torch.zeros(5)), P2PTensor((rank - 1) % 4, torch.zeros(3, dtype=torch.bfloat16))]
        counting.exchange(sends, receives).wait()
        counting.exchange(sends[1:], receives[1:]).wait()
        counting.exchange([], []).wait()
        half = (0, 1) if rank < 2 else (2, 3)
        counting.all_gather(torch.zeros(14, dtype=torch.float64), torch.zeros(7, dtype=torch.float64), half)
        counting.all_reduce(torch.zeros(5), range(4))
        counting.all_reduce(torch.zeros(5), (rank,))
        return counting

    for rank, counting in enumerate(run_ranks(4, body)):
        others = sum(1 + rank + other for other in range(4) if other != rank)
        assert counting.traffic("all_to_all") == Traffic(calls=1, bytes=4 * others)
        assert counting.traffic("exchange") == Traffic(calls=3, bytes=2 * 3 * 2)
        assert counting.traffic("all_gather") == Traffic(calls=1, bytes=7 * 8)
        assert counting.traffic("all_reduce") == Traffic(calls=2, bytes=2 * 3 * 20 // 4)
        counting.reset()
        assert counting.traffic("exchange") == Traffic()


def test_a_call_that_fails_is_not_counted():
    def body(transport):
        counting = CountingTransport(transport)
        try:
            counting.all_gather(torch.zeros(3), torch.zeros(2), (0,))
        except ValueError:
            return counting.traffic("all_gather")

    assert run_ranks(1, body) == [Traffic()]
