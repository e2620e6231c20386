"""AdamW whose master weights and moments are in host memory, streamed a part at a time.

Every element is updated by itself, so a part may be any run of elements. Two ways, chosen by their price
(`AnalyticEngine.offloaded_update_ns`); both keep copies in flight while another part is updated:

    on the device    master and moments up  ->  update beside the gradient  ->  both down again
    on the host      gradient down  ->  update on the CPUs  ->  new parameters up

On a GPU the first gives what AdamW gives there, bit by bit; the second what it gives on a CPU. Gradients were clipped
on the device before.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from seqloom.compat import dtensor_like
from seqloom.dist.streams import stream_of
from seqloom.params.host_masters import host_empty
from seqloom.params.interface import local_tensor

PART = 1 << 24
"""Elements of a part, at most."""
MOMENTS = ("exp_avg", "exp_avg_sq")


class Part(NamedTuple):
    """A run of elements of one parameter, flat: on the device, and in host memory."""

    shard: torch.Tensor  # what layers compute with, on the device
    gradient: torch.Tensor  # on the device
    master: torch.Tensor
    moments: tuple[torch.Tensor, torch.Tensor]
    step: float  # updates before this one
    group: dict[str, Any]  # the optimiser's settings

    def update(self, values: torch.Tensor, gradient: torch.Tensor, moments: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Update values and moments in place, where these tensors are."""
        step = torch.full((), self.step, dtype=torch.float32, device=values.device)
        beta1, beta2 = self.group["betas"]
        adamw(
            *([values], [gradient], [moments[0]], [moments[1]], [], [step]),
            **{key: self.group[key] for key in ("lr", "weight_decay", "eps")},
            beta1=beta1,
            beta2=beta2,
            amsgrad=False,
            maximize=False,
            fused=True,
        )


class HostAdamW(torch.optim.AdamW):
    """AdamW over master weights in host memory; `state` is there too, so that checkpoints read and write it."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        shards: Mapping[str, nn.Parameter],
        *,
        update_on_host: bool,
        threads: int | None = None,
        **settings: Any,
    ) -> None:
        """Start with moments of zero.

        Args:
            groups: of master weights by name, as torch's optimisers take them.
            shards: what the device has of each, with its gradient; written after an update.
            update_on_host: update on the CPUs, not on the device.
            threads: of an update on the CPUs, since launchers leave a rank of a GPU one; None: as many as torch has.
            settings: of AdamW.
        """
        super().__init__(groups, fused=True, **settings)
        self._shards, self._update_on_host, self._threads = shards, update_on_host, threads
        for name, master in self._named_masters():
            rows = local_tensor(master.detach())
            pinned = local_tensor(shards[name].detach()).is_cuda
            state = self.state[master]
            state["step"] = torch.zeros((), dtype=torch.float32)
            for moment in MOMENTS:
                zeros = host_empty(rows.shape, rows.dtype, pinned=pinned).zero_()
                state[moment] = dtensor_like(cast("DTensor", master), zeros) if isinstance(master, DTensor) else zeros

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # pyrefly: ignore[bad-override]
        """Update all master weights whose shards have a gradient, and write the shards."""
        parts = list(self._parts())
        device = parts[0].shard.device if parts else torch.device("cpu")
        if device.type != "cuda":
            for part in parts:
                part.update(part.master, part.gradient, part.moments)
                part.shard.copy_(part.master)
        elif self._update_on_host:
            with cpu_threads(self._threads):
                _update_on_host(parts, device)
        else:
            _update_on_device(parts, device)
        for name, master in self._named_masters():
            if self._shards[name].grad is not None:
                self.state[master]["step"] += 1

    def _named_masters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for group in self.param_groups:
            yield from zip(group.get("param_names", ()), group["params"], strict=True)

    def _parts(self) -> Iterator[Part]:
        for group in self.param_groups:
            for name, master in zip(group.get("param_names", ()), group["params"], strict=True):
                shard = self._shards[name]
                if shard.grad is None or not local_tensor(shard.detach()).numel():
                    continue
                state = self.state[master]
                tensors = (shard.detach(), shard.grad, master.detach(), *(state[moment] for moment in MOMENTS))
                rows = [local_tensor(each).reshape(-1).split(PART) for each in tensors]
                for own, gradient, values, first, second in zip(*rows, strict=True):
                    yield Part(own, gradient, values, (first, second), float(state["step"]), group)


@contextmanager
def cpu_threads(count: int | None) -> Iterator[None]:
    """Let torch use so many threads on the CPUs in this block; None: as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_of_rank(ranks: int) -> int:
    """Return the threads that a rank has to itself where so many ranks share the cores of this process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks)


def _update_on_host(parts: list[Part], device: torch.device) -> None:
    """Bring gradients to the host, one part ahead of the CPUs, and take new parameters back."""
    down, up = (cast("torch.cuda.Stream", stream_of(device, use)) for use in ("optimiser down", "optimiser up"))
    layers, most = torch.cuda.current_stream(device), max(len(part.shard) for part in parts)
    gradients = [torch.empty(most, dtype=parts[0].gradient.dtype, pin_memory=True) for _ in range(2)]
    values = [torch.empty(most, dtype=parts[0].shard.dtype, pin_memory=True) for _ in range(2)]
    down.wait_stream(layers)
    up.wait_stream(layers)
    arrived, taken = list[torch.Event](), list[torch.Event]()

    def fetch(number: int) -> None:
        if number < len(parts):
            with torch.cuda.stream(down):
                source = parts[number].gradient
                gradients[number % 2][: len(source)].copy_(source, non_blocking=True)
                arrived.append(down.record_event())

    fetch(0)
    for number, part in enumerate(parts):
        fetch(number + 1)
        arrived[number].synchronize()
        part.update(part.master, gradients[number % 2][: len(part.master)], part.moments)
        if number >= 2:
            taken[number - 2].synchronize()  # the buffer is free again
        out = values[number % 2][: len(part.shard)]
        out.copy_(part.master)
        with torch.cuda.stream(up):
            part.shard.copy_(out, non_blocking=True)
            taken.append(up.record_event())
    layers.wait_stream(up)


def _update_on_device(parts: list[Part], device: torch.device) -> None:
    """Bring master and moments to the device, one part ahead of the update, and take them back behind it."""
    up, down = (cast("torch.cuda.Stream", stream_of(device, use)) for use in ("optimiser up", "optimiser down"))
    layers, most, dtype = (
        torch.cuda.current_stream(device),
        max(len(part.shard) for part in parts),
        parts[0].master.dtype,
    )
    buffers = [[torch.empty(most, dtype=dtype, device=device) for _ in range(3)] for _ in range(2)]
    up.wait_stream(layers)
    arrived, left = list[torch.Event](), list[torch.Event]()

    def fetch(number: int) -> None:
        if number < len(parts):
            if number >= 2:
                up.wait_event(left[number - 2])  # the buffers are free again
            with torch.cuda.stream(up):
                for buffer, source in zip(buffers[number % 2], _host_state(parts[number]), strict=True):
                    buffer[: len(source)].copy_(source, non_blocking=True)
                arrived.append(up.record_event())

    fetch(0)
    for number, part in enumerate(parts):
        master, first, second = (buffer[: len(part.shard)] for buffer in buffers[number % 2])
        layers.wait_event(arrived[number])
        part.update(master, part.gradient, (first, second))
        part.shard.copy_(master)
        down.wait_stream(layers)
        with torch.cuda.stream(down):
            for target, source in zip(_host_state(part), (master, first, second), strict=True):
                target.copy_(source, non_blocking=True)
            left.append(down.record_event())
        fetch(number + 1)
    layers.wait_stream(down)
    down.synchronize()  # what reads host memory next is not on a stream


def _host_state(part: Part) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return part.master, *part.moments
