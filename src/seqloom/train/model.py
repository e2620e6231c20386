"""The model of a run: how a family of models is built and saved, and how one rank's parameters are sharded.

The trainer knows no model library. Another library brings a `ModelFamily`: two functions at the top of a module, so
that other processes find them by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from torch import nn

from seqloom.cost import CostModel
from seqloom.data.store import require_new_folder
from seqloom.dist import P2PTensor, Transport
from seqloom.errors import SeqloomError
from seqloom.models import (
    ModelAdapter,
    Transformer,
    compile_layers,
    defer_weight_gradients,
    recompute_layers,
    use_float8,
)
from seqloom.models.adapter import DeferredParameters
from seqloom.models.files import load_options, model_config, parameter_reader, write_model
from seqloom.params import FSDPParameters, Parameters, PipelineFSDP, Placement, ReshardingParameters
from seqloom.params.host_adamw import threads_of_rank
from seqloom.params.interface import ParameterShard, trained_parameters
from seqloom.params.placement import parameters_of
from seqloom.plan import LayerRange, Sharding, Stage
from seqloom.train.checkpoint import load_alone
from seqloom.train.config import Config, Optimiser
from seqloom.train.optim import make_optimiser
from seqloom.train.run_folder import atomic_folder, shape_name
from seqloom.train.setup import Describe, load_model_spec

BuildModel = Callable[[Config, torch.device, torch.dtype], ModelAdapter]
"""Return the model of a run, its parameters on "meta" and the same `deferred` values of them on all ranks.

Parameters of the dtype will live on the device; on "meta" there are no values."""
SaveModel = Callable[[Config, nn.Module, Mapping[str, torch.Tensor], Path, Path], None]
"""Write the trained model, given its module and its full state dict on the CPU, to a folder; its adapters, if it has
some, to another. Called on rank 0."""
MODEL_FOLDER, ADAPTER_FOLDER = "model", "adapter"
"""Where a run writes both, in its folder."""


def no_notes(config: Config) -> Sequence[str]:
    """Say nothing."""
    return ()


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """How models of one library are described to plans, built before the first step and saved after the last."""

    build: BuildModel
    save: SaveModel
    describe: Describe = load_model_spec
    notes: Callable[[Config], Sequence[str]] = no_notes
    """What a run says of its model at the beginning."""


def build_reference(config: Config, device: torch.device, dtype: torch.dtype) -> ModelAdapter:
    """Build the reference model with random parameters, or those that the config names: see `BuildModel`."""
    settings = config.model
    options = load_options(str(settings.spec)) if settings.parameters is not None else None
    model = Transformer(load_model_spec(config), options, dtype=dtype, device="meta")
    freeze_parameters(model, settings.freeze)
    model_config(model.spec, model.options)  # refuse now what could not be saved in the end
    path = settings.parameters
    drawn = partial(model.initial_value, settings.seed)
    read = (lambda name, rows: drawn(name)[rows]) if path is None else parameter_reader(model, path)
    return replace(ModelAdapter.of(model), deferred=None if device.type == "meta" else DeferredParameters(read, device))


def save_reference(
    config: Config, module: nn.Module, state: Mapping[str, torch.Tensor], folder: Path, adapters: Path
) -> None:
    """Write config.json and model.safetensors: see `SaveModel`."""
    with atomic_folder(folder, SafetensorError) as partial_folder:
        write_model(partial_folder, cast("Transformer", module), state, context=config.data.max_length)


REFERENCE = ModelFamily(build_reference, save_reference)
"""The reference transformer."""


def freeze_parameters(module: nn.Module, patterns: Sequence[str]) -> None:
    """Have the parameters that `model.freeze` names require no gradient; refuse a pattern that names none."""
    for pattern in patterns:
        named = [each for name, each in module.named_parameters() if matches_name(pattern, name)]
        if not named:
            names = [name for name, _ in module.named_parameters()]
            shown = ", ".join([*names[:2], "..", *names[-2:]])
            raise SeqloomError(
                f"model.freeze: {pattern!r} is the name of no parameter; give parts of names of this model ({shown}), "
                "such as layers.0-3"
            )
        for parameter in named:
            parameter.requires_grad_(False)
    if patterns and not trained_parameters(module):
        raise SeqloomError(f"model.freeze = {list(patterns)} leaves no parameter to be trained; name fewer")


def matches_name(pattern: str, name: str) -> bool:
    """Whether the parts of a pattern are parts of a name that follow each other: see `config.Model.freeze`."""
    wanted, parts = pattern.split("."), name.split(".")
    return any(
        all(map(_matches_part, wanted, parts[start : start + len(wanted)]))
        for start in range(len(parts) - len(wanted) + 1)
    )


def _matches_part(pattern: str, part: str) -> bool:
    found = re.fullmatch(r"(\d+)-(\d+)", pattern)
    if found is not None and part.isdecimal():
        return int(found[1]) <= int(part) <= int(found[2])
    return fnmatchcase(part, pattern)


def parameter_dtypes(config: Config) -> tuple[torch.dtype, torch.dtype | None]:
    """Return the dtype of the optimiser's parameters, and the one that layers compute in where it differs."""
    dtype = getattr(torch, config.model.dtype)
    return (torch.float32, dtype) if dtype == torch.bfloat16 else (dtype, None)


def prepare_layers(
    adapter: ModelAdapter, *, compiled: bool = False, split_backward: bool = True, float8: bool = False
) -> ModelAdapter:
    """Change the layers in place so that they recompute and split their backward as plans ask for.

    Plans of one stage never split backwards, and do not need `split_backward`.
    """
    if float8:
        use_float8(adapter.layers)
    if compiled:
        compile_layers(adapter.layers)
    recompute_layers(adapter.layers)
    return replace(adapter, weight_gradients=defer_weight_gradients(adapter.layers)) if split_backward else adapter


def check_splits(adapter: ModelAdapter, tensor_degrees: Sequence[int] = ()) -> None:
    """Refuse a model that cannot be cut into stages or by these tensor degrees, and parameters outside every stage."""
    parameters_of(adapter, LayerRange(0, len(adapter.layers), len(adapter.layers)))
    for degree in tensor_degrees:
        adapter.check_tp_degree(degree)


def check_expert_bias(adapter: ModelAdapter, settings: Optimiser) -> None:
    """Refuse `optimiser.expert_bias_rate` for a model without experts that have a correction bias."""
    if settings.expert_bias_rate and not adapter.bias_buffers():
        raise SeqloomError(
            f"optimiser.expert_bias_rate = {settings.expert_bias_rate}: {type(adapter.module).__name__} has no experts "
            "with a correction bias; leave it out"
        )


def state_shapes(adapter: ModelAdapter, settings: Optimiser) -> dict[str, str]:
    """Return dtype and shape, by name, of what a checkpoint holds of a model; see `Trainer.save_checkpoint`."""
    tensors = trained_parameters(adapter.module) | (adapter.bias_buffers() if settings.expert_bias_rate else {})
    return {name: shape_name(tensor) for name, tensor in tensors.items()}


def shard_parameters(
    adapter: ModelAdapter, transport: Transport, stages: Sequence[Stage], cost: CostModel, compute: torch.dtype | None
) -> Parameters:
    """Shard the parameters over all ranks, or every stage's over its ranks; under free sharding plans move them.

    Values, the same on all ranks, are read while they are cut. `stages` are those of all plans of the run, `compute` is
    the dtype of layers where it is not that of parameters. Masters are where the cost model has the optimiser.
    """
    options = {"param_dtype": compute, "offload_optimiser": cost.offload_optimiser}
    parameters: Parameters
    if cost.sharding == Sharding.FREE:
        parameters = ReshardingParameters(adapter, transport, **options)
    elif len(stages) > 1:
        placement = Placement(tuple(stages), cost.sharding, cost.node_size)
        parameters = PipelineFSDP(adapter, transport, placement, **options)
    else:
        sizes = {"node_size": cost.node_size, "expert": cost.expert, "tensor": cost.tensor}
        parameters = FSDPParameters(adapter, transport, cost.sharding, **sizes, **options)
    if adapter.deferred is not None:
        adapter.deferred.close()
    return parameters


def make_sharded_optimiser(
    parameters: Parameters, cost: CostModel, settings: Optimiser, hidden: Collection[str] = ()
) -> torch.optim.Optimizer:
    """Make the optimiser of sharded parameters, where the cost model has it, updated where that costs least.

    `hidden` are the names of what layers hold, see `layer_parameters`.
    """
    masters = parameters.master_weights()
    if not cost.offload_optimiser:
        return make_optimiser(masters, settings, hidden=[name for name in masters if name in hidden])
    options = {"update_on_host": cost.updates_on_host, "threads": threads_of_rank(cost.node_size)}
    return make_optimiser(masters, settings, shards=parameters.device_shards(), **options)


def load_trained(path: Path, config: Config, family: ModelFamily) -> ModelAdapter:
    """Build the model of a checkpoint or a dump in this process alone, on CPU, with the parameters that it has."""
    adapter = family.build(config, torch.device("cpu"), parameter_dtypes(config)[0])
    adapter.materialize()
    biases = adapter.bias_buffers() if config.optimiser.expert_bias_rate > 0 else {}
    load_alone(path, trained_parameters(adapter.module) | biases)
    return adapter


def export_model(path: Path, config: Config, family: ModelFamily, folder: Path) -> ModelAdapter:
    """Write the model of a checkpoint to a new folder, and its adapters below; return it."""
    require_new_folder(folder)
    adapter = load_trained(path, config, family)
    module = adapter.module
    state = {name: each.detach() for name, each in module.named_parameters()} | _saved_buffers(module)
    family.save(config, module, state, folder, folder / ADAPTER_FOLDER)
    return adapter


def _saved_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that a state dict of the module has, on the CPU."""
    saved = module.state_dict(keep_vars=True)
    return {name: buffer.detach().cpu() for name, buffer in module.named_buffers() if name in saved}


def layer_parameters(adapter: ModelAdapter) -> frozenset[str]:
    """Return the names of the parameters inside decoder layers, before they are sharded."""
    inside = {id(parameter) for layer in adapter.layers for parameter in layer.parameters()}
    return frozenset(name for name, each in adapter.module.named_parameters() if id(each) in inside)


def gather_state_dict(
    module: nn.Module, parameters: Parameters, transport: Transport, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers by name, whole, on the CPU of rank 0; tied ones once, by the first name.

    All ranks take part, one parameter after the other, and get nothing: they send rank 0 their shards, which are on
    the device.
    """
    state = {}
    for name, shard in parameters.shards():
        whole = _collect(shard, transport, device)
        if whole is not None:
            state[name] = whole
    if transport.rank:
        return {}
    return state | _saved_buffers(module)


def _collect(shard: ParameterShard, transport: Transport, device: torch.device) -> torch.Tensor | None:
    """Return a parameter on the CPU of rank 0, from the shards of all ranks; None on the others."""
    axes, everyone = len(shard.shape), tuple(range(transport.ranks))
    box = [0] * (2 * axes) if shard.values is None else [*shard.offset, *shard.values.shape]
    boxes = torch.empty(transport.ranks * len(box), dtype=torch.int64, device=device)
    transport.all_gather(boxes, torch.tensor(box, dtype=torch.int64, device=device), everyone)
    if transport.rank:
        if shard.values is not None:
            transport.exchange([P2PTensor(0, shard.values.contiguous())], []).wait()
        return None
    whole = torch.empty(shard.shape, dtype=shard.dtype)
    for rank, (offset, sizes) in enumerate(boxes.view(transport.ranks, 2, axes).tolist()):
        if not math.prod(sizes):
            continue
        part = shard.values if rank == 0 else torch.empty(sizes, dtype=shard.dtype, device=device)
        assert part is not None
        if rank:
            transport.exchange([], [P2PTensor(rank, part)]).wait()
        whole[tuple(slice(start, start + size) for start, size in zip(offset, sizes, strict=True))] = part.cpu()
    return whole
