"""The activations of a microbatch on one stage, between its forward and its backward.

`MicrobatchState` keeps the stage's input and the graph, but not the output: its edge in the graph is enough to start
the backward. A recomputed stage keeps the input only.

`Offload` holds the tensors that autograd saved in host memory meanwhile: it copies them there after the forward, on a
stream of its own, which frees their device memory when the copies are done, and copies them back before the backward.
Parameters stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

MIN_ELEMENTS = 1024
"""Smaller tensors are not worth a copy to the host."""


class MicrobatchState:
    """One microbatch on one stage, from forward to backward."""

    def __init__(
        self,
        stage_forward: Callable[[torch.Tensor], torch.Tensor],
        inputs: torch.Tensor,
        *,
        recompute: bool,
        offload: Offload | None,
    ) -> None:
        """Take the stage's input.

        Args:
            stage_forward: from token ids or hidden states to hidden states or a loss; called again if `recompute`.
            inputs: token ids, or hidden states that are in no graph.
            recompute: keep the input only, and run forward again before the backward.
            offload: moves what is kept to host memory; None: it stays.
        """
        self._stage_forward, self._inputs, self._recompute, self._offload = stage_forward, inputs, recompute, offload
        self.dtype = inputs.dtype  # of the output, once there is a graph
        self._device = inputs.device
        self._edge: GradientEdge | None = None
        self._offloaded_input: int | None = None

    def forward(self) -> torch.Tensor:
        """Run the stage and return its output, detached."""
        if not self._recompute:
            return self._forward_with_graph()
        with torch.no_grad():
            output = self._stage_forward(self._inputs)
        if self._offload is not None and self._inputs.is_floating_point():
            self._offloaded_input = self._offload.put(self._inputs)
            self._inputs = torch.empty(0)
        return output

    def backward_edge(self) -> GradientEdge | None:
        """Fetch or recompute what the backward needs; return where it starts, None if nothing needs a gradient."""
        offload, self._offload = self._offload, None
        if offload is not None:
            offload.fetch(self._device)
            if self._offloaded_input is not None:
                self._inputs = offload.get(self._offloaded_input)
        if self._recompute:
            self._forward_with_graph()
        return self._edge

    def input_gradient(self) -> torch.Tensor:
        """Return the gradient of the stage's input hidden states, after the backward."""
        gradient = self._inputs.grad
        return torch.zeros_like(self._inputs) if gradient is None else gradient

    def _forward_with_graph(self) -> torch.Tensor:
        if self._inputs.is_floating_point():
            self._inputs.requires_grad_()
        with nullcontext() if self._offload is None else self._offload.saving():
            output = self._stage_forward(self._inputs)
        self.dtype = output.dtype
        self._edge = get_gradient_edge(output) if output.requires_grad else None
        return output.detach()


class Offload:
    """The saved tensors of one microbatch, in host memory between forward and backward."""

    def __init__(self, parameters: Iterable[torch.Tensor], stream: torch.cuda.Stream | None = None) -> None:
        """Start empty.

        Args:
            parameters: tensors that share memory with one of these are not moved.
            stream: for the copies; None: the current one.
        """
        self._resident = set(map(_storage_address, parameters))
        self._stream = stream
        self._tensors: list[torch.Tensor] = []
        self._index: dict[tuple[object, ...], int] = {}

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Collect what autograd saves in the block, and copy it to the host at the end."""
        with saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._index.clear()
        self._tensors = self._to_host(self._tensors)

    def put(self, tensor: torch.Tensor) -> int:
        """Copy one more tensor, which is in no graph, to the host; return its index."""
        self._tensors += self._to_host([tensor.detach()])
        return len(self._tensors) - 1

    def get(self, index: int) -> torch.Tensor:
        """Return a tensor."""
        return self._tensors[index]

    def fetch(self, device: torch.device) -> None:
        """Copy everything back to the device, in the order of the current stream."""
        if device.type == "cpu":
            return
        stream, current = self._stream or torch.cuda.current_stream(), torch.cuda.current_stream()
        fetched = [torch.empty_like(each, device=device) for each in self._tensors]
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for target, source in zip(fetched, self._tensors, strict=True):
                target.copy_(source, non_blocking=True)
                target.record_stream(stream)
        current.wait_stream(stream)
        self._tensors = fetched

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | int:
        origin = tensor if tensor._base is None else tensor._base
        if (
            tensor.numel() < MIN_ELEMENTS
            or isinstance(origin, nn.Parameter)
            or _storage_address(tensor) in self._resident
        ):
            return tensor
        # Several nodes may save one tensor. All are alive until the forward ends, so an address identifies it.
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._index:
            self._index[key] = len(self._tensors)
            self._tensors.append(tensor)
        return self._index[key]

    def _unpack(self, packed: torch.Tensor | int) -> torch.Tensor:
        return self._tensors[packed] if isinstance(packed, int) else packed

    def _to_host(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if not any(each.is_cuda for each in tensors):
            return tensors
        stream, copies = self._stream or torch.cuda.current_stream(), []
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for each in tensors:
                copies.append(torch.empty_like(each, device="cpu", pin_memory=True))
                copies[-1].copy_(each, non_blocking=True)
                each.record_stream(stream)  # the allocator does not reuse its memory before the copy is done
        return copies


def _storage_address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
