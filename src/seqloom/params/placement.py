"""Which ranks hold which parameters of a model that is cut into stages: fixed for a whole run.

    stages on hosts  a b a b      a holds the embedding and the layers of stages 0 and 2,
                                  b those of 1 and 3, the final norm and the head

Parameters keep their names and their place in the module, whoever holds them. On ranks that do not hold one it is on
"meta": its shape is known there, its values are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from seqloom.errors import SeqloomError
from seqloom.models.adapter import ModelAdapter, to_meta
from seqloom.plan import LayerRange, Plan, Sharding, Stage


@dataclass(frozen=True, slots=True)
class Placement:
    """The stages of one pipeline over all ranks, and how far a host shards their parameters.

    Attributes:
        stages: in the order of layers; hosts have equally many ranks.
        sharding: over a host's ranks, its ranks in a node, or none.
        node_size: ranks of a node.
    """

    stages: tuple[Stage, ...]
    sharding: Sharding
    node_size: int

    @classmethod
    def of(cls, plan: Plan) -> Placement:
        """Return where a plan runs the layers; other plans with the same stages can follow it."""
        if len(plan.pipelines) != 1:
            raise SeqloomError(
                f"{len(plan.pipelines)} pipelines side by side: parameters are placed for one; plan with one pipeline"
            )
        return cls(plan.pipelines[0].stages, plan.sharding, plan.limits.node_size)

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every host, in the order in which stages name them."""
        return tuple(dict.fromkeys(stage.ranks for stage in self.stages))

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return self.stages[-1].layers[1]

    def parts(self, host: int) -> tuple[LayerRange, ...]:
        """Return what a host runs of the model, stage by stage."""
        ranks = self.hosts[host]
        return tuple(LayerRange(*stage.layers, self.layers) for stage in self.stages if stage.ranks == ranks)

    def host_of(self, rank: int) -> int:
        """Return the host of a rank."""
        return next(number for number, host in enumerate(self.hosts) if rank in host)

    def parts_of(self, rank: int) -> tuple[LayerRange, ...]:
        """Return what a rank runs of the model."""
        return self.parts(self.host_of(rank))

    def table(self, ranks: int) -> torch.Tensor:
        """Return the ranks as int64[hosts, replicas, shards]: ranks of one row share the shards of one replica.

        Raises:
            SeqloomError: the hosts are not all `ranks`, or not alike.
        """
        hosts = self.hosts
        if sorted(rank for host in hosts for rank in host) != list(range(ranks)) or len({*map(len, hosts)}) != 1:
            raise SeqloomError(
                f"stages on hosts {hosts} of {ranks} ranks: a pipeline's hosts make up all ranks and have equally many "
                "each; choose a number of stages that divides the ranks"
            )
        shard_groups = [_shard_groups(host, self.sharding, self.node_size) for host in hosts]
        if len({len(shard_group) for row in shard_groups for shard_group in row}) != 1:
            raise SeqloomError(
                f"{self.sharding} sharding of hosts {hosts} in nodes of {self.node_size}: every host needs equally "
                "many ranks in every node; choose a number of stages whose hosts fill nodes or divide them"
            )
        return torch.tensor(shard_groups)


def _shard_groups(host: tuple[int, ...], sharding: Sharding, node_size: int) -> list[list[int]]:
    """Cut a host into ranks that share shards, see `Limits.shard_groups`."""
    if sharding == Sharding.FULL:
        return [list(host)]
    size = node_size if sharding == Sharding.HYBRID else 1
    found: dict[int, list[int]] = {}
    for rank in host:
        found.setdefault(rank // size, []).append(rank)
    return list(found.values())


def parameters_of(adapter: ModelAdapter, part: LayerRange) -> dict[str, nn.Parameter]:
    """Return the parameters that a part needs, by canonical name: tied ones by their first name in the module.

    Raises:
        SeqloomError: the model cannot be cut, or has parameters that no part would hold.
    """
    if adapter.embedding is None or adapter.norm is None or adapter.body is None:
        raise SeqloomError(adapter.stages_error)
    names = {id(parameter): name for name, parameter in adapter.module.named_parameters()}
    modules = list(adapter.layers[part.first : part.stop])
    modules = [adapter.embedding, *modules] if part.has_embedding else modules
    modules = [*modules, adapter.norm, adapter.head] if part.has_head else modules
    found = {names[id(parameter)]: parameter for module in modules for parameter in module.parameters()}
    if part.has_embedding and part.has_head and len(found) != len(names):
        lost = next(name for name in names.values() if name not in found)
        raise SeqloomError(
            f"parameter {lost} is neither of the embedding nor of a layer, the final norm or the head, so no stage "
            "would hold it; plan with one stage (pipeline.stages = 1)"
        )
    return found


def held_by(adapter: ModelAdapter, parts: Iterable[LayerRange]) -> dict[str, nn.Parameter]:
    """Return the parameters of several parts, in the order of the module."""
    whole = LayerRange(0, len(adapter.layers), len(adapter.layers))
    every = parameters_of(adapter, whole)
    wanted = {name for part in parts for name in parameters_of(adapter, part)}
    return {name: every[name] for name, _ in adapter.module.named_parameters() if name in wanted}


def keep_only(adapter: ModelAdapter, parts: Iterable[LayerRange]) -> None:
    """Give up the values of all parameters that parts do not need: they go to "meta", under their names."""
    held = {id(parameter) for parameter in held_by(adapter, parts).values()}
    others = [parameter for parameter in adapter.module.parameters() if id(parameter) not in held]
    exchange(adapter.module, {id(each): to_meta(each) for each in others})


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Bring the buffers of a module to a device, whose parameters may be on "meta"."""
    for owner in module.modules():
        for name, buffer in list(owner.named_buffers(recurse=False)):
            setattr(owner, name, buffer.to(device))


def taken_out(module: nn.Module) -> dict[str, torch.Tensor]:
    """Take the values out of a module, whose parameters go to "meta"; return them by canonical name."""
    named = dict(module.named_parameters())
    exchange(module, {id(each): to_meta(each) for each in named.values()})
    return {name: each.detach() for name, each in named.items()}


def exchange(module: nn.Module, new: Mapping[int, nn.Parameter]) -> None:
    """Put parameters in the place of others, wherever these are: what was tied stays tied.

    Args:
        module: whose parameters they are.
        new: by the id of the old one.
    """
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in new:
                setattr(owner, name, new[id(parameter)])
