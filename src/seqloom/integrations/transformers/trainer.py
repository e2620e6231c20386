"""`transformers.Trainer` whose steps run under plans: documents of very different lengths, on all ranks of the job.

    trainer = SeqloomTrainer(model, TrainingArguments(...), train_dataset=dataset)
    trainer.train()                                # torchrun --nproc-per-node 8 script.py

The documents of a step are `per_device_train_batch_size` x ranks x `gradient_accumulation_steps`, as ever. The ranks
share the tokens of all of them, so one document may be longer than a GPU holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map
from transformers import DataCollatorWithFlattening, Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from seqloom.describe import Cluster
from seqloom.errors import SeqloomError
from seqloom.integrations.transformers.planned_steps import Documents, PlannedSteps, whole_batches
from seqloom.params.interface import full_tensor


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
        sharding: Literal["none", "full"] = "none",
        **keywords: Any,
    ) -> None:
        """Build the trainer, and attach its model.

        Args:
            planner, cluster, profile, budget_gib, max_length: see `PlannedSteps`.
            sharding: "full": FSDP2 shards parameters and states of the optimiser over all ranks; with bf16=True
                trained parameters are in float32, and layers compute with them in bfloat16. Checkpoints are those of
                an unsharded run. "none": every rank has all of them.
            args, keywords: of the trainer.
        """
        self._sharding = sharding
        super().__init__(*args, **keywords)
        host: Any = self
        check_trainer(host, sharding)
        check_cross_entropy(host)
        options: dict[str, Any] = {"seed": host.args.seed, "recompute": not host.args.gradient_checkpointing}
        if sharding != "none":
            mixed = host.accelerator.mixed_precision != "no"
            for parameter in host.model.parameters():
                if mixed and parameter.requires_grad:
                    parameter.data = parameter.data.float()
            options |= {"sharding": sharding, "shard_device": host.args.device}
            options |= {"compute_dtype": torch.bfloat16 if mixed else None}
        self.planned_steps = PlannedSteps(host.model, planner, cluster, profile, budget_gib, max_length, **options)
        if sharding != "none":
            host.is_distributed_loading_by_transformers = True  # accelerate leaves placement and gradients alone
            host.model.register_load_state_dict_pre_hook(_shard_loaded_parameters)
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

    # Sharded parameters: checkpoints hold them whole, as those of an unsharded run.

    def _move_model_to_device(self, model: torch.nn.Module, device: torch.device) -> None:
        """Leave a model that will be sharded where it is: its shards go to the device."""
        if self._sharding == "none":
            super()._move_model_to_device(model, device)  # pyrefly: ignore[missing-attribute]

    def create_optimizer(self, model: Any = None) -> Any:
        """Create the optimiser; a state that it loads is cut like its parameters."""
        optimizer = super().create_optimizer(model)  # pyrefly: ignore[missing-attribute]
        if self._sharding != "none":
            optimizer.register_load_state_dict_pre_hook(_shard_loaded_state)
        return optimizer

    def _has_mixed_mesh_grads(self, model: torch.nn.Module) -> bool:
        """Whether a gradient norm is summed over ranks, see `Trainer`."""
        return self._sharding != "none" or super()._has_mixed_mesh_grads(model)  # pyrefly: ignore[missing-attribute]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write both; all ranks gather the state of the optimiser."""
        host: Any = self
        if self._sharding == "none":
            super()._save_optimizer_and_scheduler(output_dir)  # pyrefly: ignore[missing-attribute]
            return
        state = tree_map(_whole, host.optimizer.state_dict())
        if host.args.should_save:
            torch.save(state, Path(output_dir) / OPTIMIZER_NAME)
            torch.save(host.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model; all ranks gather it."""
        host: Any = self
        if self._sharding == "none":
            super().save_model(output_dir, _internal_call)  # pyrefly: ignore[missing-attribute]
            return
        state = {name: _whole(value) for name, value in host.model.state_dict().items()}
        if host.args.should_save:
            host._save(output_dir, state_dict=state)
        if host.args.push_to_hub and not _internal_call:
            host.push_to_hub(commit_message="Model save", revision=host.args.hub_revision)


class SeqloomTrainer(PlannedTraining, Trainer):
    """`transformers.Trainer` whose steps run under plans; without a collator it packs the documents of a batch."""

    def __init__(self, model: Any = None, args: Any = None, data_collator: Any = None, *rest: Any, **keywords: Any):
        """See `PlannedTraining`."""
        super().__init__(model, args, data_collator or DataCollatorWithFlattening(), *rest, **keywords)


def check_trainer(host: Any, sharding: str = "none") -> None:
    """Refuse settings of a trainer under which no plan can run, or with another result, each by name."""
    args, mixed = host.args, host.accelerator.mixed_precision
    config = getattr(host.accelerator, "parallelism_config", None)
    optimiser = str(getattr(args.optim, "value", args.optim))
    refuse(
        host,
        {
            "deepspeed": (host.is_deepspeed_enabled, "it owns parameters and backward; leave it out"),
            "fsdp": (
                bool(args.fsdp) or getattr(host.accelerator.state, "fsdp_plugin", None) is not None,
                "it divides documents by ranks, where plans divide tokens; give the trainer sharding='full' instead",
            ),
            "parallelism_config": (config is not None, "plans decide how sequences are divided; leave it out"),
            mixed: (
                mixed not in ("no", "bf16") or (mixed == "bf16" and sharding == "none"),
                f"layers compute in the dtype of the parameters that a rank has; set {mixed}=False and load the model "
                "in bfloat16, or bf16=True and sharding='full', whose shards are in float32 and gathered in bfloat16",
            ),
            "optimizers": (
                sharding != "none" and host.optimizer is not None,
                "its parameters were sharded meanwhile; give optim or optimizer_cls_and_kwargs",
            ),
            "several GPUs in one process": (args.n_gpu > 1, "start a process for each GPU: torchrun --nproc-per-node"),
            "torch_compile": (args.torch_compile, "a compiled model does not see its context; leave it out"),
            "use_liger_kernel": (args.use_liger_kernel, "the loss is computed in chunks here; leave it out"),
            "neftune_noise_alpha": (bool(args.neftune_noise_alpha), "its noise would depend on the plan; leave it out"),
            f"optim={optimiser}": (
                optimiser.endswith(("lomo", "layerwise")),
                "it updates parameters inside the backward, before gradients are summed over ranks; use another",
            ),
        },
    )


def check_cross_entropy(host: Any) -> None:
    """Refuse settings of a trainer whose batches or loss would be others than those of `PlannedTraining`."""
    args = host.args
    refuse(
        host,
        {
            "label_smoothing_factor": (args.label_smoothing_factor > 0, "the loss is cross entropy; set it to 0"),
            "compute_loss_func": (host.compute_loss_func is not None, "the loss is cross entropy; leave it out"),
            "split_batches": (host.accelerator.split_batches, "every rank reads whole batches; leave it out"),
            "train_sampling_strategy": (
                args.train_sampling_strategy == "batch_rebalance",
                "it gives every rank documents of its own, where plans divide those of all; use random or "
                "group_by_length",
            ),
            "loss_type": (getattr(args, "loss_type", "nll") not in ("nll", "chunked_nll"), "use nll"),
        },
    )


def refuse(host: Any, refused: dict[str, tuple[bool, str]]) -> None:
    """Refuse the first setting that is found: name -> (whether it is, the reason and the way out)."""
    for name, (found, way_out) in refused.items():
        if found:
            raise SeqloomError(f"{type(host).__name__} with {name}: {way_out}")


def _whole(value: Any) -> Any:
    """Return a sharded tensor gathered, in host memory; anything else as it is."""
    return full_tensor(value.detach()).cpu() if isinstance(value, DTensor) else value


def _cut_like(value: torch.Tensor, parameter: DTensor) -> DTensor:
    """Return a tensor that every rank has, sharded like a parameter."""
    return distribute_tensor(
        value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )


def _shard_loaded_parameters(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Cut the values that a sharded model loads."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        value = state.get(prefix + name)
        if isinstance(parameter, DTensor) and value is not None and not isinstance(value, DTensor):
            state[prefix + name] = _cut_like(value, parameter)


def _shard_loaded_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Cut the state that an optimiser of sharded parameters loads, where it has their shape."""
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    cut = dict(state["state"])
    for number, parameter in zip(numbers, parameters, strict=True):
        cut[number] = {
            key: _cut_like(value, parameter)
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and isinstance(parameter, DTensor)
            else value
            for key, value in cut.get(number, {}).items()
        }
    return {**state, "state": cut}


def _take(batches: Iterator[Any], count: int) -> list[Any]:
    """Return the next batches, fewer at the end."""
    return [batch for _, batch in zip(range(count), batches, strict=False)]
