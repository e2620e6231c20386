"""What the optimiser updates where parameters have a free compute layout: an even share of the rows of every parameter.

    weight of 10 rows on 4 ranks    rank 0: rows 0-2   rank 1: rows 3-5   rank 2: rows 6-8   rank 3: row 9

These are the shards of a DTensor over all ranks, so a checkpoint of them is like that of any other layout. In a process
without torch.distributed, where ranks are threads, they are plain tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from seqloom.comm import Transport
from seqloom.compat import inherit_timeout
from seqloom.runtime.fsdp import check_job
from seqloom.runtime.network import Network
from seqloom.runtime.parameters import local, squared_norm
from seqloom.runtime.shards import distributed

SHARD = "shard"


class Masters:
    """This rank's rows of all parameters, by their number in the module.

    Attributes:
        names: canonical ones; tied parameters have one.
        shapes: of whole parameters.
        parameters: this rank's rows; some have none. Gradients are put there.
        rows: the same memory as plain tensors, by number; optimisers and checkpoints write it in place.
    """

    def __init__(self, network: Network, transport: Transport, device: torch.device) -> None:
        """Cut the parameters of a network, which keeps none of its values.

        Args:
            network: the same values on all ranks.
            transport: where torch.distributed runs, all ranks of the job.
            device: of the parameters.
        """
        self._transport, self._device = transport, device
        self._mesh = _mesh(transport, device) if dist.is_initialized() else None
        named = dict(network.module.named_parameters())
        self.names = tuple(named)
        self.shapes = tuple(each.shape for each in named.values())
        self.parameters: list[nn.Parameter] = []
        for name, parameter in named.items():
            network.fill([(name, parameter)])
            values = parameter.detach().contiguous()
            own = self._share(values)
            own = own if transport.ranks == 1 else own.clone()
            master = own if self._mesh is None else distributed(own, values, self._mesh)
            self.parameters.append(nn.Parameter(master, requires_grad=parameter.requires_grad))
            parameter.data = values.new_empty(0)  # the whole and its shares are never all there at once
        self.rows = {number: local(each.detach()) for number, each in enumerate(self.parameters)}

    def trained(self) -> dict[str, nn.Parameter]:
        """Return those that want a gradient, by name."""
        return {name: each for name, each in zip(self.names, self.parameters, strict=True) if each.requires_grad}

    def put_gradients(self, sums: Mapping[int, torch.Tensor]) -> None:
        """Make sums the gradients of this rank's rows; without a sum a gradient is zero."""
        for number, master in enumerate(self.parameters):
            if not master.requires_grad:
                continue
            own = self.rows[number]
            found = sums.get(number)
            found = torch.zeros_like(own) if found is None else found.view(own.shape).to(own.dtype)
            master.grad = found if self._mesh is None else distributed(found, master, self._mesh)

    def squared_norm(self) -> torch.Tensor:
        """Return the sum of squares of the whole model's gradient, a scalar in float64, the same on all ranks."""
        squares = squared_norm(self.trained().values()).to(self._device)
        self._transport.all_reduce(squares, tuple(range(self._transport.ranks)))
        return squares

    def values(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the whole value of every parameter; all ranks iterate."""
        for number, own in self.rows.items():
            yield self.names[number], self._whole(own, self.shapes[number])

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the whole gradient of every trained parameter; all ranks iterate."""
        for number, master in enumerate(self.parameters):
            if master.grad is not None:
                yield self.names[number], self._whole(local(master.grad), self.shapes[number])

    def _share(self, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows: torch's chunks, of which the last may be short or empty."""
        rows = -(-len(values) // self._transport.ranks)
        begin = min(self._transport.rank * rows, len(values))
        return values[begin : begin + rows]

    def _whole(self, own: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        ranks = self._transport.ranks
        rows = -(-shape[0] // ranks)
        mine = own.new_zeros((rows, *shape[1:]))
        mine[: len(own)] = own
        every = own.new_empty((ranks * rows, *shape[1:]))
        self._transport.all_gather(every.view(-1), mine.view(-1), tuple(range(ranks)))
        return every[: shape[0]]


def _mesh(transport: Transport, device: torch.device) -> DeviceMesh:
    """Make the row of all ranks. All processes of the job take part."""
    check_job(transport)
    mesh = DeviceMesh(device.type, torch.arange(transport.ranks), mesh_dim_names=(SHARD,))
    inherit_timeout(mesh.get_group(SHARD))
    return mesh
