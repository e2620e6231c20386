"""Trainers of other libraries under plans, on gloo processes, give what their plain runs in one process give."""

import pytest
import torch

from support.scripts import run_function
from support.tiny_models import tiny_model
from support.trainer_runs import (
    Stream,
    arguments,
    assert_alike,
    documents,
    evaluations,
    mixed_precision,
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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "wrap", "ranks"), [("qwen3", None, 2), ("llama", with_adapters, 4)])
def test_sharded_parameters(name, wrap, ranks, tmp_path, fork_server):
    """Also where adapters have fewer rows than there are ranks."""
    changes = {"gradient_accumulation_steps": 2, "include_num_input_tokens_seen": "all", "max_steps": 2}
    wanted = run_function(plain_trainer, 1, tmp_path, tmp_path, name, changes, wrap)[0]
    given = (tmp_path, name, changes, "auto", None, wrap, documents, "full")
    for found in run_function(planned_trainer, ranks, tmp_path, *given):
        assert_alike(found, wanted)


@pytest.mark.slow
def test_evaluations_of_sharded_parameters(tmp_path, fork_server):
    wanted = run_function(evaluations, 1, tmp_path, tmp_path, False)[0]
    for found in run_function(evaluations, 2, tmp_path, tmp_path, True, "full"):
        assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("saved", "then", "ranks"), [("full", "none", 1), ("full", "full", 4), ("none", "full", 2)])
def test_checkpoints_of_sharded_and_whole_parameters_are_the_same(saved, then, ranks, tmp_path, fork_server):
    saves = {"save_strategy": "steps", "save_steps": 2}
    given = (tmp_path, "llama", saves, "auto", None, None, documents, saved)
    whole = run_function(planned_trainer, 2, tmp_path, *given)[0]
    for losses, trained, norms in run_function(resumed, ranks, tmp_path, tmp_path, 4, then):
        assert_alike((losses[-2:], trained, norms[-2:]), (whole[0][4:], whole[1], whole[2][4:]))


@pytest.mark.slow
def test_bfloat16_with_float32_masters(tmp_path, fork_server):
    wanted = run_function(plain_trainer, 1, tmp_path, tmp_path, "llama", {})[0]
    for losses, trained, norms in run_function(mixed_precision, 2, tmp_path, tmp_path):
        assert losses == pytest.approx(wanted[0], rel=5e-3) and norms == pytest.approx(wanted[2], rel=5e-2)
        assert {values.dtype for values in trained.values()} == {torch.float32}


def test_settings_that_are_refused(tmp_path):
    from transformers import TrainingArguments

    from seqloom.errors import SeqloomError
    from seqloom.integrations.transformers.trainer import SeqloomTrainer, check_trainer

    settings = TrainingArguments(**arguments(tmp_path, 1, bf16=True))
    with pytest.raises(SeqloomError, match=r"SeqloomTrainer with bf16: .* sharding='full'"):
        SeqloomTrainer(tiny_model("llama"), settings, train_dataset=documents())
    settings = TrainingArguments(**arguments(tmp_path, 1))
    trainer = SeqloomTrainer(tiny_model("llama"), settings, train_dataset=documents())
    trainer.args.fsdp = True  # with it, transformers builds no trainer in a process of its own
    with pytest.raises(SeqloomError, match=r"SeqloomTrainer with fsdp: .* sharding='full'"):
        check_trainer(trainer)


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
