"""`SFTTrainer` of TRL whose steps run under plans, packing included: TRL refuses packing with sequence parallelism.

    trainer = SeqloomSFTTrainer(model, SFTConfig(folder, packing=True, bf16=False), train_dataset=dataset)
    trainer.train()                                # torchrun --nproc-per-node 8 script.py

TRL packs documents into rows, which save padding; a plan takes them out of their rows again, and gives each the ranks
that suit its length. The loss is TRL's `nll`: of all labels of a step, over their number. Evaluation is TRL's own.
"""

from __future__ import annotations

from typing import Any

import torch

from seqloom.errors import SeqloomError
from seqloom.integrations.transformers.trainer import PlannedTraining

try:
    from trl import SFTTrainer
except ImportError as error:
    raise SeqloomError(f"seqloom.integrations.trl needs TRL ({error}); run: pip install trl") from None


class SeqloomSFTTrainer(PlannedTraining, SFTTrainer):
    """`trl.SFTTrainer` whose steps run under plans; arguments beyond TRL's are those of `PlannedTraining`.

    Of the metrics that TRL adds to its logs there is `num_tokens`. Entropy and accuracy need the logits of every token.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        """See `PlannedTraining`."""
        settings = keywords.get("args", args[1] if len(args) > 1 else None)
        if getattr(settings, "activation_offloading", False):
            raise SeqloomError(
                "SeqloomSFTTrainer with activation_offloading: plans decide which activations are in host memory; "
                "leave it out, or give budget_gib"
            )
        super().__init__(*args, **keywords)

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
        """Count the tokens of a batch, which every rank has; then see `PlannedTraining.training_step`."""
        mask = inputs.get("attention_mask")
        self._total_train_tokens += int(inputs["input_ids"].numel() if mask is None else mask.sum())
        self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return super().training_step(model, inputs, num_items_in_batch)
