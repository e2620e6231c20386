import os
import time

import pytest
import torch

from seqloom.errors import SeqloomError
from support.workers import WorkerError, Workers

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def pool():
    """A pool of its own: these tests end its processes."""
    with Workers(3) as pool:
        yield pool


def add(transport, left, right):
    return transport.rank, transport.ranks, left + right


def identity(transport):
    return os.getpid(), torch.get_num_threads()


def fail_on_one(transport):
    if transport.rank == 1:
        raise KeyError("a reason")
    transport.all_reduce(torch.ones(1), range(transport.ranks))


def leave_one_out(transport):
    if transport.rank:
        transport.all_reduce(torch.ones(1), range(transport.ranks))


def end_the_process(transport):
    if transport.rank == 2:
        os._exit(7)


def return_what_cannot_travel(transport):
    return lambda: None


def test_results_come_in_rank_order(pool):
    assert pool.run(add, 1, 2) == [(0, 3, 3), (1, 3, 3), (2, 3, 3)]
    assert pool.run(add, "a", "b", ranks=2) == [(0, 2, "ab"), (1, 2, "ab")]
    assert pool.run(add, [1], [2], ranks=1) == [(0, 1, [1, 2])]


def test_processes_stay_and_use_one_thread(pool):
    first, second = pool.run(identity), pool.run(identity)
    assert first == second
    assert [threads for _, threads in first] == [1, 1, 1]
    assert len({process for process, _ in first}) == 3


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (fail_on_one, r"(?s)rank 1 of 3: Traceback.*fail_on_one.*KeyError: 'a reason'"),
        (end_the_process, "rank 2 of 3: the process ended with exit code 7"),
        (return_what_cannot_travel, "rank 0 of 3: Traceback"),
    ],
)
def test_an_error_comes_back_and_the_pool_goes_on(pool, body, message):
    with pytest.raises(WorkerError, match=message):
        pool.run(body)
    assert pool.run(add, 1, 2)[2] == (2, 3, 3)


def test_a_hang_ends_in_time_and_says_where(pool):
    pool.run(add, 0, 0)
    before = time.monotonic()
    with pytest.raises(WorkerError, match=r"not done after 0\.5 s") as caught:
        pool.run(leave_one_out, timeout_s=0.5)
    assert time.monotonic() - before < 5
    assert "rank 1 of 3 is at" in str(caught.value)
    assert "leave_one_out" in str(caught.value)
    assert "rank 0 of 3" not in str(caught.value)
    assert pool.run(add, 1, 2)[0] == (0, 3, 3)


def take_a_seat(rank):
    os.environ["SEAT"] = f"placement {rank}"
    if rank == 2:
        raise OSError("no such placement")


def placement(transport):
    return os.environ["SEAT"]


def test_every_process_takes_its_seat_first_and_an_error_there_is_heard():
    with Workers(2, enter=take_a_seat) as pool:
        assert pool.run(placement) == pool.run(placement) == ["placement 0", "placement 1"]
    with (
        Workers(3, enter=take_a_seat) as pool,
        pytest.raises(WorkerError, match=r"(?s)rank 2 of 3: .*no such placement"),
    ):
        pool.run(placement)


def test_bad_requests_are_refused(pool):
    with pytest.raises(SeqloomError, match=r"4 ranks in a pool of 3; ask for 1 \.\. 3"):
        pool.run(add, 1, 2, ranks=4)
    with pytest.raises(SeqloomError, match="not at the top of a module"):
        pool.run(lambda transport: None)
