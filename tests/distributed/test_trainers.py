"""Trainers of other libraries under plans, on gloo processes, give what their plain runs in one process give."""

import pytest

from support.scripts import run_function
from support.trainer_runs import (
    Stream,
    assert_alike,
    evaluations,
    padded,
    plain_trainer,
    planned_trainer,
    resumed,
    sft_run,
    with_adapters,
)


@pytest.mark.slow
def test_trainer(tmp_path, fork_server):
    wanted = run_function(plain_trainer, 1, tmp_path, tmp_path, "llama", {})[0]
    for found in run_function(planned_trainer, 2, tmp_path, tmp_path, "llama", {}, "static:2"):
        assert_alike(found, wanted)


@pytest.mark.slow
def test_trainer_on_padded_rows_and_with_accumulated_batches(tmp_path, fork_server):
    accumulated = {"gradient_accumulation_steps": 2, "include_num_input_tokens_seen": "all"}
    wanted = run_function(plain_trainer, 1, tmp_path, tmp_path, "qwen3", accumulated)[0]
    for found in run_function(planned_trainer, 2, tmp_path, tmp_path, "qwen3", accumulated, "auto", padded):
        assert_alike(found, wanted)


@pytest.mark.slow
def test_adapters_of_peft(tmp_path, fork_server):
    pytest.importorskip("peft")
    wanted = run_function(plain_trainer, 1, tmp_path, tmp_path, "llama", {}, with_adapters)[0]
    assert all("lora" in name for name in wanted[1])
    for found in run_function(planned_trainer, 2, tmp_path, tmp_path, "llama", {}, "auto", None, with_adapters):
        assert_alike(found, wanted)


@pytest.mark.slow
def test_documents_that_are_streamed(tmp_path, fork_server):
    changes = {"max_steps": 4, "accelerator_config": {"dispatch_batches": False}}
    wanted = run_function(plain_trainer, 1, tmp_path, tmp_path, "llama", changes, None, Stream)[0]
    for found in run_function(planned_trainer, 2, tmp_path, tmp_path, "llama", changes, "auto", None, None, Stream):
        assert_alike(found, wanted)


@pytest.mark.slow
def test_evaluations_between_steps(tmp_path, fork_server):
    wanted = run_function(evaluations, 1, tmp_path, tmp_path, False)[0]
    assert len(wanted) == 3
    for found in run_function(evaluations, 2, tmp_path, tmp_path, True):
        assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_goes_on_from_a_checkpoint_on_any_number_of_ranks(tmp_path, fork_server, ranks):
    saves = {"save_strategy": "steps", "save_steps": 2}
    whole = run_function(planned_trainer, 2, tmp_path, tmp_path, "llama", saves, "auto")[0]
    for losses, trained, norms in run_function(resumed, ranks, tmp_path, tmp_path, 4):
        assert_alike((losses[-2:], trained, norms[-2:]), (whole[0][4:], whole[1], whole[2][4:]))


def assert_sft_alike(found, wanted):
    assert_alike(found[0], wanted[0])
    assert found[1] == wanted[1]


def test_packed_rows_of_trl(tmp_path):
    pytest.importorskip("trl")
    wanted = sft_run(tmp_path, "llama", {"max_steps": 2}, None)
    assert_sft_alike(sft_run(tmp_path, "llama", {"max_steps": 2}, "auto"), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_packing_strategies_of_trl_on_two_ranks(tmp_path, fork_server, strategy):
    pytest.importorskip("trl")
    changes = {"packing_strategy": strategy, "gradient_accumulation_steps": 2}
    wanted = run_function(sft_run, 1, tmp_path, tmp_path, "qwen3", changes, None)[0]
    for found in run_function(sft_run, 2, tmp_path, tmp_path, "qwen3", changes, "static:2"):
        assert_sft_alike(found, wanted)


@pytest.mark.slow
def test_adapters_and_checkpointing_of_trl_on_two_ranks(tmp_path, fork_server):
    pytest.importorskip("trl")
    changes = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    wanted = run_function(sft_run, 1, tmp_path, tmp_path, "llama", changes, None, with_adapters)[0]
    for found in run_function(sft_run, 2, tmp_path, tmp_path, "llama", changes, "auto", with_adapters):
        assert_sft_alike(found, wanted)


@pytest.mark.parametrize(("name", "value"), [("loss_type", "dft"), ("activation_offloading", True)])
def test_settings_of_trl_that_are_refused(tmp_path, name, value):
    pytest.importorskip("trl")
    from seqloom.errors import SeqloomError

    with pytest.raises(SeqloomError, match=f"SeqloomSFTTrainer with {name}"):
        sft_run(tmp_path, "llama", {name: value}, "auto")
