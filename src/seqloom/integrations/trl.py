"""Trainers of TRL whose steps run under plans: `SFTTrainer`, packing included, `DPOTrainer` and `GRPOTrainer`.

    trainer = SeqloomSFTTrainer(model, args=SFTConfig(folder, packing=True, bf16=False), train_dataset=dataset)
    trainer = SeqloomDPOTrainer(model, args=DPOConfig(folder, bf16=False), train_dataset=pairs)
    trainer = SeqloomGRPOTrainer(model, reward, args=GRPOConfig(folder, bf16=False), train_dataset=prompts)
    trainer.train()                                # torchrun --nproc-per-node 8 script.py

SFT: TRL packs documents into rows, which save padding; a plan takes them out of their rows again, and gives each the
ranks that suit its length. The loss is TRL's `nll`: of all labels of a step, over their number. Evaluation is TRL's.

DPO and GRPO: TRL's losses ask a model for the log-probabilities of labels (`fused_lm_head=True`). Here the sequences of
all ranks are answered together, under one plan and without padding: a rank with the longest completion holds nobody up,
and none has to hold it alone. Losses, references, metrics, generation and rewards are TRL's own code, of each rank's
own rows; gradients are the mean over ranks, as in TRL.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

from seqloom.describe import Cluster
from seqloom.errors import SeqloomError
from seqloom.integrations.log_probs import row_log_probs
from seqloom.integrations.transformers.checks import unwrap
from seqloom.integrations.transformers.planned_steps import PlannedSteps
from seqloom.integrations.transformers.trainer import PlannedTraining, check_trainer, refuse

try:
    from trl import DPOTrainer, GRPOTrainer, SFTTrainer
    from trl.trainer.utils import FusedCausalLMOutput
except ImportError as error:
    raise SeqloomError(f"seqloom.integrations.trl needs TRL 1.16 or later ({error}); run: pip install trl") from None


class SeqloomSFTTrainer(PlannedTraining, SFTTrainer):
    """`trl.SFTTrainer` whose steps run under plans; arguments beyond TRL's are those of `PlannedTraining`.

    Of the metrics that TRL adds to its logs there is `num_tokens`. Entropy and accuracy need the logits of every token.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        """See `PlannedTraining`."""
        refuse_offloading(type(self).__name__, *args, *keywords.values())
        super().__init__(*args, **keywords)

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
        """Count the tokens of a batch, which every rank has; then see `PlannedTraining.training_step`."""
        mask = inputs.get("attention_mask")
        self._total_train_tokens += int(inputs["input_ids"].numel() if mask is None else mask.sum())
        self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return super().training_step(model, inputs, num_items_in_batch)


class PlannedLogProbs:
    """Computes the log-probabilities of a trainer of TRL, of which a class inherits after this one, under plans."""

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
        """Build the trainer, and attach its model and the reference model.

        Args:
            planner, cluster, profile, budget_gib, max_length: see `PlannedSteps`.
            args, keywords: of the trainer.
        """
        refuse_offloading(type(self).__name__, *args, *keywords.values())
        super().__init__(*args, **keywords)
        host: Any = self
        check_trainer(host)
        check_log_probs(host)
        steps = functools.partial(
            PlannedSteps,
            planner=planner,
            cluster=cluster,
            profile=profile,
            budget_gib=budget_gib,
            max_length=max_length,
            seed=host.args.seed,
            recompute=not host.args.gradient_checkpointing,
        )
        temperature = getattr(host, "temperature", 1.0)
        self.planned_steps = steps(host.model)
        plan_fused_head(self.planned_steps, temperature, statistics=True)
        if host.ref_model is not None:
            plan_fused_head(steps(host.ref_model), temperature, statistics=False)

    def compute_loss(self, model: torch.nn.Module, *args: Any, **keywords: Any) -> Any:
        """Return TRL's loss of this rank's rows, of the model itself: its gradients are joined without a wrapper."""
        host: Any = self
        return super().compute_loss(host.model, *args, **keywords)  # pyrefly: ignore[missing-attribute]


class SeqloomDPOTrainer(PlannedLogProbs, DPOTrainer):
    """`trl.DPOTrainer` whose log-probabilities are computed under plans, with all of its losses and metrics."""


class SeqloomGRPOTrainer(PlannedLogProbs, GRPOTrainer):
    """`trl.GRPOTrainer` whose log-probabilities are computed under plans, with all of its losses and metrics.

    Generation is TRL's own, of each rank's prompts. Entropies are values: a bonus for them has no gradient here.
    """

    def _get_per_token_logps_and_entropies(self, *args: Any, batch_size: int | None = None, **keywords: Any) -> Any:
        """Ask for all rows at once: one plan for them, instead of one for each batch."""
        return super()._get_per_token_logps_and_entropies(*args, **keywords)


def refuse_offloading(name: str, *given: Any) -> None:
    """Refuse the activation offloading of TRL among the arguments of a trainer, which begins while it is built."""
    if any(getattr(each, "activation_offloading", False) is True for each in given):
        raise SeqloomError(
            f"{name} with activation_offloading: plans decide which activations are in host memory; leave it out, or "
            "give budget_gib"
        )


def check_log_probs(host: Any) -> None:
    """Refuse settings of a trainer of TRL whose loss is made of more than log-probabilities."""
    args = host.args
    refuse(
        host,
        {
            "a router loss": (
                getattr(host, "aux_loss_enabled", False),
                "which loss its routers add is not known here; set router_aux_loss_coef=0.0",
            ),
            "entropy_coef": (
                getattr(host, "_entropy_bonus_enabled", False),
                "entropies have no gradient here; set entropy_coef=0.0",
            ),
            "cast_lm_head_to_fp32": (
                getattr(args, "cast_lm_head_to_fp32", False),
                "logits are computed in the dtype of the head, and their softmax in float32; leave it out",
            ),
            "use_transformers_continuous_batching": (
                getattr(args, "use_transformers_continuous_batching", False),
                "it needs attention with a paged cache; leave it out",
            ),
            "images": (getattr(host, "_is_vlm", False), "sequences of token ids alone are planned; give a tokenizer"),
        },
    )


def plan_fused_head(steps: PlannedSteps, temperature: float, *, statistics: bool) -> None:
    """Replace the `forward` that TRL has given a model: where TRL asks for log-probabilities, a plan computes them.

    Other calls, such as those of `generate()`, stay as they are.

    Args:
        steps: of the model.
        temperature: that logits are divided by.
        statistics: whether TRL reads entropies and the like.
    """
    causal = unwrap(steps.model)
    plain = causal.forward

    @functools.wraps(type(causal).forward)  # `generate()` reads its signature
    def forward(self: Any, *args: Any, fused_lm_head: bool = False, **keywords: Any) -> Any:
        if not fused_lm_head:
            return plain(*args, **keywords)
        ids, labels, mask = args[0] if args else keywords["input_ids"], keywords["labels"], keywords["attention_mask"]
        found = row_log_probs(steps, ids, labels, mask, temperature=temperature, statistics=statistics)
        return FusedCausalLMOutput(**found._asdict())

    causal.forward = types.MethodType(forward, causal)
