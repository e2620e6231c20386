"""Plans broadcast to all ranks, and kernels built before the first step."""

import pytest
import torch

import seqloom as sl
from seqloom.api import cost_model
from seqloom.describe import Cluster
from seqloom.dist import run_ranks
from seqloom.errors import SeqloomError
from seqloom.models import ModelAdapter
from seqloom.plan import Plan, json
from seqloom.planners import make_plan
from seqloom.planners.plan_ahead import StepPlan
from seqloom.train import trainer
from seqloom.train.trainer import PlanBroadcast

COST = cost_model("1x4xH200", "llama3-8b")
LENGTHS = [512, 700, 3_300, 40]


class Fixed:
    """Stands for the planner's process."""

    def __init__(self, error: str = "", step: int | None = None) -> None:
        self.error, self.step, self.submitted = error, step, []

    def submit(self, step, lengths):
        self.submitted.append(step)

    def take(self, step, lengths):
        if self.error:
            raise SeqloomError(self.error)
        plan, number = make_plan("flex", lengths, COST), step if self.step is None else self.step
        return StepPlan(number, plan.to_json(), plan.hash, 9, plan_ns=5, wait_ns=7, fallback_reason="it was late")


def take(ahead, lengths_of=lambda rank: LENGTHS):
    def body(transport):
        plans = PlanBroadcast(transport, ahead if transport.rank == 0 else None)
        plans.submit(4, LENGTHS)
        return plans.take(3, lengths_of(transport.rank))

    return run_ranks(4, body, strict=True)


def test_all_ranks_hold_the_root_s_plan_and_its_story():
    ahead = Fixed()
    taken = take(ahead)
    assert {one.plan.hash for one in taken} == {make_plan("flex", LENGTHS, COST).hash}
    assert {(one.step, one.plan_ns, one.wait_ns, one.predicted_ns, one.fallback_reason) for one in taken} == {
        (3, 5, 7, 9, "it was late")
    }
    assert ahead.submitted == [4], "only the root asks"


def test_no_plan_is_an_error_on_every_rank():
    refused = []

    def body(transport):
        plans = PlanBroadcast(transport, Fixed("too long") if transport.rank == 0 else None)
        try:
            plans.take(3, LENGTHS)
        except SeqloomError as error:
            refused.append(str(error))

    run_ranks(4, body, strict=True)
    assert refused == ["step 3 cannot be planned: too long"] * 4


def test_another_batch_on_a_rank_is_noticed():
    with pytest.raises(SeqloomError, match="the batch of rank 2 has other lengths than the plan"):
        take(Fixed(), lambda rank: LENGTHS[::-1] if rank == 2 else LENGTHS)


def test_another_step_is_noticed():
    with pytest.raises(SeqloomError, match="rank 0 is at step 3, the plan is for step 9"):
        take(Fixed(step=9))


def test_another_plan_on_a_rank_is_noticed(monkeypatch):
    """A rank whose version reads the plan differently."""
    real = Plan.from_json.__func__
    other = make_plan("static", LENGTHS, COST)
    calls = []

    def from_json(cls, text):
        calls.append(text)
        return other if len(calls) == 3 else real(cls, text)

    monkeypatch.setattr(Plan, "from_json", classmethod(from_json))
    with pytest.raises(SeqloomError, match="holds another plan than rank 0"):
        take(Fixed())


def test_ranks_parse_a_plan_once_and_hash_only_the_first(monkeypatch):
    plan = make_plan("flex", LENGTHS, COST)
    text, digest = plan.to_json(), plan.hash
    ahead, read, hashed = Fixed(), [], []
    ahead.take = lambda step, lengths: StepPlan(step, text, digest, 9)
    from_json, content_hash = Plan.from_json.__func__, json.content_hash
    monkeypatch.setattr(Plan, "from_json", classmethod(lambda cls, text: read.append(text) or from_json(cls, text)))
    monkeypatch.setattr(json, "content_hash", lambda each: hashed.append(each) or content_hash(each))

    def body(transport):
        plans = PlanBroadcast(transport, ahead if transport.rank == 0 else None)
        return [plans.take(step, LENGTHS) for step in (1, 2, 3)]

    taken = run_ranks(4, body, strict=True)
    assert (len(read), len(hashed)) == (3 * 4, 4)
    assert all(each.plan == plan and each.plan_hash == plan.hash for rank in taken for each in rank)


def test_plans_of_the_root_are_broadcast():
    plans = [make_plan(name, LENGTHS, COST) for name in ("flex", "static")]
    found = run_ranks(4, lambda t: PlanBroadcast(t, None).broadcast(plans if t.rank == 0 else None), strict=True)
    assert found == [plans] * 4


@pytest.mark.parametrize(
    ("cluster", "gpu", "tflops"),
    [
        ("1x8xH200", "NVIDIA H200", 989),
        ("1x8xA100-80G", "NVIDIA A100-SXM4-80GB", 312),
        ("1x8xH200", "NVIDIA A100-SXM4-80GB", None),
        ("1x8xCPU", "NVIDIA H200", None),
    ],
)
def test_the_peak_is_that_of_the_gpu_that_the_cluster_describes(monkeypatch, cluster, gpu, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    described = Cluster.parse(cluster).device
    found = trainer.find_peak_flops(described, torch.device("cuda:0"))
    assert found == (None if tflops is None else pytest.approx(tflops * 1e12))
    assert trainer.find_peak_flops(described, torch.device("cpu")) is None


def test_every_degree_of_the_plans_and_every_call_of_the_model_is_built(monkeypatch):
    plan = sl.plan([20_000, 300, 300], cluster="1x8xH200", model="llama3-8b", planner="static")
    asked, told = [], []

    def build(heads, kv_heads, dim, dtype, device, *, longest, tokens, scale, ulysses, report):
        asked.append((heads, kv_heads, dim, longest, tokens, ulysses))
        for done in range(1, 9):
            report(done, 8)
        return 8

    monkeypatch.setattr(trainer, "warm_up_attention", build)
    module = torch.nn.Linear(1, 1)
    calls = (warm_call(32, 8, None), warm_call(32, 8, 4_096))
    adapter = ModelAdapter(module, (), lambda ids, context: ids, module, calls)
    capacity = max(tokens for _, tokens in plan.limits.capacity)
    trainer.build_attention_kernels(adapter, [plan, plan], 20_000, torch.bfloat16, torch.device("cpu"), told.append)
    assert asked == [(32, 8, 128, 20_000, 8 * capacity, (8,)), (32, 8, 128, 4_096, 8 * capacity, (8,))]
    assert told[0] == "attention over 8 ranks: 2 of 8 shapes built" and len(told) == 8


def warm_call(heads, kv_heads, window):
    from seqloom.attention import AttentionSpec

    return AttentionSpec(heads, kv_heads, 128, window)


def test_a_cpu_has_nothing_to_build():
    from seqloom.attention import warm_up_attention

    assert warm_up_attention(8, 2, 64, torch.float32, "cpu", longest=1_000) == 0
