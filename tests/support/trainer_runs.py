"""Training runs of trainers of other libraries: plain, in one process, and under plans on several."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from support.tiny_models import VOCABULARY, tiny_model

PLAIN_BATCH = 8


def documents(count: int = 21, longest: int = 48, seed: int = 0) -> list[dict[str, list[int]]]:
    """Return documents of very unequal lengths, most of them short."""
    draw = random.Random(seed)
    lengths = [min(longest, 2 + int(draw.paretovariate(0.8))) for _ in range(count)]
    return [{"input_ids": [draw.randrange(1, VOCABULARY) for _ in range(length)]} for length in lengths]


class Stream(torch.utils.data.IterableDataset):
    """Documents without a length."""

    def __iter__(self) -> Any:
        return iter(documents())


def padded(rows: list[Mapping[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Collate documents one per row, with padding on the right."""
    longest = max(len(row["input_ids"]) for row in rows)
    batch = {"input_ids": [], "attention_mask": [], "labels": []}
    for row in rows:
        ids, left = row["input_ids"], longest - len(row["input_ids"])
        batch["input_ids"].append([*ids, *[0] * left])
        batch["attention_mask"].append([*[1] * len(ids), *[0] * left])
        batch["labels"].append([*ids, *[-100] * left])
    return {name: torch.tensor(values) for name, values in batch.items()}


def arguments(folder: Path, ranks: int, **changes: Any) -> dict[str, Any]:
    """Return the settings of a run whose steps have the same documents on any number of ranks."""
    given = {"output_dir": str(folder), "use_cpu": True, "num_train_epochs": 2, "learning_rate": 1e-2, "seed": 3}
    given |= {"logging_steps": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "bf16": False}
    given |= {"max_grad_norm": 0.5, "weight_decay": 0.1, "dataloader_pin_memory": False, "optim": "adamw_torch"}
    return given | {"per_device_train_batch_size": PLAIN_BATCH // ranks} | changes


def outcome(trainer: Any, **options: Any) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    """Train; return losses and gradient norms of the steps, and the trained parameters."""
    from seqloom.params.interface import full_tensor

    trainer.train(**options)
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    named = [(name, each.detach()) for name, each in trainer.model.named_parameters() if each.requires_grad]
    trained = {name: full_tensor(each).clone() for name, each in named}
    return [each["loss"] for each in steps], trained, [each["grad_norm"] for each in steps]


def assert_alike(found: Any, wanted: Any, tolerance: float = 1e-6) -> None:
    """Compare losses, trained parameters and gradient norms of two `outcome`s."""
    (losses, trained, norms), (wanted_losses, wanted_trained, wanted_norms) = found, wanted
    # Models are in float64, but transformers computes the loss in float32, whatever their dtype.
    assert losses == pytest.approx(wanted_losses, rel=tolerance, abs=1e-7)
    assert norms == pytest.approx(wanted_norms, rel=tolerance)
    assert trained.keys() == wanted_trained.keys()
    for name, values in trained.items():
        torch.testing.assert_close(values, wanted_trained[name], rtol=1e-5, atol=1e-6, msg=name)


def with_adapters(model: Any) -> Any:
    """Wrap a model by peft, with adapters that are not zero at the start."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    wrapped = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return wrapped.double()


def plain_trainer(folder: Path, name: str, changes: dict[str, Any], wrap: Any = None, read: Any = documents) -> Any:
    """`transformers.Trainer` on padded rows."""
    from transformers import Trainer, TrainingArguments

    settings = TrainingArguments(**arguments(folder, 1, **changes))
    model = tiny_model(name) if wrap is None else wrap(tiny_model(name))
    return outcome(Trainer(model, settings, data_collator=padded, train_dataset=read()))


def planned_trainer(
    folder: Path,
    name: str,
    changes: dict[str, Any],
    planner: str,
    collator: Any = None,
    wrap: Any = None,
    read: Any = documents,
    sharding: str = "none",
) -> Any:
    """`SeqloomTrainer` on all ranks of the job."""
    from transformers import TrainingArguments

    from seqloom.integrations.transformers.trainer import SeqloomTrainer

    settings = TrainingArguments(**arguments(folder, int(os.environ["WORLD_SIZE"]), **changes))
    model = tiny_model(name) if wrap is None else wrap(tiny_model(name))
    options = {"train_dataset": read(), "planner": planner, "sharding": sharding}
    return outcome(SeqloomTrainer(model, settings, data_collator=collator, **options))


def evaluations(folder: Path, planned: bool, sharding: str = "none") -> list[float]:
    """Train an epoch, and return the losses of evaluations meanwhile: of 2 batches of 6 documents."""
    from transformers import Trainer, TrainingArguments

    from seqloom.integrations.transformers.trainer import SeqloomTrainer

    ranks = int(os.environ["WORLD_SIZE"])
    changes = {"num_train_epochs": 1, "eval_strategy": "steps", "eval_steps": 1}
    settings = TrainingArguments(**arguments(folder, ranks, per_device_eval_batch_size=6 // ranks, **changes))
    given = {"planner": "static:2", "sharding": sharding}
    make, options = (SeqloomTrainer, given) if planned else (Trainer, {"data_collator": padded})
    trainer = make(
        tiny_model("llama"), settings, train_dataset=documents(), eval_dataset=documents(12, seed=1), **options
    )
    trainer.evaluate()  # before the optimiser is made
    trainer.train()
    return [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


def resumed(folder: Path, step: int, sharding: str = "none") -> Any:
    """Go on after a step of a run of `planned_trainer` that has written checkpoints, on all ranks of the job."""
    from transformers import TrainingArguments

    from seqloom.integrations.transformers.trainer import SeqloomTrainer

    settings = TrainingArguments(**arguments(folder, int(os.environ["WORLD_SIZE"])))
    trainer = SeqloomTrainer(tiny_model("llama", seed=5), settings, train_dataset=documents(), sharding=sharding)
    return outcome(trainer, resume_from_checkpoint=str(folder / f"checkpoint-{step}"))


def mixed_precision(folder: Path) -> Any:
    """Train a float32 model with sharded parameters in bfloat16."""
    from transformers import TrainingArguments

    from seqloom.integrations.transformers.trainer import SeqloomTrainer

    settings = TrainingArguments(**arguments(folder, int(os.environ["WORLD_SIZE"]), bf16=True))
    model = tiny_model("llama", dtype=torch.bfloat16)
    return outcome(SeqloomTrainer(model, settings, train_dataset=documents(), sharding="full"))


def accelerate_loop(folder: Path, planned: bool, sharding: str = "none", resume: bool = False) -> Any:
    """Train in a loop with accelerate; return the `outcome` of its steps. The state of step 2 is saved, or loaded."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader

    from seqloom.integrations.transformers.planned_steps import PlannedSteps, whole_batches
    from seqloom.params.interface import full_tensor

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator, model = Accelerator(cpu=True), tiny_model("llama", seed=5 if resume else 0)
    model = accelerator.prepare_model(model, evaluation_mode=True)
    steps = PlannedSteps(model, "auto", sharding=sharding) if planned else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shuffled = {"shuffle": True, "generator": torch.Generator().manual_seed(0)}
    loader = DataLoader(documents(), batch_size=5, collate_fn=padded, **shuffled)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    if steps is not None:
        loader = whole_batches(loader)
    if resume:
        accelerator.load_state(str(folder / "state"))
        loader = accelerator.skip_first_batches(loader, 2)
    losses, norms = [], []
    for batch in loader:
        if steps is None:
            logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
            loss = cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())  # in float64
            accelerator.backward(loss)
            losses.append(loss.item())
        else:
            losses.append(steps.backward(batch).loss)
        norms.append(float(full_tensor(accelerator.clip_grad_norm_(model.parameters(), 0.5))))
        optimizer.step()
        optimizer.zero_grad()
        if len(losses) == 2 and planned and not resume and sharding == "none":
            accelerator.save_state(str(folder / "state"))
    named = [(name, each.detach()) for name, each in model.named_parameters()]
    return losses, {name: full_tensor(each).clone() for name, each in named}, norms


def tokenizer() -> Any:
    """Return a tokenizer with a word for every token of the tiny models."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({words([number]): number for number in range(VOCABULARY)}, unk_token="<0>"))
    made.pre_tokenizer = pre_tokenizers.Split("<", "merged_with_next")
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<1>", pad_token="<0>", unk_token="<0>")


def words(ids: list[int]) -> str:
    """Return the text of token ids."""
    return "".join(f"<{number}>" for number in ids)


def sft_run(folder: Path, name: str, changes: dict[str, Any], planner: str | None, wrap: Any = None) -> Any:
    """Train with TRL's `SFTTrainer`, packing documents; `planner`: with `SeqloomSFTTrainer`. Also return num_tokens."""
    from datasets import Dataset, disable_progress_bars
    from trl import SFTConfig, SFTTrainer

    from seqloom.integrations.trl import SeqloomSFTTrainer

    disable_progress_bars()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    given = {"packing": True, "max_length": 48, "gradient_checkpointing": False} | changes
    settings = SFTConfig(**arguments(folder, 1) | {"per_device_train_batch_size": 4 // ranks} | given)
    make, options = (SFTTrainer, {}) if planner is None else (SeqloomSFTTrainer, {"planner": planner})
    model = tiny_model(name) if wrap is None else wrap(tiny_model(name))
    dataset = Dataset.from_list(documents())
    trainer = make(model, settings, train_dataset=dataset, processing_class=tokenizer(), **options)
    found = outcome(trainer)
    return found, [entry["num_tokens"] for entry in trainer.state.log_history if "num_tokens" in entry]


def drawn(longest: int, count: int, seed: int) -> list[list[int]]:
    """Return lists of token ids of very unequal lengths."""
    draw = random.Random(seed)
    lengths = [min(longest, 1 + int(draw.paretovariate(0.6))) for _ in range(count)]
    return [[draw.randrange(2, VOCABULARY) for _ in range(length)] for length in lengths]


def trl_outcome(trainer: Any) -> Any:
    """Train; return the `outcome`, and what TRL logs of steps but their times."""
    found = outcome(trainer)
    times = ("step_time", "grad_norm", "learning_rate", "epoch", "loss")
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return found, [{name: value for name, value in entry.items() if name not in times} for entry in logged]


def dpo_run(
    folder: Path, name: str, changes: dict[str, Any], planner: str | None, wrap: Any = None, ranks: int | None = None
) -> Any:
    """Train with TRL's `DPOTrainer` on pairs of completions; `planner`: with `SeqloomDPOTrainer`.

    A batch has 8 pairs on `ranks`; None: on those of the job.
    """
    from datasets import Dataset, disable_progress_bars
    from trl import DPOConfig, DPOTrainer

    from seqloom.integrations.trl import SeqloomDPOTrainer

    disable_progress_bars()
    ranks = ranks or int(os.environ.get("WORLD_SIZE", "1"))
    given = {"max_length": 48, "gradient_checkpointing": False, "num_train_epochs": 1} | changes
    settings = DPOConfig(**arguments(folder, ranks, **given))
    make, options = (DPOTrainer, {}) if planner is None else (SeqloomDPOTrainer, {"planner": planner})
    rows = zip(drawn(9, 24, 0), drawn(40, 24, 1), drawn(40, 24, 2), strict=True)
    pairs = [dict(zip(("prompt", "chosen", "rejected"), map(words, row), strict=True)) for row in rows]
    model, reference = tiny_model(name), tiny_model(name, seed=1)
    if wrap is not None:
        model, reference = wrap(model), None
    data = Dataset.from_list(pairs)
    return trl_outcome(make(model, reference, settings, train_dataset=data, processing_class=tokenizer(), **options))


def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Return completions that depend on their prompt and their number in its group, on whatever rank they are made."""
    completions, group = [], trainer.num_generations
    for place, prompt in enumerate(prompts):
        completions += drawn(40, 1, 1000 * int(prompt[1:-1]) + place % group)
    ids = [[int(prompt[1:-1]), 3] for prompt in prompts]
    return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}


def reward(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Reward completions with small token ids, and short ones."""
    return [1.0 / (1 + sum(ids) / len(ids)) - 0.01 * len(ids) for ids in completion_ids]


def grpo_run(
    folder: Path, name: str, changes: dict[str, Any], planner: str | None, wrap: Any = None, ranks: int | None = None
) -> Any:
    """Train with TRL's `GRPOTrainer` on completions of `rollout`; `planner`: with `SeqloomGRPOTrainer`: `dpo_run`."""
    from datasets import Dataset, disable_progress_bars
    from trl import GRPOConfig, GRPOTrainer

    from seqloom.integrations.trl import SeqloomGRPOTrainer

    disable_progress_bars()
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    ranks = ranks or int(os.environ.get("WORLD_SIZE", "1"))
    given = {"max_completion_length": 40, "gradient_checkpointing": False, "num_train_epochs": 1} | changes
    settings = GRPOConfig(**arguments(folder, ranks, **{"num_generations": 4, **given}))
    make, options = (GRPOTrainer, {}) if planner is None else (SeqloomGRPOTrainer, {"planner": planner})
    data = Dataset.from_list([{"prompt": words([number])} for number in range(2, 8)])
    model = tiny_model(name) if wrap is None else wrap(tiny_model(name))
    options |= {"train_dataset": data, "processing_class": tokenizer()}
    if not changes.get("generation_kwargs"):
        options |= {"rollout_func": rollout}
    trainer = make(model, reward, settings, **options)
    return trl_outcome(trainer)
