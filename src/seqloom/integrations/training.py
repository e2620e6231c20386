"""Hugging Face folders as a kind of model that `seqloom train` and `seqloom verify` take.

    config.json             required; of a model that `check` does not refuse
    *.safetensors           its parameters; without them they are drawn with model.seed
    tokenizer files         copied beside the trained model

The trained model is written to `run.output`/model, complete or not at all, as `from_pretrained` reads it.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn

from seqloom.errors import SeqloomError
from seqloom.integrations.loading import model_in, no_progress_bars
from seqloom.integrations.transformers import attach, network
from seqloom.runtime.network import Network
from seqloom.runtime.placement import move_buffers
from seqloom.runtime.values import Values
from seqloom.train.config import Config
from seqloom.train.folders import replaced
from seqloom.train.kinds import Kind

TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "chat_*")
"""Names of files that belong to a tokenizer."""


def build_huggingface(config: Config, device: torch.device, dtype: torch.dtype) -> Network:
    """Make the model of a folder, attached to the engine: see `train.kinds.Build`.

    Raises:
        SeqloomError: what `check` refuses, and a folder that cannot be read or lacks parameters.
    """
    folder = _folder(config)
    try:
        with no_progress_bars():
            model, read = model_in(folder, config.model.seed, device, dtype)
    except SeqloomError:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise SeqloomError(
            f"model.huggingface = {str(folder)!r} cannot be loaded ({str(error).strip()}); give a folder that "
            "AutoModelForCausalLM.from_pretrained reads without network and without code of its own"
        ) from error
    if dtype == torch.float64 and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # grouped products have no float64
    try:
        found = network(attach(model.train()))
    except SeqloomError as error:
        raise SeqloomError(f"model.huggingface = {str(folder)!r}: {error}") from None
    if read is None:
        return found
    move_buffers(found.module, device)
    return replace(found, values=Values(read, device))


def save_huggingface(config: Config, module: nn.Module, state: Mapping[str, torch.Tensor]) -> Path:
    """Write a trained model with its config and the tokenizer of the folder it came from: see `train.kinds.Save`.

    Parameters keep the dtype of the run's masters, so nothing is lost. A model that is there is replaced.
    """
    final, model = config.run.output / "model", cast("Any", module)
    with replaced(final, SafetensorError) as partial:
        with no_progress_bars():
            model.save_pretrained(partial, state_dict=dict(state))
        for path in _tokenizer_files(_folder(config)):
            shutil.copy(path, partial / path.name)
    return final


HUGGINGFACE = Kind(build_huggingface, save_huggingface)
"""What `model.huggingface` names."""


def _folder(config: Config) -> Path:
    """Return the folder of the model; the config has one where this kind is chosen."""
    assert config.model.huggingface is not None
    return config.model.huggingface


def _tokenizer_files(folder: Path) -> list[Path]:
    return sorted({path for pattern in TOKENIZER for path in folder.glob(pattern) if path.is_file()})
