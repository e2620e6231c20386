"""What layers compute with where parameters have a free compute layout: a copy of each, as the plan of the step has it.

The copies take the places of the module's parameters once. From plan to plan only their memory changes: whole on ranks
of a stage that needs them, a slice where a team cuts them, nothing elsewhere. So no module is wrapped or made anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import prod

import torch
from torch import nn

from seqloom.attention.merge import sum_dtype
from seqloom.comm.relay_index import Box
from seqloom.errors import SeqloomError
from seqloom.plan.weights import EMBEDDING, HEAD, Weight
from seqloom.runtime.network import Network
from seqloom.runtime.placement import exchange


def weights_of(network: Network) -> tuple[Weight, ...]:
    """Return the parameters of a network as layouts see them, in the order of the module.

    A parameter of which it is not known what needs it is needed everywhere: where only the layers of a model are known,
    all that is in none of them.
    """
    places: list[tuple[int | str, nn.Module]] = list(enumerate(network.layers))
    if network.embedding is not None and network.norm is not None:
        places += [(EMBEDDING, network.embedding), (HEAD, network.norm), (HEAD, network.head)]
    homes: dict[int, dict[int | str, None]] = {}
    for home, module in places:
        for parameter in module.parameters():
            homes.setdefault(id(parameter), {})[home] = None
    everywhere = dict.fromkeys((EMBEDDING, *range(len(network.layers)), HEAD))
    found = []
    for name, parameter in network.module.named_parameters():
        if not parameter.ndim:
            raise SeqloomError(f"parameter {name} has no axis, and rows are what ranks share; make it a vector of one")
        home = tuple(homes.get(id(parameter), everywhere))
        found.append(Weight(name, len(parameter), prod(parameter.shape[1:]), home, network.cuts.get(name)))
    return tuple(found)


class Copies:
    """One parameter for every weight, by number.

    Attributes:
        dtype: that layers compute in.
    """

    def __init__(self, module: nn.Module, compute: torch.dtype | None, shapes: Sequence[torch.Size]) -> None:
        """Put copies in the places of a module's parameters.

        Args:
            module: whose parameters give up their values.
            compute: dtype of the copies; None: that of the parameters. Gradients add up in float32 or wider.
            shapes: of the whole parameters.
        """
        self._shapes = shapes
        self._foreign: set[int] = set()  # copies whose memory is the masters' own, or comes and goes
        self.all: list[nn.Parameter] = []
        places = {}
        for parameter in module.parameters():
            dtype = compute or parameter.dtype
            copy = nn.Parameter(parameter.new_empty(0, dtype=dtype), requires_grad=parameter.requires_grad)
            if copy.requires_grad and dtype != sum_dtype(dtype):
                copy.grad_dtype = sum_dtype(dtype)
            places[id(parameter)] = copy
            self.all.append(copy)
        exchange(module, places)
        self.dtype = self.all[0].dtype

    def arrange(
        self, boxes: Mapping[int, Box], borrowed: Mapping[int, torch.Tensor], hollow: Collection[int] = ()
    ) -> dict[int, torch.Tensor]:
        """Give every copy the shape of its box, none to those without; return the memory to be filled.

        Args:
            boxes: what this rank computes with, by number.
            borrowed: tensors that already are what this rank computes with; those are not copied.
            hollow: copies that shall have no memory until they are given some.
        """
        room = {}
        for number, copy in enumerate(self.all):
            shape = self._shape(number, boxes.get(number))
            if number in borrowed:
                copy.data = borrowed[number].view(shape)
                continue
            if copy.shape != shape or number in self._foreign:
                copy.data = copy.new_empty(shape)
            if number in hollow:
                self.free(number)
            elif number in boxes:
                room[number] = copy.detach()
        self._foreign = {*borrowed, *hollow}
        return room

    def new(self, box: Box) -> torch.Tensor:
        """Return a tensor for some of a weight's rows, [rows, columns], beside the copies."""
        return self.all[0].new_empty((box.rows, box.columns)).detach()

    def give_memory(self, number: int) -> torch.Tensor:
        """Give a copy memory, and return that: a tensor of its own, so that autograd does not see it written."""
        copy, storage = self.all[number], self.all[number].untyped_storage()
        storage.resize_(copy.numel() * copy.element_size())
        return copy.new_empty(0).set_(storage, 0, copy.shape, copy.stride())

    def free(self, number: int) -> None:
        """Take a copy's memory; shape and graph stay."""
        self.all[number].untyped_storage().resize_(0)

    def take_gradients(self, numbers: Iterable[int]) -> dict[int, torch.Tensor]:
        """Return gradients of copies, and forget them; one that nobody has made is not there."""
        found = {}
        for number in numbers:
            gradient, self.all[number].grad = self.all[number].grad, None
            if gradient is not None:
                found[number] = gradient.contiguous()
        return found

    def held(self) -> Iterator[torch.Tensor]:
        """Yield the copies that have memory."""
        yield from (copy for copy in self.all if copy.untyped_storage().nbytes())

    def clear(self) -> None:
        """Drop all gradients."""
        for copy in self.all:
            copy.grad = None

    def _shape(self, number: int, box: Box | None) -> torch.Size:
        whole = self._shapes[number]
        if box is None:
            return torch.Size((0,))
        if box.columns == prod(whole[1:]):
            return torch.Size((box.rows, *whole[1:]))
        return torch.Size((box.rows, box.columns))
