"""Optimisers over named parameters, whole or sharded; the learning rate; state by parameter name.

The learning rate is a pure function of the step, so a resumed run needs no state of it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
    matrices = {name for name, each in parameters.items() if each.ndim >= 2}
    hidden_matrices = {name for name in hidden if parameters[name].ndim == 2}
    special = {"muon": hidden_matrices, "adamw8bit": matrices}.get(settings.name, set())
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": settings.weight_decay, "special": True},
        {"params": [], "weight_decay": settings.weight_decay, "special": False},
        {"params": [], "weight_decay": 0.0, "special": False},
    ]
    for name, parameter in parameters.items():
        groups[0 if name in special else 1 if name in matrices else 2]["params"].append((name, parameter))
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
    if settings.name == "adamw8bit":
        return AdamW8bit(groups, fused=fused, **rates)
    return torch.optim.AdamW(groups, fused=fused, **rates)


class MatrixOptimiser(torch.optim.AdamW, ABC):
    """AdamW that updates the matrices of its special groups in another way.

    Attributes:
        names: of the state of such a matrix.
    """

    names: tuple[str, ...]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # pyrefly: ignore[bad-override]
        """Update all parameters that have a gradient. All ranks with shards of the same matrices call it."""
        everything = self.param_groups
        for group in everything:
            for parameter in group["params"] if group["special"] else ():
                if parameter.grad is not None:
                    if not self.state[parameter]:
                        self.state[parameter] = self.empty_state(parameter)
                    self.update(parameter, parameter.grad, self.state[parameter], group)
        self.param_groups = [group for group in everything if not group["special"]]
        try:
            super().step()
        finally:
            self.param_groups = everything

    @abstractmethod
    def empty_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Return the state of a special matrix that was never updated."""

    @abstractmethod
    def update(
        self, parameter: nn.Parameter, gradient: torch.Tensor, state: dict[str, Any], group: Mapping[str, Any]
    ) -> None:
        """Update a special matrix and its state in place."""


class Muon(MatrixOptimiser):
    """Muon over the matrices of special groups.

    The update of a matrix is orthogonal, which follows from the whole of it: ranks gather it, each computes the same,
    and takes what it has shards of. So updates are those of `torch.optim.Muon` in one process, wherever shards are.
    They are as large as those of AdamW (torch's "match_rms_adamw"), so that one learning rate serves both.
    """

    names = _MOMENTUM

    def __init__(self, groups: list[dict[str, Any]], *, momentum: float, **settings: Any) -> None:
        """Take groups with a key "special"; `settings` are AdamW's."""
        super().__init__(groups, **settings)
        self._momentum = momentum

    def empty_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """See `MatrixOptimiser.empty_state`: a mean of gradients."""
        return zero_state(parameter, _MOMENTUM)

    def update(
        self, parameter: nn.Parameter, gradient: torch.Tensor, state: dict[str, Any], group: Mapping[str, Any]
    ) -> None:
        """See `MatrixOptimiser.update`."""
        mean = state["momentum_buffer"].lerp_(gradient, 1 - self._momentum)
        whole = newton_schulz(full_tensor(gradient.lerp(mean, self._momentum)))
        own = local_tensor(parameter)
        start = shard_offset(parameter) if isinstance(parameter, DTensor) else (0, 0)
        rows, columns = (slice(first, first + size) for first, size in zip(start, own.shape, strict=True))
        own.mul_(1 - group["lr"] * group["weight_decay"])
        own.add_(whole[rows, columns], alpha=-group["lr"] * _RMS * math.sqrt(max(parameter.shape)))


class AdamW8bit(MatrixOptimiser):
    """AdamW with moments of a byte for each element of a matrix, 2.03 bytes for both instead of 8.

    A moment is a code of `DYNAMIC_CODES` times the largest magnitude in its block, of up to 256 elements of one row.
    Blocks do not cross rows, and shards are whole rows: so moments do not depend on the number of ranks.
    """

    names = ("step", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")

    def __init__(self, groups: list[dict[str, Any]], **settings: Any) -> None:
        """Take groups with a key "special"; `settings` are AdamW's."""
        super().__init__(groups, **settings)
        for group in self.param_groups:
            for name, parameter in zip(group.get("param_names", ()), group["params"], strict=True):
                if group["special"] and _cuts_rows(parameter):
                    raise SeqloomError(
                        f"optimiser.name = 'adamw8bit': rows of {name} are cut, so blocks of its moments would depend "
                        "on the number of ranks; set plan.tensor and plan.expert to 1, or name to 'adamw'"
                    )

    def empty_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """See `MatrixOptimiser.empty_state`: codes and scales of both moments."""
        codes = [torch.zeros_like(parameter, dtype=torch.uint8, requires_grad=False) for _ in range(2)]
        first, second = codes
        scales = [_zero_scales(parameter) for _ in range(2)]
        step = torch.zeros((), dtype=torch.float32)
        return dict(zip(self.names, (step, first, scales[0], second, scales[1]), strict=True))

    def update(
        self, parameter: nn.Parameter, gradient: torch.Tensor, state: dict[str, Any], group: Mapping[str, Any]
    ) -> None:
        """See `MatrixOptimiser.update`; a few rows at a time, whose moments are decoded meanwhile."""
        state["step"] += 1
        count, (beta1, beta2), lr = float(state["step"]), group["betas"], group["lr"]
        tensors = (parameter, gradient, *(state[name] for name in self.names[1:]))
        local = [local_tensor(each.detach()) for each in tensors]
        rows = max(1, _DECODED // max(1, math.prod(local[0].shape[1:])))
        for own, slope, *moments in zip(*(each.split(rows) for each in local), strict=True):
            mean = decode(moments[0], moments[1], slope.dtype, signed=True).lerp_(slope, 1 - beta1)
            square = decode(moments[2], moments[3], slope.dtype, signed=False).mul_(beta2)
            square.addcmul_(slope, slope, value=1 - beta2)
            encode(mean, moments[0], moments[1], signed=True)
            encode(square, moments[2], moments[3], signed=False)
            own.mul_(1 - lr * group["weight_decay"])
            root = square.sqrt_().div_(math.sqrt(1 - beta2**count)).add_(group["eps"])
            own.addcdiv_(mean, root, value=-lr / (1 - beta1**count))


def _dynamic_codes(*, signed: bool) -> tuple[float, ...]:
    """Return 256 values in ascending order, finer towards 0 by decades: the dynamic code of 8-bit optimisers."""
    values = [0.0, 1.0]
    for decade in range(7):
        count = 2**decade if signed else 2 ** (decade + 1)
        middles = [0.1 + 0.9 * (k + 0.5) / count for k in range(count)]
        values += [sign * 10.0 ** (decade - 6) * each for each in middles for sign in ((1, -1) if signed else (1,))]
    return tuple(sorted(values))


DYNAMIC_CODES = {signed: _dynamic_codes(signed=signed) for signed in (True, False)}
"""Values that a code stands for, at most 1: of means, which have a sign, and of squares."""
BLOCK = 256
"""Elements of a row with one scale."""
_DECODED = 1 << 24
"""Elements whose moments are decoded at a time."""


def decode(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, *, signed: bool) -> torch.Tensor:
    """Return the values of codes, uint8[.., n], by scales, float32[.., blocks]."""
    table = torch.tensor(DYNAMIC_CODES[signed], dtype=dtype, device=codes.device)
    return table[codes.long()] * _of_elements(scales.to(dtype), codes.shape[-1])


def encode(values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, *, signed: bool) -> None:
    """Write values as the nearest codes, by the largest magnitude of every block; a square above 0 stays above 0."""
    width, table = values.shape[-1], torch.tensor(DYNAMIC_CODES[signed], dtype=values.dtype, device=values.device)
    padded = nn.functional.pad(values.abs(), (0, -width % BLOCK))
    scales.copy_(padded.unflatten(-1, (-1, BLOCK)).amax(-1))
    spread = _of_elements(scales.to(values.dtype), width)
    relative = values / spread.where(spread > 0, 1)  # a block of zeros has scale 0
    nearest = torch.bucketize(relative, (table[1:] + table[:-1]) / 2)
    codes.copy_(nearest if signed else nearest.clamp(min=1).where(values > 0, nearest))


def _cuts_rows(parameter: nn.Parameter) -> bool:
    """Whether shards of a matrix have parts of rows."""
    last = parameter.ndim - 1
    return isinstance(parameter, DTensor) and any(each.is_shard(last) for each in parameter.placements)


def _of_elements(scales: torch.Tensor, width: int) -> torch.Tensor:
    """Repeat the scale of every block for its elements."""
    return scales.repeat_interleave(BLOCK, dim=-1)[..., :width]


def _zero_scales(parameter: nn.Parameter) -> torch.Tensor:
    """Return scales of zero for the blocks of a matrix, sharded as it is."""
    blocks = -(-parameter.shape[-1] // BLOCK)
    local = local_tensor(parameter.detach())
    scales = torch.zeros((*local.shape[:-1], blocks), dtype=torch.float32, device=local.device)
    if not isinstance(parameter, DTensor):
        return scales
    shape = torch.Size((*parameter.shape[:-1], blocks))
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    options = {"run_check": False, "shape": shape, "stride": strides}
    return DTensor.from_local(scales, parameter.device_mesh, parameter.placements, **options)


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


def zero_state(parameter: nn.Parameter, names: Sequence[str], *, fused: bool = False) -> dict[str, torch.Tensor]:
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
        special = isinstance(optimiser, MatrixOptimiser) and group["special"]
        names = optimiser.names if isinstance(optimiser, MatrixOptimiser) and special else _ADAMW
        if isinstance(optimiser, torch.optim.SGD):
            names = _MOMENTUM if group["momentum"] else ()
        for name, parameter in zip(group.get("param_names", ()), group["params"], strict=True):
            state = optimiser.state[parameter]
            if not state and isinstance(optimiser, MatrixOptimiser) and special:
                state.update(optimiser.empty_state(parameter))
            elif not state:
                state.update(zero_state(parameter, names, fused=bool(group["fused"])))
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
