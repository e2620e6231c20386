"""AdamW over named parameters, and its state by the same names, so that a checkpoint does not depend on an order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from seqloom.errors import SeqloomError

if TYPE_CHECKING:
    from seqloom.train.config import Optimiser, Schedule


MOMENTS = ("exp_avg", "exp_avg_sq")
"""torch's names of the running means, in the order of the betas."""
_FUSED = ("cpu", "cuda")
"""Where torch updates all parameters in one kernel."""


def make_optimiser(parameters: Mapping[str, nn.Parameter], settings: Optimiser) -> torch.optim.AdamW:
    """Make AdamW with two groups: matrices with weight decay, all others (norms, biases) without.

    Args:
        parameters: what is updated, by canonical name: whole tensors or shards.
        settings: of the config.
    """
    if not parameters:
        raise SeqloomError("no parameter is to be trained; unfreeze some, or choose another model")
    decayed = [(name, parameter) for name, parameter in parameters.items() if parameter.ndim >= 2]
    plain = [(name, parameter) for name, parameter in parameters.items() if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    fused = all(parameter.device.type in _FUSED for parameter in parameters.values())
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        fused=fused,
    )


def set_learning_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Give all groups the rate of the step to come."""
    for group in optimiser.param_groups:
        group["lr"] = rate


def clip_factor(norm: float, limit: float) -> float:
    """Return what gradients of this norm are multiplied with so that it is at most `limit`; a limit of 0 is none."""
    if not math.isfinite(norm):
        raise SeqloomError(
            f"the gradient's norm is {norm}; nothing was updated. Lower optimiser.lr, lengthen schedule.warmup, or "
            "look for a bad document in this step"
        )
    return min(1.0, limit / norm) if limit and norm else 1.0


def named_state(optimiser: torch.optim.AdamW) -> dict[str, dict[str, torch.Tensor]]:
    """Return the state of every parameter by its name: `step` and the two moments, the optimiser's own tensors.

    A parameter that was not updated yet gets the state it begins with. So what is copied into these tensors, as a
    checkpoint is loaded, is what the next step goes on from.
    """
    states: dict[str, dict[str, torch.Tensor]] = {}
    for group in optimiser.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            state = optimiser.state[parameter]
            if not state:
                device = parameter.device if group["fused"] else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                for moment in MOMENTS:
                    state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            states[name] = {key: state[key] for key in ("step", *MOMENTS)}
    return states


# ---- merged: train.schedule
# The learning rate of a step: a pure function, so that a resumed run needs no state of it.


def learning_rate(step: int, *, steps: int, peak: float, schedule: Schedule) -> float:
    """Return the rate of step `step`.

    With warm-up the rate rises evenly and has its peak at step `warmup`; without, at step 1. From there it falls to
    `final * peak` at step `steps`: along half a cosine, along a line, or (constant) not at all. Steps beyond the last
    keep its rate.

    Args:
        step: from 1.
        steps: of the whole run.
        peak: the highest rate.
        schedule: kind, warm-up and final share.
    """
    if step < 1 or steps < 1:
        raise SeqloomError(f"step {step} of {steps}; steps are counted from 1")
    first = max(schedule.warmup, 1)  # the step that has all of the rate
    if step < first:
        return peak * step / first
    if schedule.kind == "constant":
        return peak
    passed = min(1.0, (step - first) / (steps - first)) if steps > first else 0.0
    left = 1 - passed if schedule.kind == "linear" else (1 + math.cos(math.pi * passed)) / 2
    return peak * (schedule.final + (1 - schedule.final) * left)
