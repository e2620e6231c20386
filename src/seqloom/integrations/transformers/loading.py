"""Hugging Face folders as a family of models that `seqloom train` and `seqloom verify` take (`model.huggingface`).

    config.json             required; of a model that `check` does not refuse
    *.safetensors           its parameters; without them they are drawn with model.seed
    tokenizer files         copied beside the trained model

Of a model of images and text the language model inside is trained and written, a causal model of its own; the other
parameters of its files are not read.

With `model.lora` adapters of peft are trained alone (`integrations.lora`), and written to `run.output`/adapter as well.

The model is built without values. Its parameters are read from the files one by one, when they are cut into shards, and
of divided experts a rank's own alone (`weights`); where transformers does more with what is in the files than renaming
tensors and joining experts, it loads all of it to the host's memory. The trained model is written to
`run.output`/model, complete or not at all, as `from_pretrained` reads it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, logging

from seqloom.describe import ModelSpec
from seqloom.errors import SeqloomError
from seqloom.integrations.lora import (
    adapter_reader,
    add_adapters,
    describe_adapters,
    merge_adapters,
    write_adapters,
)
from seqloom.integrations.transformers.attach import attach, model_adapter
from seqloom.integrations.transformers.checks import decoder_layers, decoder_of, unwrap
from seqloom.integrations.transformers.describe import (
    LOCAL,
    describe_folder,
    from_config,
    language_model_config,
    model_on_meta,
)
from seqloom.integrations.transformers.parts import call_layers_on_meta
from seqloom.integrations.transformers.weights import known_transforms, locate
from seqloom.models.adapter import DeferredParameters, ModelAdapter, meta_parameters
from seqloom.models.files import ReadRows, open_safetensors
from seqloom.params.placement import move_buffers, pop_values
from seqloom.train.config import Config
from seqloom.train.model import ModelFamily, freeze_parameters
from seqloom.train.run_folder import atomic_folder
from seqloom.train.setup import load_model_spec

IGNORED_TENSORS = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")
"""Names of what old files hold and models compute anew, as transformers has them; models name more."""
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model", "chat_*")
"""Names of files that belong to a tokenizer."""


def build_huggingface(config: Config, device: torch.device, dtype: torch.dtype) -> ModelAdapter:
    """Build the model of a folder and attach it to the engine: see `train.model.ModelFamily`.

    On the meta device it has no values and nothing reads them; there its layers are called, to find what only shows in
    a call. Refuses what `check` refuses, and a folder that cannot be read or lacks parameters.
    """
    folder = cast("Path", config.model.huggingface)
    try:
        with no_progress_bars():
            model, read = _build(folder, config.model.seed, device, dtype)
            if config.model.lora is not None:
                model = add_adapters(model, config.model.lora, folder)
                read = None if read is None else adapter_reader(model, read, config.model.seed)
            freeze_parameters(model, config.model.freeze)
    except SeqloomError:
        raise
    except Exception as error:  # whatever the class may raise for this config, and files for what is in them
        reason = str(error).strip().partition("\n")[0]
        raise SeqloomError(
            f"model.huggingface = {str(folder)!r} cannot be loaded ({reason}); give a folder that "
            "AutoModelForCausalLM.from_pretrained reads without network and without code of its own"
        ) from error
    try:
        adapter = model_adapter(attach(model.train(), longest=config.data.max_length))
        if device.type == "meta":
            call_layers_on_meta(decoder_of(model), model.get_input_embeddings(), adapter.layers)
    except SeqloomError as error:
        raise SeqloomError(f"model.huggingface = {str(folder)!r}: {error}") from None
    if read is None:
        return adapter
    move_buffers(adapter.module, device)
    return replace(adapter, deferred=DeferredParameters(read, device))


def save_huggingface(
    config: Config, module: nn.Module, state: Mapping[str, torch.Tensor], folder: Path, adapters: Path
) -> None:
    """Write a trained model, its config and its folder's tokenizer: see `train.model.ModelFamily`.

    Parameters keep the dtype of the run's masters, so nothing is lost. An existing model is replaced.
    """
    model, own, begun = cast("Any", module), state, cast("Path", config.model.huggingface)
    if config.model.lora is not None:
        model, own = _without_adapters(model, begun, state)
    tokenizer = {path for pattern in TOKENIZER for path in begun.glob(pattern) if path.is_file()}
    with atomic_folder(folder, SafetensorError) as partial:
        with no_progress_bars():
            model.save_pretrained(partial, state_dict=dict(own))
        for path in sorted(tokenizer):
            shutil.copy(path, partial / path.name)
    if config.model.lora is not None:
        with atomic_folder(adapters, SafetensorError) as partial:
            write_adapters(partial, module, state)


def _without_adapters(
    wrapped: Any, folder: Path, state: Mapping[str, torch.Tensor]
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a model of the folder without values, and those of a wrapped one with its adapters added."""
    merged = merge_adapters(wrapped, state)
    with torch.device("meta"), no_progress_bars():
        model = from_config(folder, next(iter(merged.values())).dtype)
    model.generation_config = wrapped.get_base_model().generation_config
    return model, merged


def describe_huggingface(config: Config) -> ModelSpec:
    """Return the shapes of the model of a folder: as its modules have them.

    With `model.lora` also those of its adapters, by the model that peft makes of it.
    """
    spec, lora, folder = _describe_base(config), config.model.lora, cast("Path", config.model.huggingface)
    if lora is None:
        return spec
    model = add_adapters(model_on_meta(folder), lora, folder)
    try:
        attach(model.train(), longest=config.data.max_length)  # refuses adapters outside of layers
    except SeqloomError as error:
        raise SeqloomError(f"model.huggingface = {str(folder)!r}: {error}") from None
    return replace(spec, adapters=describe_adapters(decoder_layers(unwrap(model))))


def _describe_base(config: Config) -> ModelSpec:
    """Return the shapes of the model of a folder, without adapters."""
    folder = cast("Path", config.model.huggingface)
    if not (folder / "config.json").is_file():
        return load_model_spec(config)  # says so
    try:
        return describe_folder(folder)
    except SeqloomError as error:
        raise SeqloomError(f"model.huggingface = {error}") from None


def huggingface_notes(config: Config) -> Sequence[str]:
    """Say so where only a part of a folder's model is trained."""
    text, lora, notes = _language_model_of(cast("Path", config.model.huggingface)), config.model.lora, []
    if text is not None:
        trained = f"the language model inside, a {text.model_type}, is trained, and written by itself"
        notes.append(f"{trained}; the parameters for images are left out")
    if lora is not None:
        where = ", ".join(lora.targets) or "all linear layers"
        notes.append(f"LoRA of rank {lora.rank} on {where} is trained, all else is frozen")
    return notes


HUGGINGFACE = ModelFamily(build_huggingface, save_huggingface, describe_huggingface, huggingface_notes)
"""The family of `model.huggingface`."""


def _build(folder: Path, seed: int, device: torch.device, dtype: torch.dtype) -> tuple[Any, ReadRows | None]:
    """Return the model without values, and what reads its parameters; on "meta" nothing does.

    Fresh parameters are drawn in float32 on the CPU, so that they do not depend on dtype and device.
    """
    stored = any(folder.glob("*.safetensors"))
    if not stored and any(folder.glob("*.bin")):
        raise SeqloomError(
            f"model.huggingface = {str(folder)!r} has parameters in .bin files and none in .safetensors; convert them "
            "with from_pretrained and save_pretrained, or remove them to draw fresh ones"
        )
    if device.type == "meta":
        with device:
            model = from_config(folder, dtype)
            if stored:
                _reader(folder, model)  # refuses tensors without a place in the model
            return model, None
    if stored:
        with meta_parameters():
            model = from_config(folder, dtype).to(dtype)
        read = _reader(folder, model)
        if read is None:
            model = _load_all(folder, dtype)
            return model, pop_values(model)
        if (folder / GENERATION_CONFIG_NAME).exists():
            model.generation_config = GenerationConfig.from_pretrained(folder, **LOCAL)
        return model, read
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = from_config(folder, torch.float32).to(dtype)
        return model, pop_values(model)


def _reader(folder: Path, model: Any) -> ReadRows | None:
    """Return what reads the parameters of a folder by name; None if only transformers knows which tensors they are.

    Buffers that the folder has are read at once.
    """
    saved, transforms = model.state_dict(), known_transforms(model.config.model_type)
    if transforms is None:
        return None
    shapes, read = open_safetensors(*_weight_files(folder))
    buffers = {name: each for name, each in model.named_buffers() if name in saved}
    wanted = {name: list(each.shape) for name, each in (*model.named_parameters(), *buffers.items())}
    parts = (WHOLE_MODEL,) if _language_model_of(folder) is None else LANGUAGE_MODELS
    part, located = next(
        ((each, found) for each in parts if (found := locate(wanted, each.own_names(shapes), shapes, transforms))),
        (WHOLE_MODEL, None),
    )
    if located is None:
        return None
    ignored = re.compile("|".join({*IGNORED_TENSORS, *(model._keys_to_ignore_on_load_unexpected or ())}))
    known = {part.stored(name) for name in saved}.union(*(chain(*each.tensors) for each in located.values()))
    others = [name for name in shapes if name.startswith(part.prefixes) and name not in known]
    _refuse_unused(folder, [name for name in others if not ignored.search(name)])
    for name, buffer in buffers.items():
        buffer.copy_(located[name].read(read, slice(None)))
    return lambda name, rows: located[name].read(read, rows)


class ModelPart(NamedTuple):
    """Where a folder's files have a causal model.

    Attributes:
        decoder: how names of the decoder begin there, instead of "model.".
        head: how those of the rest begin.
        prefixes: what all names begin with that belong to the causal model.
    """

    decoder: str
    head: str
    prefixes: tuple[str, ...]

    def stored(self, name: str) -> str:
        """Return the name in the files of a parameter of the causal model."""
        inner = name.removeprefix("model.")
        return self.head + name if inner == name else self.decoder + inner

    def own_names(self, stored: Iterable[str]) -> dict[str, str]:
        """Return the tensors of files that belong to the causal model, by the names that they have in it."""
        found = {}
        for name in stored:
            if name.startswith(self.decoder):
                found["model." + name.removeprefix(self.decoder)] = name
            elif name.startswith(self.head):
                found[name.removeprefix(self.head)] = name
        return found


WHOLE_MODEL = ModelPart("model.", "", ("",))
LANGUAGE_MODELS = (
    ModelPart("model.language_model.", "", ("model.language_model.", "lm_head.")),
    ModelPart("language_model.model.", "language_model.", ("language_model.",)),
    ModelPart("model.text_model.", "", ("model.text_model.", "lm_head.")),
)
"""Inside a model of images and text."""


def _language_model_of(folder: Path) -> Any | None:
    """Return the config of the language model inside a folder's model of images and text; None: it is no such model."""
    return language_model_config(AutoConfig.from_pretrained(folder, **LOCAL))


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers would read parameters from."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    names = [SAFE_WEIGHTS_NAME]
    if index.exists() and not (folder / SAFE_WEIGHTS_NAME).exists():
        names = sorted(set(json.loads(index.read_text()).get("weight_map", {}).values()))
    return [folder / name for name in names if (folder / name).exists()]


def _converts(model_type: str) -> bool:
    """Whether transformers makes parameters of such models from other tensors; True where it does not say."""
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    except ImportError:
        return True
    return get_checkpoint_conversion_mapping(model_type) is not None


def _load_all(folder: Path, dtype: torch.dtype) -> Any:
    """Load all parameters to the host's memory; refuse missing ones, which transformers would draw."""
    text = _language_model_of(folder)
    options = {**LOCAL, "use_safetensors": True, "dtype": dtype, "output_loading_info": True}
    if text is not None:
        if not _converts(text.model_type):
            raise SeqloomError(
                f"model.huggingface = {str(folder)!r}: the parameters of its language model are not in its safetensors "
                "by name and shape; load the language model with transformers and save it by itself"
            )
        options["config"] = text  # transformers knows where these have their language model
    model, report = AutoModelForCausalLM.from_pretrained(folder, **options)
    _refuse_unused(
        folder, [name for name in report["unexpected_keys"] if text is None or _of_language_model(name, model)]
    )
    missing = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if missing:
        raise SeqloomError(
            f"model.huggingface = {str(folder)!r}: {len(missing)} parameters are missing in its safetensors or have "
            f"another shape there, {missing[0]} among them; give the folder of the whole model"
        )
    return model.to(dtype)


def _of_language_model(name: str, model: Any) -> bool:
    """Whether a tensor beside those of a language model, of a model of images and text, would be part of it.

    Transformers reports such names as they are in the files, or as it has renamed them.
    """
    prefixes = tuple(prefix for part in LANGUAGE_MODELS for prefix in part.prefixes)
    modules = {tuple(each.split(".")[:2]) for each in model.state_dict()}
    return name.startswith(prefixes) or tuple(name.split(".")[:2]) in modules


def _refuse_unused(folder: Path, names: Iterable[str]) -> None:
    """Refuse tensors without a place in the model: it would compute something else than the one they were made by."""
    unused = sorted(names)
    if unused:
        raise SeqloomError(
            f"model.huggingface = {str(folder)!r}: {len(unused)} tensors of its safetensors have no place in the model "
            f"of its config.json, {unused[0]} among them; give the config.json that belongs to them"
        )


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing over the display of the run: every rank would."""
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()
