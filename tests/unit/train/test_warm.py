"""Warming up: what is asked of attention for the degrees of plans."""

import torch

import seqloom as sl
from seqloom.models import ModelAdapter
from seqloom.train import trainer as warm


def test_every_degree_of_the_plans_and_every_call_of_the_model_is_built(monkeypatch):
    plan = sl.plan([20_000, 300, 300], cluster="1x8xH200", model="llama3-8b", planner="static")
    asked, told = [], []

    def build(heads, kv_heads, dim, dtype, device, *, longest, tokens, scale, ulysses, report):
        asked.append((heads, kv_heads, dim, longest, tokens, ulysses))
        for done in range(1, 9):
            report(done, 8)
        return 8

    monkeypatch.setattr(warm, "warm_up_attention", build)
    module = torch.nn.Linear(1, 1)
    calls = (warm_call(32, 8, None), warm_call(32, 8, 4_096))
    adapter = ModelAdapter(module, (), lambda ids, context: ids, module, calls)
    capacity = max(tokens for _, tokens in plan.limits.capacity)
    assert warm.warm_up(adapter, [plan, plan], 20_000, torch.bfloat16, torch.device("cpu"), told.append) == 16
    assert asked == [(32, 8, 128, 20_000, 8 * capacity, (8,)), (32, 8, 128, 4_096, 8 * capacity, (8,))]
    assert told[0] == "attention over 8 ranks: 2 of 8 shapes built" and len(told) == 8


def warm_call(heads, kv_heads, window):
    from seqloom.attention import AttentionSpec

    return AttentionSpec(heads, kv_heads, 128, window)


def test_a_cpu_has_nothing_to_build():
    from seqloom.attention import warm_up_attention

    assert warm_up_attention(8, 2, 64, torch.float32, "cpu", longest=1_000) == 0
