"""Tokens of a rank in a round: what memory holds, or less if told so."""

import numpy as np
import pytest

from seqloom.api import cost_model
from seqloom.errors import SeqloomError
from seqloom.planners import make_plan

LENGTHS = np.array([100, 200, 1_500, 40, 300, 310, 90, 1_000])


def test_a_smaller_capacity_binds_every_plan():
    free = cost_model("1x4xH200", "llama3-8b")
    tight = cost_model("1x4xH200", "llama3-8b", capacity=600)
    assert {tight.capacity(policy) for policy in tight.policies} == {600}
    for name in ("static", "adaptive", "flex"):
        plan = make_plan(name, LENGTHS, tight)
        fullest = max(group.tokens_per_rank() for group in plan.pipelines[0].rounds[0].groups)
        assert fullest <= 600
        assert len(plan.pipelines[0].rounds) > len(make_plan(name, LENGTHS, free).pipelines[0].rounds)


def test_memory_is_the_limit_anyway():
    free = cost_model("1x4xH200", "llama3-8b")
    loose = cost_model("1x4xH200", "llama3-8b", capacity=10**12)
    assert [loose.capacity(v) for v in loose.policies] == [free.capacity(v) for v in free.policies]


def test_a_capacity_below_a_token_is_refused():
    with pytest.raises(SeqloomError, match="a capacity of 0 tokens; give 1 or more"):
        cost_model("1x4xH200", "llama3-8b", capacity=0)
