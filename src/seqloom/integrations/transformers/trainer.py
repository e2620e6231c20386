"""`transformers.Trainer` whose steps run under plans: documents of very different lengths, on all ranks of the job.

    trainer = SeqloomTrainer(model, TrainingArguments(...), train_dataset=dataset)
    trainer.train()                                # torchrun --nproc-per-node 8 script.py

The documents of a step are `per_device_train_batch_size` x ranks x `gradient_accumulation_steps`, as ever. The ranks
share the tokens of all of them, so one document may be longer than a GPU holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import DataCollatorWithFlattening, Trainer

from seqloom.describe import Cluster
from seqloom.errors import SeqloomError
from seqloom.integrations.transformers.planned_steps import Documents, PlannedSteps, whole_batches


class PlannedTraining:
    """Runs the training steps of a `transformers.Trainer`, of which a class inherits after this one, under plans.

    Evaluation, checkpoints, callbacks and logs stay the trainer's own; the evaluated documents are whole on a rank.
    """

    def __init__(
        self,
        *args: Any,
        planner: str = "auto",
        cluster: Cluster | str | None = None,
        profile: str | None = None,
        budget_gib: float | None = None,
        max_length: int | None = None,
        **keywords: Any,
    ) -> None:
        """Build the trainer, and attach its model.

        Args:
            planner, cluster, profile, budget_gib, max_length: see `PlannedSteps`.
            args, keywords: of the trainer.
        """
        super().__init__(*args, **keywords)
        host: Any = self
        check_trainer(host)
        self.planned_steps = PlannedSteps(
            host.model,
            planner,
            cluster,
            profile,
            budget_gib,
            max_length,
            seed=host.args.seed,
            recompute=not host.args.gradient_checkpointing,
        )
        self._batches: list[Documents] = []
        self._coming: tuple[Iterator[Any], list[Any]] | None = None

    def _get_dataloader(self, dataset: Any, description: str, batch_size: int, *args: Any, **options: Any) -> Any:
        """Return a data loader; one for training gives the batches of all ranks to each of them."""
        host: Any = super()
        if not options.get("is_training"):
            return host._get_dataloader(dataset, description, batch_size, *args, **options)
        size = batch_size * self.planned_steps.transport.ranks
        return whole_batches(host._get_dataloader(dataset, description, size, *args, **options))

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], None]:
        """Return the batches of this step, and read those of the next one, to have it planned meanwhile."""
        if self._coming is None or self._coming[0] is not epoch_iterator:
            self._coming = epoch_iterator, _take(epoch_iterator, num_batches)
        batches, self._batches = self._coming[1], []
        coming = _take(epoch_iterator, num_batches)
        self._coming = epoch_iterator, coming
        if coming:
            step = self.state.global_step + 2  # pyrefly: ignore[missing-attribute]
            self.planned_steps.submit([Documents.from_batch(each) for each in coming], step)
        return batches, None

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
        """Keep a batch; with the last of a step, run all of them under one plan and return the loss of the step."""
        host: Any = self
        model.train()
        if callable(getattr(host.optimizer, "train", None)):  # optimisers without a schedule
            host.optimizer.train()
        self._batches.append(Documents.from_batch(inputs))
        if not host.accelerator.sync_gradients:
            return torch.zeros((), device=host.args.device)
        batches, self._batches = self._batches, []
        result = self.planned_steps.backward(*batches, step=host.state.global_step + 1)
        return torch.tensor(result.loss, device=host.args.device)

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Count the tokens of a batch once, although every rank has it."""
        host: Any = self
        before = host.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # pyrefly: ignore[missing-attribute]
        host.state.num_input_tokens_seen -= (
            (host.state.num_input_tokens_seen - before)
            * (self.planned_steps.transport.ranks - 1)
            // self.planned_steps.transport.ranks
        )


class SeqloomTrainer(PlannedTraining, Trainer):
    """`transformers.Trainer` whose steps run under plans; without a collator it packs the documents of a batch."""

    def __init__(self, model: Any = None, args: Any = None, data_collator: Any = None, *rest: Any, **keywords: Any):
        """See `PlannedTraining`."""
        super().__init__(model, args, data_collator or DataCollatorWithFlattening(), *rest, **keywords)


def check_trainer(host: Any) -> None:
    """Refuse settings of a trainer whose result would be another, each by name."""
    args, plugin = host.args, getattr(host.accelerator.state, "fsdp_plugin", None)
    config = getattr(host.accelerator, "parallelism_config", None)
    optimiser = str(getattr(args.optim, "value", args.optim))
    refused = {
        "deepspeed": (host.is_deepspeed_enabled, "it owns parameters and backward; leave it out"),
        "fsdp": (plugin is not None, "parameters are replicated here; use `seqloom train` with plan.sharding"),
        "parallelism_config": (config is not None, "plans decide how sequences are divided; leave it out"),
        "fp16 or bf16": (
            host.accelerator.mixed_precision != "no",
            "layers compute in the dtype of the parameters; set bf16=False and load the model in bfloat16",
        ),
        "several GPUs in one process": (args.n_gpu > 1, "start a process for each GPU: torchrun --nproc-per-node"),
        "torch_compile": (args.torch_compile, "a compiled model does not see its context; leave it out"),
        "use_liger_kernel": (args.use_liger_kernel, "the loss is computed in chunks here; leave it out"),
        "label_smoothing_factor": (args.label_smoothing_factor > 0, "the loss is cross entropy; set it to 0"),
        "neftune_noise_alpha": (bool(args.neftune_noise_alpha), "its noise would depend on the plan; leave it out"),
        "compute_loss_func": (host.compute_loss_func is not None, "the loss is cross entropy; leave it out"),
        "split_batches": (host.accelerator.split_batches, "every rank reads whole batches; leave it out"),
        "train_sampling_strategy": (
            args.train_sampling_strategy == "batch_rebalance",
            "it gives every rank documents of its own, where plans divide those of all; use random or group_by_length",
        ),
        f"optim={optimiser}": (
            optimiser.endswith(("lomo", "layerwise")),
            "it updates parameters inside the backward, before gradients are summed over ranks; use another",
        ),
        "loss_type": (getattr(args, "loss_type", "nll") not in ("nll", "chunked_nll"), "use nll"),
    }
    for name, (found, way_out) in refused.items():
        if found:
            raise SeqloomError(f"{type(host).__name__} with {name}: {way_out}")


def _take(batches: Iterator[Any], count: int) -> list[Any]:
    """Return the next batches, fewer at the end."""
    return [batch for _, batch in zip(range(count), batches, strict=False)]
