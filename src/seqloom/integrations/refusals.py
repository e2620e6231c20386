"""What a Hugging Face model may not have, by name: each would make the result wrong, or dependent on the plan.

`check` asks before anything runs and lists every reason with its way out. What only shows in a call (a batch, a cache,
a mask, a window that a layer does not pass on) is refused by `interface`, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from seqloom.errors import SeqloomError
from seqloom.integrations import evidence

SHOWN = 3
"""Pieces of evidence that a message shows for one reason."""

Find = Callable[[nn.Module, Any], Iterable[str]]


class Refusal(NamedTuple):
    """One reason to refuse a model.

    Attributes:
        name: of the feature.
        why: what would be wrong with the result.
        way_out: what to do instead.
        find: given the model and the language model in it, says where the feature is; nothing: not there.
    """

    name: str
    why: str
    way_out: str
    find: Find


_PLAN = "which elements are dropped would depend on the plan"
_ZERO = "load with this key of the config set to 0.0"

REFUSALS = (
    Refusal(
        "no attention interface",
        "its attention cannot be exchanged by name",
        "use a model whose class has _supports_attention_backend",
        evidence.no_interface,
    ),
    Refusal(
        "no language model head",
        "there are no logits to train",
        "load it with AutoModelForCausalLM",
        evidence.no_head,
    ),
    Refusal(
        "encoder-decoder",
        "two sequences that attend to each other are not one packed sequence",
        "use a decoder-only model",
        evidence.encoder_decoder,
    ),
    Refusal(
        "several modalities",
        "images and sounds bring masks and positions of their own",
        "load the language model alone",
        evidence.modalities,
    ),
    Refusal("cross attention", "keys come from outside the packed tokens", "use a decoder-only model", evidence.cross),
    Refusal(
        "bidirectional attention",
        "the context means causal attention",
        "use a causal model, and leave use_bidirectional_attention off",
        evidence.bidirectional,
    ),
    Refusal(
        "linear attention, convolution or state space",
        "a state that runs along the sequence is not passed between ranks",
        "use a model in which only attention mixes tokens",
        evidence.stateful,
    ),
    Refusal(
        "sparse or chunked attention",
        "only full and sliding-window attention are computed",
        "use a model with full_attention and sliding_attention layers",
        evidence.sparse,
    ),
    Refusal(
        "logit soft-cap",
        "no kernel here caps the logits of attention",
        "use a model without it, for example one with QK norm",
        evidence.softcap,
    ),
    Refusal("attention sinks", "no kernel here has them", "use a model without them", evidence.sinks),
    Refusal(
        "values of another width than keys",
        "keys and values travel as one buffer (MLA)",
        "use a model with equal widths",
        evidence.value_width,
    ),
    Refusal(
        "positions that cannot be given",
        "a rank's tokens are not the first of their documents",
        "use a model whose forward takes position_ids",
        evidence.positions,
    ),
    Refusal(
        "RoPE by the longest sequence",
        "frequencies would depend on which documents share a call",
        "use rope_type default, linear, llama3 or yarn",
        evidence.rope,
    ),
    Refusal("attention dropout", _PLAN, _ZERO, evidence.attention_dropout),
    Refusal("dropout", _PLAN, _ZERO, evidence.other_dropout),
    Refusal("LoRA dropout", _PLAN, "use LoraConfig(lora_dropout=0.0)", evidence.lora_dropout),
    Refusal(
        "virtual tokens",
        "prompt and prefix tuning add tokens that no document has",
        "use LoRA",
        evidence.virtual_tokens,
    ),
    Refusal(
        "router noise",
        "the noise would depend on the plan",
        "load with this jitter set to 0.0 in the config",
        evidence.router_noise,
    ),
    Refusal(
        "router loss",
        "its statistics are those of one call, so it would depend on the plan",
        "load with router_aux_loss_coef=0.0 and output_router_logits=False",
        evidence.router_loss,
    ),
    Refusal(
        "logits altered after the head",
        "the loss is computed from hidden states and the weight of the head, without logits",
        "use a model whose logits are hidden @ weight.T; leave the head out of adapters",
        evidence.altered_logits,
    ),
    Refusal(
        "multi-token prediction",
        "it shifts tokens across the borders of spans",
        "train the main model without it",
        evidence.multi_token,
    ),
)
"""In the order in which they are reported."""


def check(model: nn.Module) -> None:
    """Refuse a model that the engine would compute wrongly, or whose result would depend on the plan.

    Dropout counts whether the model is in training mode or not, since it will be.

    Args:
        model: of transformers, or one that peft wraps.

    Raises:
        SeqloomError: every reason, where it was found, and the way out.
    """
    causal = unwrapped(model)
    reasons = []
    for refusal in REFUSALS:
        found = list(dict.fromkeys(refusal.find(model, causal)))
        if found:
            more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            where = ", ".join(found[:SHOWN]) + more
            reasons.append(f"{refusal.name} ({where}): {refusal.why}; {refusal.way_out}")
    if reasons:
        raise SeqloomError(f"{type(causal).__name__} is refused:\n" + "\n".join(f"  - {reason}" for reason in reasons))


def unwrapped(model: nn.Module) -> Any:
    """Return the model of transformers inside what peft may have put around it."""
    inner: Any = model
    if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        inner = inner.get_base_model()
    if not isinstance(inner, PreTrainedModel):
        raise SeqloomError(
            f"{type(model).__name__} is not a model of transformers; load one with AutoModelForCausalLM, "
            "or use seqloom.models.Transformer as it is"
        )
    return inner
