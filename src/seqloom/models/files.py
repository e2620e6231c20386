"""The reference model as files: shapes and constants in config.json, parameters in model.safetensors.

Parameters have the names and shapes of Hugging Face's LlamaForCausalLM (Qwen2's with biases, Qwen3's with QK norm).
Where the model is one of these, so is the config, and `from_pretrained` reads the folder. A model with sliding windows
is none; its config has the fields of `ModelSpec`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from seqloom.attention.kernels.interface import dtype_name
from seqloom.describe import ModelSpec
from seqloom.errors import SeqloomError
from seqloom.models.transformer import FAMILIES, Rope, Transformer, TransformerOptions
from seqloom.reader import is_file_name, read_mapping

ReadRows = Callable[[str, slice], torch.Tensor]
"""read(name of a parameter, rows) -> these rows of its values."""
CONFIG, PARAMETERS = "config.json", "model.safetensors"
_HEAD = "lm_head.weight"


def write_model(
    folder: Path, model: Transformer, state: Mapping[str, torch.Tensor], *, context: int | None = None
) -> None:
    """Write a model as config.json and model.safetensors.

    Args:
        state: its parameters by name, whole and on the CPU; a tied head may be left out.
        context: longest document of the training, for the config; None: left out.
    """
    dtype = next((dtype_name(tensor.dtype) for tensor in state.values()), None)
    config = model_config(model.spec, model.options, dtype, context)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tied = {_HEAD} if model.spec.tied else set()
    tensors = {name: tensor.contiguous() for name, tensor in state.items() if name not in tied}
    save_file(tensors, folder / PARAMETERS, metadata={"format": "pt"})


def model_config(
    spec: ModelSpec, options: TransformerOptions, dtype: str | None = None, context: int | None = None
) -> dict[str, Any]:
    """Return the content of config.json: Hugging Face's keys where it has this model, else the fields of the spec.

    Raises:
        SeqloomError: neither can say what the model is.
    """
    switches = {name: True for name in ("qk_norm", "qkv_bias") if getattr(options, name)}
    family = next((name for name, on in FAMILIES.items() if on == switches), None)
    if family is None or set(spec.masks) != {(None, None)} or not spec.causal:
        if options != TransformerOptions():
            raise SeqloomError(
                f"model {spec.name} with {options} and (window, chunk) {sorted(set(map(str, spec.masks)))}, "
                f"causal = {spec.causal}: no config says all of this, so the trained model could not be written; use "
                "full causal attention, or TransformerOptions()"
            )
        return asdict(spec)
    config = {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "num_hidden_layers": spec.layers,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.ffn,
        "vocab_size": spec.vocabulary,
        "tie_word_embeddings": spec.tied,
        "rms_norm_eps": options.eps,
        "rope_parameters": _rope_parameters(options.rope),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": context,
        "dtype": dtype,
    }
    return {key: value for key, value in config.items() if value is not None}


def load_options(spec: str) -> TransformerOptions:
    """Return the options of the model whose shapes `ModelSpec.load(spec)` reads: those of its config.json."""
    path = Path(spec) / CONFIG if Path(spec).is_dir() else Path(spec)
    content = read_mapping(path) if is_file_name(str(path)) else {}
    return TransformerOptions.from_config(content) if "model_type" in content else TransformerOptions()


def parameter_reader(model: Transformer, path: Path) -> ReadRows:
    """Return a reader of the parameters of a .safetensors file by name, see `open_safetensors`.

    Raises:
        SeqloomError: no such file, or one of another model.
    """
    try:
        found, read = open_safetensors(path)
    except (OSError, SafetensorError) as error:
        raise SeqloomError(f"{path} cannot be read ({error}); name a .safetensors file of the whole model") from error
    _check_same_model(path, {name: list(parameter.shape) for name, parameter in model.named_parameters()}, found)
    return read


def open_safetensors(*paths: Path) -> tuple[dict[str, list[int]], ReadRows]:
    """Open .safetensors files; return the shape of every tensor, and a reader of one, on the CPU and as it is there.

    The reader takes from the file no more than the rows it is asked for; a scalar has none, and is read whole.

    Raises:
        OSError, SafetensorError: some cannot be read.
    """
    files = [safe_open(path, framework="pt") for path in paths]
    holder = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - no mapping
    shapes = {name: list(file.get_slice(name).get_shape()) for name, file in holder.items()}

    def read(name: str, rows: slice) -> torch.Tensor:
        return holder[name].get_slice(name)[rows] if shapes[name] else holder[name].get_tensor(name)

    return shapes, read


def _check_same_model(path: Path, wanted: Mapping[str, list[int]], found: Mapping[str, list[int]]) -> None:
    """Refuse names and shapes that are not the model's. A head that repeats a tied table does no harm."""
    names = [name for name in sorted(set(wanted) ^ set(found)) if name != _HEAD or name in wanted]
    names += [name for name in wanted if name in found and wanted[name] != found[name]]
    if names:
        here, there = wanted.get(names[0], "none"), found.get(names[0], "none")
        raise SeqloomError(
            f"{path} has the parameters of another model: {len(names)} differ, {names[0]} is {there} there and {here} "
            "in the model's spec; name the spec that belongs to it"
        )


def _rope_parameters(rope: Rope) -> dict[str, Any]:
    if rope.scaling is None:
        return {"rope_type": "default", "rope_theta": rope.theta}
    return {
        "rope_type": "llama3",
        "rope_theta": rope.theta,
        "factor": rope.scaling.factor,
        "low_freq_factor": rope.scaling.low,
        "high_freq_factor": rope.scaling.high,
        "original_max_position_embeddings": rope.scaling.context,
    }
