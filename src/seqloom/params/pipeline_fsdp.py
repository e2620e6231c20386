"""Parameters of a pipeline: every rank has those of its stages, in shards over its host.

Ranks stand in a table, hosts x replicas x shards. Four stages on 16 ranks, hybrid sharding in nodes of 2:

    host 0   0  1      host 1   4  5      host 2   8  9      host 3   12 13     a row shares shards,
             2  3               6  7              10 11               14 15     a host's rows are replicas

Once per step a host gathers its stages' parameters, whole gradients add up over all units, then each rank gets the sum
of its rows: along a row in `reduce`, over the rows in `finish`. A table of tokens that is also the head is on the first
and on the last stage. Its gradients are summed over both, so both keep the same values.

torch's FSDP2 does not fit: it reduces inside a backward, and here weights' gradients come after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from seqloom.compat import inherit_timeout
from seqloom.dist import Context, Transport
from seqloom.errors import SeqloomError
from seqloom.models.adapter import ModelAdapter, ModelWithLoss
from seqloom.models.loss import CHUNK, HeadGradients
from seqloom.models.split_backward import WeightGradients
from seqloom.params.fsdp import check_job, device_of, reduce_dtype
from seqloom.params.interface import check_fixed, complete_gradients, squared_norm, sum_gradients, trained
from seqloom.params.placement import Placement, exchange, held_by, keep_only, parameters_of
from seqloom.params.shards import ShardedParameter, buckets, gather, scatter
from seqloom.plan import LayerRange, Plan

HOST, REPLICA, SHARD = "host", "replica", "shard"


class PipelineFSDP:
    """The parameters of this rank's stages. Every rank of the job makes one, with the same values where both hold some.

    Masters are the parameters that were given, in their dtype (float32 for training), cut along their first axis.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        transport: Transport,
        placement: Placement,
        *,
        param_dtype: torch.dtype | None = None,
        chunk: int = CHUNK,
    ) -> None:
        """Cut the network in place: what this rank's stages do not need goes to "meta".

        Args:
            network: the model, on the device where it will run, or with `values`, one at a time; parameters that this
                rank does not hold may be on "meta" for good.
            transport: over torch.distributed; all its ranks.
            placement: who holds what.
            param_dtype: dtype of parameters and activations in the model; None: that of the masters. Gradients are
                added up and reduced in float32 or wider.
            chunk: as in `summed_loss`.
        """
        check_job(transport)
        table = placement.table(transport.ranks)
        self._host, self._parts = placement.host_of(transport.rank), placement.parts_of(transport.rank)
        hosts = [held_by(adapter, placement.parts(host)) for host in range(len(placement.hosts))]
        held = hosts[self._host]
        device = device_of(adapter, list(held.values()))
        reduce_dtype(list(held.values()))
        self._mesh = DeviceMesh(device.type, table, mesh_dim_names=(HOST, REPLICA, SHARD))
        for axis in (HOST, REPLICA, SHARD):
            inherit_timeout(self._mesh.get_group(axis))
        self._replicas = self._mesh[REPLICA].size()
        self._shard_ranks: tuple[int, ...] = tuple(self._mesh[SHARD].mesh.flatten().tolist())
        self._holders = {
            name: [host for host, names in enumerate(hosts) if name in names]
            for name, _ in adapter.module.named_parameters()
        }
        self._together = _groups(self._holders, table)
        keep_only(adapter, self._parts)
        self._kept: dict[str, ShardedParameter] = {}
        for name, each in held.items():
            adapter.materialize([(name, each)])
            self._kept[name] = ShardedParameter.of(each, self._mesh[SHARD], param_dtype)
            each.data = each.data.new_empty(0)  # the whole and its shards are never all there at once
        exchange(adapter.module, {id(held[name]): kept.copy for name, kept in self._kept.items()})
        self._needs = {part: [self._kept[name] for name in parameters_of(adapter, part)] for part in self._parts}
        self._ready: set[LayerRange] = set()  # acquired
        self._due: set[LayerRange] = set()  # have run, and are to be reduced
        self._adapter, self._device, self._head = adapter, device, HeadGradients()
        self._loss = ModelWithLoss(adapter, chunk, self._head)

    @property
    def shard_ranks(self) -> tuple[int, ...]:
        """See `Parameters.shard_ranks`."""
        return self._shard_ranks

    @property
    def weight_gradients(self) -> WeightGradients:
        """See `Parameters.weight_gradients`."""
        return self._adapter.weight_gradients

    def empty_hidden_states(self, tokens: int) -> torch.Tensor:
        """See `Parameters.empty_hidden_states`."""
        head = cast("torch.Tensor", self._adapter.head.weight)
        dtype = next(iter(self._kept.values())).copy.dtype
        return torch.empty((tokens, head.shape[1]), dtype=dtype, device=self._device)

    def prefetch(self, plan: Plan) -> None:
        """See `Parameters.prefetch`; parameters stay where they are."""
        check_fixed(plan)

    def wait_prefetch(self) -> None:
        """See `Parameters.wait_prefetch`; nothing is under way."""

    def unshard(self, part: LayerRange) -> None:
        """See `Parameters.unshard`."""
        self._check(part)
        if part in self._ready:
            return
        there = self._in_use()
        self._ready.add(part)
        wanted = [kept for kept in self._needs[part] if id(kept) not in there and not kept.is_master]
        for bucket in buckets(wanted):
            for kept in bucket:
                kept.give_memory()
            gather(bucket, self._mesh.get_group(SHARD))

    def forward(
        self, part: LayerRange, given: torch.Tensor, labels: torch.Tensor | None, context: Context
    ) -> torch.Tensor:
        """See `Parameters.forward`."""
        self.unshard(part)
        if torch.is_grad_enabled():
            self._due.add(part)
        return self._loss(given, labels, context, part)

    def backward(self, output: torch.Tensor | GradientEdge, gradient: torch.Tensor | None, *, reduce: bool) -> None:
        """See `Parameters.backward`. Whole gradients add up on this rank: they are reduced once, in the step's end."""
        torch.autograd.backward((cast("torch.Tensor", output),), (gradient,))

    def reduce(self, part: LayerRange) -> None:
        """See `Parameters.reduce`. What was reduced before is added to: a table of two parts has two sums."""
        self._check(part)
        self._due.discard(part)
        wanted = [kept for kept in self._needs[part] if kept.copy.requires_grad]
        for bucket in buckets(wanted):
            scatter(bucket, self._mesh.get_group(SHARD))

    def reshard(self, part: LayerRange) -> None:
        """See `Parameters.reshard`."""
        self._check(part)
        self._ready.discard(part)
        needed = self._in_use()
        for kept in self._needs[part]:
            if id(kept) not in needed:
                kept.free()

    def finish_gradients(self) -> None:
        """See `Parameters.finish_gradients`. A parameter on several hosts gets its gradient from all of them."""
        for part in self._parts:
            if part in self._due:  # the plan left it to this
                self.reduce(part)
        masters = self.master_weights()
        if self._replicas > 1:
            group = self._mesh.get_group(REPLICA)
            sum_gradients(masters.values(), lambda flat: dist.all_reduce(flat, group=group))
        complete_gradients(masters.values())
        for holders, group in self._together.items():
            shared = [each for name, each in masters.items() if tuple(self._holders[name]) == holders]
            sum_gradients(shared, lambda flat, group=group: dist.all_reduce(flat, group=group))

    def gradient_norm(self) -> torch.Tensor:
        """See `Parameters.gradient_norm`. What several hosts hold is counted on the first of them."""
        counted = [each for name, each in self.master_weights().items() if self._holders[name][0] == self._host]
        squares = squared_norm(counted).to(self._device)
        for axis in (SHARD, HOST):
            dist.all_reduce(squares, group=self._mesh.get_group(axis))
        return squares.sqrt()

    def full_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Parameters.full_gradients`; each comes from its host when its turn comes."""
        for name, parameter in trained(self._adapter.module).items():
            kept = self._kept.get(name)
            yield name, self._whole(name, parameter, None if kept is None else kept.master.grad)

    def full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Parameters.full_parameters`; each comes from its host when its turn comes."""
        for name, parameter in self._adapter.module.named_parameters():
            kept = self._kept.get(name)
            yield name, self._whole(name, parameter, None if kept is None else kept.master.detach())

    def master_weights(self) -> dict[str, nn.Parameter]:
        """See `Parameters.master_weights`; all of them are distributed tensors, of this rank's stages."""
        return {name: kept.master for name, kept in self._kept.items() if kept.master.requires_grad}

    def compute_weights(self) -> Iterator[torch.Tensor]:
        """See `Parameters.compute_weights`."""
        yield from (kept.copy for kept in self._kept.values())

    def zero_grad(self) -> None:
        """See `Parameters.zero_grad`. Copies are dropped too: the optimiser may have changed the masters."""
        self._due.clear()
        self._head.clear()
        for kept in self._kept.values():
            kept.master.grad = kept.copy.grad = None
        for part in tuple(self._ready):
            self.reshard(part)

    def _whole(self, name: str, like: nn.Parameter, found: torch.Tensor | None) -> torch.Tensor:
        """Return a parameter's tensor on all ranks, from the first host that has it."""
        source = self._holders[name][0]
        if source == self._host:
            whole = cast("DTensor", found).full_tensor().contiguous()
        else:
            dtype = next(iter(self._kept.values())).master.dtype
            whole = torch.empty(like.shape, dtype=dtype, device=self._device)
        column = self._mesh[HOST]
        if column.size() > 1:
            dist.broadcast(whole, int(column.mesh[source]), group=column.get_group())
        return whole

    def _in_use(self) -> set[int]:
        """Copies that acquired parts need."""
        return {id(kept) for part in self._ready for kept in self._needs[part]}

    def _check(self, part: LayerRange) -> None:
        if part not in self._needs:
            mine = ", ".join(f"{each.first} to {each.stop - 1}" for each in self._parts)
            raise SeqloomError(
                f"layers {part.first} to {part.stop - 1} of {part.model_layers} asked of a rank that holds the stages "
                f"with layers {mine}; plan with the stages that the parameters were placed for"
            )


def _groups(holders: dict[str, list[int]], table: torch.Tensor) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """Make groups of ranks that have the same rows of what several hosts hold; return those of this rank.

    All processes of the job take part, in one order.
    """
    found: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for hosts in sorted({tuple(each) for each in holders.values() if len(each) > 1}):
        for replica, shard in product(*map(range, table.shape[1:])):
            members = [int(table[host, replica, shard]) for host in hosts]
            group = dist.new_group(members)
            if isinstance(group, dist.ProcessGroup):  # this rank is a member
                inherit_timeout(group)
                found[hosts] = group
    return found
