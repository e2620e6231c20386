"""DPO and GRPO of TRL under plans, on gloo processes, give what TRL's trainers give: losses, parameters, metrics."""

import pytest

from support.scripts import run_function
from support.trainer_runs import assert_alike, dpo_run, grpo_run, with_adapters

pytest.importorskip("trl")

RUNS = [pytest.param(dpo_run, id="dpo"), pytest.param(grpo_run, id="grpo")]


def assert_trl_alike(found, wanted):
    assert_alike(found[0], wanted[0], 1e-5)  # TRL computes log-probabilities in float32, whatever the model's dtype
    for mine, other in zip(found[1], wanted[1], strict=True):
        assert mine == pytest.approx(other, rel=1e-5, abs=1e-6)


def on_two_ranks(run, folder, name, changes, planner, wrap=None):
    return run_function(run, 2, folder, folder, name, changes, planner, wrap)


@pytest.mark.parametrize("run", [RUNS[0], pytest.param(*RUNS[1].values, id="grpo", marks=pytest.mark.slow)])
def test_one_process(run, tmp_path):
    wanted = run(tmp_path, "llama", {"max_steps": 1}, None)
    assert_trl_alike(run(tmp_path, "llama", {"max_steps": 1}, "auto"), wanted)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("planner", ["static:2", "flex"])
def test_two_ranks_equal_one_process(run, planner, tmp_path, fork_server):
    wanted = run_function(run, 1, tmp_path, tmp_path, "qwen3", {}, None)[0]
    for found in on_two_ranks(run, tmp_path, "qwen3", {}, planner):
        assert_alike(found[0], wanted[0], 1e-5)


LOSSES = {
    "dpo": {"loss_type": ["sigmoid", "ipo", "sft"], "loss_weights": [1.0, 0.5, 0.1], "ld_alpha": 0.7},
    "weighted": {"use_weighting": True, "optim": "sgd"},
    "grpo": {"loss_type": "grpo", "beta": 0.1, "num_iterations": 2, "top_entropy_quantile": 0.8},
    "sequences": {"importance_sampling_level": "sequence", "steps_per_generation": 4, "temperature": 0.7},
    "cispo": {"loss_type": "cispo", "mask_truncated_completions": True},
}
OF = {"dpo": dpo_run, "weighted": dpo_run}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("losses", LOSSES)
def test_losses_of_trl_on_two_ranks(losses, tmp_path, fork_server):
    """TRL's two ranks are the oracle: losses may be means of a rank's own tokens, batches are shuffled rank by rank."""
    run, changes = OF.get(losses, grpo_run), {"gradient_accumulation_steps": 2, "max_steps": 3, **LOSSES[losses]}
    wrap = with_adapters if "beta" in changes else None  # without adapters TRL loads the reference by name
    wanted = on_two_ranks(run, tmp_path, "llama", changes, None, wrap)
    for found, other in zip(on_two_ranks(run, tmp_path, "llama", changes, "auto", wrap), wanted, strict=True):
        assert_trl_alike(found, other)


@pytest.mark.slow
@pytest.mark.distributed
def test_adapters_of_peft_are_their_own_reference(tmp_path, fork_server):
    wanted = run_function(dpo_run, 1, tmp_path, tmp_path, "llama", {}, None, with_adapters)[0]
    assert wanted[0][1] and all("lora" in name and ".ref." not in name for name in wanted[0][1])
    for found in on_two_ranks(dpo_run, tmp_path, "llama", {}, "auto", with_adapters):
        assert_alike(found[0], wanted[0], 1e-5)


@pytest.mark.slow
@pytest.mark.distributed
def test_completions_that_are_generated_on_two_ranks(tmp_path, fork_server):
    changes = {"generation_kwargs": {"min_new_tokens": 2}, "max_steps": 3}
    wanted = on_two_ranks(grpo_run, tmp_path, "llama", changes, None)
    for found, other in zip(on_two_ranks(grpo_run, tmp_path, "llama", changes, "auto"), wanted, strict=True):
        assert_trl_alike(found, other)


REFUSED = [
    (dpo_run, "mixtral", {}, "a router loss: .* set router_aux_loss_coef=0.0"),
    (dpo_run, "llama", {"activation_offloading": True}, "activation_offloading"),
    (grpo_run, "llama", {"entropy_coef": 0.1}, "entropy_coef"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("run", "name", "changes", "words"), REFUSED)
def test_settings_that_are_refused(run, name, changes, words, tmp_path):
    from seqloom.errors import SeqloomError

    with pytest.raises(SeqloomError, match=f"Trainer with {words}"):
        run(tmp_path, name, changes, "auto")
