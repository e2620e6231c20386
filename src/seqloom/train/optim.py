"""AdamW over named parameters, on the device or in host memory, the learning rate, and state by parameter name.

The learning rate is a pure function of the step, so a resumed run needs no state of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from seqloom.errors import SeqloomError
from seqloom.params.host_adamw import HostAdamW

if TYPE_CHECKING:
    from seqloom.train.config import Optimiser, Schedule


_STATE = ("step", "exp_avg", "exp_avg_sq")
"""torch's names of AdamW's state: steps, and the moments in the order of the betas."""
_FUSED = ("cpu", "cuda")
"""Devices where torch updates all parameters in one kernel."""


def make_optimiser(
    parameters: Mapping[str, nn.Parameter],
    settings: Optimiser,
    *,
    shards: Mapping[str, nn.Parameter] | None = None,
    update_on_host: bool = False,
    threads: int | None = None,
) -> torch.optim.AdamW:
    """Make AdamW over full tensors or shards: matrices with weight decay, all others (norms, biases) without.

    Args:
        parameters: master weights by name.
        shards: what the device has of them, where they are in host memory; None: they are on the device.
        update_on_host, threads: see `HostAdamW`.
    """
    if not parameters:
        raise SeqloomError("no parameter is to be trained; unfreeze some, or choose another model")
    matrices = [(name, parameter) for name, parameter in parameters.items() if parameter.ndim >= 2]
    others = [(name, parameter) for name, parameter in parameters.items() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    rates: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}
    if shards is not None:
        return HostAdamW(groups, shards, update_on_host=update_on_host, threads=threads, **rates)
    fused = all(parameter.device.type in _FUSED for parameter in parameters.values())
    return torch.optim.AdamW(groups, fused=fused, **rates)


def set_learning_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Give all groups the rate of the next step."""
    for group in optimiser.param_groups:
        group["lr"] = rate


def is_usable(loss: float, norm: float) -> bool:
    """Whether a step has a gradient to update by: numbers, and not all of them zero where there is a loss.

    A value that overflows inside a norm ends in a finite loss whose gradient is zero everywhere.
    """
    return math.isfinite(loss) and math.isfinite(norm) and (norm > 0 or loss == 0)


def check_gradients(loss: float, norm: float) -> None:
    """Refuse to update parameters by gradients that are no numbers, or zero although there is a loss."""
    if not is_usable(loss, norm):
        raise SeqloomError(
            f"the loss is {loss:g} and the gradient's norm {norm:g}; nothing was updated. Lower optimiser.lr, lengthen "
            "schedule.warmup, or look for a bad document in this step"
        )


def state_by_name(optimiser: torch.optim.AdamW) -> dict[str, dict[str, torch.Tensor]]:
    """Return the optimiser's own state tensors by parameter name: `step` and the two moments.

    A parameter that was never updated gets the state it starts with. So what a checkpoint loads into these tensors is
    what the next step continues from, and does not depend on an order of parameters.
    """
    states: dict[str, dict[str, torch.Tensor]] = {}
    for group in optimiser.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            state = optimiser.state[parameter]
            if not state:
                device = parameter.device if group["fused"] else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                for moment in _STATE[1:]:
                    state[moment] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            states[name] = {key: state[key] for key in _STATE}
    return states


def learning_rate(step: int, *, steps: int, peak: float, schedule: Schedule) -> float:
    """Return the learning rate of step `step`.

    With warm-up the rate rises linearly to its peak at step `warmup`; without, the peak is at step 1. From there it
    falls to `final * peak` at step `steps`: along half a cosine, along a line, or (constant) not at all. Steps after
    the last have its rate.
    """
    if step < 1 or steps < 1:
        raise SeqloomError(f"step {step} of {steps}; steps are counted from 1")
    peak_step = max(schedule.warmup, 1)
    if step < peak_step:
        return peak * step / peak_step
    if schedule.kind == "constant":
        return peak
    progress = min(1.0, (step - peak_step) / (steps - peak_step)) if steps > peak_step else 0.0
    left = 1 - progress if schedule.kind == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return peak * (schedule.final + (1 - schedule.final) * left)
