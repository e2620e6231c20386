"""Activations in host memory from a layer's forward to its backward, copied beside the work of other layers.

    forward     layer 0 | layer 1 | layer 2 | layer 3 |
    copies              | 0 out   | 1 out   | 2 out   |

    backward            | layer 3 | layer 2 | layer 1 | layer 0 |
    copies      3 in    | 2 in    | 1 in    | 0 in    |

What autograd saves in a layer, and what selective checkpointing keeps of its attention, is copied to pinned memory on a
stream of its own when the layer has run forward, and back while the layer above it goes backward. The device has two
layers at a time: layer k + 2 waits until layer k has been copied. Then its tensors are dropped, and since the stream of
the layers has waited, that stream may use their memory at once. Parameters and what all layers are given stay.

Pinned memory comes in blocks: torch's allocator of it rounds sizes up to powers of two, which could double a tensor.

On a CPU the copies are made as well, and nothing is gained.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any, NamedTuple, cast
from weakref import ref

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from seqloom.dist import Context
from seqloom.dist.streams import stream_of

MIN_ELEMENTS = 1024
"""Smaller tensors are not worth a copy to the host."""
BLOCK_BYTES = 1 << 26
"""Bytes of a block of pinned memory, a power of two."""
Tensors = list[torch.Tensor]


class HostTensor(NamedTuple):
    """A tensor in blocks of host memory, uint8 each, in the order of its memory; and its shape there."""

    blocks: Tensors
    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def empty_like(cls, tensor: torch.Tensor, *, pinned: bool) -> HostTensor:
        """Allocate host memory for a tensor whose elements are one after another in memory, in any order."""
        sizes = [min(BLOCK_BYTES, tensor.nbytes - at) for at in range(0, tensor.nbytes, BLOCK_BYTES)]
        blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]
        return cls(blocks, tensor.size(), tensor.stride(), tensor.dtype)

    def copy_from(self, tensor: torch.Tensor) -> None:
        """Copy a tensor of this shape, in the order of the current stream."""
        for block, part in zip(self.blocks, _memory(tensor).split(BLOCK_BYTES), strict=True):
            block.copy_(part, non_blocking=True)

    def copy_to(self, tensor: torch.Tensor) -> None:
        """Copy to a tensor of this shape, in the order of the current stream."""
        for block, part in zip(self.blocks, _memory(tensor).split(BLOCK_BYTES), strict=True):
            part.copy_(block, non_blocking=True)


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor, uint8[bytes], whose elements are one after another in any order of axes."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose elements are one after another in memory: the same one, if they are."""
    order = sorted(range(tensor.dim()), key=lambda axis: (-tensor.stride(axis), -tensor.size(axis)))
    return tensor if tensor.permute(order).is_contiguous() else tensor.contiguous()


class HostCopies:
    """Copies between one device and its host, in order: all microbatches of a step share them."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._stream = device, stream_of(device, "offload")
        self._leaving: deque[OffloadedLayer] = deque()  # on the device until their copies are done, the oldest first

    def send(self, layer: OffloadedLayer, tensors: Tensors) -> tuple[list[HostTensor], torch.Event | None]:
        """Start to copy the dense tensors of a layer, which stay on the device until `release`; return copies, when."""
        self._leaving.append(layer)
        host = [HostTensor.empty_like(each, pinned=self._stream is not None) for each in tensors]
        with self._on_stream() as done:
            for copy_of, tensor in zip(host, tensors, strict=True):
                copy_of.copy_from(tensor)
        return host, done()

    def receive(self, host: list[HostTensor]) -> tuple[Tensors, torch.Event | None]:
        """Start to copy tensors back; return them, and when they are there."""
        tensors = [torch.empty_strided(each.size, each.stride, dtype=each.dtype, device=self.device) for each in host]
        with self._on_stream() as done:
            for copy_of, tensor in zip(host, tensors, strict=True):
                copy_of.copy_to(tensor)
        return tensors, done()

    def release(self, most: int = 0) -> None:
        """Let at most so many layers keep their tensors on the device: the stream of the layers waits for the copies.

        They were started in this order, so waiting for one is waiting for those before it.
        """
        while len(self._leaving) > most:
            self._leaving.popleft().drop()

    def keep(self, layer: OffloadedLayer) -> bool:
        """Let a layer keep its tensors on the device, if they still are."""
        if layer not in self._leaving:
            return False
        self._leaving.remove(layer)
        return True

    def wait(self, event: torch.Event | None) -> None:
        """Have the stream of the layers wait for copies."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    @contextmanager
    def _on_stream(self) -> Iterator[Callable[[], torch.Event | None]]:
        """Run copies on their stream, behind what the stream of the layers was given so far; yield when they are done.

        So they are written to memory of the device that nothing before still uses.
        """
        if self._stream is None:
            yield lambda: None
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield self._stream.record_event


class Offload:
    """What the layers of one microbatch have in host memory between its forward and its backward."""

    def __init__(self, copies: HostCopies) -> None:
        """Start empty."""
        self._copies, self._last = copies, cast("OffloadedLayer | None", None)

    def context(self, context: Context) -> Context:
        """Return a context whose layers offload as the plan says, see `models.layer_wrapper`."""
        own = copy(context)
        own.offload = self
        return own

    @contextmanager
    def layer(self, resident: Iterable[torch.Tensor], module: nn.Module | None = None) -> Iterator[OffloadedLayer]:
        """Collect what the next layer saves in this block, and start to copy it at the end.

        Args:
            resident: tensors that stay on the device.
            module: the layer, whose parameters stay there, too.
        """
        self._copies.release(most=1)
        layer = self._last = OffloadedLayer(self._copies, self._last, resident, module)
        with saved_tensors_hooks(layer.pack, layer.unpack):
            yield layer
        layer.send()

    def put(self, tensor: torch.Tensor) -> Any:
        """Offload one tensor, which is in no graph; return what `get` takes."""
        with self.layer(()) as layer:
            return layer.pack(tensor)

    def get(self, packed: Any) -> torch.Tensor:
        """Return the tensor that was put."""
        assert self._last is not None
        return self._last.unpack(packed)

    def begin_backward(self) -> None:
        """Start to fetch the layer that goes backward first. What is still on the device stays there."""
        layer = self._last
        while layer is not None and layer.stay():
            layer = layer.before
        if layer is self._last and layer is not None:
            layer.fetch()


class OffloadedLayer:
    """The tensors of one layer: on the device in forward, on the host, and on the device again in its backward.

    Layers hold those before them, which their backward fetches; a graph holds its layers, and nothing holds a graph.
    """

    def __init__(
        self,
        copies: HostCopies,
        before: OffloadedLayer | None,
        resident: Iterable[torch.Tensor] = (),
        module: nn.Module | None = None,
    ) -> None:
        self.before, self._copies = before, copies
        own = () if module is None else tuple(module.parameters())
        self._sharded = module if any(isinstance(each, DTensor) for each in own) else None
        self._after: ref[OffloadedLayer] | None = None
        if before is not None:
            before._after = ref(self)
        self._resident = set(map(_storage_address, (*resident, *own)))
        self._index: dict[tuple[object, ...], int] = {}
        self._device: Tensors | None = []
        self._host: list[HostTensor] = []
        self._sent: torch.Event | None = None  # when the tensors are in host memory, and may be dropped
        self._ready: torch.Event | None = None  # when they are back, and may be used
        self._going_backward = False

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | int:
        """Take a tensor of the device, unless it is small or shall stay there."""
        origin = tensor if tensor._base is None else tensor._base
        stays = tensor.numel() < MIN_ELEMENTS or tensor.device.type != self._copies.device.type
        if stays or isinstance(origin, nn.Parameter) or _storage_address(tensor) in self._resident | self._gathered:
            return tensor
        assert self._device is not None
        # Several nodes may save one tensor. All are alive until the layer ends, so an address identifies it.
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._index:
            self._index[key] = len(self._device)
            self._device.append(_dense(tensor.detach()))  # without its graph, which holds this layer
        return self._index[key]

    @property
    def _gathered(self) -> set[int]:
        """Storages of parameters as they are now: experts that an EP group shards are gathered inside the layer."""
        return set() if self._sharded is None else set(map(_storage_address, self._sharded.parameters()))

    def unpack(self, packed: torch.Tensor | int) -> torch.Tensor:
        """Return a tensor on the device. The first of a layer has the layer before it fetched, and the one after go."""
        if not isinstance(packed, int):
            return packed
        if not self._going_backward:
            self._going_backward = True
            after = None if self._after is None else self._after()
            if after is not None:
                after.drop()
            if self.before is not None:
                self.before.fetch()
        if self._device is None:  # a second backward
            self.fetch()
        self._copies.wait(self._ready)
        self._ready = None
        assert self._device is not None
        return self._device[packed]

    def send(self) -> None:
        """Start to copy the tensors to the host."""
        self._index.clear()
        assert self._device is not None
        if self._device:
            self._host, self._sent = self._copies.send(self, self._device)

    def stay(self) -> bool:
        """Leave the tensors on the device, if they still are."""
        return self._copies.keep(self)

    def fetch(self) -> None:
        """Start to copy the tensors back, if they are not on the device."""
        if self._device is None:
            self._device, self._ready = self._copies.receive(self._host)

    def drop(self) -> None:
        """Drop the tensors of the device, behind copies from or to them."""
        for copied in (self._sent, self._ready):
            self._copies.wait(copied)
        self._device = self._sent = self._ready = None


def _storage_address(tensor: torch.Tensor) -> int:
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            tensor = tensor.to_local()
    return tensor.untyped_storage().data_ptr()
