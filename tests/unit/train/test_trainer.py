"""Plans broadcast to all ranks, and kernels built before the first step."""

from functools import partial

import pytest
import torch

import seqloom as sl
from seqloom.api import cost_model
from seqloom.attention import AttentionSpec, attention_builds
from seqloom.describe import Cluster
from seqloom.dist import run_ranks
from seqloom.dist.layer_times import TimeSlice
from seqloom.errors import SeqloomError
from seqloom.models import ModelAdapter
from seqloom.plan import Plan, json
from seqloom.planners import make_plan
from seqloom.planners.plan_ahead import StepPlan
from seqloom.train import trainer
from seqloom.train.plan_broadcast import PlanBroadcast
from seqloom.train.trainer import gather_slices

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


def test_other_factors_on_a_rank_are_noticed():
    """A rank of another version may read them differently."""

    def body(transport):
        plan = make_plan("flex", LENGTHS, COST)
        step_plan = StepPlan(4, plan.to_json(), plan.hash, 9, factors=(1.0, 2.0, 1.0, 1.0, 1.0 + transport.rank))
        PlanBroadcast(transport, None).check_all_ranks(4, LENGTHS, step_plan)

    with pytest.raises(SeqloomError, match="step 4: rank 1 holds another plan than rank 0"):
        run_ranks(2, body, strict=True)


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


def test_every_degree_of_the_plans_and_every_spec_of_the_model_is_built(monkeypatch):
    plan = sl.plan([20_000, 300, 300], cluster="1x8xH200", model="llama3-8b", planner="static")
    asked = []

    def builds(spec, dtype, device, *, longest, tokens, degrees):
        asked.append((spec, longest, tokens, degrees))
        return [lambda: None]

    monkeypatch.setattr(trainer, "attention_builds", builds)
    module = torch.nn.Linear(1, 1)
    specs = (AttentionSpec(32, 8, 128), AttentionSpec(32, 8, 128, window=4_096))
    adapter = ModelAdapter(module, (), lambda ids, context: ids, module, specs)
    capacity = max(tokens for _, tokens in plan.limits.capacity)
    found = trainer.kernel_builds(adapter, [plan, plan], 20_000, torch.bfloat16, torch.device("cpu"))
    degrees = {(1, 1), (8, 1)}
    assert asked == [(specs[0], 20_000, capacity, degrees), (specs[1], 20_000, capacity, degrees)] and len(found) == 2


def test_ranks_of_a_node_compile_a_share_each_and_load_the_rest():
    compiled = {0: [], 1: [], 2: [], 3: []}  # by rank, in order
    shown = []

    def body(transport):
        ran = compiled[transport.rank]
        builds = [partial(ran.append, number) for number in range(6)]
        show = shown.append if transport.rank == 0 else str
        trainer.run_builds(builds, transport, 2, torch.device("cpu"), show)
        trainer.run_builds([], transport, 2, torch.device("cpu"), show)

    run_ranks(4, body, strict=True)
    assert compiled[0] == compiled[2] == [0, 2, 4, 1, 3, 5] and compiled[1] == compiled[3] == [1, 3, 5, 0, 2, 4]
    assert shown[0] == "compiling kernels 1/6" and len(shown) == 6


def test_a_cpu_has_nothing_to_build():
    assert attention_builds(AttentionSpec(8, 2, 64), torch.float32, "cpu", longest=1_000) == []


def test_slices_of_ranks_with_different_numbers_of_them_are_gathered():
    def own(rank):
        return [TimeSlice("F", 0.25 * k, 0.25 * k + 0.125, 0, k) for k in range(rank)] + [TimeSlice("rows", 2.0, 3.0)]

    gathered = run_ranks(3, lambda transport: gather_slices(own(transport.rank), transport, torch.device("cpu")))
    assert gathered == [[own(rank) for rank in range(3)]] * 3
