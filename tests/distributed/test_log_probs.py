"""Log-probabilities of completions under plans, and gradients of losses of them, are those of plain transformers."""

import pytest
import torch

from support.completions import (
    clipped_loss,
    outcome,
    plain,
    plain_log_probs,
    planned,
    prompts_and_completions,
    refused_by_rank,
)
from support.scripts import run_function
from support.tiny_models import tiny_model
from support.trainer_runs import with_adapters

pytestmark = pytest.mark.distributed


def assert_alike(found, wanted, tolerance=1e-9):
    (policy, loss, gradients), (wanted_policy, wanted_loss, wanted_gradients) = found, wanted
    for mine, other in zip(policy, wanted_policy, strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
    assert loss == pytest.approx(wanted_loss, rel=tolerance)
    for name, values in wanted_gradients.items():
        off = (gradients[name] - values).norm() / values.norm().clamp(min=1e-12)
        assert off < tolerance, f"{name}: {off:.1e}"


def test_two_ranks_equal_one_process(tmp_path, fork_server):
    cases = [("llama", 0, "static:2", 1.0), ("qwen3", 1, "auto", 0.7)]
    for rank in run_function(planned, 2, tmp_path, cases):
        for (name, seed, _, temperature), found in zip(cases, rank, strict=True):
            assert_alike(found, plain(name, seed, temperature))


@pytest.mark.slow
def test_models_planners_and_lengths(tmp_path, fork_server):
    planners = ("static:1", "static:4", "flex", "zones", "adaptive", "auto")
    cases = [("llama-tied", seed, planner, 1.3) for seed, planner in enumerate(planners, 10)]
    cases += [("granite", 20, "auto", 0.5), ("mistral", 21, "flex", 1.0), ("mixtral", 22, "auto", 1.0)]
    for rank in run_function(planned, 4, tmp_path, cases):
        for (name, seed, _, temperature), found in zip(cases, rank, strict=True):
            assert_alike(found, plain(name, seed, temperature))


@pytest.mark.slow
def test_adapters_alone_get_gradients(tmp_path, fork_server):
    pytest.importorskip("peft")
    wanted = plain("llama", 3, wrap=with_adapters)
    assert all("lora" in name for name in wanted[2])
    for found in run_function(planned, 2, tmp_path, [("llama", 3, "auto", 1.0)], with_adapters):
        assert_alike(found[0], wanted)


@pytest.mark.slow
def test_a_loss_of_a_ranks_own_completions_is_refused_on_all(tmp_path, fork_server):
    assert all("ranks computed different losses" in said for said in run_function(refused_by_rank, 2, tmp_path))


class TestOneProcess:
    """What does not depend on ranks."""

    @pytest.fixture
    def steps(self):
        from seqloom.integrations.transformers.planned_steps import PlannedSteps

        return PlannedSteps(tiny_model("llama"), "auto")

    def test_gradients_accumulate_as_autograd_does(self, steps):
        from seqloom.integrations.log_probs import completion_log_probs

        parts = [prompts_and_completions(seed) for seed in (0, 1)]
        for part in parts:
            clipped_loss(completion_log_probs(steps, *part)).backward()
        plain_model = tiny_model("llama")
        for part in parts:
            wanted = outcome(plain_model, plain_log_probs(plain_model, *part))
        for name, parameter in steps.model.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[2][name], rtol=1e-9, atol=1e-9)

    def test_a_reference_needs_no_graph_and_the_ratio_to_it_is_one(self, steps):
        from seqloom.integrations.log_probs import completion_log_probs

        with torch.no_grad():
            old = completion_log_probs(steps, *prompts_and_completions())
        new = completion_log_probs(steps, *prompts_and_completions())
        assert all(not each.requires_grad for each in old) and all(each.requires_grad for each in new)
        assert all(torch.equal(first, second.detach()) for first, second in zip(old, new, strict=True))

    def test_parameters_that_changed_before_the_backward_are_noticed(self, steps):
        from seqloom.integrations.log_probs import completion_log_probs

        policy = completion_log_probs(steps, *prompts_and_completions())
        with torch.no_grad():
            next(steps.model.parameters()).add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            clipped_loss(policy).backward()

    def test_what_is_refused(self, steps):
        from seqloom.errors import SeqloomError
        from seqloom.integrations.log_probs import completion_log_probs

        for given, words in {
            (((1, 2),), ()): "1 prompts and 0 completions",
            (((),), ((1,),)): "a prompt has one token or more",
            (((1,),), ((),)): "no completion has a token",
            ((), ()): "no completion has a token",
        }.items():
            with pytest.raises(SeqloomError, match=words):
                completion_log_probs(steps, *given)
        with pytest.raises(SeqloomError, match="temperature 0"):
            completion_log_probs(steps, [[1]], [[2]], temperature=0.0)

    def test_rows_that_are_refused(self, steps):
        from seqloom.errors import SeqloomError
        from seqloom.integrations.log_probs import row_log_probs
        from seqloom.integrations.transformers.planned_steps import PlannedSteps

        ids, mask = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 1, 1, 1]])
        for labels, given in ((ids, torch.tensor([[1, 0, 1, 1]])), (torch.tensor([[-100, 6, 7, 8]]), mask)):
            with pytest.raises(SeqloomError, match=r"rows with holes .* or with a label that no token"):
                row_log_probs(steps, ids, labels, given)
        steps.sharding = "full"
        with pytest.raises(SeqloomError, match="sharding 'full'"):
            row_log_probs(steps, ids, ids, torch.ones_like(ids))
        with pytest.raises(SeqloomError, match=r"compute_dtype .* not sharded"):
            PlannedSteps(tiny_model("llama"), compute_dtype=torch.bfloat16)

    def test_rows_without_a_label_have_zeros_with_gradients(self, steps):
        from seqloom.integrations.log_probs import row_log_probs

        ids = torch.tensor([[5, 6, 7, 8]])
        found = row_log_probs(steps, ids, torch.full_like(ids, -100), statistics=True)
        found.log_probs.sum().backward()
        assert not found.log_probs.any() and not found.entropy.any()
        assert all(not each.grad.any() for each in steps.model.parameters())
