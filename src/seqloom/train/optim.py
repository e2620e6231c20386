"""Optimisers over named parameters, whole or sharded; the learning rate; state by parameter name.

The learning rate is a pure function of the step, so a resumed run needs no state of it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from seqloom.compat import newton_schulz, shard_offset
from seqloom.errors import SeqloomError
from seqloom.params.host_adamw import HostAdamW
from seqloom.params.interface import full_tensor, local_tensor

if TYPE_CHECKING:
    from seqloom.train.config import Optimiser, Schedule


MOMENTUM = 0.95
"""Of Muon, where a config gives none; torch's."""
_ADAMW, _MOMENTUM = ("step", "exp_avg", "exp_avg_sq"), ("momentum_buffer",)
"""torch's names of optimisers' state. AdamW's: steps, and the moments in the order of the betas."""
_FUSED = ("cpu", "cuda")
"""Devices where torch updates all parameters in one kernel."""
_RMS = 0.2
"""Root mean square of AdamW's updates, about, to which those of Muon are scaled."""


def make_optimiser(
    parameters: Mapping[str, nn.Parameter],
    settings: Optimiser,
    *,
    hidden: Collection[str] = (),
    shards: Mapping[str, nn.Parameter] | None = None,
    update_on_host: bool = False,
    threads: int | None = None,
) -> torch.optim.Optimizer:
    """Make an optimiser over full tensors or shards: matrices with weight decay, all others (norms, biases) without.

    Args:
        parameters: master weights by name; perhaps none, on the ranks of a stage that is frozen.
        settings: say which.
        hidden: names of what layers hold, whose matrices Muon updates.
        shards: what the device has of them, where they are in host memory; None: they are on the device.
        update_on_host, threads: see `HostAdamW`.
    """
    orthogonal = {name for name in hidden if settings.name == "muon" and parameters[name].ndim == 2}
    decay = settings.weight_decay
    kinds = (
        ({"weight_decay": decay, "muon": True}, lambda name, each: name in orthogonal),
        ({"weight_decay": decay, "muon": False}, lambda name, each: name not in orthogonal and each.ndim >= 2),
        ({"weight_decay": 0.0, "muon": False}, lambda name, each: each.ndim < 2),
    )
    groups = [kind | {"params": [each for each in parameters.items() if belongs(*each)]} for kind, belongs in kinds]
    groups = [group for group in groups if group["params"]] or groups[:1]
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=settings.lr, momentum=settings.momentum or 0.0)
    rates: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}
    if shards is not None:
        return HostAdamW(groups, shards, update_on_host=update_on_host, threads=threads, **rates)
    fused = all(parameter.device.type in _FUSED for parameter in parameters.values())
    if settings.name == "muon":
        momentum = MOMENTUM if settings.momentum is None else settings.momentum
        return Muon(groups, momentum=momentum, fused=fused, **rates)
    return torch.optim.AdamW(groups, fused=fused, **rates)


class Muon(torch.optim.AdamW):
    """Muon over the matrices of groups that say so, AdamW over all else.

    The update of a matrix is orthogonal, which follows from the whole of it: ranks gather it, each computes the same,
    and takes what it has shards of. So updates are those of `torch.optim.Muon` in one process, wherever shards are.
    They are as large as those of AdamW (torch's "match_rms_adamw"), so that one learning rate serves both.
    """

    def __init__(self, groups: list[dict[str, Any]], *, momentum: float, **settings: Any) -> None:
        """Take groups with a key "muon"; `settings` are AdamW's."""
        super().__init__(groups, **settings)
        self._momentum = momentum

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # pyrefly: ignore[bad-override]
        """Update all parameters that have a gradient. All ranks with shards of the same matrices call it."""
        everything = self.param_groups
        for group in everything:
            for parameter in group["params"] if group["muon"] else ():
                if parameter.grad is not None:
                    self._update(parameter, group)
        self.param_groups = [group for group in everything if not group["muon"]]
        try:
            super().step()
        finally:
            self.param_groups = everything

    def _update(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        gradient, state = cast("torch.Tensor", parameter.grad), self.state[parameter]
        if not state:
            state.update(empty_state(parameter, _MOMENTUM))
        mean = state["momentum_buffer"].lerp_(gradient, 1 - self._momentum)
        whole = newton_schulz(full_tensor(gradient.lerp(mean, self._momentum)))
        own = local_tensor(parameter)
        start = shard_offset(parameter) if isinstance(parameter, DTensor) else (0, 0)
        rows, columns = (slice(first, first + size) for first, size in zip(start, own.shape, strict=True))
        own.mul_(1 - group["lr"] * group["weight_decay"])
        own.add_(whole[rows, columns], alpha=-group["lr"] * _RMS * math.sqrt(max(parameter.shape)))


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


def empty_state(parameter: nn.Parameter, names: Sequence[str], *, fused: bool = False) -> dict[str, torch.Tensor]:
    """Return the state of a parameter that was never updated: `step` and means of zero."""
    step_device = parameter.device if fused else "cpu"
    return {
        name: torch.zeros((), dtype=torch.float32, device=step_device)
        if name == "step"
        else torch.zeros_like(parameter, memory_format=torch.preserve_format)
        for name in names
    }


def state_by_name(optimiser: torch.optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Return the optimiser's own state tensors by parameter name, such as `step` and the two moments of AdamW.

    A parameter that was never updated gets the state it starts with. So what a checkpoint loads into these tensors is
    what the next step continues from, and does not depend on an order of parameters.
    """
    states: dict[str, dict[str, torch.Tensor]] = {}
    for group in optimiser.param_groups:
        if isinstance(optimiser, torch.optim.SGD):
            names = _MOMENTUM if group["momentum"] else ()
        else:
            names = _MOMENTUM if group.get("muon") else _ADAMW
        for name, parameter in zip(group.get("param_names", ()), group["params"], strict=True):
            state = optimiser.state[parameter]
            if not state:
                state.update(empty_state(parameter, names, fused=bool(group["fused"])))
            states[name] = {key: state[key] for key in names}
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
