"""Experts of transformers models, computed with `models.experts`: grouped products, divided over EP groups.

Transformers looks the forward of an expert module up by name, as it does attention. `attach_experts` registers ours and
switches a model to it. What an expert computes stays the model's own: its weights, its gate or activation, its biases.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import nn

from seqloom.integrations.transformers.checks import decoder_layers
from seqloom.models.experts import (
    ExpertLoad,
    ExpertRange,
    ExpertScope,
    divide_experts,
    grouped_linear,
    run_experts,
)
from seqloom.models.layer_wrapper import EXPERTS, LayerWrapper

BIASES = ("e_score_correction_bias", "expert_bias")
"""Names of what routers add to scores only to choose experts, and what no gradient moves."""
NEEDED = ("down_proj", "is_transposed", "has_bias", "has_gate", "num_experts")
"""What an expert module that looks its forward up has."""


def attach_experts(causal: Any, name: str) -> None:
    """Make the experts of a model compute with `experts_function`, registered as `name`, if they can be exchanged."""
    try:
        from transformers.integrations.moe import ExpertsInterface
    except ImportError:  # an older release: experts are the model's own code, on every rank
        return
    if not causal._can_set_experts_implementation() or expert_load(causal) is not None:
        return
    ExpertsInterface.register(name, experts_function)
    causal.set_experts_implementation(name)
    divide_experts(decoder_layers(causal), dict(attached_experts(causal, name)).get)


def attached_experts(causal: Any, name: str) -> tuple[tuple[nn.Module, int], ...]:
    """Return the modules of experts that compute with what is registered as `name`, and how many experts each has."""
    known = (cast("Any", module) for module in causal.modules() if all(hasattr(module, key) for key in NEEDED))
    return tuple((each, int(each.num_experts)) for each in known if each.config._experts_implementation == name)


def expert_load(causal: Any) -> ExpertLoad | None:
    """Return what counts the tokens of a model's experts; None: nothing does."""
    scopes = (LayerWrapper.of(layer).scopes.get(EXPERTS) for layer in decoder_layers(causal))
    return next((scope.load for scope in scopes if isinstance(scope, ExpertScope)), None)


def expert_biases(model: nn.Module, causal: Any, name: str) -> tuple[str, ...]:
    """Return, for every module of experts, the name in `model` of the correction bias of its router; "": none."""
    buffers = {id(buffer): where for where, buffer in model.named_buffers()}
    parents = {id(child): parent for parent in causal.modules() for child in parent.children()}
    found = []
    for module, count in attached_experts(causal, name):
        beside = parents[id(module)].named_buffers()
        biases = [each for where, each in beside if where.endswith(BIASES) and each.shape == (count,)]
        found.append(buffers[id(biases[0])] if biases else "")
    return tuple(found)


def experts_function(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute the experts of one layer: the weighted sum of those of every token, [tokens, hidden].

    Args:
        module: of the experts; `expert_range` says which are this rank's.
        hidden_states: [tokens, hidden].
        top_k_index: int64[tokens, top_k].
        top_k_weights: [tokens, top_k].
    """
    experts: ExpertRange = getattr(module, "expert_range", None) or ExpertRange(
        module.num_experts, range(module.num_experts)
    )
    first = "gate_up_proj" if module.has_gate else "up_proj"
    into, out_of = (_Projection.of(module, name, experts) for name in (first, "down_proj"))

    def compute(rows: torch.Tensor, expert: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        inner = into(rows, expert, ends)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        out = out_of(inner, expert, ends)
        has_norm = getattr(module, "has_post_expert_norm", False)  # transformers 5.17 knows of none
        return module.post_expert_norm(out) if has_norm else out

    return run_experts(hidden_states, top_k_index, top_k_weights, experts, compute)


class _Projection(NamedTuple):
    """A projection of all experts of this rank.

    Attributes:
        weight: [experts, out, in].
        bias: [experts, out]; None: there is none.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def of(cls, module: Any, name: str, experts: ExpertRange) -> _Projection:
        weight = experts.in_hand(getattr(module, name))
        bias = experts.in_hand(getattr(module, f"{name}_bias")) if module.has_bias else None
        return cls(weight.transpose(1, 2) if module.is_transposed else weight, bias)

    def __call__(self, rows: torch.Tensor, expert: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        out = grouped_linear(rows, self.weight, ends)
        return out if self.bias is None else out + self.bias.index_select(0, expert)
