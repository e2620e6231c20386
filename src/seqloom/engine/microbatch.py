"""What a unit keeps for its backward, in host memory meanwhile.

Tensors that autograd saves in the forward are collected; after it they are copied to the host on a stream of their own
and their memory is free as soon as the copies are done. Before the backward they come back. Parameters stay, and so
does what is in host memory already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

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


# ---- merged: pipeline.kept
# What a rank keeps of a unit between its forward and its backward on one stage.
#
# The output's memory is not kept: its place in the graph is enough to go backward from. Where the stage is
# recomputed,
# there is no graph either, only the input.


Run = Callable[[torch.Tensor], torch.Tensor]
"""A stage's forward: from token ids or hidden states to hidden states or a loss."""


class MicrobatchState:
    """One unit on one stage, from forward to backward."""

    def __init__(self, run: Run, given: torch.Tensor, *, again: bool, offload: Offload | None) -> None:
        """Take what the stage is given.

        Args:
            run: the stage's forward; called once more if `again`.
            given: token ids, or hidden states of which nobody else has a graph.
            again: keep the input only, and run forward again before the backward.
            offload: what is kept lies in host memory meanwhile; None: where it is.
        """
        self._run, self._given, self._again, self._offload = run, given, again, offload
        self.dtype = given.dtype  # of the output, once there is a graph
        self._device = given.device
        self._edge: GradientEdge | None = None
        self._number: int | None = None

    def forward(self) -> torch.Tensor:
        """Run the stage and return its output, outside of any graph."""
        if not self._again:
            return self._with_graph()
        with torch.no_grad():
            output = self._run(self._given)
        if self._offload is not None and self._given.is_floating_point():
            self._number = self._offload.hold(self._given)
            self._given = torch.empty(0)
        return output

    def edge(self) -> GradientEdge | None:
        """Return where backward starts, with all it needs in place; None where nothing wants a gradient."""
        offload, self._offload = self._offload, None
        if offload is not None:
            offload.bring_back(self._device)
            if self._number is not None:
                self._given = offload.held(self._number)
        if self._again:
            self._with_graph()
        return self._edge

    def gradient(self) -> torch.Tensor:
        """Return the gradient of the hidden states that the stage was given, after its backward."""
        found = self._given.grad
        return torch.zeros_like(self._given) if found is None else found

    def _with_graph(self) -> torch.Tensor:
        if self._given.is_floating_point():
            self._given.requires_grad_()
        if self._offload is None:
            output = self._run(self._given)
        else:
            with self._offload.saving():
                output = self._run(self._given)
        self.dtype = output.dtype
        self._edge = get_gradient_edge(output) if output.requires_grad else None
        return output.detach()
