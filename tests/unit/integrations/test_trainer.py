"""What `SeqloomTrainer` refuses, each setting by name and with the way out, before a step runs."""

from types import SimpleNamespace

import pytest
from transformers import TrainingArguments

from seqloom.errors import SeqloomError
from seqloom.integrations.transformers.trainer import SeqloomTrainer, check_cross_entropy, check_trainer
from support.tiny_models import tiny_model
from support.trainer_runs import arguments, documents, padded

REFUSED = {
    "bf16": ({"bf16": True}, "load the model in bfloat16"),
    "torch_compile": ({"torch_compile": True}, "leave it out"),
    "use_liger_kernel": ({"use_liger_kernel": True}, "in chunks"),
    "label_smoothing_factor": ({"label_smoothing_factor": 0.1}, "set it to 0"),
    "neftune_noise_alpha": ({"neftune_noise_alpha": 5.0}, "would depend on the plan"),
    "split_batches": ({"accelerator_config": {"split_batches": True}}, "whole batches"),
    "train_sampling_strategy": ({"train_sampling_strategy": "batch_rebalance"}, "group_by_length"),
    "optim=galore_adamw_layerwise": ({"optim": "galore_adamw_layerwise"}, "before gradients are summed"),
}


def trainer(tmp_path, **changes):
    settings = TrainingArguments(**arguments(tmp_path, 1, **changes))
    return SeqloomTrainer(tiny_model("llama"), settings, train_dataset=documents())


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_would_be_computed_otherwise(tmp_path, name):
    changes, way_out = REFUSED[name]
    with pytest.raises(SeqloomError) as caught:
        trainer(tmp_path, **changes)
    assert f"SeqloomTrainer with {name}: " in str(caught.value) and way_out in str(caught.value)


@pytest.mark.parametrize(
    ("name", "change"),
    {
        "deepspeed": lambda host: setattr(host, "is_deepspeed_enabled", True),
        "fsdp": lambda host: setattr(host.accelerator.state, "fsdp_plugin", object()),
        "parallelism_config": lambda host: setattr(host.accelerator, "parallelism_config", object()),
        "several GPUs in one process": lambda host: setattr(host.args, "n_gpu", 2),
        "compute_loss_func": lambda host: setattr(host, "compute_loss_func", print),
        "loss_type": lambda host: setattr(host.args, "loss_type", "dft"),
    }.items(),
)
def test_settings_that_need_a_launcher_or_another_trainer(name, change):
    """A host as `check_trainer` sees it, with one change; unchanged it passes."""
    args = SimpleNamespace(
        n_gpu=1,
        torch_compile=False,
        use_liger_kernel=False,
        label_smoothing_factor=0.0,
        neftune_noise_alpha=None,
        train_sampling_strategy="random",
        optim="adamw_torch",
        fsdp=[],
    )
    accelerator = SimpleNamespace(state=SimpleNamespace(), mixed_precision="no", split_batches=False)
    host = SimpleNamespace(args=args, accelerator=accelerator, is_deepspeed_enabled=False, compute_loss_func=None)
    check_trainer(host)
    check_cross_entropy(host)
    change(host)
    with pytest.raises(SeqloomError, match=f"with {name}: "):
        check_trainer(host)
        check_cross_entropy(host)


def test_a_reader_that_cuts_batches_for_the_others(tmp_path):
    with pytest.raises(SeqloomError, match="dispatch_batches=False"):
        trainer(tmp_path, accelerator_config={"dispatch_batches": True}).get_train_dataloader()


def test_a_model_that_the_engine_refuses(tmp_path):
    settings = TrainingArguments(**arguments(tmp_path, 1))
    model = tiny_model("llama")
    model.config.is_encoder_decoder = True
    with pytest.raises(SeqloomError, match="encoder-decoder"):
        SeqloomTrainer(model, settings, train_dataset=documents())


def test_a_batch_without_labels(tmp_path):
    def without(rows):
        return {name: values for name, values in padded(rows).items() if name != "labels"}

    settings = TrainingArguments(**arguments(tmp_path, 1))
    refused = SeqloomTrainer(tiny_model("llama"), settings, data_collator=without, train_dataset=documents())
    with pytest.raises(SeqloomError, match="use a collator that makes them"):
        refused.train()
