"""Kinds of models that a run can train: how one is built, and how the trained one is written.

The loop knows no library. Who brings another kind of model brings these two functions, at the top of a module, so that
other processes find them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors import SafetensorError
from torch import nn

from seqloom.cost import CostModel
from seqloom.dist import Transport
from seqloom.models import ModelAdapter, Transformer, compile_layers, defer_weight_gradients, recompute_layers
from seqloom.models.adapter import DeferredParameters
from seqloom.models.files import load_options, model_config, parameter_reader, write_model
from seqloom.params import FSDPParameters, Parameters, PipelineFSDP, Placement, ReshardingParameters
from seqloom.params.placement import parameters_of
from seqloom.plan import LayerRange, Sharding, Stage
from seqloom.train.checkpoint import replaced
from seqloom.train.config import Config
from seqloom.train.setup import model_spec


class Build(Protocol):
    """Makes the model of a run."""

    def __call__(self, config: Config, device: torch.device, dtype: torch.dtype, /) -> ModelAdapter:
        """Return the model, its parameters on "meta" and the same `values` of them on all ranks.

        Args:
            config: of the run.
            device: where parameters shall live; on "meta" there are no values.
            dtype: of parameters.
        """
        ...


Save = Callable[[Config, nn.Module, Mapping[str, torch.Tensor]], Path]
"""Write the trained model, given the module of its network and all its tensors, whole and on the CPU; return where.
Called on the first rank."""


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """A kind of model.

    Attributes:
        build: makes it.
        save: writes it after the last step.
    """

    build: Build
    save: Save


def build_reference(config: Config, device: torch.device, dtype: torch.dtype) -> ModelAdapter:
    """Make the reference model, with fresh parameters or those that the config names: see `Build`."""
    settings = config.model
    options = load_options(str(settings.spec)) if settings.parameters is not None else None
    model = Transformer(model_spec(config), options, dtype=dtype, device="meta")
    model_config(model.spec, model.options)  # refuse now what could not be written in the end
    given = settings.parameters
    read = partial(model.initial_value, settings.seed) if given is None else parameter_reader(model, given)
    return replace(ModelAdapter.of(model), deferred=None if device.type == "meta" else DeferredParameters(read, device))


def save_reference(config: Config, module: nn.Module, state: Mapping[str, torch.Tensor]) -> Path:
    """Write config.json and model.safetensors: see `Save`."""
    final = config.run.output / "model"
    with replaced(final, SafetensorError) as partial:
        write_model(partial, cast("Transformer", module), state, context=config.data.max_length)
    return final


REFERENCE = ModelFamily(build_reference, save_reference)
"""The reference transformer."""


def dtypes(config: Config) -> tuple[torch.dtype, torch.dtype | None]:
    """Return the dtype of the parameters that are updated, and the one that layers compute in where it differs."""
    dtype = getattr(torch, config.model.dtype)
    return (torch.float32, dtype) if dtype == torch.bfloat16 else (dtype, None)


def gathered(module: nn.Module, parameters: Parameters, *, keep: bool) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a model by name, whole and on the CPU; tied ones once, by the first name.

    All ranks take part, one tensor after the other.

    Args:
        module: of the model; every rank has its buffers.
        parameters: keeps its parameters, in shards or not.
        keep: whether this rank wants them; others get nothing.
    """
    found = {name: whole.cpu() for name, whole in parameters.full_parameters() if keep}
    if not keep:
        return found
    saved = module.state_dict(keep_vars=True)
    return found | {name: each.detach().cpu() for name, each in module.named_buffers() if name in saved}


# ---- merged: train.model
# The model of a run on one rank: its layers made ready, its parameters where the run's plans want them.


def made_ready(adapter: ModelAdapter, *, compiled: bool = False, split: bool = True) -> ModelAdapter:
    """Return a network whose layers recompute and split their backward as plans ask for.

    Args:
        network: fresh; its layers are changed in place.
        compiled: whether the bodies of layers are compiled.
        split: whether plans may split backwards; those of one stage have no use for it.
    """
    if compiled:
        compile_layers(adapter.layers)
    recompute_layers(adapter.layers)
    return replace(adapter, weight_gradients=defer_weight_gradients(adapter.layers)) if split else adapter


def require_parts(adapter: ModelAdapter, tensor_degrees: Sequence[int] = ()) -> None:
    """Refuse a model that cannot be cut into stages or by these degrees, and parameters that no stage would hold."""
    parameters_of(adapter, LayerRange(0, len(adapter.layers), len(adapter.layers)))
    for degree in tensor_degrees:
        adapter.check_tp_degree(degree)


def place(
    adapter: ModelAdapter, transport: Transport, stages: Sequence[Stage], cost: CostModel, compute: torch.dtype | None
) -> Parameters:
    """Shard the parameters over all ranks, or every stage's over its own; under free sharding plans move them.

    Args:
        network: made ready, with the same values on all ranks; they are read while they are cut.
        transport: over torch.distributed.
        stages: of all plans of the run; none: every plan may have its own.
        cost: says how far parameters are sharded.
        compute: as in `Sharded`.
    """
    parameters: Parameters
    if cost.sharding == Sharding.FREE:
        parameters = ReshardingParameters(adapter, transport, param_dtype=compute)
    elif len(stages) > 1:
        placement = Placement(tuple(stages), cost.sharding, cost.node_size)
        parameters = PipelineFSDP(adapter, transport, placement, param_dtype=compute)
    else:
        parameters = FSDPParameters(adapter, transport, cost.sharding, node_size=cost.node_size, param_dtype=compute)
    if adapter.deferred is not None:
        adapter.deferred.close()
    return parameters
