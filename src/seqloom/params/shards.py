"""What `ReshardingParameters` stores: the optimiser's rows of every parameter, and copies that layers compute with.

    weight of 10 rows on 4 ranks    rank 0: rows 0-2   rank 1: rows 3-5   rank 2: rows 6-8   rank 3: row 9

`OptimizerShards` are those rows, the shards of a DTensor over all ranks, so a checkpoint of them is like any other. In
a process without torch.distributed, where ranks are threads, they are plain tensors.

`ComputeCopies` replace the module's parameters once. From plan to plan only their memory changes: the full parameter on
ranks of a stage that needs it, a slice in a TP group, nothing elsewhere. So no module is wrapped or rebuilt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import prod

import torch
import torch.distributed as dist
from torch import nn

from seqloom.dist import Transport
from seqloom.dist.resharding import Box
from seqloom.errors import SeqloomError
from seqloom.models.adapter import ModelAdapter
from seqloom.params.fsdp import SHARD, new_mesh
from seqloom.params.host_masters import device_shard, host_copy, host_master
from seqloom.params.interface import accumulate_wide, check_job, local_tensor, row_shard, shard_rows
from seqloom.params.placement import replace_parameters
from seqloom.plan.parameter_layout import EMBEDDING, HEAD, Weight


def weights_of(adapter: ModelAdapter) -> tuple[Weight, ...]:
    """Return the parameters of a model as layouts see them, in the order of the module.

    A parameter outside all known modules is needed everywhere: where the adapter names only the layers, that is
    everything else.
    """
    modules: list[tuple[int | str, nn.Module]] = list(enumerate(adapter.layers))
    if adapter.embedding is not None and adapter.norm is not None:
        modules += [(EMBEDDING, adapter.embedding), (HEAD, adapter.norm), (HEAD, adapter.head)]
    users: dict[int, dict[int | str, None]] = {}
    for user, module in modules:
        for parameter in module.parameters():
            users.setdefault(id(parameter), {})[user] = None
    everywhere = dict.fromkeys((EMBEDDING, *range(len(adapter.layers)), HEAD))
    weights, experts = [], adapter.expert_parameters
    for name, parameter in adapter.module.named_parameters():
        if not parameter.ndim:
            raise SeqloomError(f"parameter {name} has no axis, and rows are what ranks share; make it a vector of one")
        used_by, columns = tuple(users.get(id(parameter), everywhere)), prod(parameter.shape[1:])
        weights.append(Weight(name, len(parameter), columns, used_by, adapter.tp_axes.get(name), name in experts))
    return tuple(weights)


class ComputeCopies:
    """One parameter for every weight, by index, that layers compute with.

    Attributes:
        dtype: that layers compute in.
        parameters: the copies, in the module.
    """

    def __init__(
        self, module: nn.Module, dtype: torch.dtype | None, shapes: Sequence[torch.Size], device: torch.device
    ) -> None:
        """Replace a module's parameters by copies on a device, without memory.

        Args:
            dtype: of the copies; None: that of the parameters. Gradients add up in float32 or wider.
        """
        self._shapes = shapes
        self._not_owned: set[int] = set()  # copies in the masters' memory, or whose memory comes and goes
        self.parameters: list[nn.Parameter] = []
        new = {}
        for parameter in module.parameters():
            empty = torch.empty(0, dtype=dtype or parameter.dtype, device=device)
            copy = accumulate_wide(nn.Parameter(empty, requires_grad=parameter.requires_grad))
            new[id(parameter)] = copy
            self.parameters.append(copy)
        replace_parameters(module, new)
        self.dtype = self.parameters[0].dtype

    def allocate_all(
        self, boxes: Mapping[int, Box], aliases: Mapping[int, torch.Tensor], resharded: Collection[int] = ()
    ) -> dict[int, torch.Tensor]:
        """Give every copy the shape of its box, or none; return the memory to fill, by weight.

        Args:
            boxes: what this rank computes with, by weight.
            aliases: tensors that already hold what this rank computes with: these copies share their memory.
            resharded: weights whose copies get memory later, by `allocate`.
        """
        to_fill = {}
        for weight, copy in enumerate(self.parameters):
            shape = self._shape(weight, boxes.get(weight))
            if weight in aliases:
                copy.data = aliases[weight].view(shape)
                continue
            if copy.shape != shape or weight in self._not_owned:
                copy.data = copy.new_empty(shape)
            if weight in resharded:
                self.free(weight)
            elif weight in boxes:
                to_fill[weight] = copy.detach()
        self._not_owned = {*aliases, *resharded}
        return to_fill

    def allocate(self, weight: int) -> torch.Tensor:
        """Allocate a copy's memory; return it as another tensor, so that autograd does not see writes to it."""
        copy, storage = self.parameters[weight], self.parameters[weight].untyped_storage()
        storage.resize_(copy.numel() * copy.element_size())
        return copy.new_empty(0).set_(storage, 0, copy.shape, copy.stride())

    def free(self, weight: int) -> None:
        """Free a copy's memory; shape and graph stay."""
        self.parameters[weight].untyped_storage().resize_(0)

    def pop_gradients(self, weights: Iterable[int]) -> dict[int, torch.Tensor]:
        """Return the gradients of copies and drop them; weights without one are left out."""
        found = {}
        for weight in weights:
            gradient, self.parameters[weight].grad = self.parameters[weight].grad, None
            if gradient is not None:
                found[weight] = gradient.contiguous()
        return found

    def allocated(self) -> Iterator[torch.Tensor]:
        """Yield the copies that have memory."""
        yield from (copy for copy in self.parameters if copy.untyped_storage().nbytes())

    def _shape(self, weight: int, box: Box | None) -> torch.Size:
        full = self._shapes[weight]
        if box is None:
            return torch.Size((0,))
        if box.columns == prod(full[1:]):
            return torch.Size((box.rows, *full[1:]))
        return torch.Size((box.rows, box.columns))


class OptimizerShards:
    """This rank's rows of all parameters, by index in the module.

    Attributes:
        names: canonical; tied parameters have one.
        shapes: of the full parameters.
        masters: this rank's rows, which the optimiser updates; some have none.
        parameters: what the device has of them, with gradients: the masters, or rows in another dtype where the masters
            are in host memory.
        rows: {index: memory of `parameters` as a plain tensor}; optimisers and checkpoints write it in place.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        transport: Transport,
        device: torch.device,
        *,
        offload_dtype: torch.dtype | None = None,
    ) -> None:
        """Shard the parameters of a model, which keeps none of its values.

        Args:
            adapter: of the model; the same values on all ranks.
            transport: where torch.distributed runs, all ranks of the job.
            offload_dtype: keep masters in host memory, and rows of this dtype on the device; None: masters are there.
        """
        self._transport, self._mesh = transport, None
        if dist.is_initialized():
            check_job(transport)
            self._mesh = new_mesh(device, torch.arange(transport.ranks), (SHARD,))
        named = dict(adapter.module.named_parameters())
        self.names = tuple(named)
        self.shapes = tuple(each.shape for each in named.values())
        self.masters: list[nn.Parameter] = []
        self.parameters: list[nn.Parameter] = []
        for name, parameter in named.items():
            shard = adapter.read_rows(name, parameter, shard_rows(len(parameter), transport.rank, transport.ranks))
            trained, master_dtype = parameter.requires_grad, shard.dtype
            host = None if offload_dtype is None else host_copy(shard)
            shard = shard if offload_dtype is None else shard.to(offload_dtype)
            sharded = shard if self._mesh is None else row_shard(shard, parameter.shape, self._mesh)
            self.parameters.append(device_shard(sharded, requires_grad=trained, master_dtype=master_dtype))
            master = self.parameters[-1] if host is None else host_master(host, self.parameters[-1])
            self.masters.append(master)
            parameter.data = parameter.new_empty(0)  # so that unsharded values exist one parameter at a time
        self.rows = {index: local_tensor(each.detach()) for index, each in enumerate(self.parameters)}

    def trained(self, parameters: Sequence[nn.Parameter]) -> dict[str, nn.Parameter]:
        """Return those of the masters, or of the parameters, that require a gradient, by name."""
        return {name: each for name, each in zip(self.names, parameters, strict=True) if each.requires_grad}

    def set_gradients(self, sums: Mapping[int, torch.Tensor]) -> None:
        """Set the gradients of this rank's rows; zero where there is no sum."""
        for index, parameter in enumerate(self.parameters):
            if not parameter.requires_grad:
                continue
            rows, total, dtype = self.rows[index], sums.get(index), parameter.grad_dtype
            gradient = torch.zeros_like(rows, dtype=dtype) if total is None else total.view(rows.shape).to(dtype)
            parameter.grad = gradient if self._mesh is None else row_shard(gradient, parameter.shape, self._mesh)

    def gather(self, index: int, shard: torch.Tensor) -> torch.Tensor:
        """Return a parameter's value or gradient from all ranks' rows of it; all of them call it."""
        shape, ranks = self.shapes[index], self._transport.ranks
        padded = shard.new_zeros((-(-shape[0] // ranks), *shape[1:]))
        padded[: len(shard)] = shard
        gathered = shard.new_empty((ranks * len(padded), *shape[1:]))
        self._transport.all_gather(gathered.view(-1), padded.view(-1), tuple(range(ranks)))
        return gathered[: shape[0]]
