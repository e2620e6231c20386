import math

import pytest

from seqloom.errors import SeqloomError
from seqloom.train.config import Schedule
from seqloom.train.optim import learning_rate


def rates(steps, peak=2.0, **settings):
    return [learning_rate(step, steps=steps, peak=peak, schedule=Schedule(**settings)) for step in range(1, steps + 1)]


def test_warm_up_rises_evenly_and_ends_at_the_peak():
    assert rates(8, warmup=4, kind="constant") == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert rates(3, kind="constant") == [2.0, 2.0, 2.0]


def test_linear():
    assert rates(6, warmup=2, kind="linear", final=0.5) == [1.0, 2.0, 1.75, 1.5, 1.25, 1.0]
    assert rates(5, kind="linear", final=0.0) == [2.0, 1.5, 1.0, 0.5, 0.0]


def test_cosine():
    half = math.sqrt(0.5)
    expected = [1 + 1, 1 + half, 1, 1 - half, 0]
    assert rates(5, final=0.0) == pytest.approx(expected, abs=1e-15)
    assert rates(7, warmup=3, final=0.1)[2::2] == pytest.approx([2.0, 2 * 0.55, 0.2])


def test_the_last_step_has_the_final_share_and_later_ones_keep_it():
    schedule = Schedule(kind="cosine", warmup=2, final=0.25)
    assert learning_rate(10, steps=10, peak=1.0, schedule=schedule) == pytest.approx(0.25)
    assert learning_rate(99, steps=10, peak=1.0, schedule=schedule) == pytest.approx(0.25)


def test_runs_of_one_step_and_of_warm_up_only():
    assert rates(1) == [2.0]
    assert rates(2, warmup=2) == [1.0, 2.0]


def test_steps_begin_at_one():
    with pytest.raises(SeqloomError, match="step 0 of 5; steps are counted from 1"):
        learning_rate(0, steps=5, peak=1.0, schedule=Schedule())
