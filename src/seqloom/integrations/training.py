"""Hugging Face folders as a kind of model that `seqloom train` and `seqloom verify` take.

    config.json             required; of a model that `check` does not refuse
    *.safetensors           its parameters; without them they are drawn with model.seed
    tokenizer files         copied beside the trained model

The trained model is written to `run.output`/model, complete or not at all, as `from_pretrained` reads it.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from seqloom.errors import SeqloomError
from seqloom.integrations.transformers import attach, network
from seqloom.plan import Part
from seqloom.runtime.network import Network
from seqloom.runtime.placement import keep_only, move
from seqloom.train.config import Config
from seqloom.train.folders import replaced
from seqloom.train.kinds import Kind

TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "chat_*")
"""Names of files that belong to a tokenizer."""
LOCAL = {"local_files_only": True, "trust_remote_code": False}
"""Nothing is fetched, and no code of a folder is run."""


def build_huggingface(
    config: Config, device: torch.device, dtype: torch.dtype, parts: Sequence[Part] | None = None
) -> Network:
    """Make the model of a folder, attached to the engine: see `train.kinds.Build`.

    Raises:
        SeqloomError: what `check` refuses, and a folder that cannot be read or lacks parameters.
    """
    folder = _folder(config)
    loads = parts is not None and device.type != "meta"  # all of it, to the host's memory
    try:
        with _no_progress_bars():
            model = _model(folder, config.model.seed, torch.device("cpu") if loads else device, dtype)
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
        if parts is not None and loads:
            keep_only(found, parts)
            move(found, device)
        return found
    except SeqloomError as error:
        raise SeqloomError(f"model.huggingface = {str(folder)!r}: {error}") from None


def save_huggingface(config: Config, module: nn.Module, state: Mapping[str, torch.Tensor]) -> Path:
    """Write a trained model with its config and the tokenizer of the folder it came from: see `train.kinds.Save`.

    Parameters keep the dtype of the run's masters, so nothing is lost. A model that is there is replaced.
    """
    final, model = config.run.output / "model", cast("Any", module)
    with replaced(final, SafetensorError) as partial:
        with _no_progress_bars():
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


def _model(folder: Path, seed: int, device: torch.device, dtype: torch.dtype) -> Any:
    """Load the model, or draw it: in float32 on the CPU, so that its values do not depend on dtype and device."""
    if device.type == "meta":
        with device:
            return _drawn(folder, dtype)
    if any(folder.glob("*.safetensors")):
        return _loaded(folder, dtype).to(device)
    if any(folder.glob("*.bin")):
        raise SeqloomError(
            f"model.huggingface = {str(folder)!r} has parameters in .bin files and none in .safetensors; convert them "
            "with from_pretrained and save_pretrained, or remove them to draw fresh ones"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _drawn(folder, torch.float32).to(device=device, dtype=dtype)


def _drawn(folder: Path, dtype: torch.dtype) -> Any:
    """Make the model of a config.json with fresh parameters."""
    settings = AutoConfig.from_pretrained(folder, **LOCAL)
    return AutoModelForCausalLM.from_config(settings, dtype=dtype, trust_remote_code=False)


def _loaded(folder: Path, dtype: torch.dtype) -> Any:
    """Load parameters, all of them: transformers would draw those that are missing."""
    options = {**LOCAL, "use_safetensors": True, "dtype": dtype, "output_loading_info": True}
    model, report = AutoModelForCausalLM.from_pretrained(folder, **options)
    missing = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if missing:
        raise SeqloomError(
            f"model.huggingface = {str(folder)!r}: {len(missing)} parameters are missing in its safetensors or have "
            f"another shape there, {missing[0]} among them; give the folder of the whole model"
        )
    return model.to(dtype)


def _tokenizer_files(folder: Path) -> list[Path]:
    return sorted({path for pattern in TOKENIZER for path in folder.glob(pattern) if path.is_file()})


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing over the display of the run: every rank would."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
