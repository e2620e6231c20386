"""LoRA: low-rank adapters of peft on the linear layers of a Hugging Face model, which alone are trained (`model.lora`).

    y = W x + (alpha / rank) B A dropout(x)        A [rank, in] is drawn, B [out, rank] is zero at first

The model's own parameters are frozen: they are sharded as ever, and have neither gradients nor optimiser state. A run
writes its adapters as peft saves them, for `PeftModel.from_pretrained`, and the merged model W + (alpha / rank) B A,
which needs no peft.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import save_file
from torch import nn

from seqloom.describe import Adapters
from seqloom.errors import SeqloomError, import_extra
from seqloom.models.adapter import meta_parameters
from seqloom.models.files import ReadRows

if TYPE_CHECKING:
    from seqloom.train.config import Lora

PREFIX = "base_model.model."
"""What peft puts before the names of a model's parameters."""
BASE = ".base_layer."
"""What it puts between a linear layer that has an adapter and the layer's own parameters."""
ADAPTER = re.compile(r"\.lora_(A|B)\.default\.weight$")
"""Names of the parameters of adapters."""
WEIGHTS = "adapter_model.safetensors"


def add_adapters(model: nn.Module, settings: Lora, folder: Path) -> Any:
    """Wrap a model with adapters, whose parameters are on "meta"; all others are frozen from now on."""
    import_extra("model.lora", "lora", "peft", otherwise=", or take model.lora out of the config")
    from peft import LoraConfig, get_peft_model

    dtype = next(model.parameters()).dtype
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=cast("int", settings.alpha),  # any number will do
        lora_dropout=settings.dropout,
        target_modules=list(settings.targets) or "all-linear",
    )
    try:
        with meta_parameters():
            wrapped = get_peft_model(model, config)
    except ValueError as error:
        reason = str(error).strip().partition("\n")[0]
        raise SeqloomError(
            f"model.lora.targets = {list(settings.targets)}: {reason}; name linear layers of this model, such as "
            "q_proj and v_proj, or leave targets out, which means all of its layers"
        ) from None
    wrapped.peft_config["default"].base_model_name_or_path = str(folder)
    for name, parameter in wrapped.named_parameters():
        if ADAPTER.search(name):  # peft leaves those on "meta" in float32
            parameter.data = parameter.data.to(dtype)
    others = [name for name, each in wrapped.named_parameters() if each.requires_grad and ADAPTER.search(name) is None]
    if others:
        raise SeqloomError(
            f"model.lora.targets = {list(settings.targets)}: {others[0]} would be trained, which is no adapter of a "
            "linear layer; name linear layers alone"
        )
    return wrapped


def describe_adapters(layers: Iterable[nn.Module]) -> tuple[Adapters, ...]:
    """Return the sizes of the adapters on each of these layers of a wrapped model."""
    found = []
    for layer in layers:
        own: list[Any] = [each for each in layer.modules() if hasattr(each, "lora_A")]
        sides = [(each.lora_A["default"].weight.shape, each.lora_B["default"].weight.shape) for each in own]
        found.append(
            Adapters(
                rank=max((down[0] for down, _ in sides), default=0),
                linears=len(sides),
                inputs=sum(down[1] for down, _ in sides),
                outputs=sum(up[0] for _, up in sides),
                dropout=any(getattr(each.lora_dropout["default"], "p", 0.0) > 0 for each in own),
            )
        )
    return tuple(found)


def adapter_reader(wrapped: nn.Module, read: ReadRows, seed: int) -> ReadRows:
    """Return what reads parameters of a wrapped model by name: those of the model by `read`, those of adapters drawn.

    They are drawn as peft does, but by name, so that no rank needs those of others.
    """
    shapes = {name: each.shape for name, each in wrapped.named_parameters()}

    def read_any(name: str, rows: slice) -> torch.Tensor:
        found = ADAPTER.search(name)
        if found is None:
            return read(plain_name(name), rows)
        first = torch.zeros if found[1] == "B" else partial(_draw, f"{seed} {name}")
        return first(shapes[name])[rows]

    return read_any


def _draw(seed: str, shape: torch.Size) -> torch.Tensor:
    """Draw A [rank, in] in float32, uniform within 1 / sqrt(in), by a generator of its own."""
    digest = hashlib.sha256(seed.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)


def plain_name(name: str) -> str:
    """Return the name of a parameter in the model without adapters."""
    return name.removeprefix(PREFIX).replace(BASE, ".")


@torch.no_grad()
def merge_adapters(wrapped: Any, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the full state of the model without adapters, with them added to its weights; names as it has them.

    Products are computed in float64, so that each weight is rounded once.
    """
    merged = {plain_name(name): value for name, value in state.items() if ADAPTER.search(name) is None}
    for name, module in wrapped.named_modules():
        down, up = (state.get(f"{name}.lora_{side}.default.weight") for side in "AB")
        if down is None or up is None:
            continue
        delta = module.scaling["default"] * (up.double() @ down.double())
        weight = plain_name(f"{name}{BASE}weight")
        value = merged[weight]
        turned = delta.T if getattr(module, "fan_in_fan_out", False) else delta  # Conv1D keeps [in, out]
        merged[weight] = (value.double() + turned).to(value.dtype)
    return merged


def write_adapters(folder: Path, wrapped: Any, state: Mapping[str, torch.Tensor]) -> None:
    """Write adapter_config.json and adapter_model.safetensors, as peft reads them."""
    wrapped.peft_config["default"].save_pretrained(str(folder))
    own = {name.replace(".default.", "."): value for name, value in state.items() if ADAPTER.search(name)}
    save_file({name: value.contiguous() for name, value in own.items()}, folder / WEIGHTS, metadata={"format": "pt"})
