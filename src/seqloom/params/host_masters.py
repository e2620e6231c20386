"""Master weights in host memory, beside what the device has of them: an optimiser that is offloaded.

    host, pinned     master rows of this rank, float32         (and the optimiser's moments, `params.host_adamw`)
    device           the same rows in the dtype that layers compute in, and their gradient in float32

Layers' parameters are gathered from the rows of the device. The optimiser updates the master and writes the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from seqloom.compat import dtensor_like, pinned_empty


def host_empty(shape: torch.Size, dtype: torch.dtype, *, pinned: bool) -> torch.Tensor:
    """Allocate host memory: pinned where a GPU copies to and from it."""
    return pinned_empty(shape, dtype) if pinned else torch.empty(shape, dtype=dtype)


def host_copy(values: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor of the device in host memory of its own."""
    copy = host_empty(values.shape, values.dtype, pinned=values.is_cuda)
    return copy.copy_(values.detach())


def host_master(values: torch.Tensor, shard: nn.Parameter) -> nn.Parameter:
    """Return the master weight with these values in host memory, as a DTensor if the device's shard of it is one."""
    master = dtensor_like(cast("DTensor", shard), values) if isinstance(shard, DTensor) else values
    return nn.Parameter(master, requires_grad=shard.requires_grad)


def device_shard(shard: torch.Tensor, *, requires_grad: bool, master_dtype: torch.dtype) -> nn.Parameter:
    """Return the device's part of a parameter, whose gradient has the master's dtype."""
    parameter = nn.Parameter(shard, requires_grad=requires_grad)
    if requires_grad and shard.dtype != master_dtype:
        parameter.grad_dtype = master_dtype
    return parameter


def copy_to_shards(masters: Mapping[str, nn.Parameter], shards: Mapping[str, nn.Parameter]) -> None:
    """Write the values of master weights, such as a checkpoint has loaded, into the device's parts of them."""
    with torch.no_grad():
        for name, master in masters.items():
            if shards[name] is not master:
                target, source = (
                    each.to_local() if isinstance(each, DTensor) else each for each in (shards[name], master)
                )
                target.detach().copy_(source.detach())
