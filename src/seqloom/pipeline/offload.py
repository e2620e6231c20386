"""What a unit keeps for its backward, in host memory meanwhile.

Tensors that autograd saves in the forward are collected; after it they are copied to the host on a stream of their own
and their memory is free as soon as the copies are done. Before the backward they come back. Parameters stay, and so
does what is in host memory already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

LEAST = 1024
"""Elements from which on a tensor is worth a copy."""


class Offload:
    """The saved tensors of one unit."""

    def __init__(self, stays: Iterable[torch.Tensor], stream: torch.cuda.Stream | None = None) -> None:
        """Start with nothing.

        Args:
            stays: parameters; what shares memory with them is not moved.
            stream: for the copies; None: the current one.
        """
        self._stays = set(map(_memory, stays))
        self._stream = stream
        self._tensors: list[torch.Tensor] = []
        self._numbers: dict[tuple[object, ...], int] = {}

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Collect what is saved in the block; at its end it goes to the host."""
        with saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._leave()

    def hold(self, tensor: torch.Tensor) -> int:
        """Take one more tensor, outside of any graph; return its number."""
        self._tensors += self._to_host([tensor.detach()])
        return len(self._tensors) - 1

    def held(self, number: int) -> torch.Tensor:
        """Return a tensor that came back."""
        return self._tensors[number]

    def bring_back(self, device: torch.device) -> None:
        """Copy everything back to the device, before the current stream goes on."""
        if device.type == "cpu":
            return
        stream, current = self._stream or torch.cuda.current_stream(), torch.cuda.current_stream()
        back = [torch.empty_like(each, device=device) for each in self._tensors]
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for target, source in zip(back, self._tensors, strict=True):
                target.copy_(source, non_blocking=True)
                target.record_stream(stream)
        current.wait_stream(stream)
        self._tensors = back

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | int:
        origin = tensor if tensor._base is None else tensor._base
        if tensor.numel() < LEAST or isinstance(origin, nn.Parameter) or _memory(tensor) in self._stays:
            return tensor
        # Several nodes may save one tensor. All are alive until the forward ends, so an address means one of them.
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._numbers:
            self._numbers[key] = len(self._tensors)
            self._tensors.append(tensor)
        return self._numbers[key]

    def _unpack(self, packed: torch.Tensor | int) -> torch.Tensor:
        return self._tensors[packed] if isinstance(packed, int) else packed

    def _leave(self) -> None:
        self._numbers.clear()
        self._tensors = self._to_host(self._tensors)

    def _to_host(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if not any(each.is_cuda for each in tensors):
            return tensors
        stream, hosts = self._stream or torch.cuda.current_stream(), []
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for each in tensors:
                hosts.append(torch.empty_like(each, device="cpu", pin_memory=True))
                hosts[-1].copy_(each, non_blocking=True)
                each.record_stream(stream)  # its memory is not used anew before the copy is done
        return hosts


def _memory(tensor: torch.Tensor) -> int:
    """Name the memory that a tensor is in; others may be in it too."""
    return tensor.untyped_storage().data_ptr()
