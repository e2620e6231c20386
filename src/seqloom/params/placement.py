"""Which ranks hold which parameters of a pipeline: fixed for a whole run.

    stages on pp ranks  a b a b      a holds the embedding and the layers of stages 0 and 2,
                                     b those of 1 and 3, the final norm and the head

Parameters keep their names and their place in the module. Ranks that do not hold one have it on "meta": its shape
without its values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from seqloom.errors import SeqloomError
from seqloom.models.adapter import ModelAdapter, to_meta
from seqloom.plan import LayerRange, Sharding, Stage
from seqloom.plan.pipeline import layer_ranges


@dataclass(frozen=True, slots=True)
class Placement:
    """The stages of one pipeline over all ranks, and how far the ranks of a stage shard their parameters.

    Attributes:
        stages: in the order of layers, with equally many ranks.
        sharding: over all ranks of a stage, its ranks in a node, or none.
    """

    stages: tuple[Stage, ...]
    sharding: Sharding
    node_size: int

    @property
    def ranks_by_pp_rank(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every pp rank, in the order in which stages name them."""
        return tuple(dict.fromkeys(stage.ranks for stage in self.stages))

    def pp_rank_of(self, rank: int) -> int:
        """Return the pp rank of a rank."""
        return next(index for index, ranks in enumerate(self.ranks_by_pp_rank) if rank in ranks)

    def layer_ranges(self, pp_rank: int) -> tuple[LayerRange, ...]:
        """Return the layers of every stage of a pp rank."""
        ranks, every = self.ranks_by_pp_rank[pp_rank], zip(self.stages, layer_ranges(self.stages), strict=True)
        return tuple(layers for stage, layers in every if stage.ranks == ranks)

    @property
    def expert(self) -> int:
        """Neighbours that divide the experts of a layer.

        Raises:
            SeqloomError: stages have several degrees.
        """
        return _one_degree("expert", [stage.expert for stage in self.stages])

    @property
    def tensor(self) -> int:
        """Neighbours that divide the weights of a layer; see `expert`."""
        return _one_degree("tensor", [stage.tensor for stage in self.stages])

    def mesh(self, ranks: int) -> torch.Tensor:
        """Return the ranks as int64[pp ranks, replicas, shards].

        Raises:
            SeqloomError: the stages are not on all `ranks`, or not on equally many each.
        """
        blocks = self.ranks_by_pp_rank
        if sorted(rank for block in blocks for rank in block) != list(range(ranks)) or len({*map(len, blocks)}) != 1:
            raise SeqloomError(
                f"stages on ranks {blocks} of {ranks}: the stages of a pipeline use all ranks and have equally many "
                "each; choose a number of stages that divides the ranks"
            )
        shard_groups = [_shard_groups(block, self.sharding, self.node_size) for block in blocks]
        if len({len(group) for groups in shard_groups for group in groups}) != 1:
            raise SeqloomError(
                f"{self.sharding} sharding of stages on ranks {blocks} in nodes of {self.node_size}: every stage needs "
                "equally many ranks in every node; choose a number of stages whose ranks fill nodes or divide them"
            )
        return torch.tensor(shard_groups)

    def divided_mesh(self, ranks: int) -> torch.Tensor:
        """Return the ranks as int64[pp ranks, replicas, parts, shards of a part] of experts, or of weights of layers.

        Shard groups have whole EP or TP groups.
        """
        degree = max(self.expert, self.tensor)
        width = max(self.mesh(ranks).shape[2], degree)
        blocks = torch.tensor(self.ranks_by_pp_rank)
        if self.sharding == Sharding.HYBRID:
            blocks = self.mesh(ranks).flatten(1)
        if width % degree or blocks.shape[1] % width:
            name, groups = ("tensor", "TP") if self.tensor > 1 else ("expert", "EP")
            raise SeqloomError(
                f"{name} degree {degree} where {width} ranks share parameters: {groups} groups are parts of them; use "
                f"a degree that divides {width}"
            )
        return blocks.view(len(blocks), -1, width // degree, degree).transpose(2, 3)


def _one_degree(name: str, degrees: Iterable[int]) -> int:
    found = sorted(set(degrees))
    if len(found) > 1:
        raise SeqloomError(
            f"stages with {name} degrees {', '.join(map(str, found))}: parameters that stay in one place are divided "
            "alike on all stages; give all stages one degree"
        )
    return found[0]


def _shard_groups(ranks: tuple[int, ...], sharding: Sharding, node_size: int) -> list[list[int]]:
    """Split the ranks of a stage into those that share shards, see `Limits.shard_groups`."""
    if sharding == Sharding.FULL:
        return [list(ranks)]
    size = node_size if sharding == Sharding.HYBRID else 1
    groups: dict[int, list[int]] = {}
    for rank in ranks:
        groups.setdefault(rank // size, []).append(rank)
    return list(groups.values())


def parameters_of(adapter: ModelAdapter, layers: LayerRange) -> dict[str, nn.Parameter]:
    """Return the parameters of a stage by canonical name: tied ones by their first name in the module.

    Raises:
        SeqloomError: the model cannot be cut into stages, or has parameters that no stage would hold.
    """
    if adapter.embedding is None or adapter.norm is None or adapter.body is None:
        raise SeqloomError(adapter.stages_error)
    names = {id(parameter): name for name, parameter in adapter.module.named_parameters()}
    modules = list(adapter.layers[layers.first : layers.stop])
    modules = [adapter.embedding, *modules] if layers.has_embedding else modules
    modules = [*modules, adapter.norm, adapter.head] if layers.has_head else modules
    found = {names[id(parameter)]: parameter for module in modules for parameter in module.parameters()}
    if layers.has_embedding and layers.has_head and len(found) != len(names):
        missing = next(name for name in names.values() if name not in found)
        raise SeqloomError(
            f"parameter {missing} is neither of the embedding nor of a layer, the final norm or the head, so no stage "
            "would hold it; plan with one stage (pipeline.stages = 1)"
        )
    return found


def parameters_of_stages(adapter: ModelAdapter, stages: Iterable[LayerRange]) -> dict[str, nn.Parameter]:
    """Return the parameters of several stages, in the order of the module."""
    every = parameters_of(adapter, LayerRange(0, len(adapter.layers), len(adapter.layers)))
    wanted = {name for layers in stages for name in parameters_of(adapter, layers)}
    return {name: every[name] for name, _ in adapter.module.named_parameters() if name in wanted}


def drop_other_stages(adapter: ModelAdapter, stages: Iterable[LayerRange]) -> None:
    """Replace all parameters that these stages do not need by ones on "meta"."""
    kept = {id(parameter) for parameter in parameters_of_stages(adapter, stages).values()}
    others = [parameter for parameter in adapter.module.parameters() if id(parameter) not in kept]
    replace_parameters(adapter.module, {id(each): to_meta(each) for each in others})


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move the buffers of a module, whose parameters may be on "meta", to a device."""
    for owner in module.modules():
        for name, buffer in list(owner.named_buffers(recurse=False)):
            setattr(owner, name, buffer.to(device))


def pop_values(module: nn.Module) -> Callable[[str, slice], torch.Tensor]:
    """Leave all parameters on "meta"; return what reads rows of their values by canonical name, each of them once."""
    named = dict(module.named_parameters())
    replace_parameters(module, {id(each): to_meta(each) for each in named.values()})
    values = {name: each.detach() for name, each in named.items()}
    return lambda name, rows: values.pop(name)[rows]


def replace_parameters(module: nn.Module, new: Mapping[int, nn.Parameter]) -> None:
    """Replace parameters wherever they are in a module: tied ones stay tied.

    Args:
        new: {id of the old parameter: new parameter}.
    """
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in new:
                setattr(owner, name, new[id(parameter)])
