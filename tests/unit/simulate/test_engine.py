"""The engine alone: order on streams, lock step, links, deadlock."""

import pickle

import pytest

from seqloom.errors import SeqloomError
from seqloom.simulate import DeadlockError, Engine


def times(engine):
    start, stop = engine.run()
    return list(zip(start.tolist(), stop.tolist(), strict=True))


def test_nothing_to_do():
    start, stop = Engine().run()
    assert len(start) == len(stop) == 0


def test_a_stream_keeps_its_order_and_streams_run_side_by_side():
    engine = Engine()
    for duration, stream in ((5, "a"), (2, "b"), (3, "a"), (4, "b")):
        engine.add(duration, streams=[stream])
    assert times(engine) == [(0, 5), (0, 2), (5, 8), (2, 6)]


def test_a_task_on_two_streams_waits_for_both_and_holds_both():
    engine = Engine()
    engine.add(5, streams="a")
    engine.add(2, streams="b")
    engine.add(1, streams="ab")
    engine.add(1, streams="b")
    assert times(engine) == [(0, 5), (0, 2), (5, 6), (6, 7)]


def test_a_task_waits_for_what_it_needs():
    engine = Engine()
    message = engine.add(3)
    sender = engine.add(4, streams="a")
    engine.add(1, streams="b", after=[message])
    engine.require(message, [sender])
    assert times(engine) == [(4, 7), (0, 4), (7, 8)]


def test_a_link_serves_first_come_first_served():
    engine = Engine()
    late = engine.add(3, links=("nic",), after=[engine.add(2, streams="a")])
    engine.add(10, links=("nic",), after=[engine.add(1, streams="b")])
    engine.add(1, links=("other",))
    begun = engine.run()[0].tolist()
    assert begun[late] == 11
    assert begun == [0, 11, 0, 1, 0]


def test_links_that_are_free_are_taken_together():
    engine = Engine()
    engine.add(2, links=("x",))
    engine.add(2, links=("x", "y"))
    engine.add(1, links=("y",))
    assert times(engine) == [(0, 2), (2, 4), (0, 1)]


def test_tasks_without_duration():
    engine = Engine()
    for _ in range(3):
        engine.add(0, streams="a", links=("x",))
    assert times(engine) == [(0, 0)] * 3


def test_the_same_tasks_give_the_same_times():
    def build():
        engine = Engine()
        for k in range(200):
            engine.add(k * 7 % 11, streams=[k % 5, k * 3 % 7], links=(k % 2,) if k % 3 == 0 else ())
        return times(engine)

    assert build() == build()


def test_deadlock_names_the_circle_and_nothing_else():
    engine = Engine()
    engine.add(1, streams="a")
    first = engine.add(1, streams="a")
    second = engine.add(1, streams="b", after=[first])
    engine.add(1, streams="b")
    engine.require(first, [second])
    with pytest.raises(DeadlockError) as caught:
        engine.run({0: "zero", 1: "first", 2: "second", 3: "behind"}.__getitem__)
    assert caught.value.cycle == ("first", "second")
    assert "first waits for second waits for first" in str(caught.value)
    assert isinstance(caught.value, SeqloomError)
    assert pickle.loads(pickle.dumps(caught.value)).cycle == caught.value.cycle
