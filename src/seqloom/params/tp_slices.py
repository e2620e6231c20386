"""Slices of the weights of layers that the ranks of a TP group compute with: rows or columns, see `ModelAdapter`.

    weight of 6 rows, tensor degree 2,    TP rank 0: rows 0-2, of which shard 0 has 0-1 and shard 1 row 2
    two ranks share shards of a slice     TP rank 1: rows 3-5, of which shard 0 has 3-4 and shard 1 row 5

A module has the slice under the name of the whole weight, as a plain tensor. Optimisers and checkpoints see the whole
weight: a DTensor over a mesh of tensor ranks x shards, so that no file depends on the degree. Parameters of layers that
no TP group cuts (norms, routers, biases of sums) are whole on all of its ranks, whose gradients are summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from seqloom.models.adapter import ModelAdapter
from seqloom.plan.parameter_layout import ROWS


@dataclass(frozen=True, slots=True)
class TPSlice:
    """Which part of a weight a rank of a TP group has: the `index`-th of `degree` equal ones along `axis`."""

    axis: int
    index: int
    degree: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the slice of a tensor with the shape of the whole weight, in its memory."""
        length = whole.shape[self.axis] // self.degree
        return whole.narrow(self.axis, self.index * length, length)

    def read(self, adapter: ModelAdapter, name: str, parameter: nn.Parameter) -> torch.Tensor:
        """Return the slice of a parameter's value in new memory, on its device; see `ModelAdapter.read_rows`."""
        if self.axis == ROWS:
            length = len(parameter) // self.degree
            return adapter.read_rows(name, parameter, slice(self.index * length, (self.index + 1) * length))
        return self.of(adapter.read_rows(name, parameter, slice(None))).clone(memory_format=torch.contiguous_format)

    def whole(self, shard: torch.Tensor, shape: torch.Size, mesh: DeviceMesh) -> DTensor:
        """Return the DTensor of the whole weight of which this rank has some rows of its slice.

        Args:
            mesh: tensor ranks x ranks that share the slice's rows.
        """
        strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
        cuts = [Shard(self.axis), Shard(0)]
        return DTensor.from_local(shard, mesh, cuts, run_check=False, shape=shape, stride=strides)


def tp_slices(
    adapter: ModelAdapter, layers: Iterable[nn.Module], index: int, degree: int, *, tables: bool = True
) -> dict[str, TPSlice]:
    """Return the slices of a rank with this index in its TP group, by canonical name, for weights of these layers.

    With `tables` also those of embedding and head, if the degree divides the vocabulary.
    """
    if degree == 1:
        return {}
    adapter.check_tp_degree(degree)
    names = {id(parameter): name for name, parameter in adapter.module.named_parameters()}
    found = (names[id(each)] for layer in layers for each in layer.parameters())
    axes = {name: adapter.tp_axes[name] for name in found if name in adapter.tp_axes}
    axes |= dict.fromkeys(adapter.cut_tables(degree) if tables else (), ROWS)
    return {name: TPSlice(axis, index, degree) for name, axis in axes.items()}


def slice_parameters(
    adapter: ModelAdapter, slices: Mapping[str, TPSlice], named: Mapping[str, nn.Parameter]
) -> dict[int, nn.Parameter]:
    """Return new parameters with this rank's slices of some parameters, by the id of the old one."""
    return {
        id(each): nn.Parameter(slices[name].read(adapter, name, each), requires_grad=each.requires_grad)
        for name, each in named.items()
        if name in slices
    }
